"""Every allocation of a micro-batch's samples to the replicas of a placement under which all replicas can end in
time."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from operator import le

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.executors.stage_model import TpGroup
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.plan.messages import sample_overlaps
from hexiopt.problem.space import Recompute, recompute_chains
from hexiopt.schedules.in_flight import InFlight, in_flight
from hexiopt.schedules.schedule import Schedule, StagePosition
from solvers.exact.assignments import PlacedDevices
from solvers.exact.pipeline_bounds import ReplicaWork, ends_lower_bound_s
from solvers.exact.splits import Layers

StageAllocation = tuple[tuple[int, ...], Recompute]  # of a stage: samples of each replica, what it recomputes
_SLACK = 1e-9  # of the memory, for rounding


@dataclass(frozen=True, slots=True)
class GlobalChoices:
    """The choices common to all pipelines.

    Schedule, policies (fastest first), ZeRO stage, and the most holders over which a parameter may be spread.
    """

    schedule: Schedule
    policies: tuple[str, ...]
    sharding: int
    holders: int


@dataclass(frozen=True, slots=True)
class _PrecedingReplica:
    """A replica of the previous stage with its samples from `first` to `end`.

    `there_s`: from the start of the step to the end of the first micro-batch's forward. `back_s`: its backward of the
    last micro-batch and all that follows. Before the first stage, both are 0 for all samples.
    """

    first: int
    end: int
    there_s: float
    back_s: float
    group: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Stage:
    """For each chain and replica, by 1, 2, ... samples while they fit: the index in the chain of the first policies
    that fit; and for each replica the seconds of the fastest of these.
    """

    chains: tuple[tuple[Recompute, ...], ...]
    fitting: list[list[list[int]]]
    work_s: list[list[float]]
    enough: bool  # whether all replicas together can process a micro-batch in time


class ReplicaSeconds:
    """Stage times by number of samples, and the recompute chains; caches what it computes."""

    def __init__(self, model: PlanPricer) -> None:
        self.model = model
        self._most = model.problem.space.micro_batch_sizes(model.problem.workload.global_batch)[-1]
        self.least_recompute = LeastRecompute(model)
        per_layer = model.problem.space.recompute_per_layer
        self._chains: Memo[tuple[tuple[str, ...], int], tuple[tuple[Recompute, ...], ...]] = Memo(
            lambda key: recompute_chains(*key, per_layer)
        )
        self._work: Memo[tuple[TpGroup, int, bool, bool, Recompute], list[tuple[float, float]]] = Memo(
            lambda key: self._work_s(*key)
        )

    def chains(self, policies: tuple[str, ...], num_layers: int) -> tuple[tuple[Recompute, ...], ...]:
        """The recompute chains of a stage; see `recompute_chains`."""
        return self._chains[policies, num_layers]

    def work_s(
        self, tp_group: TpGroup, num_layers: int, first: bool, last: bool, recompute: Recompute
    ) -> list[tuple[float, float]]:
        """Forward and backward seconds of 1, 2, ... samples."""
        return self._work[tp_group, num_layers, first, last, recompute]

    def _work_s(
        self, tp_group: TpGroup, num_layers: int, first: bool, last: bool, recompute: Recompute
    ) -> list[tuple[float, float]]:
        return [
            self.model.stages.stage_s(tp_group, num_layers, first, last, x, recompute) for x in range(1, self._most + 1)
        ]


class SampleAllocation:
    """The allocations with which a placement takes less than `limit_s` for `count` micro-batches of `size`
    sequences.
    """

    def __init__(
        self,
        seconds: ReplicaSeconds,
        groups: PlacedDevices,
        size: int,
        count: int,
        global_choices: GlobalChoices,
        limit_s: float,
    ) -> None:
        self._seconds, self._model = seconds, seconds.model
        self._size, self._count, self._frame, self._limit_s = size, count, global_choices, limit_s
        self._groups = groups
        self._tp_groups = [[self._model.tp_group(group) for group in stage] for stage in groups]
        self._stages: Memo[tuple[int, tuple[int, ...]], _Stage] = Memo(lambda key: self._stage(*key))
        self._parts: Memo[tuple[int, tuple[int, ...], StageAllocation], tuple[ReplicaWork, ...]] = Memo(
            lambda key: self._part(*key)
        )
        self._sends: Memo[tuple[tuple[int, ...], tuple[int, ...], int], float] = Memo(
            lambda key: self._model.message_s(*key)
        )
        self._pair_sends: Memo[tuple[int, tuple[int, ...], tuple[int, ...]], list[tuple[float, float]]] = Memo(
            lambda key: self._pair_sends_s(*key)
        )

    def allocations(
        self, layers: Layers
    ) -> Iterator[tuple[tuple[StageAllocation, ...], tuple[float, ...], tuple[float, ...]]]:
        """The samples and policies of every stage; and of each replica, stage by stage, a lower bound on its end, and
        the seconds of the backward that it ends with."""
        lengths = [tuple(end - first for first, end in ranges) for ranges in layers]
        stages = [self._stages[s, own] for s, own in enumerate(lengths)]
        if all(stage.enough for stage in stages):
            for allocated in self._allocate(lengths, stages, [_PrecedingReplica(0, self._size, 0.0, 0.0)]):
                parts = [
                    self._parts[s, own, given] for s, (own, given) in enumerate(zip(lengths, allocated, strict=True))
                ]
                sends_s = [self._pair_sends[s, allocated[s][0], allocated[s + 1][0]] for s in range(len(allocated) - 1)]
                ends_s = ends_lower_bound_s(self._frame.schedule, parts, sends_s, len(lengths[0]), self._count)
                if max(ends_s) < self._limit_s:
                    yield allocated, tuple(ends_s), tuple(part.first_s[1] for stage in parts for part in stage)

    def _allocate(
        self, lengths: Sequence[tuple[int, ...]], stages: Sequence[_Stage], before: Sequence[_PrecedingReplica]
    ) -> Iterator[tuple[StageAllocation, ...]]:
        """Allocations for the last `stages`, after the replicas `before`."""
        if not stages:
            yield ()
            return
        s = len(self._tp_groups) - len(stages)
        for allocated, ways_s in self._allocate_stage(s, stages[0], lengths[s], before):
            own, first = [], 0
            for part, group, (there_s, back_s) in zip(
                self._parts[s, lengths[s], allocated], self._groups[s], ways_s, strict=True
            ):
                there_s, back_s = there_s + part.first_s[0], back_s + part.first_s[1]
                own.append(_PrecedingReplica(first, first + part.samples, there_s, back_s, group))
                first += part.samples
            for others in self._allocate(lengths, stages[1:], own):
                yield (allocated, *others)

    def _allocate_stage(
        self, s: int, stage: _Stage, lengths: tuple[int, ...], before: Sequence[_PrecedingReplica]
    ) -> Iterator[tuple[StageAllocation, tuple[tuple[float, float], ...]]]:
        """Samples of every replica, the first policies of a chain that fit all of them, and their ways there and back.

        A replica runs all its operations after its samples of the first micro-batch have come through the previous
        stages, and before those of the last one go back through them; both pass first layer ranges only. The messages
        of all micro-batches, on each link one after another, must fit in between as well.
        """
        work, last, count, limit_s = stage.work_s, len(stage.work_s) - 1, self._count, self._limit_s
        remaining_s = (limit_s - min(one.there_s + one.back_s for one in before)) / count
        capacity = [0] * (last + 2)  # the most samples of the replicas from r on
        for r in range(last, -1, -1):
            capacity[r] = capacity[r + 1] + bisect_left(work[r], remaining_s)

        def allocate(r: int, at: int) -> Iterator[tuple[tuple[int, float, float], ...]]:
            """Samples and ways of the replicas from r on, which share the samples from index `at` on."""
            if r > last:
                yield ()
                return
            group = self._groups[s][r]
            for x in range(1, min(self._size - at - (last - r), len(work[r])) + 1):
                there = back = link = 0.0
                for one in before:
                    common = min(one.end, at + x) - max(one.first, at)
                    if common > 0:
                        ahead_s, recompute_s = (
                            self._send_s(one.group, group, common),
                            self._send_s(group, one.group, common),
                        )
                        there, back = max(there, one.there_s + ahead_s), max(back, one.back_s + recompute_s)
                        link = max(link, one.there_s + one.back_s + count * max(ahead_s, recompute_s))
                work_s = work[r][x - 1]
                if max(there + back + count * work_s, link + work_s) >= limit_s:
                    return
                left = self._size - at - x
                if left <= capacity[r + 1] and (left == 0) == (r == last):
                    for others in allocate(r + 1, at + x):
                        yield ((x, there, back), *others)

        if capacity[0] >= self._size:
            for found in allocate(0, 0):
                given, ways_s = tuple(x for x, _, _ in found), tuple((there, back) for _, there, back in found)
                for recompute in self._recomputes(s, stage, lengths, given):
                    yield (given, recompute), ways_s

    def _recomputes(
        self, s: int, stage: _Stage, lengths: tuple[int, ...], given: tuple[int, ...]
    ) -> Iterable[Recompute]:
        """The first policies of each chain that fit all replicas, unless another's layers are as fast in every
        range.
        """
        firsts: dict[Recompute, list[float]] = {}
        for chain, fitting in zip(stage.chains, stage.fitting, strict=True):
            if all(x <= len(own) for own, x in zip(fitting, given, strict=True)):
                recompute = chain[max(own[x - 1] for own, x in zip(fitting, given, strict=True))]
                firsts.setdefault(recompute, [])
        if len(firsts) > 1:
            ends = [0, *accumulate(lengths)]
            for recompute, seconds in firsts.items():
                each = recompute * ends[-1] if len(recompute) == 1 else recompute
                seconds += (
                    self._model.stages.stage_s(tp_group, b - a, False, False, x, each[a:b])[1]
                    for a, b in pairwise(ends)
                    for tp_group, x in zip(self._tp_groups[s], given, strict=True)
                )
        found: list[Recompute] = []
        for recompute in sorted(firsts, key=firsts.__getitem__):
            if not any(all(map(le, firsts[other], firsts[recompute])) for other in found):
                found.append(recompute)
        return found

    def _stage(self, s: int, lengths: tuple[int, ...]) -> _Stage:
        """The limits of stage s with layer ranges of `lengths`."""
        global_choices, num_layers = self._frame, sum(lengths)
        at = StagePosition(s, len(self._tp_groups), self._count, len(lengths))
        shards = StateSharding(global_choices.sharding, global_choices.holders)
        chains, least_recompute = (
            self._seconds.chains(global_choices.policies, num_layers),
            self._seconds.least_recompute,
        )
        fitting = [
            [
                least_recompute.first_fits(tp_group, lengths, global_choices.schedule, at, shards, chain)
                for tp_group in self._tp_groups[s]
            ]
            for chain in chains
        ]
        work = []
        for tp_group, *each in zip(self._tp_groups[s], *fitting, strict=True):
            least = [inf] * max(map(len, each))
            for chain, own in zip(chains, each, strict=True):
                for k, first_fit in enumerate(own):
                    both_s = self._seconds.work_s(tp_group, num_layers, at.first, at.last, chain[first_fit])[k]
                    least[k] = min(least[k], sum(both_s))
            work.append(least)
        capacity = sum(bisect_left(own, self._limit_s / self._count) for own in work)
        return _Stage(chains, fitting, work, capacity >= self._size)

    def _part(self, s: int, lengths: tuple[int, ...], allocated: StageAllocation) -> tuple[ReplicaWork, ...]:
        """The work of the replicas of stage s."""
        (given, recompute), work_s = allocated, self._seconds.work_s
        first, last, alone = s == 0, s == len(self._tp_groups) - 1, len(lengths) == 1
        begin = recompute if len(recompute) == 1 else recompute[: lengths[0]]
        return tuple(
            ReplicaWork(
                x,
                work_s(tp_group, lengths[0], first, last and alone, begin)[x - 1],
                work_s(tp_group, sum(lengths), first, last, recompute)[x - 1],
            )
            for tp_group, x in zip(self._tp_groups[s], given, strict=True)
        )

    def _pair_sends_s(self, s: int, here: tuple[int, ...], there: tuple[int, ...]) -> list[tuple[float, float]]:
        """Seconds of the messages forward and back between the replicas of stages s and s + 1, given their samples."""
        a, b = self._groups[s], self._groups[s + 1]
        return [
            (self._send_s(a[i], b[j], common), self._send_s(b[j], a[i], common))
            for i, j, common in sample_overlaps(here, there)
        ]

    def _send_s(self, sender: tuple[int, ...], receiver: tuple[int, ...], samples: int) -> float:
        """Seconds of a message of `samples` on an otherwise idle network; 0 before the first stage."""
        if not sender or not receiver:
            return 0.0
        return self._sends[sender, receiver, samples]


class LeastRecompute:
    """The least recomputation with which a replica fits, its states sharded as widely as possible; caches what it
    computes.
    """

    def __init__(self, model: PlanPricer) -> None:
        self._model = model
        self._most_samples = model.problem.space.micro_batch_sizes(model.problem.workload.global_batch)[-1]
        self._found: dict[tuple[object, ...], list[int]] = {}

    def first_fits(
        self,
        tp_group: TpGroup,
        ranges: tuple[int, ...],
        schedule: Schedule,
        position: StagePosition,
        shards: StateSharding,
        chain: tuple[Recompute, ...],
    ) -> list[int]:
        """For 1, 2, ... samples, the index of the first element of `chain` that fits; the list ends where none does.

        `ranges` are the lengths of the stage's layer ranges, as equal as possible; `chain` as given by
        `recompute_chains`.
        """
        held = in_flight(schedule, position)
        key = (tp_group, ranges, position.first, position.last, held, shards, chain)
        found = self._found.get(key)
        if found is None:
            found, at = [], 0
            for samples in range(1, self._most_samples + 1):
                # More samples never fit with less recomputation.
                while at < len(chain) and not self._fits(
                    tp_group, sum(ranges), position, held, shards, samples, chain[at]
                ):
                    at += 1
                if at == len(chain):
                    break
                found.append(at)
            self._found[key] = found
        return found

    def _fits(
        self,
        tp_group: TpGroup,
        num_layers: int,
        position: StagePosition,
        held: InFlight,
        shards: StateSharding,
        samples: int,
        recompute: Recompute,
    ) -> bool:
        model = self._model.stages.memory_model(tp_group, samples)
        each, ends = recompute * num_layers if len(recompute) == 1 else recompute, (position.first, position.last)
        memory = model.layered(each, *ends, held, shards)
        return memory.total <= tp_group.gpu.usable_memory_bytes * (1 + _SLACK)
