"""Pipelines as cuts of the ranked devices of a cluster: device groups of uneven sizes and TP degrees, stage by stage.

Metis's plan space, whose best cuts `planner.py` improves.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, permutations, product
from typing import Any, NamedTuple

from hexiopt.problem.problem import Problem
from solvers.baselines._estimates import GridEstimates
from solvers.baselines._plans import balanced_layers
from solvers.baselines.metis_atc24.cutting import Cut, cuts
from solvers.baselines.metis_atc24.ranked_devices import Batching, RankedDevices

_SEQUENCES = 24  # sequences of GPU types that are tried
_BATCHINGS = 4  # batchings tried for all sequences: those best for the first two
_SLACK = 1.5  # cuts whose rough estimate is this much above the best are left out
_FILL = 0.8  # a stage's time in a fill, over the slowest stage's, roughly


class RankedCut(NamedTuple):
    """A cut with a rough estimate of a step in seconds, the number of its sequence, and its batching."""

    rough_s: float
    sequence: int
    batching: Batching
    cut: Cut


def sequences(problem: Problem) -> list[tuple[int, ...]]:
    """Devices by rank for each sequence of GPU types; fastest types first and last come first."""
    cluster, by_type = problem.cluster, dict[str, list[int]]()
    for machine, devices in problem.usable_by_machine.items():
        by_type.setdefault(cluster.machines[machine].gpu.name, []).extend(devices)
    speed = {gpu.name: gpu.peak_flops(problem.workload.precision) or 0.0 for gpu in cluster.types}
    ordered = sorted(by_type, key=lambda name: (-speed[name], name))
    orders = [tuple(ordered), tuple(ordered[::-1]), *islice(permutations(ordered), _SEQUENCES)]
    return [tuple(d for name in order for d in by_type[name]) for order in list(dict.fromkeys(orders))[:_SEQUENCES]]


def batchings(problem: Problem, policy: str, sharded: bool) -> list[Batching]:
    """Micro-batches that divide the global batch, in as few pipelines as the plan space allows or as it requires."""
    batch, asked, dividing = problem.workload.global_batch, problem.space.num_pipelines, []
    sizes = problem.space.micro_batch_sizes(batch)
    size = asked or 1
    while size <= min(batch, len(problem.usable_devices) * sizes[-1]):
        pipelines = asked or max(1, size // sizes[-1])
        if batch % size == 0 and size // pipelines in sizes:
            dividing.append(Batching(batch // size, size, pipelines, policy, sharded))
        size *= 2
    return dividing


class GroupCuts:
    """Cuts of `sequences` of a cluster's devices under all recompute policies; `sharded` as in ZeRO-1."""

    def __init__(self, estimates: GridEstimates, sequences: Sequence[Sequence[int]], *, sharded: bool) -> None:
        self.problem = estimates.problem
        timed: dict[Any, Any] = {}
        self.ranked = [RankedDevices(estimates, ranks, timed) for ranks in sequences]
        policies = estimates.pricer.policies()
        self.batchings = [batching for policy in policies for batching in batchings(self.problem, policy, sharded)]

    def cuts(self, rng: random.Random, should_continue: Callable[[float], bool]) -> list[RankedCut]:
        """Cuts, the best estimate first, sought while `should_continue` says so of the share that it is asked for."""
        space = self.problem.space
        degrees: list[int | None] = [None] if space.uneven_tp else [*self.ranked[0].degrees]
        estimated: list[RankedCut] = []
        best_s = dict.fromkeys(self.batchings, float("inf"))

        def cut_all(numbers: Iterable[int], chosen: Sequence[Batching]) -> None:
            for batching, k, tp in product(chosen, numbers, degrees):
                if not should_continue(1.0):
                    break
                ranked = self.ranked[k]
                groups = ranked.groups(batching, tp)
                aligned = [[group for group in starting if ranked.is_aligned(group)] for starting in groups]
                for offered in (aligned, groups):
                    longest_s = partial(_slowest_s, batching, _SLACK * min(best_s.values()))
                    for slowest_s, cut in cuts(self.problem, offered, ranked.max_stages, rng, longest_s):
                        rough_s = slowest_s / _slowest_s(batching, 1.0, len(cut))
                        best_s[batching] = min(best_s[batching], rough_s)
                        estimated.append(RankedCut(rough_s, k, batching, cut))

        # Uniform cuts come first.
        for batching, k in product(self.batchings, range(len(self.ranked))):
            for cut, layers in self._uniform_cuts(batching, self.ranked[k]):
                rough_s = quick_s(cut, layers, batching)
                best_s[batching] = min(best_s[batching], rough_s)
                estimated.append(RankedCut(rough_s, k, batching, cut))
            if not should_continue(0.5):
                break
        cut_all(range(2)[: len(self.ranked)], self.batchings)
        cut_all(range(2, len(self.ranked)), sorted(self.batchings, key=best_s.__getitem__)[:_BATCHINGS])
        return sorted(estimated, key=lambda estimate: estimate.rough_s)

    def _uniform_cuts(self, batching: Batching, ranked: RankedDevices) -> Iterator[tuple[Cut, tuple[int, ...]]]:
        """Cuts into groups of equal size and TP degree in which the layers fit, and the layers of each."""
        total, asked = len(ranked.ranks), self.problem.space.num_stages
        for count in range(1, ranked.max_stages + 1):
            size = total // count
            if total % count or size & (size - 1) or asked not in (None, count):
                continue
            for tp in ranked.degrees:
                cut = [group for k in range(count) if (group := ranked.group(k * size, size, tp, batching)) is not None]
                for layers in split_layers(tuple(cut), self.problem.model.num_layers)[:1] if len(cut) == count else ():
                    yield tuple(cut), layers


def split_layers(cut: Cut, total: int) -> list[tuple[int, ...]]:
    """Layers per stage that make the slowest as fast as memory allows, and neighbouring splits; none if they do not
    fit."""
    most = [min(top, total) for top in max_layers(cut)]
    times = [
        [group.stage_s(n) + group.waits_s for n in range(1, top + 1)] for group, top in zip(cut, most, strict=True)
    ]
    return balanced_layers(times, total)


def max_layers(cut: Cut) -> list[int]:
    """The most layers of each stage."""
    return [int(group.max_layers[len(cut) - s]) for s, group in enumerate(cut)]


def _slowest_s(batching: Batching, step_s: float, stages: int) -> float:
    """Seconds that the slowest of some stages may take if a step takes about `step_s`."""
    return step_s / (batching.count - 1 + _FILL * stages)


def quick_s(cut: Cut, layers: tuple[int, ...], batching: Batching) -> float:
    """A rough estimate of a step, in which every stage waits for its own messages only."""
    stage_s = [group.stage_s(n) + group.waits_s for group, n in zip(cut, layers, strict=True)]
    return (batching.count - 1) * max(stage_s) + sum(stage_s)
