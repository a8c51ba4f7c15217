"""Whether a pipeline on a given line of TP groups may process so many micro-batches within a time.

Necessary conditions only, so that a no is a proof. With t_s the forward and backward of stage s for a micro-batch, f_s
its forward, r the stages behind it, M micro-batches, S the sum of all t_s and of the messages both ways:

- with one layer range a stage: S + (M−1)·t_s − min(k_s, M−1)·f_s ≤ T, k_s being the most forwards that a stage runs
  ahead under any of the schedules (`BoundTerms`); in a replicated stage this holds for every replica, the others as
  short as may be;
- with several, M is a multiple of the stages, and a stage waits for a layer of each stage before: M·t_s + Σ ≤ T;
- memory holds at least as many micro-batches in flight as `BoundTerms` says, of several ranges as of the last;
- where a parameter has other holders, a ring passes on at least half of what a device holds, after its last backward;
  or, from ZeRO-2 on, in the backward of every micro-batch (`hexiopt/cost/sharding.py`).

Layers are dealt from the last stage to the first; of all ways to deal n layers to the stages behind, the one that
takes the first micro-batch through them fastest stands for all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.executors.stage_model import TpGroup
from hexiopt.cost.model import PlanPricer
from hexiopt.problem.space import schedules
from hexiopt.schedules.schedule import weakest_terms
from solvers.exact.assignments import Groups
from solvers.exact.stage_times import StageTable

Floats = NDArray[np.float64]
_SLACK = 1e-9  # of a time, for rounding


class Sync(Enum):
    """Which stages synchronise gradients: the replicated ones, or all."""

    REPLICATED = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class Context:
    """What is known of the plan: who synchronises, how lean memory gets, whether from ZeRO-2 on."""

    sync: Sync
    shards: StateSharding
    lockstep: bool


@dataclass(frozen=True, slots=True)
class _Seconds:
    """By layers, in seconds: forward and backward; forward; gradient sync at the end of the step; and what scattering
    gradients adds to the backward where every micro-batch does (from ZeRO-2 on).
    """

    both: list[float]
    forward: list[float]
    sync: list[float]
    scatter: list[float]


class LineFloor:
    """The conditions on all lines of one problem."""

    def __init__(self, model: PlanPricer, table: StageTable) -> None:
        problem = model.problem
        self._model, self._table, self._layers = model, table, problem.model.num_layers
        self._sizes = problem.space.micro_batch_sizes(problem.workload.global_batch)
        self._widths = problem.workload.stored_gradient_bytes, problem.workload.element_bytes
        self._schedules = schedules(problem.workload)
        self._interleaved = [schedule for schedule in self._schedules if schedule.chunked]
        self._lists: dict[tuple[object, ...], _Seconds] = {}

    def most_sequences(self, groups: Groups, context: Context, least: int, most: int, step_s: float) -> int:
        """The most sequences, from `least` to `most`, that may be processed in `step_s` seconds; 0 for none."""
        stages, best = len(groups), 0
        limit_s = step_s * (1 + _SLACK)
        if stages > self._layers:
            return 0
        chunks = bool(self._interleaved) and not context.lockstep and 1 < stages <= self._layers // 2
        for size in self._sizes:
            if size < max(map(len, groups)):
                continue
            low, high = -(-max(least, best + 1) // size), most // size
            count = _last(partial(self._flat, groups, context, limit_s, size), low, high)
            best = max(best, count * size)
            if chunks:
                low = -(-max(least, best + 1) // (size * stages))
                turns = _last(partial(self._chunked, groups, context, limit_s, size), low, high // stages)
                best = max(best, turns * stages * size)
        return best

    def _flat(self, groups: Groups, context: Context, limit_s: float, size: int, count: int) -> bool:
        layers, last = self._layers, len(groups) - 1
        routes = self._hops(groups, size)
        least = [self._least(slots, size) for slots in groups]
        behind = {0: 0.0}  # seconds of the first micro-batch through the stages behind, by their layers
        for s in range(last, -1, -1):
            after = last - s
            terms = weakest_terms(self._schedules, after, len(groups), 1)
            held, warm = min(count, terms.last_in_flight), min(terms.forwards_ahead, count - 1)
            before = [min((one[k] for one in least[:s]), default=0.0) for k in (0, 1)]
            message_s, ways_s = routes[s] if s < last else 0.0, sum(routes[:s])
            reached: dict[int, float] = {}
            for done, passed_s in behind.items():
                for n in range(1 if s else layers - done, layers - done - s + 1):
                    left = layers - done - n
                    room_s = limit_s - passed_s - message_s
                    rooms = room_s - left * before[0] - ways_s, room_s - left * before[1] - ways_s / 2
                    way_s = self._stage_s(groups[s], n, s == 0, s == last, size, count, warm, held, context, rooms)
                    if way_s is None:
                        break
                    total = passed_s + message_s + way_s
                    if total < reached.get(done + n, inf):
                        reached[done + n] = total
            behind = reached
            if not behind:
                return False
        return layers in behind

    def _chunked(self, groups: Groups, context: Context, limit_s: float, size: int, turns: int) -> bool:
        """Of `turns` times as many micro-batches as stages."""
        count = turns * len(groups)
        last, total, before = len(groups) - 1, 0, [0.0, 0.0]
        for s, slots in enumerate(groups):
            after, room = last - s, 0
            held = min(count, weakest_terms(self._interleaved, after, len(groups), 2).last_in_flight)
            rooms = limit_s - before[0], limit_s - before[1]
            for n in range(2, self._layers - 2 * last + 1):
                if self._stage_s(slots, n, s == 0, s == last, size, count, 0, held, context, rooms) is None:
                    break
                room = n
            if not room:
                return False
            total += room
            before = [a + b for a, b in zip(before, self._least(slots, size), strict=True)]
        return total >= self._layers

    def _stage_s(
        self,
        slots: Sequence[tuple[int, ...]],
        n: int,
        first: bool,
        last: bool,
        size: int,
        count: int,
        warm: int,
        held: int,
        context: Context,
        rooms: tuple[float, float],
    ) -> float | None:
        """Least seconds of a stage of n layers for the first micro-batch; None where a replica takes too long.

        `rooms`: seconds until the pipeline must have ended after the stage has, and until gradients must be
        synchronised.
        """
        synchronises = context.sync is Sync.ALL or (context.sync is Sync.REPLICATED and len(slots) > 1)

        def fits(own: _Seconds) -> bool:
            work_s = count * own.both[n] - warm * own.forward[n]
            if work_s > rooms[0]:
                return False
            if not synchronises or work_s + own.sync[n] <= rooms[1]:
                return True
            return context.lockstep and work_s + count * own.scatter[n] <= rooms[0]

        if len(slots) == 1:
            own = self._seconds(slots[0], size, first, last, held, context.shards)
            return own.both[n] if fits(own) else None
        most = []
        for slot in slots:
            x = size - len(slots) + 1
            while x and not fits(self._seconds(slot, x, first, last, held, context.shards)):
                x -= 1
            most.append(x)
        total = sum(most)
        if total < size or 0 in most:
            return None
        return min(
            self._seconds(slot, max(1, size - total + x), first, last, held, context.shards).both[n]
            for slot, x in zip(slots, most, strict=True)
        )

    def _least(self, slots: Sequence[tuple[int, ...]], size: int) -> tuple[float, float]:
        """Least seconds of a layer there: both ways, and forward; with the samples that a replica takes at least."""
        x = size if len(slots) == 1 else 1
        each = [
            self._model.layer_s(self._model.tp_group(slot), x, policy)
            for slot in slots
            for policy in self._model.policies()
        ]
        return min(map(sum, each)), min(forward for forward, _ in each)

    def _hops(self, groups: Groups, size: int) -> list[float]:
        """Both messages between stages without replicas, the network otherwise idle."""
        found = []
        for here, there in pairwise(groups):
            ways = [(here[0], there[0]), (there[0], here[0])] if len(here) == 1 == len(there) else []
            found.append(sum(self._model.message_s(a, b, size) for a, b in ways))
        return found

    def _seconds(
        self, slot: tuple[int, ...], samples: int, first: bool, last: bool, held: int, shards: StateSharding
    ) -> _Seconds:
        tp_group, machine = self._model.tp_group(slot), int(self._model.problem.cluster.machine_of[slot[0]])
        key = (tp_group, machine, samples, first, last, held, shards)
        found = self._lists.get(key)
        if found is None:
            times = self._table.times(tp_group, samples, first, last, held, shards)
            both, forward = times.both_s, times.forward_s
            backward = np.where(np.isfinite(both), both - forward, 0.0)
            gradient, weight = self._widths
            once = self._ring_s(tp_group, machine, first, last)  # seconds of a pass of one byte per parameter
            scatter = once * gradient
            # The last unit's scatter has nothing to hide behind; together they take at least what they take.
            more = np.maximum(scatter[1] - scatter[0], scatter - backward)
            ended = once * (2 * gradient if shards.stage >= 2 else min(2 * gradient, gradient + weight))
            found = _Seconds(both.tolist(), forward.tolist(), ended.tolist(), more.tolist())
            self._lists[key] = found
        return found

    def _ring_s(self, tp_group: TpGroup, machine: int, first: bool, last: bool) -> Floats:
        """Seconds in which a device passes on half of its parameters' bytes, one each, by layers.

        It has a port and an interface for itself.
        """
        problem = self._model.problem
        spec, several = problem.cluster.machines[machine], len(problem.usable_by_machine) > 1
        pairs = [(i, j) for i in range(spec.num_gpus) for j in range(i)]
        rate = max((spec.pair_bandwidth(i, j) for i, j in pairs), default=0.0)
        rate += spec.nic_bandwidth_bytes_per_s if several else 0.0
        if not rate:
            return np.zeros(self._layers + 1)
        model = problem.model
        ends = (model.embedding_params - model.vocabulary_params) * first + model.head_params * last
        if not model.tied_embeddings:
            ends += model.vocabulary_params * first
        params: Floats = np.arange(self._layers + 1, dtype=np.float64) * float(model.layer_params) + ends
        return params / (2 * tp_group.tp * rate)


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The last number from `low` to `high` for which `holds`, which once false stays false; 0 where there is none."""
    if low > high or not holds(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
