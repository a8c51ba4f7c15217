"""How the layers of a pipeline are dealt to stages that may be built in several ways."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hexiopt.plan.plan import Ends
from solvers.sequence.recompute import Mixtures

_BISECTIONS = 40


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
    if even:
        low, extra = divmod(total, len(slots))
        counts = [low + (k < extra) for k in range(len(slots))]
        finite = all(np.isfinite(seconds[n - 1]) for n, seconds in zip(counts, each_s, strict=True))
        return counts if finite else None

    def most(limit_s: float) -> list[int]:
        return [int(np.flatnonzero(seconds <= limit_s)[-1:].sum()) + bool(seconds[0] <= limit_s) for seconds in each_s]

    high_s = max(float(seconds[np.isfinite(seconds)].max(initial=0.0)) for seconds in each_s)
    if min(most(high_s)) < 1 or sum(most(high_s)) < total:
        return None
    low_s = 0.0
    for _ in range(_BISECTIONS):
        middle_s = 0.5 * (low_s + high_s)
        counts = most(middle_s)
        low_s, high_s = (low_s, middle_s) if min(counts) >= 1 and sum(counts) >= total else (middle_s, high_s)
    counts = most(high_s)
    while sum(counts) > total:
        # From the stage that this relieves most: the slowest.
        able = [k for k, n in enumerate(counts) if n > 1]
        counts[max(able, key=lambda k: each_s[k][counts[k] - 1])] -= 1
    return counts


def fastest(ways: Sequence[Way], layers: int) -> Way:
    """The best way for so many layers."""
    return min(ways, key=lambda way: float(way.mixtures.seconds[layers - 1]))
