"""Good tokens and heads, found quickly, from which the exact search starts: shares by speed, then single moves."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, permutations

from solvers.completion.allocation import earliest_finish
from solvers.sequence.exact.layout_skeletons import LayoutSkeleton

QuantaShares = tuple[tuple[int, ...], tuple[int, ...]]  # quanta and heads of the devices of a skeleton


def by_speed(skeleton: LayoutSkeleton, speeds: Sequence[float], resolution: int, num_heads: int) -> QuantaShares:
    """Quanta in proportion to the devices' `speeds`, and heads in proportion to those within each group."""
    heads: list[int] = []
    for own, end in zip(skeleton.groups, accumulate(map(len, skeleton.groups)), strict=True):
        heads += _in_turns(speeds[end - len(own) : end], num_heads)
    return tuple(_in_turns(speeds, resolution)), tuple(heads)


def _in_turns(speeds: Sequence[float], total: int) -> list[int]:
    """Allocate unit by unit, each to the device that would have half of it done first."""

    def half_done(speed: float) -> Callable[[int], float]:
        return lambda units: (units - 0.5) / speed

    return earliest_finish(list(map(half_done, speeds)), total)


def climb(
    skeleton: LayoutSkeleton,
    shares: QuantaShares,
    price: Callable[[QuantaShares], float],
    should_continue: Callable[[], bool],
) -> QuantaShares:
    """The shares after repeatedly making the best move of one quantum or head, as long as that helps.

    `price` returns seconds, infinite where a device has not enough memory.
    """
    best_s = price(shares)
    while should_continue():
        nearby = [(price(other), other) for other in _moves(skeleton, shares)]
        least_s, other = min(nearby, default=(best_s, shares))
        if least_s >= best_s:
            break
        best_s, shares = least_s, other
    return shares


def _moves(skeleton: LayoutSkeleton, shares: QuantaShares) -> Iterator[QuantaShares]:
    quanta, heads = shares
    for a, b in permutations(range(len(quanta)), 2):
        if quanta[a] > 1:
            yield _move(quanta, a, b), heads
    ends = list(accumulate(map(len, skeleton.groups)))
    for own, end in zip(skeleton.groups, ends, strict=True):
        for a, b in permutations(range(end - len(own), end), 2):
            if heads[a] > 1:
                yield quanta, _move(heads, a, b)


def _move(parts: tuple[int, ...], a: int, b: int) -> tuple[int, ...]:
    return tuple(n - (k == a) + (k == b) for k, n in enumerate(parts))
