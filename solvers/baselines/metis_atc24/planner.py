"""Metis's planner (see `metis_atc24.py`): cuts of all sequences of ranks, the best improved step by step."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice, permutations, product
from typing import Any

from hexiopt.cost.executors.routes import route
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.schedules.schedule import Schedule
from solvers.baselines._estimates import GridEstimates, one_f_one_b_s
from solvers.baselines._plans import neighbouring_layers, shifted
from solvers.baselines.metis_atc24.cutting import Cut, cuts
from solvers.baselines.metis_atc24.device_groups import MetisBatching, RankedDevices
from solvers.baselines.metis_atc24.parallel_pipelines import boundaries_s, plan_of_cut
from solvers.completion.allocation import least_bottleneck
from solvers.core.search import Search

_SEQUENCES = 24  # sequences of GPU types that are tried
_CUTTING, _IMPROVING = 0.4, 0.55  # shares of the time limit by which cuts are found, and improved
_BATCHINGS = 4  # batchings tried for all sequences: those best for the first two
_SLACK = 1.5  # cuts whose rough estimate is this much above the best are left out
_FILL = 0.8  # a stage's time in a fill, over the slowest stage's, roughly
_LAYERED = 1000  # cuts whose layers are split
_REFINED = 600  # cuts whose messages are estimated too
_IMPROVED = 8  # of them, how many are improved
_ALL_SPLITS = 4  # stages up to which layers one off are tried too
_ALL_PAIRS = 8  # stages up to which a layer moves between any two of them
_PROMISING = 1.1  # changes whose quick estimate is this much above the present one are left out


@dataclass(frozen=True, slots=True)
class MetisChoice:
    """A whole plan: the number of its sequence of ranks, its batching, and (ranks, TP degree) and layers of every
    stage."""

    sequence: int
    batching: MetisBatching
    groups: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]


def sequences(problem: Problem) -> list[tuple[int, ...]]:
    """Devices by rank for each sequence of GPU types; fastest types first and last come first."""
    cluster, by_type = problem.cluster, dict[str, list[int]]()
    for machine, devices in problem.usable_by_machine.items():
        by_type.setdefault(cluster.machines[machine].gpu.name, []).extend(devices)
    speed = {gpu.name: gpu.peak_flops(problem.workload.precision) or 0.0 for gpu in cluster.types}
    ordered = sorted(by_type, key=lambda name: (-speed[name], name))
    orders = [tuple(ordered), tuple(ordered[::-1]), *islice(permutations(ordered), _SEQUENCES)]
    return [tuple(d for name in order for d in by_type[name]) for order in list(dict.fromkeys(orders))[:_SEQUENCES]]


def batchings(problem: Problem, policy: str, sharded: bool) -> list[MetisBatching]:
    """Micro-batches that divide the global batch, in as few pipelines as the plan space allows or as it requires."""
    batch, asked, found = problem.workload.global_batch, problem.space.num_pipelines, []
    sizes = problem.space.micro_batch_sizes(batch)
    size = asked or 1
    while size <= min(batch, len(problem.usable_devices) * sizes[-1]):
        pipelines = asked or max(1, size // sizes[-1])
        if batch % size == 0 and size // pipelines in sizes:
            found.append(MetisBatching(batch // size, size, pipelines, policy, sharded))
        size *= 2
    return found


class MetisPlanner:
    """The search for one problem."""

    def __init__(self, run: Search, schedule: Schedule, sharding: int) -> None:
        self.run, self.schedule, self.sharding = run, schedule, sharding
        self.problem, self.estimates = run.problem, GridEstimates(run.pricer)
        kept: dict[Any, Any] = {}
        self.ranked = [RankedDevices(self.estimates, ranks, kept) for ranks in sequences(self.problem)]
        self.batchings = [
            batching for policy in run.pricer.policies() for batching in batchings(self.problem, policy, bool(sharding))
        ]
        self._hop_of = cache(partial(route, self.problem.cluster))
        self._seconds: dict[MetisChoice, float] = {}
        self._hops: dict[MetisChoice, list[float]] = {}

    def choices(self, rng: random.Random) -> Iterator[tuple[float, MetisChoice]]:
        """What the search finds, with estimates: the best cuts, and improvements of some."""
        quick: dict[MetisChoice, float] = {}
        for _, sequence, batching, cut in sorted(self._cuts(rng), key=lambda one: one[0])[:_LAYERED]:
            own = tuple((group.end_rank - group.first_rank, group.tp) for group in cut)
            for layers in self._layers(cut):
                quick[MetisChoice(sequence, batching, own, layers)] = _quick_s(cut, layers, batching)
        found = []
        for choice in sorted(quick, key=quick.__getitem__)[:_REFINED]:
            for each in {choice: None, self._refined(choice): None}:
                found.append((self.seconds(each), each))
                yield found[-1]
            if not self.run.should_continue(0.5 * (_CUTTING + _IMPROVING)):
                break
        for _, choice in sorted(found, key=lambda one: one[0])[:_IMPROVED]:
            yield from self._improved(choice)

    def plan(self, choice: MetisChoice) -> Plan:
        """The plan of a choice."""
        cut = self._cut(choice)
        assert cut is not None, "a choice without devices"
        return plan_of_cut(self.problem, choice.batching, cut, choice.layers, self.schedule, self.sharding)

    def seconds(self, choice: MetisChoice) -> float:
        """The estimate of a step, messages as 1F1B lets them overlap."""
        found = self._seconds.get(choice)
        if found is None:
            cut = self._cut(choice)
            assert cut is not None, "a choice without devices"
            stage_s = [group.stage_s(n) for group, n in zip(cut, choice.layers, strict=True)]
            found = self._seconds[choice] = one_f_one_b_s(stage_s, self._hops_s(choice), choice.batching.count)
        return found

    def _hops_s(self, choice: MetisChoice) -> list[float]:
        """Seconds of the messages at each boundary, both ways; layers do not matter."""
        key = replace(choice, layers=tuple(range(1, len(choice.groups) + 1)))
        found = self._hops.get(key)
        if found is None:
            pipelines = self.plan(key).pipelines
            found = self._hops[key] = boundaries_s(pipelines, self._hop_of, self.estimates.sequence_bytes)
        return found

    def _refined(self, choice: MetisChoice) -> MetisChoice:
        """`choice` with layers moved while its estimate falls."""
        cut, message_s = self._cut(choice), self._hops_s(choice)
        assert cut is not None, "a choice without devices"

        def seconds(layers: Sequence[int]) -> float:
            stage_s = [group.stage_s(n) for group, n in zip(cut, layers, strict=True)]
            return one_f_one_b_s(stage_s, message_s, choice.batching.count)

        return replace(choice, layers=shifted(choice.layers, _max_layers(cut), seconds)[0])

    def _cuts(self, rng: random.Random) -> list[tuple[float, int, MetisBatching, Cut]]:
        """Cuts with a rough estimate, the number of their sequence and their batching; uniform cuts come first."""
        problem, space = self.problem, self.problem.space
        degrees: list[int | None] = [None] if space.uneven_tp else [*self.ranked[0].degrees]
        found: list[tuple[float, int, MetisBatching, Cut]] = []
        best_s = dict.fromkeys(self.batchings, float("inf"))

        def cut_all(numbers: Iterable[int], chosen: Sequence[MetisBatching]) -> None:
            for batching, k, tp in product(chosen, numbers, degrees):
                if not self.run.should_continue(_CUTTING):
                    break
                ranked = self.ranked[k]
                groups = ranked.groups(batching, tp)
                aligned = [[group for group in own if ranked.is_aligned(group)] for own in groups]
                for offered in (aligned, groups):
                    longest_s = partial(_slowest_s, batching, _SLACK * min(best_s.values()))
                    for slowest_s, cut in cuts(problem, offered, ranked.max_stages, rng, longest_s):
                        rough_s = slowest_s / _slowest_s(batching, 1.0, len(cut))
                        best_s[batching] = min(best_s[batching], rough_s)
                        found.append((rough_s, k, batching, cut))

        for batching, k in product(self.batchings, range(len(self.ranked))):
            for cut in self._uniform_cuts(batching, self.ranked[k]):
                rough_s = _quick_s(cut, self._layers(cut)[0], batching)
                best_s[batching] = min(best_s[batching], rough_s)
                found.append((rough_s, k, batching, cut))
            if not self.run.should_continue(0.5 * _CUTTING):
                break
        cut_all(range(2)[: len(self.ranked)], self.batchings)
        cut_all(range(2, len(self.ranked)), sorted(self.batchings, key=best_s.__getitem__)[:_BATCHINGS])
        return found

    def _uniform_cuts(self, batching: MetisBatching, ranked: RankedDevices) -> Iterator[Cut]:
        """Cuts into groups of equal size and TP degree in which the layers fit."""
        total, asked = len(ranked.ranks), self.problem.space.num_stages
        for count in range(1, ranked.max_stages + 1):
            size = total // count
            if total % count or size & (size - 1) or asked not in (None, count):
                continue
            for tp in ranked.degrees:
                cut = [group for k in range(count) if (group := ranked.group(k * size, size, tp, batching)) is not None]
                if len(cut) == count and self._layers(tuple(cut)):
                    yield tuple(cut)

    def _cut(self, choice: MetisChoice) -> Cut | None:
        """The stages of a choice; None if one of them is impossible."""
        at, found = 0, []
        for size, tp in choice.groups:
            group = self.ranked[choice.sequence].group(at, size, tp, choice.batching)
            if group is None:
                return None
            found.append(group)
            at += size
        return tuple(found)

    def _layers(self, cut: Cut) -> list[tuple[int, ...]]:
        """Layers per stage that make the slowest as fast as memory allows, and neighbouring splits; none if nothing
        fits."""
        total = self.problem.model.num_layers
        most = [min(top, total) for top in _max_layers(cut)]
        if min(most) < 1 or sum(most) < total:
            return []
        times = [
            [group.stage_s(n) + group.waits_s for n in range(1, top + 1)] for group, top in zip(cut, most, strict=True)
        ]
        best = tuple(least_bottleneck(times, total))
        return [best, *neighbouring_layers(best, most, _ALL_SPLITS)]

    def _improved(self, choice: MetisChoice) -> Iterator[tuple[float, MetisChoice]]:
        """Changes `choice` step by step while its estimate falls."""
        present_s = self.seconds(choice)
        while True:
            started_s = present_s
            for changed in self.neighbours(choice):
                if not self.run.should_continue(_IMPROVING):
                    return
                seconds = self.seconds(changed)
                if seconds < present_s:
                    choice, present_s = changed, seconds
                    yield present_s, choice
                    break
            if present_s == started_s:
                return

    def neighbours(self, choice: MetisChoice, promising: float = _PROMISING) -> Iterator[MetisChoice]:
        """Choices one change away whose quick estimate is at most `promising` times the present one."""
        present = self._cut(choice)
        assert present is not None, "a choice without devices"
        limit_s = promising * _quick_s(present, choice.layers, choice.batching)
        space = self.problem.space
        for changed in _changes(choice, len(self.ranked), self.ranked[0].degrees, self.batchings):
            if space.num_stages not in (None, len(changed.groups)):
                continue
            if not space.uneven_tp and len({tp for _, tp in changed.groups}) > 1:
                continue
            cut = self._cut(changed)
            if cut is None or len(cut) > self.ranked[0].max_stages:
                continue
            for layers in self._layers(cut):
                if _quick_s(cut, layers, changed.batching) <= limit_s:
                    yield replace(changed, layers=layers)
        for layers in neighbouring_layers(choice.layers, _max_layers(present), _ALL_PAIRS, reach=1):
            yield replace(choice, layers=layers)


def _max_layers(cut: Cut) -> list[int]:
    """The most layers of each stage."""
    return [int(group.max_layers[len(cut) - s]) for s, group in enumerate(cut)]


def _slowest_s(batching: MetisBatching, step_s: float, stages: int) -> float:
    """Seconds that the slowest of some stages may take if a step takes about `step_s`."""
    return step_s / (batching.count - 1 + _FILL * stages)


def _quick_s(cut: Cut, layers: tuple[int, ...], batching: MetisBatching) -> float:
    """A rough estimate of a step, in which every stage waits for its own messages only."""
    stage_s = [group.stage_s(n) + group.waits_s for group, n in zip(cut, layers, strict=True)]
    return (batching.count - 1) * max(stage_s) + sum(stage_s)


def _changes(
    choice: MetisChoice, num_sequences: int, degrees: list[int], batchings: list[MetisBatching]
) -> Iterator[MetisChoice]:
    """Choices in which a group has another TP degree, is halved, or is joined to or exchanged with the next, and
    choices of another batching or sequence."""
    groups = choice.groups
    for i, (size, tp) in enumerate(groups):
        before, after = groups[:i], groups[i + 1 :]
        for other in degrees:
            if other != tp and size % other == 0:
                yield replace(choice, groups=(*before, (size, other), *after))
        if size > 1:
            half = (size // 2, min(tp, size // 2))
            yield replace(choice, groups=(*before, half, half, *after))
        if after and after[0][0] == size:
            for joined in {tp, after[0][1]}:
                yield replace(choice, groups=(*before, (2 * size, joined), *after[1:]))
        if after and after[0] != groups[i]:
            yield replace(choice, groups=(*before, after[0], groups[i], *after[1:]))
    for batching in batchings:
        if (batching.size == choice.batching.size) != (batching.policy == choice.batching.policy):
            yield replace(choice, batching=batching)
    for k in range(num_sequences):
        if k != choice.sequence:
            yield replace(choice, sequence=k)
