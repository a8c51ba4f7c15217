"""What one executor takes and holds: a TP group, or the devices of a sequence layout."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from hexiopt.cost.executors.compute import ComputeTimes
from hexiopt.cost.executors.memory import Memory
from hexiopt.problem.model import ModelSpec
from hexiopt.schedules.split import Footprint

ChunkTimes = tuple[float, ...]  # seconds of a layer range for one micro-batch, by the schedule's kinds of operations


@dataclass(frozen=True, slots=True)
class ParameterCopy:
    """A copy of a stage's parameters: bytes and parameters on its fullest device, and seconds of its optimiser step."""

    memory: Memory
    limit_bytes: float
    num_params: float
    optimizer_s: float = 0.0

    @property
    def excess_bytes(self) -> float:
        """Bytes beyond the limit; negative where there is room."""
        return self.memory.total - self.limit_bytes


def fullest_of(copies: Sequence[ParameterCopy]) -> ParameterCopy:
    """The copy with the least room."""
    return copies[0] if len(copies) == 1 else max(copies, key=lambda one: one.excess_bytes)


class MemoryUse(ABC):
    """What executors and stages say of memory, by the copy of their parameters that has the least room."""

    __slots__ = ()

    @property
    @abstractmethod
    def fullest(self) -> ParameterCopy:
        """The copy with the least room."""

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
        """Bytes beyond the limit on the fullest device; negative where there is room."""
        return self.fullest.excess_bytes


class Unit(NamedTuple):
    """Equal units of a stage, `repeats` of them, which run one after another: the embedding, layers or the LM head.

    Each takes `forward_s` and `backward_s`, and has `params` parameters on every device, if a TP group cuts all of them
    into equal parts.
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
    """The units of a stage in order: `ends_s` of embedding and head, `layer_s` by the recompute policy of a layer."""
    embedding, head = ends_s
    found = [Unit(1, embedding.forward_s, embedding.backward_s, model.embedding_params / tp)] if first else []
    for policy, same in groupby(policies):
        found.append(Unit(len(list(same)), *layer_s(policy), model.layer_params / tp))
    if last:
        # A tied matrix is gathered for both its uses.
        found.append(Unit(1, head.forward_s, head.backward_s, model.params_of("last", "ends") / tp))
    return tuple(found)


NOT_SPLIT = Footprint((), 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ExecutorCost(MemoryUse):
    """Seconds of each layer range for one micro-batch, and the copies of the parameters that the executor holds.

    A TP group holds one copy together; each device of a sequence layout holds one of its own. `units` are stated from
    ZeRO-2 on, where executors gather and scatter them one by one;
    `footprint` has bytes, and is stated where backwards may be split.
    """

    chunk_s: tuple[ChunkTimes, ...]
    copies: tuple[ParameterCopy, ...]
    units: tuple[Unit, ...] = ()
    footprint: Footprint = NOT_SPLIT

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
        """The same with other seconds, for one layer range."""
        return replace(self, chunk_s=((forward_s, backward_s),))
