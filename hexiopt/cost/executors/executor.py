"""What one executor takes and holds: a TP group, or the devices of a sequence layout."""

from dataclasses import dataclass, replace

from hexiopt.cost.executors.memory import Memory

ChunkTimes = tuple[float, float]  # forward and backward seconds of a layer range for one micro-batch


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


@dataclass(frozen=True, slots=True)
class ExecutorCost:
    """Seconds of each layer range for one micro-batch, and the copies of the parameters that the executor holds.

    A TP group holds one copy together; each device of a sequence layout holds one of its own.
    """

    chunk_s: tuple[ChunkTimes, ...]
    copies: tuple[ParameterCopy, ...]

    @property
    def forward_s(self) -> float:
        """Forward seconds of all layer ranges."""
        return sum([forward_s for forward_s, _ in self.chunk_s]) if len(self.chunk_s) > 1 else self.chunk_s[0][0]

    @property
    def backward_s(self) -> float:
        """Backward seconds of all layer ranges, recompute included."""
        return sum([backward_s for _, backward_s in self.chunk_s]) if len(self.chunk_s) > 1 else self.chunk_s[0][1]

    @property
    def fullest(self) -> ParameterCopy:
        """The copy with the least room."""
        return self.copies[0] if len(self.copies) == 1 else max(self.copies, key=lambda one: one.excess_bytes)

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
        """As of `ParameterCopy`, on the fullest device."""
        return self.fullest.excess_bytes

    def taking(self, forward_s: float, backward_s: float) -> "ExecutorCost":
        """The same with other seconds, for one layer range."""
        return replace(self, chunk_s=((forward_s, backward_s),))
