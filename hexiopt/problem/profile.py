"""Measured times of layers, which the cost model takes instead of calculated ones where they fit the problem.

A profile is JSON: `{"format": "hexiopt.profile", "version": 1, "layers": [...]}`, each entry for one model shape,
sequence length, precision, GPU type, TP degree and micro-batch size, with forward and backward seconds of the
embedding, of a layer, and of the LM head with the loss. TP collectives are in them. `sailor.py` and `amp.py` read what
others have measured.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from hexiopt.calibration.gpus import PRECISIONS
from hexiopt.errors import InputError
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section

FORMAT, VERSION = "hexiopt.profile", 1
MAX_SECONDS = 1e4
Times = tuple[float, float]  # forward and backward seconds


@dataclass(frozen=True)
class Shape:
    """What must equal for a measurement to stand for a problem's layers."""

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
    """Forward and backward seconds of a micro-batch, on each rank of a TP group."""

    embedding: Times
    layer: Times
    head: Times


@dataclass(frozen=True)
class Entry:
    """One measurement, and of what."""

    shape: Shape
    gpu: str
    tp: int
    micro_batch_size: int
    times: Measured


@dataclass(frozen=True)
class Profile:
    """Measured layers by shape, GPU type, TP degree and micro-batch size. Raises InputError where one differs."""

    entries: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        seen: dict[tuple[Shape, str, int, int], Measured] = {}
        for entry in self.entries:
            key = entry.shape, entry.gpu, entry.tp, entry.micro_batch_size
            if seen.setdefault(key, entry.times) != entry.times:
                said = f"{entry.gpu} at TP {entry.tp} and micro-batches of {entry.micro_batch_size}"
                raise InputError(f"profile: {said} is measured twice, and differently; keep one of them")

    @cached_property
    def _sizes(self) -> dict[tuple[Shape, str, int], list[tuple[int, Measured]]]:
        found: dict[tuple[Shape, str, int], list[tuple[int, Measured]]] = {}
        for entry in self.entries:
            found.setdefault((entry.shape, entry.gpu, entry.tp), []).append((entry.micro_batch_size, entry.times))
        for sizes in found.values():
            sizes.sort(key=lambda pair: pair[0])
        return found

    def times(self, shape: Shape, gpu: str, tp: int, micro_batch_size: int) -> Measured | None:
        """What was measured, linear between the nearest sizes of micro-batches; None outside what was measured."""
        sizes = self._sizes.get((shape, gpu, tp))
        if sizes is None:
            return None
        at = bisect_left(sizes, micro_batch_size, key=lambda pair: pair[0])
        if at == len(sizes):
            return None
        high, above = sizes[at]
        if high == micro_batch_size:
            return above
        if at == 0:
            return None
        low, below = sizes[at - 1]
        share = (micro_batch_size - low) / (high - low)

        def between(a: Times, b: Times) -> Times:
            return a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1])

        return Measured(
            between(below.embedding, above.embedding),
            between(below.layer, above.layer),
            between(below.head, above.head),
        )


NOTHING_MEASURED = Profile()


def profile_from_section(section: Section) -> Profile:
    """The profile in the format above. Raises InputError."""
    section.text("format", choices=(FORMAT,))
    section.integer("version", at_least=VERSION, at_most=VERSION)
    entries = tuple(_entry(entry) for entry in section.sections("layers"))
    section.done()
    return Profile(entries)


def _entry(section: Section) -> Entry:
    keys = ("hidden_size", "num_heads", "ffn_size", "vocab_size", "seq_len")
    sizes = {key: section.integer(key, at_least=1, at_most=2**27) for key in keys}
    entry = Entry(
        Shape(**sizes, precision=section.text("precision", choices=PRECISIONS)),
        section.text("gpu"),
        section.integer("tp", at_least=1, at_most=1024),
        section.integer("micro_batch_size", at_least=1, at_most=2**20),
        Measured(_times(section, "embedding_s"), _times(section, "layer_s"), _times(section, "head_s")),
    )
    section.done()
    return entry


def _times(section: Section, key: str) -> Times:
    rule = f"is not a time; write forward and backward as two numbers of seconds from 0 to {MAX_SECONDS:g}"

    def is_time(value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and 0 <= value <= MAX_SECONDS

    found = list(section.each(key, is_time, rule))
    if len(found) != 2:
        section.fail(key, rule)
    return float(found[0]), float(found[1])


def profile_to_dict(profile: Profile) -> Mapping[str, Any]:
    """The profile in the format above."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "layers": [
            {
                **asdict(entry.shape),
                "gpu": entry.gpu,
                "tp": entry.tp,
                "micro_batch_size": entry.micro_batch_size,
                "embedding_s": list(entry.times.embedding),
                "layer_s": list(entry.times.layer),
                "head_s": list(entry.times.head),
            }
            for entry in profile.entries
        ],
    }
