"""Layers and recompute policies over stages, against all splits and policies."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest

from hexiopt.cost.executors.memory import UNSHARDED, StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Recompute, recompute_policies
from hexiopt.schedules.in_flight import holding, in_flight
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B
from hexiopt.schedules.schedule import StagePosition
from solvers.completion.layers import LayerSplitter
from tests.solvers import problems


def compositions(total: int, rooms: Sequence[int], low: int = 1) -> Iterator[tuple[int, ...]]:
    """All counts n_s from `low` to the room of stage s that sum to `total`."""
    for counts in itertools.product(*(range(low, room + 1) for room in rooms)):
        if sum(counts) == total:
            yield counts


# The splitter on a cost model whose memory binds.

GROUPS = ((0,), (1,), (2,), (1, 2))


@cache
def model(layers: int, fast_gib: float, slow_gib: float) -> PlanPricer:
    base = problems.tight()
    cluster = problems.cluster(("a", "fast", 1), ("b", "slow", 2), fast_gib=fast_gib, slow_gib=slow_gib)
    return PlanPricer(replace(base, cluster=cluster, model=replace(base.model, num_layers=layers)))


def stage_time(
    pricer: PlanPricer,
    groups: Sequence[tuple[int, ...]],
    s: int,
    n: int,
    recompute: Recompute,
    choice: tuple[int, str, int, int],
) -> float | None:
    """Forward and backward of stage `s` with `n` layers; None where it does not fit."""
    size, schedule, count, shards = choice
    first, last = s == 0, s == len(groups) - 1
    tp_group = pricer.tp_group(groups[s])
    held = in_flight(schedule, StagePosition(s, len(groups), count))
    policies = recompute * n if len(recompute) == 1 else recompute
    memory = pricer.stages.memory_model(tp_group, size).stage_of_layers(
        policies, first, last, held, StateSharding(1, shards)
    )
    if memory.total > tp_group.gpu.usable_memory_bytes:
        return None
    return sum(pricer.stages.stage_s(tp_group, len(policies), first, last, size, policies))


def recomputes(policies: Sequence[str], n: int, per_layer: bool) -> list[Recompute]:
    """One policy for n layers, or any two, in any order of the layers."""
    if not per_layer:
        return [(policy,) for policy in policies]
    return [each for each in itertools.product(policies, repeat=n) if len(set(each)) < 3]


def brute_force(
    pricer: PlanPricer,
    groups: Sequence[tuple[int, ...]],
    choice: tuple[int, str, int, int],
    even: bool,
    per_layer: bool,
) -> float | None:
    """The least slowest stage over all splits and policies; None where nothing fits."""
    problem: Problem = pricer.problem
    layers, p = problem.model.num_layers, len(groups)
    policies = recompute_policies(problem.workload)
    best: float | None = None
    for counts in compositions(layers, [layers] * p):
        if even and max(counts) - min(counts) > 1:
            continue
        slowest = 0.0
        for s, n in enumerate(counts):
            each = recomputes(policies, n, per_layer)
            fitting = [t for q in each if (t := stage_time(pricer, groups, s, n, q, choice)) is not None]
            slowest = max(slowest, min(fitting, default=float("inf")))
        if slowest < float("inf") and (best is None or slowest < best):
            best = slowest
    return best


CHOICES = [(1, ONE_F_ONE_B, 4, 1), (1, ONE_F_ONE_B, 1, 2), (2, GPIPE, 2, 3), (1, GPIPE, 4, 1)]


@pytest.mark.parametrize("gib", [(16.0, 8.0), (1.5, 1.1), (1.2, 0.9), (0.9, 1.3), (0.6, 0.5)])
@pytest.mark.parametrize("even", [False, True], ids=["uneven", "even"])
@pytest.mark.parametrize("per_layer", [False, True], ids=["per_stage", "per_layer"])
def test_splitter_against_all_splits(gib: tuple[float, float], even: bool, per_layer: bool) -> None:
    """Every order of groups, memory from plenty to nothing: the answer fits, and is the fastest that does."""
    outcomes, mixed = set(), 0
    for layers in (3, 5):
        pricer = model(layers, *gib)
        splitter = LayerSplitter(pricer, recompute_policies(pricer.problem.workload), even, per_layer)
        for p in (1, 2, 3):
            for groups in itertools.permutations(GROUPS, p):
                if len({d for g in groups for d in g}) < sum(map(len, groups)):
                    continue
                for choice in CHOICES:
                    size, schedule, count, shards = choice
                    tp_groups = [frozenset([pricer.tp_group(group)]) for group in groups]
                    split = splitter.split(tp_groups, size, schedule, count, StateSharding(1, shards))
                    best = brute_force(pricer, groups, choice, even, per_layer)
                    outcomes.add(best is None)
                    if isinstance(split, int):
                        assert best is None, (groups, choice)
                        assert split >= 1
                        continue
                    assert best is not None, (groups, choice)
                    assert sum(n for n, _ in split) == layers
                    mixed += any(len(set(recompute)) > 1 for _, recompute in split)
                    times = [stage_time(pricer, groups, s, n, q, choice) for s, (n, q) in enumerate(split)]
                    assert None not in times
                    assert max(t for t in times if t is not None) <= best * (1 + 1e-8)
                    if even:
                        assert max(n for n, _ in split) - min(n for n, _ in split) <= 1
    if gib == (1.5, 1.1):
        assert outcomes == {True, False}  # memory decides here
        assert bool(mixed) == per_layer


def test_a_slot_of_unequal_sites_fits_the_fullest() -> None:
    """A stage that holds on several sites takes the slowest time, and the layers of the smallest memory."""
    pricer = model(5, 1.5, 1.1)
    splitter = LayerSplitter(pricer, ("none", "selective", "full"), even=False)
    fast, slow = pricer.tp_group((0,)), pricer.tp_group((1,))
    both = splitter.options[frozenset([fast, slow]), False, False, 1, holding(1), UNSHARDED]
    each = [
        splitter.options[frozenset([tp_group]), False, False, 1, holding(1), UNSHARDED] for tp_group in (fast, slow)
    ]
    assert len(both.times) == min(len(options.times) for options in each)
    assert all(t >= max(o.times[k] for o in each) for k, t in enumerate(both.times))


def test_more_stages_than_layers_find_no_room() -> None:
    pricer = model(3, 16.0, 8.0)
    splitter = LayerSplitter(pricer, ("none",), even=False)
    assert splitter.split([frozenset([pricer.tp_group((0,))])] * 4, 1, ONE_F_ONE_B, 4, UNSHARDED) == 1


def test_added_seconds_shift_layers() -> None:
    """Of two equal stages, the one that also sends takes fewer layers."""
    pricer = PlanPricer(replace(problems.fast_network(), model=replace(problems.TINY, num_layers=6)))
    splitter = LayerSplitter(pricer, ("none",), even=False)
    tp_groups = [frozenset([pricer.tp_group((0,))])] * 3
    alone = splitter.split(tp_groups, 1, ONE_F_ONE_B, 4, UNSHARDED)
    layer_s = sum(pricer.stages.layer_s(pricer.tp_group((0,)), 1, "none"))
    sending = splitter.split(tp_groups, 1, ONE_F_ONE_B, 4, UNSHARDED, (0.0, 3 * layer_s, 0.0))
    assert not isinstance(alone, int)
    assert not isinstance(sending, int)
    assert sending[1][0] < alone[1][0]
