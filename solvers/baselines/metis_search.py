"""The search of Metis (see `metis_atc24.py`): cuts of all sequences of ranks, the best improved step by step."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice, permutations, product
from typing import Any

from hexiopt.cost.executors.routes import hop
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.schedules.schedule import Schedule
from solvers.baselines.aligned import nearby
from solvers.baselines.cutting import Cut, cuts
from solvers.baselines.device_groups import Batching, RankedDevices
from solvers.baselines.estimate import Estimates, one_f_one_b_s, shifted
from solvers.baselines.lanes import boundaries_s, plan_of_cut
from solvers.completion.layers import bottleneck_counts
from solvers.core.search import Search

_SEQUENCES = 24  # sequences of GPU types that are tried
_CUTTING, _IMPROVING = 0.4, 0.55  # shares of the time limit by which cuts are found, and improved
_BATCHINGS = 4  # batchings tried for all sequences: those best for the first two
_SLACK = 1.5  # cuts whose rough estimate is this much above the best are left out
_FILL = 0.8  # a stage's time in a fill, over the slowest stage's, roughly
_LAYERED = 1000  # cuts whose layers are split
_REFINED = 600  # cuts whose messages are estimated too
_IMPROVED = 8  # of them, how many are improved
_FEW_STAGES = 8
_PROMISING = 1.1  # changes whose quick estimate is this much above the present one are left out


@dataclass(frozen=True, slots=True)
class Choice:
    """All of a plan: ranks by number of their sequence, batching, and (ranks, TP degree) and layers of every stage."""

    sequence: int
    batching: Batching
    groups: tuple[tuple[int, int], ...]
    layers: tuple[int, ...]


def sequences(problem: Problem) -> list[tuple[int, ...]]:
    """Devices by rank, for each sequence of GPU types; fastest types first, and backwards, in the lead."""
    cluster, by_type = problem.cluster, dict[str, list[int]]()
    for machine, devices in problem.usable_by_machine.items():
        by_type.setdefault(cluster.machines[machine].gpu.name, []).extend(devices)
    speed = {gpu.name: gpu.peak_flops(problem.workload.precision) or 0.0 for gpu in cluster.types}
    ordered = sorted(by_type, key=lambda name: (-speed[name], name))
    orders = [tuple(ordered), tuple(ordered[::-1]), *islice(permutations(ordered), _SEQUENCES)]
    return [tuple(d for name in order for d in by_type[name]) for order in list(dict.fromkeys(orders))[:_SEQUENCES]]


def batchings(problem: Problem, policy: str, sharded: bool) -> list[Batching]:
    """Micro-batches that divide the global batch, in as few lanes as the plan space allows, or as many as asked."""
    batch, asked, found = problem.workload.global_batch, problem.space.num_pipelines, []
    sizes = problem.space.micro_batch_sizes(batch)
    size = asked or 1
    while size <= min(batch, len(problem.usable_devices) * sizes[-1]):
        lanes = asked or max(1, size // sizes[-1])
        if batch % size == 0 and size // lanes in sizes:
            found.append(Batching(batch // size, size, lanes, policy, sharded))
        size *= 2
    return found


class Planner:
    """The search for one problem."""

    def __init__(self, search: Search, schedule: Schedule, sharding: int) -> None:
        self.search, self.schedule, self.sharding = search, schedule, sharding
        self.problem, self.estimates = search.problem, Estimates(search.pricer)
        kept: dict[Any, Any] = {}
        self.ranked = [RankedDevices(self.estimates, ranks, kept) for ranks in sequences(self.problem)]
        self.batchings = [
            batching
            for policy in search.pricer.policies()
            for batching in batchings(self.problem, policy, bool(sharding))
        ]
        self._hop_of = cache(partial(hop, self.problem.cluster))
        self._seconds: dict[Choice, float] = {}
        self._hops: dict[Choice, list[float]] = {}

    def choices(self, rng: random.Random) -> Iterator[tuple[float, Choice]]:
        """What the search finds, with estimates; the best cuts, and what came of improving some."""
        quick: dict[Choice, float] = {}
        for _, sequence, batching, cut in sorted(self._cuts(rng), key=lambda one: one[0])[:_LAYERED]:
            own = tuple((group.end_rank - group.first_rank, group.tp) for group in cut)
            for layers in self._layers(cut):
                quick[Choice(sequence, batching, own, layers)] = _quick_s(cut, layers, batching)
        found = []
        for choice in sorted(quick, key=quick.__getitem__)[:_REFINED]:
            for each in {choice: None, self._refined(choice): None}:
                found.append((self.seconds(each), each))
                yield found[-1]
            if not self.search.go_on(0.5 * (_CUTTING + _IMPROVING)):
                break
        for _, choice in sorted(found, key=lambda one: one[0])[:_IMPROVED]:
            yield from self._improved(choice)

    def plan(self, choice: Choice) -> Plan:
        """The plan of a choice."""
        cut = self._cut(choice)
        assert cut is not None, "a choice without devices"
        return plan_of_cut(self.problem, choice.batching, cut, choice.layers, self.schedule, self.sharding)

    def seconds(self, choice: Choice) -> float:
        """The estimate of a step, messages as 1F1B lets them overlap."""
        found = self._seconds.get(choice)
        if found is None:
            cut = self._cut(choice)
            assert cut is not None, "a choice without devices"
            stage_s = [group.stage_s(n) for group, n in zip(cut, choice.layers, strict=True)]
            found = self._seconds[choice] = one_f_one_b_s(stage_s, self._hops_s(choice), choice.batching.count)
        return found

    def _hops_s(self, choice: Choice) -> list[float]:
        """Messages at each boundary, both ways; whatever the layers."""
        key = replace(choice, layers=tuple(range(1, len(choice.groups) + 1)))
        found = self._hops.get(key)
        if found is None:
            lanes = self.plan(key).pipelines
            found = self._hops[key] = boundaries_s(lanes, self._hop_of, self.estimates.sequence_bytes)
        return found

    def _refined(self, choice: Choice) -> Choice:
        """`choice` with layers moved while its estimate falls."""
        cut, hop_s = self._cut(choice), self._hops_s(choice)
        assert cut is not None, "a choice without devices"

        def seconds(layers: Sequence[int]) -> float:
            stage_s = [group.stage_s(n) for group, n in zip(cut, layers, strict=True)]
            return one_f_one_b_s(stage_s, hop_s, choice.batching.count)

        rooms = [int(group.rooms[len(cut) - s]) for s, group in enumerate(cut)]
        return replace(choice, layers=shifted(choice.layers, rooms, seconds)[0])

    def _cuts(self, rng: random.Random) -> list[tuple[float, int, Batching, Cut]]:
        """Cuts with a rough estimate, number of sequence and batching: uniform ones, then those by speed first."""
        problem, space = self.problem, self.problem.space
        degrees: list[int | None] = [None] if space.uneven_tp else [*self.ranked[0].degrees]
        found: list[tuple[float, int, Batching, Cut]] = []
        best_s = dict.fromkeys(self.batchings, float("inf"))

        def cut_all(numbers: Iterable[int], chosen: Sequence[Batching]) -> None:
            for batching, k, tp in product(chosen, numbers, degrees):
                if not self.search.go_on(_CUTTING):
                    break
                ranked = self.ranked[k]
                groups = ranked.groups(batching, tp)
                aligned = [[group for group in own if ranked.is_aligned(group)] for own in groups]
                for offered in (aligned, groups):
                    longest_s = partial(_slowest_s, batching, _SLACK * min(best_s.values()))
                    for slowest_s, cut in cuts(problem, offered, ranked.most_stages, rng, longest_s):
                        rough_s = slowest_s / _slowest_s(batching, 1.0, len(cut))
                        best_s[batching] = min(best_s[batching], rough_s)
                        found.append((rough_s, k, batching, cut))

        for batching, k in product(self.batchings, range(len(self.ranked))):
            for cut in self._uniform_cuts(batching, self.ranked[k]):
                rough_s = _quick_s(cut, self._layers(cut)[0], batching)
                best_s[batching] = min(best_s[batching], rough_s)
                found.append((rough_s, k, batching, cut))
            if not self.search.go_on(0.5 * _CUTTING):
                break
        cut_all(range(2)[: len(self.ranked)], self.batchings)
        cut_all(range(2, len(self.ranked)), sorted(self.batchings, key=best_s.__getitem__)[:_BATCHINGS])
        return found

    def _uniform_cuts(self, batching: Batching, ranked: RankedDevices) -> Iterator[Cut]:
        """Cuts into groups of equal size and TP degree in which the layers fit."""
        total, asked = len(ranked.ranks), self.problem.space.num_stages
        for count in range(1, ranked.most_stages + 1):
            size = total // count
            if total % count or size & (size - 1) or asked not in (None, count):
                continue
            for tp in ranked.degrees:
                cut = [group for k in range(count) if (group := ranked.group(k * size, size, tp, batching)) is not None]
                if len(cut) == count and self._layers(tuple(cut)):
                    yield tuple(cut)

    def _cut(self, choice: Choice) -> Cut | None:
        """The stages of a choice; None where some of them cannot be."""
        at, found = 0, []
        for size, tp in choice.groups:
            group = self.ranked[choice.sequence].group(at, size, tp, choice.batching)
            if group is None:
                return None
            found.append(group)
            at += size
        return tuple(found)

    def _layers(self, cut: Cut) -> list[tuple[int, ...]]:
        """Layers per stage, the slowest as fast as memory allows, and splits close by; none where they do not fit."""
        total = self.problem.model.num_layers
        rooms = [min(int(group.rooms[len(cut) - s]), total) for s, group in enumerate(cut)]
        if min(rooms) < 1 or sum(rooms) < total:
            return []
        times = [
            [group.stage_s(n) + group.waits_s for n in range(1, room + 1)]
            for group, room in zip(cut, rooms, strict=True)
        ]
        return nearby(bottleneck_counts(times, total), rooms)

    def _improved(self, choice: Choice) -> Iterator[tuple[float, Choice]]:
        """Changes of `choice` one by one while its estimate falls."""
        present_s = self.seconds(choice)
        while True:
            started_s = present_s
            for changed in self.near(choice):
                if not self.search.go_on(_IMPROVING):
                    return
                seconds = self.seconds(changed)
                if seconds < present_s:
                    choice, present_s = changed, seconds
                    yield present_s, choice
                    break
            if present_s == started_s:
                return

    def near(self, choice: Choice, promising: float = _PROMISING) -> Iterator[Choice]:
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
            if cut is None or len(cut) > self.ranked[0].most_stages:
                continue
            for layers in self._layers(cut):
                if _quick_s(cut, layers, changed.batching) <= limit_s:
                    yield replace(changed, layers=layers)
        for layers in _shifted(choice.layers):
            if all(
                n <= group.rooms[len(present) - s] for s, (n, group) in enumerate(zip(layers, present, strict=True))
            ):
                yield replace(choice, layers=layers)


def _slowest_s(batching: Batching, step_s: float, stages: int) -> float:
    """What the slowest of some stages may take for a step to take about `step_s`."""
    return step_s / (batching.count - 1 + _FILL * stages)


def _quick_s(cut: Cut, layers: tuple[int, ...], batching: Batching) -> float:
    """An estimate of a step by what stages wait for on their own."""
    stage_s = [group.stage_s(n) + group.waits_s for group, n in zip(cut, layers, strict=True)]
    return (batching.count - 1) * max(stage_s) + sum(stage_s)


def _changes(choice: Choice, num_sequences: int, degrees: list[int], batchings: list[Batching]) -> Iterator[Choice]:
    """A group with another TP degree, halved, joined to the next or exchanged with it; another batching or sequence."""
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


def _shifted(layers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """A layer moved between two stages: of a few, any two; of many, neighbours."""
    reach = len(layers) if len(layers) <= _FEW_STAGES else 1
    for a, b in permutations(range(len(layers)), 2):
        if abs(a - b) <= reach and layers[a] > 1:
            yield tuple(n - (s == a) + (s == b) for s, n in enumerate(layers))
