"""What was measured: one point an operator, a collective or a message at one size."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hexiopt.files.profile_files import FORMAT, VERSION

PRECISIONS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class MeasuredPoint:
    """`what` took `seconds` (the median of several runs) at `size`, numbers by name (flops, bytes, ...); `of` says
    whose: a device `machine:index`, or several."""

    what: str
    size: Mapping[str, float]
    seconds: float
    of: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"what": self.what, "of": list(self.of), **self.size, "seconds": self.seconds}


def of_kind(points: Iterable[MeasuredPoint], *kinds: str) -> Sequence[MeasuredPoint]:
    """The points that are of one of some kinds."""
    return [point for point in points if point.what in kinds]


@dataclass(frozen=True)
class Device:
    """A GPU, or one process on a CPU: its machine and index there, what it is called, its memory; `host` is what the
    machine calls itself. `total_bytes` is all its memory, `free_bytes` what a process can allocate."""

    machine: str
    index: int
    host: str
    product: str
    is_gpu: bool
    threads: int
    total_bytes: int
    free_bytes: int
    precisions: tuple[str, ...]  # that its arithmetic knows
    precision: str  # in which it is measured

    @property
    def name(self) -> str:
        """`machine:index`."""
        return f"{self.machine}:{self.index}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "precisions": list(self.precisions)}


@dataclass(frozen=True)
class Measurement:
    """All devices by rank, all points, and the version of torch."""

    devices: tuple[Device, ...]
    points: tuple[MeasuredPoint, ...]
    torch_version: str

    def to_dict(self) -> dict[str, Any]:
        """The content of `profile.json`."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "torch": self.torch_version,
            "devices": [device.to_dict() for device in self.devices],
            "points": [point.to_dict() for point in self.points],
        }
