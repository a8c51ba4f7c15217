"""The largest value that fits, by few trials."""

from collections.abc import Callable


def largest(fits: Callable[[int], bool], first: int, grain: int, top: int, precision: float) -> int | None:
    """The largest value that fits, by doubling or halving from `first`, then bisection; None where `grain` does not.

    All values but `first` and `top` are multiples of `grain`. The search ends when the least value tried that does
    not fit is within `grain`, or the relative `precision`, of the result.
    """
    low: int | None = None
    high: int | None = None
    value = first
    while True:
        if fits(value):
            low = value
            if value == top or high is not None:
                break
            value = min(top, max(grain, 2 * value // grain * grain))
        else:
            high = value
            if low is not None or value <= grain:
                break
            value = max(grain, value // 2 // grain * grain)
    if low is None or high is None:
        return low
    while high - low > max(grain, precision * low):
        middle = (low + high) // 2 // grain * grain
        if not low < middle < high:
            break
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
