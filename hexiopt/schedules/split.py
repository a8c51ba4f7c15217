"""Split backwards: what a stage puts off, and the orders of operations that come of it.

The weight gradients of a layer are put off by a backward and computed later, layer by layer, first come first served.
The rule: when an executor is free, it runs its next forward or backward, if its input is there and its memory has room;
else the weight gradients of a layer, if some are put off.

A forward asks for room for the activations that it stores. A backward frees them layer by layer and puts its layers
off; it asks for room at its beginning and at its end, where it still works on its last layer.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hexiopt.schedules.operation import Operation, OperationKind, Turn

ROOM = 1 + 1e-12  # of what an executor has room for, rounding aside
SAME = 1e-12  # share of a time within which events are simultaneous, so that rounding does not decide what runs


class Footprint(NamedTuple):
    """Of an executor's memory, in bytes or as shares of its room: what a micro-batch in flight stores [layer ranges],
    what a layer put off holds, what a backward works with beside for a layer that it recomputes, and what of that is no
    part of the layer put off."""

    stored: tuple[float, ...]
    layer: float
    working: float
    extra: float


class LateWeights(NamedTuple):
    """What an executor puts off: `layers` [layer ranges] of a backward, for `weights_s` seconds each; `shares` has
    its footprint as shares of its room."""

    layers: tuple[int, ...]
    weights_s: float
    shares: Footprint


class Turnover(NamedTuple):
    """What an operation does to an executor's memory: the layers that it puts off, less those that it computes, what it
    stores, less what it frees, and what it works with beside, at its beginning and at its end."""

    layers: int
    stored: float
    begin: float
    end: float


LATE_LAYER = Turnover(-1, 0.0, 0.0, 0.0)
"""Of the weight gradients of a layer."""
_NOTHING = Turnover(0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, eq=False)
class Order:
    """The turns of an executor whose backwards are split: layer range · kinds + kind of an operation, or −1 for the
    weight gradients of the next layer put off. Equal if it is the same object, so that what follows from it is
    remembered without reading it."""

    turns: NDArray[np.int64]


def turnovers(layers: tuple[int, ...], memory: Footprint) -> list[Turnover]:
    """Of an executor's turns: a forward and a backward of each layer range that puts `layers` off, and nothing in the
    place of weight gradients, which are of no range in particular (`LATE_LAYER`)."""
    turns = []
    for late, stored in zip(layers, memory.stored, strict=True):
        end = memory.extra if late else memory.working
        turns += [Turnover(0, stored, 0.0, 0.0), Turnover(late, -stored, memory.working, end), _NOTHING]
    return turns


def late_operations(turns: Iterable[Turn | None], late: LateWeights) -> list[Operation]:
    """The operations of an order in which None is the next layer put off, numbered by micro-batches."""
    begun: dict[Turn, int] = {}
    waiting = deque[Operation]()
    order = []
    for turn in turns:
        if turn is None:
            order.append(waiting.popleft())
            continue
        number = begun[turn] = begun.get(turn, -1) + 1
        order.append(Operation(turn.kind, turn.chunk, number))
        if turn.kind is OperationKind.BACKWARD:
            waiting.extend([Operation(OperationKind.WEIGHTS, turn.chunk, number)] * late.layers[turn.chunk])
    assert not waiting, "all that is put off is computed in the step"
    return order
