"""`constraints.memory_headroom`: everyone obeys it, and it equals GPUs of that much less memory."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hexiopt as hx
from hexiopt.bounds import lower_bound
from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.problem_file import problem_from_section, problem_sha256, problem_to_dict
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section
from hexiopt.solving import Budget
from hexiopt.solving.result import Result
from solvers.registry import make_solver
from tests.conftest import STRESS
from tests.models import TINY
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.brute_force import best_plan
from tests.solvers.problems import SMALL_SPACE

STEPS = 60
HEADROOM = 0.2


def task(gib: float, headroom: float) -> Problem:
    """Five layers on three devices of `gib` GiB, two kinds: one device cannot hold the model at 1.9 GiB."""
    small = problems.cluster(("a", "fast", 1), ("b", "slow", 2), fast_gib=gib, slow_gib=0.75 * gib)
    workload = replace(problems.BATCH_OF_4, seq_len=4096, schedule="1f1b")
    space = SMALL_SPACE.replace(memory_headroom=headroom)
    return Problem(small, replace(TINY, num_layers=5), workload, space)


def solve(problem: Problem, solver: str) -> Result:
    return make_solver(solver).solve(problem, Budget(3600.0, STEPS))


def check_equal_to_less_memory(gib: float, headroom: float) -> None:
    held, less = task(gib, headroom), task(gib * (1 - headroom), 0.0)
    (plan, step_s), (_, less_s) = (best_plan(problem) for problem in (held, less))
    assert step_s == less_s
    bounds_s = [lower_bound(PlanPricer(problem), 600.0).bound_s for problem in (held, less)]
    assert bounds_s[0] == pytest.approx(bounds_s[1], rel=1e-9)
    if plan is not None:
        assert not violations(held, plan, PlanPricer(held).price(plan))


@pytest.mark.parametrize(("gib", "headroom"), slow_but([(4.5, 0.05)], [(2.1, 0.25), (2.9, 0.5), (4.5, 0.05)]))
def test_the_optimum_is_that_of_gpus_with_less_memory(gib: float, headroom: float) -> None:
    check_equal_to_less_memory(gib, headroom)


@pytest.mark.slow
@settings(max_examples=15 if STRESS else 5, deadline=None)
@given(gib=st.floats(1.3, 4.5), headroom=st.floats(0.0, 0.5))
def test_the_optimum_is_that_of_gpus_with_less_memory_whatever_they_are(gib: float, headroom: float) -> None:
    check_equal_to_less_memory(gib, headroom)


def test_a_plan_that_fits_is_refused_under_a_headroom_that_it_does_not_leave() -> None:
    problem = task(1.9, 0.0)
    plan, _ = best_plan(problem)
    assert plan is not None
    cost = PlanPricer(problem).price(plan)
    assert not violations(problem, plan, cost)
    taken = max(s.memory.total / s.limit_bytes for pipeline in cost.pipelines for s in pipeline.stages)
    enough, too_much = (
        problem.replace(space=SMALL_SPACE.replace(memory_headroom=1 - taken + d)) for d in (-1e-3, 1e-3)
    )
    assert not violations(enough, plan, PlanPricer(enough).price(plan))
    refused = PlanPricer(too_much).price(plan)
    assert refused.step_time_s == cost.step_time_s
    assert not refused.fits
    (broken, *_) = violations(too_much, plan, refused)
    assert broken.rule == "memory"
    assert "beside constraints.memory_headroom=" in broken.text


@pytest.mark.parametrize(
    "solver", ["random", "local_search", "hexiscale", "megatron", "galvatron", "flashflex", "portfolio"]
)
def test_solvers_leave_it_free(solver: str) -> None:
    problem = task(2.7, HEADROOM)
    plan = solve(problem, solver).plan
    assert plan is not None
    for pipeline in PlanPricer(task(2.7, 0.0)).price(plan).pipelines:
        assert all(stage.memory.total <= (1 - HEADROOM) * stage.limit_bytes for stage in pipeline.stages)


def test_the_limit_is_of_the_problem_and_not_of_the_cluster() -> None:
    plain, held = task(1.5, 0.0), task(1.5, HEADROOM)
    gpu = plain.cluster.gpu_of(0)
    assert held.cluster.gpu_of(0).usable_memory_bytes == gpu.usable_memory_bytes * (1 - HEADROOM)
    assert held.replace(space=SMALL_SPACE) == plain
    again = held.replace(cluster=held.cluster, space=held.space.replace(memory_headroom=0.3))
    assert again.cluster.gpu_of(0).usable_memory_bytes == gpu.usable_memory_bytes * 0.7
    slow = plain.cluster.with_speeds({"a": 0.5, "b:1": 0.7})
    slowed = held.replace(cluster=slow)
    assert {gpu_type.usable_memory_bytes / gpu_type.process_memory_bytes for gpu_type in slowed.cluster.types} == {
        1 - HEADROOM
    }
    assert slowed.cluster.with_speeds({"a": 1.0, "b": 1.0}).types == held.cluster.types
    assert slowed.cluster.with_memory_headroom(0.0) == slow


def test_files_state_it_only_where_it_is() -> None:
    plain, held = task(1.5, 0.0), task(1.5, HEADROOM)
    data: dict[str, Any] = problem_to_dict(plain)
    assert "memory_headroom" not in data["space"]
    stated = problem_to_dict(held)
    assert stated == data | {"space": data["space"] | {"memory_headroom": HEADROOM}}
    assert problem_from_section(Section(stated, "plan.json")) == held
    assert problem_sha256(held) != problem_sha256(plain)


def test_what_does_not_fit_is_told_to_lower_it() -> None:
    problem = task(1.5, 0.5)
    result = solve(problem, "portfolio")
    assert result.plan is None
    assert result.reason is not None
    assert "it fits with constraints.memory_headroom=0" in result.reason


def test_fit_obeys_it() -> None:
    fits = [hx.fit(task(2.0, share), "random", max_steps=10, time_limit_s=600, precision=0.3) for share in (0.0, 0.3)]
    free, held = ({limit.quantity: limit.most or 0 for limit in fit.fittings[0].limits} for fit in fits)
    assert held["seq_len"] < free["seq_len"]
    assert held["num_layers"] < free["num_layers"]
