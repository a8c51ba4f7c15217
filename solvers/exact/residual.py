"""What the devices beside a pipeline can process at most."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def most_together(most: Ints) -> Ints:
    """The most sequences of any number of pipelines, by devices of each kind, from the most of one pipeline.

    `most[u]` for u devices of each kind; both never fall with more devices. An unbounded knapsack.
    """
    best = most.copy()
    for axis in range(best.ndim):
        np.maximum.accumulate(best, axis=axis, out=best)
    single = best.copy()
    # A pipeline that does no better than one on fewer devices need not be looked at.
    useful = [
        u
        for u in np.ndindex(*single.shape)
        if single[u] > max((single[_less(u, k)] for k in range(len(u)) if u[k]), default=0)
    ]
    for u in np.ndindex(*best.shape):
        for used in useful:
            if all(a <= b for a, b in zip(used, u, strict=True)):
                rest = tuple(b - a for a, b in zip(used, u, strict=True))
                best[u] = max(best[u], best[rest] + single[used])
    return best


def _less(u: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(n - (k == axis) for k, n in enumerate(u))
