"""The cost of one executor, a TP group or the devices of a sequence layout: its seconds and bytes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from hexiopt.cost.executors.compute import ComputeTimes
from hexiopt.cost.executors.memory import Memory
from hexiopt.problem.model import ModelSpec
from hexiopt.schedules.split import Footprint

ChunkTimes = tuple[float, ...]  # seconds of a layer range for one micro-batch, by kind of operation of the schedule


@dataclass(frozen=True, slots=True)
class ParameterCopy:
    """A copy of a stage's parameters: bytes and parameters on its fullest device, seconds of the optimiser step, and,
    where others hold them too, of converting their gradients to 8 bits and summing these."""

    memory: Memory
    limit_bytes: float
    num_params: float
    optimizer_s: float = 0.0
    quantization_s: float = 0.0

    @property
    def excess_bytes(self) -> float:
        """Bytes beyond the limit, negative below it."""
        return self.memory.total - self.limit_bytes


def fullest_of(copies: Sequence[ParameterCopy]) -> ParameterCopy:
    """The copy whose fullest device has the least memory left."""
    return copies[0] if len(copies) == 1 else max(copies, key=lambda copy: copy.excess_bytes)


class MemoryUse(ABC):
    """Memory of executors and stages: that of their fullest parameter copy."""

    __slots__ = ()

    @property
    @abstractmethod
    def fullest(self) -> ParameterCopy:
        """The copy whose fullest device has the least memory left."""

    @property
    def memory(self) -> Memory:
        """Bytes on the fullest device."""
        return self.fullest.memory

    @property
    def limit_bytes(self) -> float:
        """Usable bytes of the fullest device."""
        return self.fullest.limit_bytes

    @property
    def num_params(self) -> float:
        """Parameters on the fullest device."""
        return self.fullest.num_params

    @property
    def excess_bytes(self) -> float:
        """Bytes beyond the limit on the fullest device, negative below it."""
        return self.fullest.excess_bytes


class Unit(NamedTuple):
    """Equal units of a stage, `repeats` of them, which run one after another: the embedding, layers or the LM head.

    A unit takes `forward_s` and `backward_s`, and has `params` parameters on every device, as if a TP group divided all
    of them equally.
    """

    repeats: int
    forward_s: float
    backward_s: float
    params: float


def units_of(
    model: ModelSpec,
    tp: int,
    ends_s: tuple[ComputeTimes, ComputeTimes],
    layer_s: Callable[[str], tuple[float, float]],
    policies: Sequence[str],
    first: bool,
    last: bool,
) -> tuple[Unit, ...]:
    """The units of a stage in order; `ends_s` of embedding and head, `layer_s` (forward, backward) of a policy."""
    embedding, head = ends_s
    units = [Unit(1, embedding.forward_s, embedding.backward_s, model.embedding_params / tp)] if first else []
    for policy, same in groupby(policies):
        units.append(Unit(len(list(same)), *layer_s(policy), model.layer_params / tp))
    if last:
        # A tied matrix is gathered for either of its uses.
        units.append(Unit(1, head.forward_s, head.backward_s, model.params_of("last", "ends") / tp))
    return tuple(units)


NOT_SPLIT = Footprint((), 0.0, 0.0, 0.0)


class ForwardLayers(NamedTuple):
    """The layers of an executor: how many, seconds of each in a forward, and the most that a forward runs `together`,
    as they are recomputed together."""

    num_layers: int
    layer_s: float
    together: int = 1


NO_LAYERS = ForwardLayers(0, 0.0)


@dataclass(frozen=True, slots=True)
class ExecutorCost(MemoryUse):
    """Seconds of each layer range for one micro-batch, and the parameter copies that the executor holds.

    The devices of a TP group hold one copy together, those of a sequence layout a copy each. `units` are filled from
    ZeRO-2 on, where executors gather and scatter them one by one. Of the seconds of a forward, and of those of a
    backward, `quantization_s` go to the quantisation of messages. `footprint` has bytes, where backwards may be split.
    `layers` are there where somebody asks what a forward hides.
    """

    chunk_s: tuple[ChunkTimes, ...]
    copies: tuple[ParameterCopy, ...]
    units: tuple[Unit, ...] = ()
    quantization_s: float = 0.0
    footprint: Footprint = NOT_SPLIT
    layers: ForwardLayers = NO_LAYERS

    @property
    def forward_s(self) -> float:
        """Forward seconds of all layer ranges."""
        return sum([seconds[0] for seconds in self.chunk_s])

    @property
    def backward_s(self) -> float:
        """Backward seconds of all layer ranges, recompute included."""
        return sum([sum(seconds[1:]) for seconds in self.chunk_s])

    @property
    def last_backward_s(self) -> float:
        """Seconds of the backward that the executor ends with, of its first layer range; of its weight gradients where
        they come last."""
        _, backward_s, *late_s = self.chunk_s[0]
        return max(late_s, default=0.0) or backward_s

    @property
    def fullest(self) -> ParameterCopy:
        """As of `MemoryUse`."""
        return fullest_of(self.copies)

    def with_times(self, forward_s: float, backward_s: float) -> "ExecutorCost":
        """The same executor with other seconds of its units, and one layer range."""
        more_s = self.quantization_s
        return replace(self, chunk_s=((forward_s + more_s, backward_s + more_s),))
