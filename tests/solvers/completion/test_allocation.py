"""The four rules of sharing out whole numbers, against all ways to do so."""

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from solvers.completion.allocation import earliest_finish, even, least_bottleneck, proportional


def compositions(total: int, rooms: Sequence[int], low: int = 1) -> Iterator[tuple[int, ...]]:
    """All counts n_s from `low` to the room of part s that sum to `total`."""
    for counts in product(*(range(low, room + 1) for room in rooms)):
        if sum(counts) == total:
            yield counts


@given(st.integers(0, 30), st.integers(1, 7), st.randoms())
def test_even_parts_differ_by_one(total: int, parts: int, rng: random.Random) -> None:
    first = rng.sample(range(parts), parts)
    for shares, order in ((even(total, parts), range(parts)), (even(total, parts, first), first)):
        assert sum(shares) == total
        larger = [k for k in order if shares[k] > total // parts]
        assert larger == list(order)[: total % parts]


@given(st.lists(st.tuples(st.floats(0.1, 9.0), st.integers(1, 12)), min_size=1, max_size=5), st.integers(0, 40))
def test_proportional_parts_are_as_near_to_their_share_as_bounds_allow(
    parts: list[tuple[float, int]], more: int
) -> None:
    """Shares are one factor times the weights, but for bounds; whole numbers are within one of them."""
    weights, caps = (np.array(column, float) for column in zip(*parts, strict=True))
    total = int(min(len(parts) + more, caps.sum()))
    shares = proportional(weights, total, caps=caps + 0.5)
    assert shares.sum() == total
    assert ((shares >= 1) & (shares <= caps)).all()
    low, high = 0.0, (total + 1) / weights.min()
    for _ in range(200):
        factor = 0.5 * (low + high)
        low, high = (low, factor) if np.clip(factor * weights, 1.0, caps).sum() >= total else (factor, high)
    assert (np.abs(shares - np.clip(high * weights, 1.0, caps)) < 1 + 1e-6).all()


def test_proportional_by_hand() -> None:
    assert proportional(np.array([1.0, 1.0, 2.0]), 8).tolist() == [2, 2, 4]
    assert proportional(np.array([1.0, 9.0]), 4).tolist() == [1, 3]
    assert proportional(np.array([1.0, 1.0, 8.0]), 10, caps=np.array([9.0, 9.0, 4.9])).tolist() == [3, 3, 4]
    assert proportional(np.array([1.0, 3.0]), 4, least=0).tolist() == [1, 3]


@st.composite
def tables(draw: st.DrawFn, *, convex: bool = False) -> tuple[list[list[float]], int, list[float]]:
    """Times of n layers that never fall, layers that have room, and what stages do beside them."""
    steps = st.one_of(st.sampled_from((0.0, 1.0)), st.floats(0.0, 5.0))
    times = []
    for _ in range(draw(st.integers(1, 4))):
        grow = draw(st.lists(steps, min_size=1, max_size=5))
        times.append(list(accumulate(sorted(grow) if convex else grow, initial=0.5))[1:])
    total = draw(st.integers(len(times), sum(map(len, times))))
    added = [draw(st.sampled_from((0.0, 0.0, 2.5))) for _ in times]
    return times, total, added


@given(tables(), st.integers(1, 3))
def test_bottleneck_is_the_least(table: tuple[list[list[float]], int, list[float]], low: int) -> None:
    """With one layer a stage at least, or as many as its ranges."""
    times, total, added = table
    low = min(low, total // len(times), *map(len, times))
    counts = least_bottleneck(times, total, added, low)
    assert sum(counts) == total
    assert all(low <= n <= len(t) for n, t in zip(counts, times, strict=True))

    def bottleneck(chosen: Sequence[int]) -> float:
        return max(t[n - 1] + more for t, n, more in zip(times, chosen, added, strict=True))

    least = min(bottleneck(chosen) for chosen in compositions(total, [len(t) for t in times], low))
    assert bottleneck(counts) <= least * (1 + 1e-8)


@given(tables(convex=True))
def test_then_the_sum_is_the_least(table: tuple[list[list[float]], int, list[float]]) -> None:
    """Among splits with the least bottleneck, where a layer never costs less than the one before."""
    times, total, _ = table
    ways = list(compositions(total, [len(t) for t in times]))

    def cost(chosen: Sequence[int]) -> tuple[float, float]:
        stage_s = [t[n - 1] for t, n in zip(times, chosen, strict=True)]
        return max(stage_s), sum(stage_s)

    least = min(cost(chosen)[0] for chosen in ways)
    best_sum = min(cost(chosen)[1] for chosen in ways if cost(chosen)[0] <= least * (1 + 1e-12))
    assert cost(least_bottleneck(times, total))[1] <= best_sum * (1 + 1e-8)


@given(
    st.lists(st.lists(st.floats(0.0, 1.0), min_size=9, max_size=9), min_size=1, max_size=4),
    st.integers(0, 5),
)
def test_samples_make_the_slowest_as_fast_as_possible(rises: list[list[float]], more: int) -> None:
    """Against all ways to deal them."""
    size = len(rises) + more
    times = [[sum(rise[:n]) for n in range(10)] for rise in rises]
    samples = earliest_finish([lambda n, column=column: column[n] for column in times], size)

    def slowest(given: Sequence[int]) -> float:
        return max(column[n] for column, n in zip(times, given, strict=True))

    every = [deal for deal in product(range(1, size + 1), repeat=len(rises)) if sum(deal) == size]
    assert sum(samples) == size
    assert slowest(samples) == min(map(slowest, every))
