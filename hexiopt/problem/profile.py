"""Measured layer times, which the cost model uses instead of calculated ones where they match the problem."""

from bisect import bisect_left
from dataclasses import astuple, dataclass
from functools import cached_property

from hexiopt.checks import is_number, whole_in, word_in
from hexiopt.errors import FieldError, InputError
from hexiopt.numbers.gpus import PRECISIONS
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload

Times = tuple[float, float]  # forward and backward seconds
MAX_SECONDS = 1e4


@dataclass(frozen=True)
class Shape:
    """The values that must be equal for a measurement to apply to a problem's layers."""

    hidden_size: int
    num_heads: int
    ffn_size: int
    vocab_size: int
    seq_len: int
    precision: str

    @classmethod
    def of(cls, model: ModelSpec, workload: Workload) -> "Shape":
        """The shape of a problem."""
        sizes = model.hidden_size, model.num_heads, model.ffn_size, model.vocab_size
        return cls(*sizes, workload.seq_len, workload.precision)


@dataclass(frozen=True)
class Measured:
    """Forward and backward seconds per micro-batch on each rank of a TP group."""

    embedding: Times
    layer: Times
    head: Times

    def slower(self, speed: float) -> "Measured":
        """The times on devices that run at a share `speed` of their speed."""
        return Measured(*((forward_s / speed, backward_s / speed) for forward_s, backward_s in self._parts))

    @property
    def _parts(self) -> tuple[Times, Times, Times]:
        return self.embedding, self.layer, self.head


@dataclass(frozen=True)
class Entry:
    """One measurement, with the shape and the devices measured. Raises FieldError where a value breaks its rule."""

    shape: Shape
    gpu: str
    tp: int
    micro_batch_size: int
    times: Measured

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "ffn_size", "vocab_size", "seq_len"):
            whole_in(getattr(self.shape, name), f"profile: {name}", at_least=1, at_most=2**27)
        word_in(self.shape.precision, "profile: precision", PRECISIONS)
        word_in(self.gpu, "profile: gpu")
        whole_in(self.tp, "profile: tp", at_least=1, at_most=1024)
        whole_in(self.micro_batch_size, "profile: micro_batch_size", at_least=1, at_most=2**20)
        rule = f"is not a time; write forward and backward as two numbers of seconds from 0 to {MAX_SECONDS:g}"
        for name, times in zip(("embedding_s", "layer_s", "head_s"), astuple(self.times), strict=True):
            for k, seconds in enumerate(times):
                if not is_number(seconds) or not 0 <= seconds <= MAX_SECONDS:
                    raise FieldError(f"profile: {name}[{k}]", seconds, rule)
            if len(times) != 2:
                raise FieldError(f"profile: {name}", times, rule)


@dataclass(frozen=True)
class Profile:
    """Measured layers by shape, GPU type, TP degree and micro-batch size. Raises InputError for contradictions."""

    entries: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        seen: dict[tuple[Shape, str, int, int], Measured] = {}
        for entry in self.entries:
            key = entry.shape, entry.gpu, entry.tp, entry.micro_batch_size
            if seen.setdefault(key, entry.times) != entry.times:
                measurement = f"{entry.gpu} at TP {entry.tp} and micro-batches of {entry.micro_batch_size}"
                raise InputError(f"profile: {measurement} has two different measurements; keep one of them")

    @cached_property
    def _sizes(self) -> dict[tuple[Shape, str, int], list[tuple[int, Measured]]]:
        by_key: dict[tuple[Shape, str, int], list[tuple[int, Measured]]] = {}
        for entry in self.entries:
            by_key.setdefault((entry.shape, entry.gpu, entry.tp), []).append((entry.micro_batch_size, entry.times))
        for sizes in by_key.values():
            sizes.sort(key=lambda pair: pair[0])
        return by_key

    def times(self, shape: Shape, gpu: str, tp: int, micro_batch_size: int) -> Measured | None:
        """The measured times, interpolated between the nearest micro-batch sizes; None outside the measured range."""
        sizes = self._sizes.get((shape, gpu, tp))
        if sizes is None:
            return None
        k = bisect_left(sizes, micro_batch_size, key=lambda pair: pair[0])
        if k == len(sizes):
            return None
        high, above = sizes[k]
        if high == micro_batch_size:
            return above
        if k == 0:
            return None
        low, below = sizes[k - 1]
        share = (micro_batch_size - low) / (high - low)

        def between(a: Times, b: Times) -> Times:
            return a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1])

        return Measured(
            between(below.embedding, above.embedding),
            between(below.layer, above.layer),
            between(below.head, above.head),
        )


NOTHING_MEASURED = Profile()
