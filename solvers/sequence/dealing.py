"""How the layers of a pipeline are dealt to stages that may be built in several ways."""

from collections.abc import Sequence
from dataclasses import dataclass

from hexiopt.plan import Ends

_BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class Way:
    """A way to build a stage: tensor parallelism or a layout, a recompute policy; seconds of a layer and of what the
    stage holds beside, and the layers that fit memory."""

    ends: Ends
    policy: str
    layer_s: float
    beside_s: float
    most: int

    def layers_in(self, seconds: float) -> int:
        """Layers that fit memory and `seconds`; negative where not even none do."""
        return min(self.most, int((seconds - self.beside_s) / self.layer_s + 1e-9)) if seconds >= self.beside_s else -1


Dealt = list[tuple[int, Way]]


def dealt_layers(stages: Sequence[Sequence[Way]], total: int, *, even: bool = False) -> Dealt | None:
    """Layers of each stage, at least one, and its way, so that the slowest stage is as fast as may be; `even`: within
    one layer of each other, the first stages longer. None where memory has no room for `total`."""
    if not all(stages):
        return None
    if even:
        low, extra = divmod(total, len(stages))
        counts = [low + (k < extra) for k in range(len(stages))]
        if any(n > max(way.most for way in ways) for n, ways in zip(counts, stages, strict=True)):
            return None
        return [(n, _fastest(ways, n)[1]) for ways, n in zip(stages, counts, strict=True)]

    def most(seconds: float) -> list[int]:
        return [max(way.layers_in(seconds) for way in ways) for ways in stages]

    high_s = max(max(way.beside_s + total * way.layer_s for way in ways) for ways in stages)
    if min(most(high_s)) < 1 or sum(min(n, total) for n in most(high_s)) < total:
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
        k = max(able, key=lambda k: _fastest(stages[k], counts[k])[0])
        counts[k] -= 1
    return [(n, _fastest(ways, n)[1]) for ways, n in zip(stages, counts, strict=True)]


def _fastest(ways: Sequence[Way], layers: int) -> tuple[float, Way]:
    """Seconds of so many layers by the fastest way that fits them."""
    return min(
        ((way.beside_s + layers * way.layer_s, way) for way in ways if layers <= way.most), key=lambda item: item[0]
    )
