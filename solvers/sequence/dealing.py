"""How the layers of a pipeline are dealt to stages that may be built in several ways."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hexiopt.plan.plan import Ends
from solvers.completion import allocation
from solvers.completion.allocation import least_bottleneck
from solvers.sequence.recompute import Mixtures


@dataclass(frozen=True, slots=True)
class Way:
    """A way to build a stage: tensor parallelism or a layout, and what it takes with any number of layers."""

    ends: Ends
    mixtures: Mixtures


def dealt_layers(lines: Sequence[Sequence[Sequence[Way]]], total: int, *, even: bool = False) -> list[int] | None:
    """Layers of each stage, at least one, the same in all lines, so that the slowest stage is as fast as may be with
    the best of its ways [lines][stages][ways]; `even`: within one layer of each other, the first stages longer. None
    where memory has no room for `total`, or a stage would have no layer."""
    slots = list(zip(*lines, strict=True))
    if not all(ways for slot in slots for ways in slot) or len(slots) > total:
        return None
    each_s = [
        np.max([np.min([way.mixtures.seconds for way in ways], axis=0) for ways in slot], axis=0) for slot in slots
    ]
    times = [seconds[: np.isfinite(seconds).sum()].tolist() for seconds in each_s]  # memory bounds the layers
    if not all(times) or sum(map(len, times)) < total:
        return None
    if not even:
        return least_bottleneck(times, total)
    counts = allocation.even(total, len(slots))
    return counts if all(n <= len(own) for n, own in zip(counts, times, strict=True)) else None


def fastest(ways: Sequence[Way], layers: int) -> Way:
    """The best way for so many layers."""
    return min(ways, key=lambda way: float(way.mixtures.seconds[layers - 1]))
