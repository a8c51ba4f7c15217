"""The most sequences that a pipeline can process, for all devices it may have at once."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray


def most_sequences(
    shape: tuple[int, ...],
    batch: int,
    sizes: Sequence[int],
    fits: Callable[[int, int], NDArray[np.bool_]],
    go_on: Callable[[], bool],
) -> NDArray[np.int64] | None:
    """The most sequences of micro-batches of one of `sizes`, `batch` at most, for every element of `shape`.

    `fits(size, count)` [shape] says where so many micro-batches of a size fit. None where `go_on` says to stop.
    """
    found = np.zeros(shape, np.int64)
    for size in sizes:
        for count in range(batch // size, 0, -1):
            if (found >= count * size).all():
                break
            if not go_on():
                return None
            found = np.where(fits(size, count), np.maximum(found, count * size), found)
    return found
