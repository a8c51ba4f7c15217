"""Metis: what it can say, samples by speed, cuts as good as all cuts, lanes."""

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import Replica
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.baselines._estimates import GridEstimates
from solvers.baselines.metis_atc24.cutting import cuts
from solvers.baselines.metis_atc24.group_cuts import batchings, sequences
from solvers.baselines.metis_atc24.parallel_pipelines import plan_of_cut
from solvers.baselines.metis_atc24.ranked_devices import Batching, RankedDevices, StageGroup
from solvers.completion.allocation import earliest_finish
from solvers.registry import make_solver
from tests.solvers import problems as small
from tests.solvers.baselines.published_spaces import SPACES


def pair() -> Problem:
    """A fast and three slow GPUs, one each a machine, on a network as fast as their own links."""
    cluster = small.cluster(("a", "fast", 1), ("b", "slow", 1), ("c", "slow", 2), network_gb_per_s=100.0)
    return Problem(cluster, small.TINY, Workload(global_batch=32, seq_len=2048), Space())


def plan(*stages: Stage, batches: int = 4, size: int = 8) -> Plan:
    return Plan((Pipeline(stages, batches, size),), ONE_F_ONE_B, Sharding(1))


def shared_stage(layers: tuple[int, int], *replicas: tuple[tuple[int, ...], int], policy: str = "none") -> Stage:
    return Stage.of_replicas(tuple(Replica(devices, samples) for devices, samples in replicas), (layers,), (policy,))


# a:0 is device 0, b:0 is 1, c:0 and c:1 are 2 and 3.
UNSHARDED = plan(shared_stage((0, 3), ((0,), 6), ((1,), 2)), shared_stage((3, 4), ((2,), 4), ((3,), 4)))
LANES = Plan(
    tuple(
        Pipeline((shared_stage((0, 3), ((first,), 4)), shared_stage((3, 4), ((second,), 4))), 4, 4)
        for first, second in ((0, 2), (1, 3))
    ),
    ONE_F_ONE_B,
    Sharding(1),
)


@pytest.mark.parametrize(
    ("tried", "broken"),
    [
        (UNSHARDED, None),
        (LANES, None),
        (replace(UNSHARDED, schedule=GPIPE), "schedule gpipe"),
        (replace(UNSHARDED, sharding=Sharding(2)), "ZeRO-2"),
        (
            plan(shared_stage((0, 3), ((0,), 6), ((1,), 2)), Stage.of((2, 3), 3, 4, "full")),
            "several recompute policies",
        ),
        (plan(shared_stage((0, 3), ((0,), 4), ((2, 3), 4)), Stage.of((1,), 3, 4)), "unequal TP degrees in a stage"),
        (
            plan(Stage.of((1,), 0, 1), Stage.of((0,), 1, 3), shared_stage((3, 4), ((2,), 4), ((3,), 4))),
            "no powers of two",
        ),
        (
            plan(Stage.of((2,), 0, 1), shared_stage((1, 3), ((0,), 6), ((1,), 2)), Stage.of((3,), 3, 4)),
            "no powers of two",
        ),
        (plan(shared_stage((0, 4), ((0,), 4), ((1,), 2), ((2,), 2))), "no powers of two"),
        (replace(LANES, pipelines=(LANES.pipelines[0], replace(LANES.pipelines[1], num_micro_batches=3))), "batches"),
    ],
)
def test_its_space(tried: Plan, broken: str | None) -> None:
    violation = SPACES["metis_atc24"].first_violation(pair(), tried)
    assert violation is None if broken is None else violation is not None and broken in violation


def test_devices_idle_only_where_their_share_is_none() -> None:
    """With one micro-batch of two samples the fast GPU has both; of eight, the slow one would have some."""
    problem = pair()
    problem = replace(problem, space=replace(problem.space, exclude=("c",)))
    alone = (Stage.of((0,), 0, 4),)
    assert SPACES["metis_atc24"].first_violation(problem, plan(*alone, batches=16, size=2)) is None
    assert "idle or none" in str(SPACES["metis_atc24"].first_violation(problem, plan(*alone, batches=4, size=8)))


def test_samples_by_speed() -> None:
    """The fast GPU gets more of the micro-batch than the slow one it shares a stage with."""
    problem = pair()
    problem = replace(problem, space=replace(problem.space, exclude=("c",)))
    result = make_solver("metis_atc24").solve(problem, Budget(3600.0))
    assert result.plan is not None
    (pipeline,) = result.plan.pipelines
    samples = {r.devices[0]: r.samples for stage in pipeline.stages for r in stage.parallelism.replicas}
    assert len(pipeline.stages) == 1
    assert samples[0] > samples[1] > 0


@given(
    st.lists(st.lists(st.integers(1, 20), min_size=6, max_size=6).map(sorted), min_size=1, max_size=3),
    st.integers(1, 6),
)
def test_samples_finish_as_early_as_possible(times: list[list[int]], samples: int) -> None:
    def slowest(counts: tuple[int, ...]) -> int:
        return max((times[r][n - 1] for r, n in enumerate(counts) if n), default=0)

    best = min(slowest(c) for c in product(range(samples + 1), repeat=len(times)) if sum(c) == samples)
    counts = earliest_finish([(0, *column, 21).__getitem__ for column in times], samples, least=0)
    assert sum(counts) == samples
    assert slowest(tuple(counts)) == best


