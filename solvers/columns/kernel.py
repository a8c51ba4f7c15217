"""A move's fills of `multiset_search.py`, compiled."""

import numba

from hexiopt.plan.token_layout import Floats, Ints


@numba.njit(cache=True, nogil=True)
def fill(counts: Ints, order: Ints, usage: Floats, free: Floats, draws: Floats, single: float) -> None:
    """Add to `counts` as many copies of the columns in `order` as fit in what is `free` of each row, of which a copy
    takes `usage` [row, column]; one at a time where a draw, in turn, is below `single`."""
    num_rows, drawn = len(free), 0
    for column in order:
        while True:
            most = -1
            for row in range(num_rows):
                each = usage[row, column]
                if each > 0.0 and (most < 0 or free[row] // each < most):
                    most = int(free[row] // each)
            if most <= 0:
                break
            copies = 1 if draws[drawn % len(draws)] < single else most
            drawn += 1
            counts[column] += copies
            for row in range(num_rows):
                free[row] -= copies * usage[row, column]
            if copies == most:
                break
