"""Ring, Ulysses and USP: their answers are in their spaces, and no random plan of these beats them."""

import random
from dataclasses import replace
from functools import cache
from itertools import chain, product

import pytest

from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import ORDERS, SequenceParallel
from hexiopt.plan.plan import Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies
from hexiopt.problem.workload import Workload
from hexiopt.solving import Budget
from hexiopt.solving.result import Result
from solvers.baselines._plans import dividing_sizes
from solvers.baselines.symmetric_layouts import (
    RingLayouts,
    SymmetricLayouts,
    UlyssesLayouts,
    UspLayouts,
    _Cut,
    _degrees_beside,
    _plan,
    _shardings,
)
from solvers.core.search import Search
from solvers.registry import make_solver
from tests.slow import slow_but
from tests.solvers.baselines.published_spaces import SPACES
from tests.solvers.sequence.small_layouts import task

RIVALS: dict[str, type[SymmetricLayouts]] = {"ring": RingLayouts, "ulysses": UlyssesLayouts, "usp": UspLayouts}
PROBLEMS = {
    "three_types": lambda: task(("fast", 4), ("slow", 2), ("old", 2), batch=4),
    "tight": lambda: task(("fast", 2), ("slow", 4), seq_len=65536, batch=4, memory_gib=5.0),
    "two_policies_fixed": lambda: task(
        ("fast", 4), ("slow", 4), batch=6, network_gb_per_s=3.0, recompute="full", optimizer_sharding="0"
    ),
}
DRAWS = 100

EACH = pytest.mark.parametrize("name", RIVALS)
EVERYWHERE = pytest.mark.parametrize("kind", PROBLEMS)


@cache
def problem_of(kind: str) -> Problem:
    return PROBLEMS[kind]()


@cache
def answer(name: str, kind: str) -> Result:
    return RIVALS[name]().solve(problem_of(kind), Budget(3600.0))


def draw_plan(solver: SymmetricLayouts, problem: Problem, rng: random.Random) -> Plan | None:
    """Random machines in random order, and everything else at random; None where that comes to nothing."""
    machines = list(problem.usable_by_machine.values())
    devices = tuple(chain.from_iterable(rng.sample(machines, rng.randint(1, len(machines)))))
    beside = list(_degrees_beside(problem, len(devices)))
    if not beside:
        return None
    d, s = rng.choice(beside)
    degrees = list(solver.degrees(problem.model.num_heads, len(devices) // (d * s)))
    sizes = dividing_sizes(problem, d)
    if not degrees or not sizes:
        return None
    cp, hp = rng.choice(degrees)
    across = d > 1 and s > 1 and rng.random() < 0.5
    grid = _Cut(devices, d, s, cp * hp, hp, rng.choice(sizes), across).grid()
    policy, sharding = rng.choice(recompute_policies(problem.workload)), rng.choice(_shardings(problem))
    return _plan(problem, grid, rng.choice(ORDERS), sharding, policy)


@pytest.mark.parametrize(("name", "kind"), slow_but([*zip(RIVALS, PROBLEMS, strict=True)], product(RIVALS, PROBLEMS)))
def test_no_random_plan_of_its_space_beats_it(name: str, kind: str) -> None:
    problem, solver, rng, result = problem_of(kind), RIVALS[name](), random.Random(1), answer(name, kind)
    assert result.plan is not None, result.reason
    assert violations(problem, result.plan, result.cost) == []
    assert SPACES[solver.name].first_violation(problem, result.plan) is None
    model, steps_s = PlanPricer(problem), []
    for _ in range(DRAWS):
        plan = draw_plan(solver, problem, rng)
        if plan is not None:
            assert check(problem, plan) == []
            assert SPACES[solver.name].first_violation(problem, plan) is None
            steps_s.append(model.price(plan).objective)
    assert len(steps_s) >= DRAWS / 10
    assert result.objective <= 1.02 * min(steps_s)


@EVERYWHERE
def test_usp_is_as_good_as_its_two_parts(kind: str) -> None:
    """Their plans are among its own; estimates may choose otherwise by little."""
    for name in ("ring", "ulysses"):
        plan = answer(name, kind).plan
        assert plan is not None
        assert SPACES["usp"].first_violation(problem_of(kind), plan) is None
        assert answer("usp", kind).objective <= 1.005 * answer(name, kind).objective


def change_layout(plan: Plan, layout: SequenceParallel) -> Plan:
    """The plan with another layout in its first stage."""
    line = plan.pipelines[0]
    stage = replace(line.stages[0], parallelism=layout)
    return replace(plan, pipelines=(replace(line, stages=(stage, *line.stages[1:])), *plan.pipelines[1:]))


@pytest.mark.parametrize("name", RIVALS)
def test_what_is_foreign_is_said(name: str) -> None:
    problem = replace(task(("fast", 4)), workload=Workload(2, 32768))
    problem = replace(problem, space=replace(problem.space, num_pipelines=1, num_stages=1))
    solver = RIVALS[name]()
    plan = solver.solve(problem, Budget(3600.0)).plan
    assert plan is not None
    stage = plan.pipelines[0].stages[0]
    layout = stage.parallelism
    assert isinstance(layout, SequenceParallel)
    first = layout.groups[0]
    uneven = replace(first, tokens=(first.tokens[0] + 8, *first.tokens[1:]))
    broken = {
        "unequal groups, orders, heads or shards": change_layout(
            plan, replace(layout, groups=(uneven, *layout.groups[1:]))
        ),
        "a stage without a sequence layout": replace(
            plan, pipelines=(replace(plan.pipelines[0], stages=(Stage.of((0,), 0, 4),)),)
        ),
        "several recompute policies": replace(
            plan,
            pipelines=(
                replace(plan.pipelines[0], stages=(replace(stage, recompute=("none", "full", "none", "none")),)),
            ),
        ),
    }
    for word, tried in broken.items():
        assert word in (SPACES[solver.name].first_violation(problem, tried) or "")
    words = {"ring": "an all-to-all", "ulysses": "a ring"}
    for other, wrong in words.items():
        theirs = "ulysses" if other == "ring" else "ring"
        foreign = RIVALS[theirs]().solve(problem, Budget(3600.0)).plan
        assert foreign is not None
        if name == other:
            assert SPACES[solver.name].first_violation(problem, foreign) == wrong


def test_the_slowest_device_sets_their_pace() -> None:
    """Uneven shards of `hexiseq` are better where types differ and links are fast; where all devices are alike, they
    are no worse."""
    problem = task(("fast", 2), ("slow", 2), batch=1, network_gb_per_s=400.0)
    ours, theirs = (make_solver(n).solve(problem, Budget(3600.0, 100)).objective for n in ("hexiseq", "usp"))
    assert ours < 0.9 * theirs
    alike = task(("fast", 4), batch=1)
    ours, theirs = (make_solver(n).solve(alike, Budget(3600.0, 100)).objective for n in ("hexiseq", "usp"))
    assert ours <= theirs * (1 + 1e-9)


@EACH
def test_of_equal_compute_the_smallest_groups_are_estimated_first(name: str) -> None:
    """So that on large clusters, where time ends before all are, what says least to others has been."""
    problem = task(("fast", 4), ("fast", 4), batch=8)
    search = Search(name, problem, Budget(3600.0), 0)
    plan = next(RIVALS[name]().candidates(search, random.Random(0))).make()
    assert plan is not None
    assert len(plan.pipelines) == 8
    assert all(len(stage.parallelism.executors[0]) == 1 for pipeline in plan.pipelines for stage in pipeline.stages)
