"""The times of a stage with any number of layers: policies layer by layer, and layers of stages with several options.

As few layers of a stage as memory requires recompute activations. The bytes of a stage are linear in the number of
layers under each policy, except for the working set of the layer being recomputed, of which the largest counts
(`hexiopt/cost/executors/activations.py`). So of n layers with two policies, as many as fit use the faster one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.plan.parallelism import Devices, SequenceParallel
from hexiopt.plan.token_layout import Floats, Ints
from hexiopt.schedules.in_flight import holding
from solvers.completion import allocation
from solvers.completion.allocation import least_bottleneck
from solvers.completion.executors import PolicyMix, StageOptions

_EXACT = 1e-9  # of the limit, for rounding


class RecomputeTable:
    """The best policies for stages of 1 to `most` layers.

    `layer_s` gives the seconds of a layer, `bytes_of` the bytes of a stage on each device [devices], both by policy;
    `beside_s` is the time of the stage without layers. `mixed`: whether its layers may have different policies.
    """

    def __init__(
        self,
        policies: Sequence[str],
        layer_s: Callable[[str], float],
        bytes_of: Callable[[tuple[str, ...]], Floats],
        limit_bytes: Floats,
        beside_s: float,
        most: int,
        *,
        mixed: bool,
    ) -> None:
        self._policies = policies
        count = np.arange(1, most + 1)
        rows = []
        for policy in policies:
            # From two layers on linear under ZeRO-3 too, which holds two of them whole.
            two, three = (bytes_of((policy,) * n) for n in (2, 3))
            rows.append((layer_s(policy), two - 2 * (three - two), three - two))
        limit = limit_bytes * (1.0 + _EXACT)
        self.seconds: Floats = np.full(most, np.inf)
        self._smaller, self._faster, self._num_faster = (np.zeros(most, np.int64) for _ in range(3))
        for k, (seconds, base, each) in enumerate(rows):
            fits = count <= ((limit - base) / each).min()
            self._offer(np.where(fits, count * seconds, np.inf) + beside_s, k, k, count)
        for faster, smaller in combinations(range(len(rows)), 2) if mixed else ():
            (faster_s, one_base, more), (smaller_s, other_base, less) = rows[faster], rows[smaller]
            if faster_s >= smaller_s or (more <= less).any():
                continue
            free_bytes = limit - np.maximum(one_base, other_base) - count[:, None] * less
            number = np.minimum(np.floor((free_bytes / (more - less)).min(axis=1)), count - 1).astype(np.int64)
            some_s = number * faster_s + (count - number) * smaller_s + beside_s
            self._offer(np.where(number > 0, some_s, np.inf), smaller, faster, number)

    def _offer(self, seconds: Floats, smaller: int, faster: int, number: Ints) -> None:
        better = seconds < self.seconds
        self.seconds = np.where(better, seconds, self.seconds)
        self._smaller = np.where(better, smaller, self._smaller)
        self._faster = np.where(better, faster, self._faster)
        self._num_faster = np.where(better, number, self._num_faster)

    def options(self) -> StageOptions:
        """The times and policies of the numbers of layers that fit."""
        most = int(np.isfinite(self.seconds).sum())
        return StageOptions(self.seconds[:most].tolist(), [self._mix(n) for n in range(1, most + 1)])

    def _mix(self, num_layers: int) -> PolicyMix:
        at, policies = num_layers - 1, self._policies
        num_smaller = num_layers - int(self._num_faster[at])
        return PolicyMix(policies[self._smaller[at]], num_smaller, policies[self._faster[at]])


@dataclass(frozen=True, slots=True)
class StageOption:
    """An executor that a stage may have, tensor parallelism or a layout, with its options for any number of layers."""

    layout: Devices | SequenceParallel
    options: StageOptions

    def seconds(self, num_layers: int) -> float:
        """The least time of so many layers; infinite where they do not fit."""
        times = self.options.times
        return times[num_layers - 1] if num_layers <= len(times) else np.inf


def allocate_layers(
    lines: Sequence[Sequence[Sequence[StageOption]]], total: int, *, even: bool = False
) -> list[int] | None:
    """Layers of each stage, equal in all pipelines, so that the slowest stage is as fast as possible with its best
    option.

    `lines` [pipelines][stages][options]. Every stage gets at least one layer; `even`: stages differ by at most one, the
    first ones larger. None where `total` layers do not fit or there are more stages than layers.
    """
    slots = list(zip(*lines, strict=True))
    if not all(options for slot in slots for options in slot) or len(slots) > total:
        return None
    times = []
    for slot in slots:
        most = min(max(len(option.options.times) for option in options) for options in slot)
        times.append([max(fastest(options, n).seconds(n) for options in slot) for n in range(1, most + 1)])
    if not all(times) or sum(map(len, times)) < total:
        return None
    if not even:
        return least_bottleneck(times, total)
    counts = allocation.even(total, len(slots))
    return counts if all(n <= len(own) for n, own in zip(counts, times, strict=True)) else None


def fastest(options: Sequence[StageOption], layers: int) -> StageOption:
    """The fastest option for that number of layers."""
    return min(options, key=lambda option: option.seconds(layers))


class TensorTable:
    """Seconds and bytes of layers on TP groups: GPU types in the order of `types`, degrees up to a machine's."""

    def __init__(self, model: PlanPricer, types: Sequence[str]) -> None:
        problem = self._problem = model.problem
        self._model = model
        self._examples: dict[tuple[int, int], tuple[int, ...]] = {}  # (type, degree): devices
        for machine, own in problem.usable_by_machine.items():
            kind = problem.cluster.machines[machine]
            for degree in problem.space.allowed_tp(kind.num_gpus):
                if degree <= len(own):
                    name = problem.cluster.gpu_of(own[0]).name
                    self._examples.setdefault((types.index(name), degree), own[:degree])
        self._most = max(degree for _, degree in self._examples)
        self._shape = (len(model.policies()), len(types), self._most + 1)
        self._by_size: Memo[tuple[int, StateSharding], tuple[Floats, Floats]] = Memo(lambda key: self._tables(*key))

    def of(
        self, counts: Floats, machines: Ints, held: Floats, size: int, shards: StateSharding
    ) -> tuple[Floats, Floats]:
        """Seconds of a layer per sequence, and the number of layers that fit, both [policies, ...].

        For stages with `counts` [..., types] devices in `machines` [...] machines and `held` [...] micro-batches of
        `size` sequences in flight; infinite and 0 where tensor parallelism is not allowed.
        """
        layer_s, bytes_of = self._by_size[size, shards]
        degree, types = counts.sum(axis=-1).astype(np.int64), (counts > 0).sum(axis=-1)
        may = (machines == 1) & (types == 1) & (degree <= self._most)
        kind, at = counts.argmax(axis=-1), np.where(may, degree, 0)
        free_bytes, each, per_micro_batch, both = bytes_of[:, :, kind, at]
        most = np.floor((free_bytes - per_micro_batch * held) / (each + both * held) + 1e-9)
        return np.where(may, layer_s[:, kind, at], np.inf), np.where(may, most, 0.0)

    def _tables(self, size: int, shards: StateSharding) -> tuple[Floats, Floats]:
        """Seconds [policies, types, degrees], and bytes [parts, policies, types, degrees]; the parts are the free bytes
        without layers, and the bytes of a layer, of a micro-batch in flight, and of a layer's micro-batch in flight.
        """
        model = self._model
        layer_s, bytes_of = np.full(self._shape, np.inf), np.zeros((4, *self._shape))
        bytes_of[1] = 1.0
        for (kind, degree), devices in self._examples.items():
            tp_group = model.tp_group(devices)
            memory, limit = model.stages.memory_model(tp_group, size), tp_group.gpu.usable_memory_bytes
            for k, policy in enumerate(model.policies()):
                layer_s[k, kind, degree] = sum(model.stages.layer_s(tp_group, size, policy)) / size
                # From two layers on linear under ZeRO-3 too.
                one, more, two, both = (
                    memory.stage(n, False, False, policy, holding(held), shards).total
                    for held in (1, 2)
                    for n in (2, 3)
                )
                ends = 0.5 * (memory.stage(2, True, True, policy, holding(1), shards).total - one)
                grows = both - two - more + one
                per_micro_batch, each = two - one - 2 * grows, more - one - grows
                free_bytes = limit - ends - (one - 2 * each - per_micro_batch - 2 * grows)
                bytes_of[:, k, kind, degree] = free_bytes, each, per_micro_batch, grows
        return layer_s, bytes_of
