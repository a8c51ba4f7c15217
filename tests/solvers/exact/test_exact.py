"""`exact`: which part of the plan space a proof covers, where it ends, and that steps determine it."""

from dataclasses import replace
from typing import Any

import pytest

from hexiopt.bounds import bound_under_s, our_model
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.numbers.frameworks import default_framework
from hexiopt.problem.space import Space
from hexiopt.solving import Budget
from hexiopt.solving.result import Status
from solvers.exact.exact import Exact
from solvers.proof.gaps import is_provable
from solvers.registry import make_solver
from tests.solvers.proof.problems import random_problem


def test_the_same_steps_prove_the_same() -> None:
    problem = random_problem(3)
    first, second = (Exact().solve(problem, Budget(60.0, max_steps=400), seed=1) for _ in range(2))
    assert first.status is Status.OPTIMAL
    assert (first.plan, first.bound_s, first.steps) == (second.plan, second.bound_s, second.steps)


def test_a_proof_ends_at_the_gap_asked_for() -> None:
    problem = random_problem(9)
    rough, whole = (Exact(gap).solve(problem, Budget(60.0, max_steps=400), seed=1) for gap in (0.02, 0.0))
    assert 1e-6 < rough.gap <= 0.02 * (1 + 1e-9)
    assert rough.steps < whole.steps
    with pytest.raises(InputError, match=r"solver\.gap: 1\.0 is out of range"):
        Exact(1.0)


def test_a_bound_of_part_of_the_space_says_so() -> None:
    """Where schedules or replicas are allowed that are not proved, `optimal` is not said."""
    problem = random_problem(3)
    free = replace(problem, workload=replace(problem.workload, schedule="auto"), space=Space(max_micro_batch_size=2))
    result = Exact().solve(free, Budget(60.0, max_steps=600), seed=1)
    assert result.restricted_bound is not None
    assert result.restricted_bound.space == (
        "plans without the interleaved schedule (workload.schedule=1f1b) or replicated stages (space.replicas=false)"
    )
    assert result.restricted_gap <= 0.01
    assert result.bound_s <= result.objective


@pytest.mark.parametrize("hidden", [{"gradient_sums": "beside"}, {"weight_gathers": "beside"}])
def test_what_hides_sync_is_not_proved(monkeypatch: pytest.MonkeyPatch, hidden: dict[str, Any]) -> None:
    """The proof charges sync from the beginning of the last backward on, and gathers from its end on: no runtime that
    begins earlier is ever bounded, were it our own."""
    problem = random_problem(3)
    assert our_model(PlanPricer(problem), problem) is not None
    hiding = replace(default_framework(), **hidden)
    assert our_model(PlanPricer(problem, hiding), problem) is None
    monkeypatch.setattr("hexiopt.cost.executors.group_model.default_framework", lambda: hiding)
    model = PlanPricer(problem)
    assert model.framework == hiding
    assert our_model(model, problem) is None
    assert bound_under_s(model, problem) == 0.0
    result = make_solver("local_search").solve(problem, Budget(60.0, max_steps=50), seed=1)
    assert (result.status, result.bound_s, result.restricted_bound) == (Status.FEASIBLE, 0.0, None)


def test_other_networks_get_a_plan_without_the_proof() -> None:
    problem = random_problem(3)
    two = tuple(replace(machine, num_interfaces=2) for machine in problem.cluster.machines)
    other = replace(problem, cluster=replace(problem.cluster, machines=two))
    assert not is_provable(PlanPricer(other))
    result = Exact().solve(other, Budget(60.0, max_steps=50), seed=1)
    assert result.plan is not None
    assert 1e300 > result.bound_s > 0.0
