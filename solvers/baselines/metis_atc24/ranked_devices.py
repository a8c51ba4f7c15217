"""Stages as device groups of consecutive ranks, whose replicas share a micro-batch by their speed, as Metis has them.

A group is a power of two of ranks. With a TP degree, the same for all its replicas, it is timed as a stage.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hexiopt.memo import Memo
from hexiopt.problem.space import default_schedule
from hexiopt.schedules.in_flight import holding, most_in_flight_before
from solvers.baselines._estimates import GridEstimates, around
from solvers.completion.allocation import earliest_finish
from solvers.core.partition import DeviceGroup

_MAX_STAGES = 40

ReplicaSamples = tuple[DeviceGroup, int]  # a replica: its devices and its samples of a micro-batch
Replicas = tuple[ReplicaSamples, ...]
Samples = list[tuple[list[int], list[int]]]


@dataclass(frozen=True, slots=True)
class Batching:
    """`count` micro-batches of `size` sequences, each split equally over `pipelines`; one policy."""

    count: int
    size: int
    pipelines: int
    policy: str
    sharded: bool

    @property
    def pipeline_size(self) -> int:
        """Sequences of a micro-batch in each of the pipelines."""
        return self.size // self.pipelines


@dataclass(frozen=True, slots=True, eq=False)
class StageGroup:
    """Ranks [first_rank, end_rank) as a stage, with the times of its slowest replica.

    `samples` lists, pipeline by pipeline, the numbers of its replicas and their samples of a micro-batch.
    """

    ranks: tuple[int, ...]
    first_rank: int
    end_rank: int
    tp: int
    samples: Samples
    layer_s: float  # with the layer's share of the gradient sync, spread over the micro-batches
    ends_s: float  # what embedding or head add
    waits_s: float  # about what messages to and from other machines add to a period of 1F1B
    max_layers: NDArray[np.int64]  # that fit, by how many stages there are from this one to the last

    def stage_s(self, num_layers: int) -> float:
        """Seconds of a micro-batch, messages apart."""
        return num_layers * self.layer_s + self.ends_s

    def pipelines(self) -> list[Replicas]:
        """The devices and samples of the replicas of each pipeline; replicas without a sample are idle."""
        pipelines = []
        for members, counts in self.samples:
            starts = [(self.first_rank + i * self.tp, n) for i, n in zip(members, counts, strict=True) if n]
            pipelines.append(tuple(sorted((self.ranks[a : a + self.tp], n) for a, n in starts)))
        return pipelines


class RankedDevices:
    """One sequence of ranks. `ranks` are devices; those of a machine, and of a GPU type, stand together."""

    def __init__(self, estimates: GridEstimates, ranks: Sequence[int], timed: dict[Any, Any]) -> None:
        """`timed` is shared with the other sequences of the same devices."""
        self.estimates, self.ranks, self._timed_stages = estimates, tuple(ranks), timed
        self.problem = problem = estimates.problem
        machine_of = problem.cluster.machine_of
        self._machine = [int(machine_of[d]) for d in ranks]
        self.degrees = sorted(
            {t for devices in problem.usable_by_machine.values() for t in problem.space.allowed_tp(len(devices))}
        )
        self._tp_groups: dict[int, list[Any]] = {
            tp: [self._tp_group(a, tp) for a in range(len(ranks))] for tp in self.degrees
        }
        self._crossing_s = [self._sequence_s(a) for a in range(len(ranks) + 1)]
        self._places: Memo[tuple[int, int, int], tuple[tuple[Any, ...], float, float]] = Memo(
            lambda key: self._place(*key)
        )
        self.max_stages = min(len(ranks), problem.model.num_layers, _MAX_STAGES)

    def _tp_group(self, a: int, tp: int) -> Any:
        """The TP group that begins at rank a; None if it would leave the machine."""
        if a + tp > len(self.ranks) or self._machine[a] != self._machine[a + tp - 1]:
            return None
        allowed = self.problem.space.allowed_tp(self.problem.cluster.machines[self._machine[a]].num_gpus)
        return self.estimates.pricer.tp_group(self.ranks[a : a + tp]) if tp in allowed else None

    def _sequence_s(self, a: int) -> float:
        """Seconds to send the hidden states of a sequence from the machine before rank a to its own; 0 inside a
        machine."""
        if not 0 < a < len(self.ranks) or self._machine[a - 1] == self._machine[a]:
            return 0.0
        x, y = self._machine[a - 1 : a + 1]
        cluster = self.problem.cluster
        interfaces = min(cluster.machines[m].num_interfaces for m in (x, y))
        return self.estimates.sequence_bytes / (float(cluster.network.bandwidth[x, y]) * interfaces)

    def _waits_s(self, a: int, end: int) -> float:
        """Seconds that a stage waits for messages, for one sequence: a cycle of two stages waits for a message, that of
        three for two (`period_s`)."""
        inside = max(self._crossing_s[a + 1 : end], default=0.0)
        shorter, longer = sorted(self._side_s(at, inside) for at in (a, end))
        return longer / 2 + shorter / 6

    def _side_s(self, at: int, inside: float) -> float:
        """A message each way between ranks at − 1 and at, for a stage beside that crosses machines `inside` itself.

        A machine in the middle receives from both sides at once, unless a stage over several shares that out.
        """
        if not 0 < at < len(self.ranks):
            return 0.0
        if not self._crossing_s[at]:
            return inside  # half of the samples change machines
        middle = (self._machine[at - 1] != self._machine[0]) + (self._machine[at] != self._machine[-1])
        return self._crossing_s[at] * (2 + max(0, middle - (inside > 0)))

    def groups(self, batching: Batching, tp_asked: int | None = None) -> list[list[StageGroup]]:
        """All stages that begin at each rank."""
        return [[*self.groups_from(a, batching, tp_asked)] for a in range(len(self.ranks))]

    def groups_from(self, a: int, batching: Batching, tp_asked: int | None = None) -> Iterator[StageGroup]:
        """All stages that begin at rank a."""
        size = 1
        while a + size <= len(self.ranks):
            for tp in self.degrees:
                group = self.group(a, size, tp, batching) if tp_asked in (None, tp) else None
                if group is not None:
                    yield group
            size *= 2

    def group(self, a: int, size: int, tp: int, batching: Batching) -> StageGroup | None:
        """The stage of `size` ranks from rank a with TP degree `tp`; None if there is none."""
        if size % tp or not batching.pipelines <= size // tp <= batching.size:
            return None
        tp_groups, ring_s, waits_s = self._places[a, size, tp]
        if None in tp_groups:
            return None
        first, last = a == 0, a + size == len(self.ranks)
        key = (tp_groups, ring_s, first, last, batching)
        if key not in self._timed_stages:
            self._timed_stages[key] = self._time_stage(tp_groups, tp, ring_s, first, last, batching)
        samples, layer_s, ends_s, max_layers = self._timed_stages[key]
        return StageGroup(self.ranks, a, a + size, tp, samples, layer_s, ends_s, batching.size * waits_s, max_layers)

    def _place(self, a: int, size: int, tp: int) -> tuple[tuple[Any, ...], float, float]:
        """TP groups of the replicas (None for those that would leave their machine), and seconds of their ring and of
        waits."""
        return tuple(self._tp_groups[tp][a : a + size : tp]), self._ring_s(a, size, tp), self._waits_s(a, a + size)

    def is_aligned(self, group: StageGroup) -> bool:
        """Whether the group begins at a multiple of its size from the first rank of its machine."""
        size = group.end_rank - group.first_rank
        return (group.first_rank - self._machine.index(self._machine[group.first_rank])) % size == 0

    def _ring_s(self, a: int, size: int, tp: int) -> float:
        """Seconds per byte on the slowest link of the rings over a stage's replicas, one ring for each TP rank.

        Inside a machine every rank has its own link; between machines those of an interface share it.
        """
        cluster = self.problem.cluster
        replicas = Counter(self._machine[a : a + size : tp])
        seconds = [1.0 / cluster.machines[m].intra_bandwidth_bytes_per_s for m, n in replicas.items() if n > 1]
        if len(replicas) > 1:
            for x, y in around(replicas):
                sharing = max(cluster.machines[m].num_gpus // cluster.machines[m].num_interfaces for m in (x, y))
                seconds.append(max(1, min(tp, sharing)) / float(cluster.network.bandwidth[x, y]))
        return max(seconds, default=0.0)

    def _time_stage(
        self, tp_groups: tuple[Any, ...], tp: int, ring_s: float, first: bool, last: bool, batching: Batching
    ) -> Any:
        """The replicas of each pipeline and their samples, stage times, and the most layers that fit."""
        size, policy = batching.pipeline_size, batching.policy
        pipelines = _by_kind(tp_groups, batching.pipelines)
        samples: Samples = []
        for members in pipelines:
            finish_s = [partial(self._layer_s, policy, tp_groups[i]) for i in members]
            samples.append((members, earliest_finish(finish_s, size, least=0)))
        used = {(tp_groups[i], n) for members, counts in samples for i, n in zip(members, counts, strict=True) if n}
        copies = sum(n > 0 for _, counts in samples for n in counts)
        layer_s = max(self._layer_s(policy, tp_group, n) for tp_group, n in used)
        ends_s = max(
            self._stage_s(tp_group, 1, first, last, n, policy) - self._layer_s(policy, tp_group, n)
            for tp_group, n in used
        )
        trained = self.problem.parameters
        moved = 2.0 * (copies - 1) / copies * self.problem.workload.states.gradient / tp
        sync_s = moved * ring_s / batching.count  # of a parameter, spread over the micro-batches
        layer_s += trained.layer_params * sync_s
        ends_s += (first * trained.params_of("first", "ends") + last * trained.last_params) * sync_s
        shards = copies if batching.sharded else 1
        total, schedule = self.problem.model.num_layers, default_schedule(self.problem.workload)

        def max_layers(left: int) -> int:
            held = holding(most_in_flight_before(schedule, left - 1, batching.count))
            return min(
                total,
                *(
                    self.estimates.max_layers[frozenset([tp_group]), first, last, n, policy, held, shards]
                    for tp_group, n in used
                ),
            )

        return samples, layer_s, ends_s, np.array([0, *_falling_values(max_layers, 1, self.max_stages)])

    def _layer_s(self, policy: str, tp_group: Any, size: int) -> float:
        return self._stage_s(tp_group, 1, False, False, size, policy)

    def _stage_s(self, tp_group: Any, num_layers: int, first: bool, last: bool, size: int, policy: str) -> float:
        return self.estimates.stage_s(frozenset([tp_group]), num_layers, first, last, size, policy)


def _by_kind(tp_groups: Sequence[Any], pipelines: int) -> list[list[int]]:
    """The replicas of each pipeline: consecutive ones if all are alike, else equal shares of each kind."""
    count = len(tp_groups)
    if len(set(tp_groups)) == 1:
        return [
            list(range(pipeline * count // pipelines, (pipeline + 1) * count // pipelines))
            for pipeline in range(pipelines)
        ]
    kinds = {tp_group: k for k, tp_group in enumerate(dict.fromkeys(tp_groups))}
    order = sorted(range(count), key=lambda i: (kinds[tp_groups[i]], i))
    return [sorted(order[pipeline::pipelines]) for pipeline in range(pipelines)]


def _falling_values(function: Callable[[int], int], first: int, last: int) -> list[int]:
    """Values from `first` to `last` of a function that never rises; where two agree, so do all between."""
    values = {first: function(first), last: function(last)}

    def fill(low: int, high: int) -> None:
        if values[low] == values[high]:
            values.update(dict.fromkeys(range(low, high), values[low]))
        elif high - low > 1:
            middle = (low + high) // 2
            values[middle] = function(middle)
            fill(low, middle)
            fill(middle, high)

    fill(first, last)
    return [values[k] for k in range(first, last + 1)]
