"""Whole numbers that sum to a total: how layers, samples, tokens and heads are allocated.

Four rules: evenly; in proportion to weights; so that the slowest part is as fast as possible; and one unit at a time,
each to the part that would finish it first.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from hexiopt.plan.token_layout import Floats, Ints

_EXACT = 1e-9  # of a bottleneck: times that differ by less are equal


def even(total: int, parts: int, first: Sequence[int] | None = None) -> list[int]:
    """Parts that differ by at most one; `first` lists the parts that should be larger, most preferred first (default:
    by index).

    It must name at least `total % parts` of them.
    """
    low, more = divmod(total, parts)
    larger = set((range(parts) if first is None else first)[:more])
    return [low + (k in larger) for k in range(parts)]


def proportional(weights: Floats, total: int, *, least: int = 1, caps: Floats | None = None) -> Ints:
    """Parts in proportion to `weights`, each at least `least` and at most its cap; the largest remainders are rounded
    up.

    `total` must allow `least` for every part and must not exceed the sum of the caps rounded down.
    """
    count = len(weights)
    most = np.full(count, np.inf) if caps is None else np.floor(caps)
    assert least * count <= total <= most.sum()
    assert (most >= least).all()
    share, open_ = np.full(count, float(least)), np.ones(count, bool)
    while open_.any():
        share[open_] = (total - share[~open_].sum()) * weights[open_] / weights[open_].sum()
        missing, excess = np.maximum(least - share, 0.0), np.maximum(share - most, 0.0)
        if not missing.any() and not excess.any():
            break
        # The bound that is violated more in total binds: enforcing the other one only moves shares towards it.
        bound, beyond = (float(least), missing > 0.0) if missing.sum() > excess.sum() else (most, excess > 0.0)
        share[beyond] = np.broadcast_to(bound, count)[beyond]
        open_ &= ~beyond
    parts: Ints = np.floor(share + 1e-9).astype(np.int64)
    able = np.flatnonzero(open_ & (parts < most))
    order = np.argsort(-(share - parts)[able], kind="stable")
    parts[able[order[: total - int(parts.sum())]]] += 1
    return parts


def least_bottleneck(
    times: Sequence[Sequence[float]], total: int, added: Sequence[float] = (), least: int = 1
) -> list[int]:
    """Counts n_s ≥ `least` with Σ n_s = total that minimise the largest `times[s][n_s - 1] + added[s]`.

    Among these, the sum of times is small too, and minimal where times are convex. `times[s]` must not decrease, and
    `total` must lie between `least` · len(times) and Σ len(times[s]).
    """
    if any(added):
        times = [[x + more for x in t] for t, more in zip(times, added, strict=True)]
    low, high = max(t[least - 1] for t in times), max(t[-1] for t in times)
    fewest, most = [bisect_right(t, low) for t in times], [len(t) for t in times]
    if sum(fewest) >= total:
        return give_back(times, fewest, total, least)
    # Bisection leaves few times between, of which every one has room for a unit more.
    while sum(most) - sum(fewest) > 2 * len(times) and high - low > _EXACT * high:
        middle = 0.5 * (low + high)
        counts = [bisect_right(t, middle) for t in times]
        if sum(counts) >= total:
            high, most = middle, counts
        else:
            low, fewest = middle, counts
    between = sorted(chain.from_iterable(t[n:m] for t, n, m in zip(times, fewest, most, strict=True)))
    bottleneck = between[total - sum(fewest) - 1] * (1 + _EXACT)
    return give_back(times, [bisect_right(t, bottleneck) for t in times], total, least)


def give_back(times: Sequence[Sequence[float]], counts: Sequence[int], total: int, least: int = 1) -> list[int]:
    """`counts` with as many units less, one by one, that they sum to `total`; each is where it saves most time, and
    none below `least`."""
    left = list(counts)
    for _ in range(sum(left) - total):
        # A layer less shortens the pipeline's fill and drain.
        s = max(
            (s for s in range(len(left)) if left[s] > least),
            key=lambda s: times[s][left[s] - 1] - times[s][left[s] - 2],
        )
        left[s] -= 1
    return left


def earliest_finish(finish_s: Sequence[Callable[[int], float]], total: int, least: int = 1) -> list[int]:
    """Counts of at least `least`; every further unit goes to the part that would finish it first.

    `finish_s[k](n)` is when part k has finished n units. Where it does not decrease with n, the last part finishes as
    early as possible.
    """
    counts = [least] * len(finish_s)
    after = [own(least + 1) for own in finish_s]
    for _ in range(total - least * len(counts)):
        k = min(range(len(counts)), key=after.__getitem__)
        counts[k] += 1
        after[k] = finish_s[k](counts[k] + 1)
    return counts