def all_cuts(groups: list[list[StageGroup]], a: int = 0) -> list[tuple[StageGroup, ...]]:
    if a == len(groups):
        return [()]
    return [(group, *rest) for group in groups[a] for rest in all_cuts(groups, group.end_rank)]


def slowest_s(problem: Problem, cut: tuple[StageGroup, ...]) -> float:
    """The slowest stage with the best layers, by trying all."""
    total, best = problem.model.num_layers, float("inf")
    for ends in product(range(1, total), repeat=len(cut) - 1):
        layers = [end - first for first, end in pairwise((0, *ends, total))]
        if min(layers) > 0 and all(
            n <= g.max_layers[len(cut) - s] for s, (n, g) in enumerate(zip(layers, cut, strict=True))
        ):
            best = min(best, max(g.stage_s(n) + g.waits_s for g, n in zip(cut, layers, strict=True)))
    return best


@pytest.mark.parametrize("size", [2, 4, 8])
def test_cuts_are_as_good_as_all_cuts(size: int) -> None:
    problem = pair()
    estimates = GridEstimates(PlanPricer(problem))
    for ranks in sequences(problem):
        groups = RankedDevices(estimates, ranks, {}).groups(Batching(32 // size, size, 1, "none", True))
        for stages in range(1, 5):
            best = min((slowest_s(problem, cut) for cut in all_cuts(groups) if len(cut) == stages), default=None)
            limited = replace(problem, space=replace(problem.space, num_stages=stages))
            limited_cuts = list(cuts(limited, groups, 4, random.Random(0), lambda stages: float("inf")))
            if best is None or best == float("inf"):
                assert not limited_cuts
            else:
                assert all(len(cut) == stages for _, cut in limited_cuts)
                assert all(slowest_s(problem, cut) <= limit * (1 + 1e-9) for limit, cut in limited_cuts)
                # Limits stand about a tenth apart.
                assert min(slowest_s(problem, cut) for _, cut in limited_cuts) <= 1.15 * best


@pytest.mark.parametrize("asked", [None, 1, 2])
def test_lanes_hold_the_same(asked: int | None) -> None:
    """However many lanes, every replica has its samples, and the plan is valid."""
    problem = small.easy(Space(num_pipelines=asked))
    estimates, rng = GridEstimates(PlanPricer(problem)), random.Random(0)
    ranked = RankedDevices(estimates, sequences(problem)[0], {})
    made = 0
    for batching in batchings(problem, "none", True):
        for _, cut in cuts(problem, ranked.groups(batching), 3, rng, lambda stages: float("inf")):
            layers = (1,) * (len(cut) - 1) + (problem.model.num_layers - len(cut) + 1,)
            plan = plan_of_cut(problem, batching, cut, layers, ONE_F_ONE_B, 1)
            assert check(problem, plan) == []
            assert SPACES["metis_atc24"].first_violation(problem, plan) is None
            assert asked in (None, len(plan.pipelines))
            for s, group in enumerate(cut):
                held = {
                    (replica.devices, samples)
                    for pipeline in plan.pipelines
                    for replica, samples in zip(
                        pipeline.stages[s].parallelism.replicas,
                        pipeline.stages[s].parallelism.samples(pipeline.micro_batch_size),
                        strict=True,
                    )
                }
                assert held == {share for shares in group.pipelines() for share in shares}
                assert sum(samples for _, samples in held) == batching.size
            made += 1
    assert made > 10


def test_a_micro_batch_may_exceed_that_of_a_pipeline() -> None:
    """Eight equal GPUs with micro-batches of one sequence at most: eight lanes make one of eight."""
    cluster = small.cluster(("a", "fast", 8), network_gb_per_s=1.0)
    problem = Problem(cluster, small.TINY, Workload(global_batch=32, seq_len=2048), Space(max_micro_batch_size=1))
    result = make_solver("metis_atc24").solve(problem, Budget(3600.0))
    assert result.plan is not None
    assert len(result.plan.pipelines) > 1
    assert {pipeline.micro_batch_size for pipeline in result.plan.pipelines} == {1}


def test_equal_devices_are_all_used() -> None:
    """Even over a network so slow that one machine alone would be faster: that is its limit, and others do better."""
    cluster = small.cluster(("a", "fast", 2), ("b", "fast", 2), network_gb_per_s=0.02)
    problem = Problem(cluster, small.TINY, Workload(global_batch=32, seq_len=2048), Space())
    made = {name: make_solver(name).solve(problem, Budget(3600.0)) for name in ("metis_atc24", "sailor")}
    assert made["metis_atc24"].plan is not None
    assert made["sailor"].plan is not None
    assert len(made["metis_atc24"].plan.devices()) == 4
    assert len(made["sailor"].plan.devices()) == 2
    assert made["sailor"].objective < made["metis_atc24"].objective
