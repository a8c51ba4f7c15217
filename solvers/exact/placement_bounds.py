"""Whether a pipeline on a given placement of TP groups may process a number of micro-batches within a time.

All conditions are necessary, so a negative answer is a proof. Let t_s be the forward and backward seconds of stage s
for a micro-batch, f_s its forward seconds, r the number of stages behind it, M the number of micro-batches, and S the
sum of all t_s and of the messages in both directions:

- with one layer range per stage: S + (M−1)·t_s − min(k_s, M−1)·f_s ≤ T, where k_s is the most forwards a stage runs
  ahead under any of the schedules (`BoundTerms`), while the first micro-batch passes all stages behind it twice; in a
  replicated stage this holds for every replica, the others as short as possible;
- with several ranges, M is a multiple of the number of stages, and a stage waits for a layer of each stage before it:
  M·t_s + Σ ≤ T;
- memory holds at least as many micro-batches in flight as `BoundTerms` says; with several ranges, as of the last one;
- where a parameter has other holders, a ring passes on at least half of what a device holds, after its last backward,
  or beside it where the framework sums gradients so; or, from ZeRO-2 on, in the backward of every micro-batch
  (`hexiopt/cost/rings.py`).

Layers are allocated from the last stage to the first. Of all allocations of n layers to the stages behind, the one that
takes the first micro-batch through them fastest stands for all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import pairwise
from math import inf

import numpy as np

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.executors.stage_model import TpGroup
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.plan.token_layout import Floats
from hexiopt.problem.space import schedules, sharding_stages
from hexiopt.schedules.schedule import weakest_terms
from solvers.exact.assignments import PlacedDevices
from solvers.proof.stage_times import StageTable

_SLACK = 1e-9  # of a time, for rounding


class SyncScope(Enum):
    """Which stages synchronise gradients: the replicated ones, or all."""

    REPLICATED = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class SyncContext:
    """The given facts about the plan: the stages that synchronise, the widest sharding, and whether stages gather and
    scatter in lockstep (ZeRO-2 and 3).
    """

    sync: SyncScope
    shards: StateSharding
    lockstep: bool


@dataclass(frozen=True, slots=True)
class _StageSeconds:
    """Seconds by number of layers: forward and backward; forward; gradient sync after the last backward; and what
    scattering gradients adds to every backward from ZeRO-2 on.
    """

    both: list[float]
    forward: list[float]
    sync: list[float]
    scatter: list[float]


class PlacementBound:
    """The conditions for all placements of one problem."""

    def __init__(self, model: PlanPricer, table: StageTable) -> None:
        problem = model.problem
        self._model, self._table, self._layers = model, table, problem.model.num_layers
        self._sizes = problem.space.micro_batch_sizes(problem.workload.global_batch)
        self._widths = problem.workload.stored_gradient_bytes, problem.workload.element_bytes
        self._shown = model.framework.share_after_backward(sharding_stages(problem.workload), *self._widths)
        self._schedules = schedules(problem.workload)
        self._interleaved = [schedule for schedule in self._schedules if schedule.chunked]
        self._lists: Memo[tuple[TpGroup, int, int, bool, bool, int, StateSharding], _StageSeconds] = Memo(
            lambda key: self._stage_lists(*key)
        )

    def most_sequences(self, groups: PlacedDevices, context: SyncContext, least: int, most: int, step_s: float) -> int:
        """The most sequences, between `least` and `most`, that may be processed in `step_s` seconds; 0 if none."""
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

    def _flat(self, groups: PlacedDevices, context: SyncContext, limit_s: float, size: int, count: int) -> bool:
        layers, last = self._layers, len(groups) - 1
        routes = self._hops(groups, size)
        least = [self._least(replicas, size) for replicas in groups]
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
                    remaining_s = limit_s - passed_s - message_s
                    available_s = remaining_s - left * before[0] - ways_s, remaining_s - left * before[1] - ways_s / 2
                    way_s = self._stage_s(
                        groups[s], n, s == 0, s == last, size, count, warm, held, context, available_s
                    )
                    if way_s is None:  # more layers here may still fit, where those before take longer
                        continue
                    total = passed_s + message_s + way_s
                    if total < reached.get(done + n, inf):
                        reached[done + n] = total
            behind = reached
            if not behind:
                return False
        return layers in behind

    def _chunked(self, groups: PlacedDevices, context: SyncContext, limit_s: float, size: int, turns: int) -> bool:
        """Whether `turns` times as many micro-batches as stages may be processed with several layer ranges."""
        count = turns * len(groups)
        last, total, before = len(groups) - 1, 0, [0.0, 0.0]
        for s, replicas in enumerate(groups):
            after, most = last - s, 0
            held = min(count, weakest_terms(self._interleaved, after, len(groups), 2).last_in_flight)
            available_s = limit_s - before[0], limit_s - before[1]
            for n in range(2, self._layers - 2 * last + 1):
                if self._stage_s(replicas, n, s == 0, s == last, size, count, 0, held, context, available_s) is None:
                    break
                most = n
            if not most:
                return False
            total += most
            before = [a + b for a, b in zip(before, self._least(replicas, size), strict=True)]
        return total >= self._layers

    def _stage_s(
        self,
        replicas: Sequence[tuple[int, ...]],
        n: int,
        first: bool,
        last: bool,
        size: int,
        count: int,
        warm: int,
        held: int,
        context: SyncContext,
        available_s: tuple[float, float],
    ) -> float | None:
        """Least seconds of a stage of n layers for the first micro-batch; None where a replica takes too long.

        `available_s`: the seconds left until the pipeline must have ended, and until gradients must be synchronised.
        """
        synchronises = context.sync is SyncScope.ALL or (context.sync is SyncScope.REPLICATED and len(replicas) > 1)

        def fits(own: _StageSeconds) -> bool:
            work_s = count * own.both[n] - warm * own.forward[n]
            if work_s > available_s[0]:
                return False
            if not synchronises or work_s + own.sync[n] <= available_s[1]:
                return True
            return context.lockstep and work_s + count * own.scatter[n] <= available_s[0]

        if len(replicas) == 1:
            own = self._seconds(replicas[0], size, first, last, held, context.shards)
            return own.both[n] if fits(own) else None
        most = []
        for group in replicas:
            x = size - len(replicas) + 1
            while x and not fits(self._seconds(group, x, first, last, held, context.shards)):
                x -= 1
            most.append(x)
        total = sum(most)
        if total < size or 0 in most:
            return None
        return min(
            self._seconds(group, max(1, size - total + x), first, last, held, context.shards).both[n]
            for group, x in zip(replicas, most, strict=True)
        )

    def _least(self, replicas: Sequence[tuple[int, ...]], size: int) -> tuple[float, float]:
        """Least seconds of a layer in the stage, forward and backward, and forward, with the fewest samples of a
        replica.
        """
        x = size if len(replicas) == 1 else 1
        each = [
            self._model.stages.layer_s(self._model.tp_group(group), x, policy)
            for group in replicas
            for policy in self._model.policies()
        ]
        return min(map(sum, each)), min(forward for forward, _ in each)

    def _hops(self, groups: PlacedDevices, size: int) -> list[float]:
        """Seconds of both messages between adjacent unreplicated stages on an otherwise idle network; 0 elsewhere."""
        found = []
        for here, there in pairwise(groups):
            ways = [(here[0], there[0]), (there[0], here[0])] if len(here) == 1 == len(there) else []
            found.append(sum(self._model.message_s(a, b, size) for a, b in ways))
        return found

    def _seconds(
        self, group: tuple[int, ...], samples: int, first: bool, last: bool, held: int, shards: StateSharding
    ) -> _StageSeconds:
        tp_group, machine = self._model.tp_group(group), int(self._model.problem.cluster.machine_of[group[0]])
        return self._lists[tp_group, machine, samples, first, last, held, shards]

    def _stage_lists(
        self, tp_group: TpGroup, machine: int, samples: int, first: bool, last: bool, held: int, shards: StateSharding
    ) -> _StageSeconds:
        times = self._table.times(tp_group, samples, first, last, held, shards)
        both, forward = times.both_s, times.forward_s
        backward = np.where(np.isfinite(both), both - forward, 0.0)
        gradient, weight = self._widths
        once = self._ring_s(tp_group, machine, first, last)  # seconds of a pass of one byte per parameter
        scatter = once * gradient
        # The last unit's scatter is exposed; all scatters together take at least their own time.
        more = np.maximum(scatter[1] - scatter[0], scatter - backward)
        ended = once * (2 * gradient if shards.stage >= 2 else min(2 * gradient, gradient + weight))
        if shards.stage < 2 and self._shown < 1.0:
            ended = np.maximum(ended - backward, self._shown * ended)
        return _StageSeconds(both.tolist(), forward.tolist(), ended.tolist(), more.tolist())

    def _ring_s(self, tp_group: TpGroup, machine: int, first: bool, last: bool) -> Floats:
        """Seconds in which a device passes on half of its parameters, at one byte each, by number of layers.

        The device is assumed to have a link and a network interface to itself.
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
    """The largest number from `low` to `high` for which `holds`, which stays false once it is false; 0 if none."""
    if low > high or not holds(low):
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
