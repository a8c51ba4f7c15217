"""Espresso: what it can say, its order by compute and memory, its layers."""

import math
from dataclasses import replace

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.baselines._estimates import GridEstimates
from solvers.baselines._money import Objective
from solvers.baselines.espresso.planner import _COUNTS, EspressoAllocation, EspressoPlanner, _numbers
from solvers.registry import make_solver
from tests.solvers import problems as small
from tests.solvers.baselines.published_spaces import SPACES


def plan(*lines: tuple[tuple[int, ...], tuple[int, ...]], cut: int = 2, batches: tuple[int, int] = (4, 4)) -> Plan:
    """Pipelines of two stages, the first with `cut` of six layers."""
    return Plan(
        tuple(
            Pipeline((Stage.of(first, 0, cut), Stage.of(second, cut, 6)), count, 2)
            for (first, second), count in zip(lines, batches, strict=True)
        ),
        ONE_F_ONE_B,
        Sharding(1),
    )


# Devices 0 to 3 are fast, on machines a and b; 4 to 7 slow, on c.
@pytest.mark.parametrize(
    ("tried", "broken"),
    [
        (plan(((4,), (0,)), ((5,), (2,))), None),
        (plan(((4, 5), (0, 1)), ((6, 7), (2, 3)), cut=1), None),
        (plan(((4,), (0,)), ((1,), (2,))), "several GPU types"),
        (plan(((4, 5), (0,)), ((6, 7), (2,))), "unequal TP degrees"),
        (plan(((4,), (0,)), ((5,), (2,)), batches=(5, 4)), "unequal batches"),
        (replace(plan(((4,), (0,)), ((5,), (2,))), schedule=GPIPE), "schedule gpipe"),
    ],
)
def test_its_space(tried: Plan, broken: str | None) -> None:
    violation = SPACES["espresso"].first_violation(small.easy(), tried)
    assert violation is None if broken is None else violation is not None and broken in violation


def test_first_stages_go_to_types_with_room_for_activations() -> None:
    """Of two types as fast as each other, the one with more memory comes first, where most micro-batches wait."""
    cluster = small.cluster(("a", "fast", 1), ("b", "slow", 1), fast_gib=1.6, slow_gib=16.0)
    alike = replace(cluster.machines[1].gpu, flops_bf16=cluster.machines[0].gpu.flops_bf16, hbm_bytes_per_s=1.5e12)
    machines = (cluster.machines[0], replace(cluster.machines[1], gpu=alike))
    problem = Problem(replace(cluster, machines=machines), small.TINY, Workload(32, 2048, recompute="none"), Space())
    planner = EspressoPlanner(GridEstimates(PlanPricer(problem)), Objective(), frozenset({0, 1}))
    roomy = [m[0] for m in planner.machines].index((1,))
    choice = next(c for c in planner.choices(("none",)) if (c.tp, c.dp, c.size) == (1, 1, 1))
    assert planner.orders(EspressoAllocation(choice, (1, 1)))[0] == (roomy, 1 - roomy)


def test_layers_by_speed_on_every_type() -> None:
    """The fast machine gets more layers of a stage than the slow one."""
    cluster = small.cluster(("a", "fast", 1), ("b", "slow", 1), network_gb_per_s=100.0)
    problem = Problem(cluster, replace(small.TINY, num_layers=12), Workload(64, 2048), Space(num_stages=2))
    result = make_solver("espresso").solve(problem, Budget(3600.0))
    assert result.plan is not None
    (pipeline,) = result.plan.pipelines
    layers = {stage.devices[0]: stage.num_layers for stage in pipeline.stages}
    assert layers[0] >= 2 * layers[1]


def test_it_finds_the_best_of_a_few_hundred() -> None:
    """All plans of two GPUs: types, orders, layers, micro-batches, policies; one stage or two."""
    cluster = small.cluster(("a", "fast", 1), ("b", "slow", 1), network_gb_per_s=1.0, fast_gib=2.0, slow_gib=2.0)
    problem = Problem(cluster, small.TINY, Workload(8, 2048, schedule="1f1b", optimizer_sharding="0"), Space())
    model, best = PlanPricer(problem), float("inf")
    for policy in ("none", "selective", "full"):
        for size in (1, 2, 4, 8):
            lines = [(Stage.of((d,), 0, 4, policy),) for d in (0, 1)]
            lines += [
                (Stage.of((d,), 0, cut, policy), Stage.of((1 - d,), cut, 4, policy))
                for d in (0, 1)
                for cut in (1, 2, 3)
            ]
            for stages in lines:
                best = min(best, model.price(Plan((Pipeline(stages, 8 // size, size),))).objective)
    assert make_solver("espresso").solve(problem, Budget(3600.0)).objective == pytest.approx(best, rel=1e-12)


def test_of_many_types_numbers_of_stages_are_evenly_spaced() -> None:
    """All of a few types; of eight, few enough for memory, with none and all of each type among them."""
    assert [counts.tolist() for counts in _numbers([2, 0, 3])] == [[0, 1, 2], [0], [0, 1, 2, 3]]
    many = [16, 26, 40, 28, 18, 46, 5, 24]
    numbers = _numbers(many)
    assert math.prod(map(len, numbers)) * len(many) <= _COUNTS
    assert [(counts[0], counts[-1]) for counts in numbers] == [(0, n) for n in many]
    assert all((counts[1:] > counts[:-1]).all() for counts in numbers)
