"""Split backwards: what executors of a stage put off, and the memory that this takes in the order that they run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.cost import StageCost
from hexiopt.cost.executors.executor import NOT_SPLIT, ExecutorCost, ParameterCopy
from hexiopt.cost.executors.stage_model import StageModel, StagePlace
from hexiopt.memo import Memo
from hexiopt.numbers.coefficients import FRAGMENTATION
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Stage
from hexiopt.schedules.in_flight import largest
from hexiopt.schedules.split import LATE_LAYER, Footprint, LateWeights, Order, turnovers

_MEMO_SIZE = 20_000  # executors in orders


class _Part(NamedTuple):
    """An executor's memory: what micro-batches in flight take at most, and the bytes for these, for a layer that is
    recomputed and for what is put off."""

    held: Footprint
    most_bytes: float
    room_bytes: float

    def layers(self, chunk: int) -> int:
        """How many layers a backward of a range may put off beside the most micro-batches in flight."""
        left = self.room_bytes - self.most_bytes + self.held.stored[chunk]
        return max(0, int((left - self.held.extra) / self.held.layer))

    def shares(self) -> tuple[float, ...]:
        """The footprint as shares of the room, in a row; none of it fits where there is no room."""
        row = *self.held.stored, *self.held[1:]
        return tuple([num_bytes / self.room_bytes if self.room_bytes > 0 else 1.0 for num_bytes in row])


def with_late_weights(
    stage: Stage, size: int, at: StagePlace, executors: Sequence[ExecutorCost], model: StageModel
) -> list[tuple[ExecutorCost, LateWeights]]:
    """Each executor of a stage whose backwards are split, and what it puts off.

    A backward puts off as many layers as fit beside the most micro-batches in flight; the others stay whole. Replicas
    run one order: they put off equally many, and none counts on more room than another has. With a sequence layout all
    layers stay whole.
    """
    parallelism, chunks, parts = stage.parallelism, len(stage.layers), []
    if isinstance(parallelism, SequenceParallel):
        nothing = LateWeights((0,) * chunks, 0.0, Footprint((0.0,) * chunks, 0.0, 0.0, 0.0))
        return [(_split(executor, nothing, NOT_SPLIT), nothing) for executor in executors]
    groups = list(zip(map(model.tp_groups.of, parallelism.executors), parallelism.samples(size), strict=True))
    for executor, (group, samples) in zip(executors, groups, strict=True):
        held = model.footprint(group, samples, stage.policies(), at.first, at.last)
        most = sum([n * b for n, b in zip(largest(at.in_flight, held.stored), held.stored, strict=True)])
        parts.append(_Part(held, most, most + held.working - executor.excess_bytes / (1 + FRAGMENTATION)))
    *stored, layer, working, extra = map(max, zip(*[part.shares() for part in parts], strict=True))
    layers = [min(end - first, *[part.layers(c) for part in parts]) for c, (first, end) in enumerate(stage.layers)]
    costs = []
    for executor, part, (group, samples) in zip(executors, parts, groups, strict=True):
        seconds = model.layer_weights_s(group, samples)
        late = LateWeights(tuple(layers), seconds, Footprint(tuple(stored), layer, working, extra))
        costs.append((_split(executor, late, part.held), late))
    return costs


def _split(executor: ExecutorCost, late: LateWeights, held: Footprint) -> ExecutorCost:
    """The executor whose backwards leave to weight gradients what they put off."""
    seconds = [count * late.weights_s for count in late.layers]
    chunk_s = tuple([(f, b - w, w) for (f, b), w in zip(executor.chunk_s, seconds, strict=True)])
    return replace(executor, chunk_s=chunk_s, footprint=held)


class LateBytes:
    """What executors hold of the weight gradients that they put off, remembered by their orders."""

    def __init__(self) -> None:
        self._more_bytes: Memo[tuple[Footprint, tuple[int, ...], Order], float] = Memo(
            lambda key: _more_bytes(*key), _MEMO_SIZE
        )

    def add(
        self, stages: Sequence[StageCost], late: Sequence[LateWeights], orders: Sequence[Order]
    ) -> tuple[StageCost, ...]:
        """The stages of a pipeline with what their executors put off, beside the activations, where they hold most in
        their `orders` [executors]."""
        rows = iter(zip(late, orders, strict=True))
        return tuple([StageCost(tuple([self._add(executor, *next(rows)) for executor in s.executors])) for s in stages])

    def _add(self, executor: ExecutorCost, late: LateWeights, order: Order) -> ExecutorCost:
        held = executor.footprint
        more = self._more_bytes[held, late.layers, order] if held.stored else 0.0
        return _with_more(executor, more) if more else executor

    def forget(self) -> None:
        """Forget all orders."""
        self._more_bytes.clear()


def _more_bytes(held: Footprint, layers: tuple[int, ...], order: Order) -> float:
    """The bytes of an executor's fullest moment in an order beyond those that it has without what it puts off."""
    turns = order.turns
    # `LATE_LAYER` stands last: its number in orders is -1.
    whole = np.array([*turnovers((0,) * len(layers), held), LATE_LAYER])
    late = np.array([*turnovers(layers, held), LATE_LAYER])
    return _most_bytes(late[turns], held.layer) - _most_bytes(whole[turns[turns >= 0]], held.layer)


def _with_more(executor: ExecutorCost, more: float) -> ExecutorCost:
    def enlarge(copy: ParameterCopy) -> ParameterCopy:
        memory = copy.memory
        activations, reserve = memory.activations + more, memory.reserve + FRAGMENTATION * more
        return replace(copy, memory=replace(memory, activations=activations, reserve=reserve))

    return replace(executor, copies=tuple(map(enlarge, executor.copies)))


def _most_bytes(rows: NDArray[np.float64], layer: float) -> float:
    """The most that operations take one after another [operations, fields of `Turnover`]."""
    changes = rows[:, 0] * layer + rows[:, 1]
    after = np.cumsum(changes)
    return float(np.maximum(after - changes + rows[:, 2], after + rows[:, 3]).max())
