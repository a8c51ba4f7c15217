"""Splitting the global batch, against all ways to split it."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from solvers.completion.batches import split_batch

seconds = st.floats(0.01, 10.0)


def all_counts(sizes: list[int], global_batch: int) -> list[tuple[int, ...]]:
    ranges = [range(1, global_batch // size + 1) for size in sizes]
    return [
        counts
        for counts in itertools.product(*ranges)
        if sum(size * count for size, count in zip(sizes, counts, strict=True)) == global_batch
    ]


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[float], list[float], list[int], int]:
    count = draw(st.integers(1, 4))
    fills = [draw(st.one_of(st.just(0.0), seconds)) for _ in range(count)]
    periods = [draw(seconds) for _ in range(count)]
    sizes = [draw(st.sampled_from((1, 2, 4))) for _ in range(count)]
    return fills, periods, sizes, draw(st.integers(1, 14))


@given(lines())
def test_against_all_splits(line: tuple[list[float], list[float], list[int], int]) -> None:
    """Exact sums, none only where there is no split, and at most one micro-batch longer than the best."""
    fills, periods, sizes, batch = line
    ways = all_counts(sizes, batch)
    counts = split_batch(fills, periods, sizes, batch)
    if not ways:
        assert counts is None
        return
    assert counts is not None
    assert tuple(counts) in ways

    def longest(chosen: tuple[int, ...]) -> float:
        return max(f + b * c for f, b, c in zip(fills, periods, chosen, strict=True))

    best = min(map(longest, ways))
    assert longest(tuple(counts)) <= best + max(periods)
    if len(set(sizes)) == 1:
        assert longest(tuple(counts)) <= best * (1 + 1e-5)


@given(st.integers(1, 6), st.sampled_from((1, 2, 4)), st.integers(1, 40))
def test_even(pipelines: int, size: int, batch: int) -> None:
    """Within one micro-batch; none only where the batch does not divide, or does not go round."""
    counts = split_batch([0.0] * pipelines, [1.0] * pipelines, [size] * pipelines, batch, even=True)
    if batch % size or batch < size * pipelines:
        assert counts is None
        return
    assert counts is not None
    assert size * sum(counts) == batch
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 1


@given(lines(), st.lists(st.sampled_from((1, 1, 2, 3)), min_size=4, max_size=4), st.booleans())
def test_multiples(line: tuple[list[float], list[float], list[int], int], drawn: list[int], even: bool) -> None:
    fills, periods, sizes, batch = line
    multiples = drawn[: len(sizes)]
    counts = split_batch(fills, periods, sizes, batch, even=even, multiples=multiples)
    if counts is None:
        return
    assert tuple(counts) in all_counts(sizes, batch)
    assert all(count % n == 0 for count, n in zip(counts, multiples, strict=True))
    if even:
        sequences = [size * count for size, count in zip(sizes, counts, strict=True)]
        assert max(sequences) - min(sequences) <= max(sizes)


def test_multiples_by_hand() -> None:
    assert split_batch([0.0, 0.0], [1.0, 3.0], [1, 1], 16, multiples=[4, 4]) == [12, 4]
    assert split_batch([0.0, 0.0], [1.0, 1.0], [1, 1], 9, multiples=[4, 1]) == [4, 5]
    assert split_batch([0.0], [1.0], [1], 6, multiples=[4]) is None
    assert split_batch([0.0, 0.0], [1.0, 1.0], [1, 1], 12, even=True, multiples=[4, 4]) is None
    assert split_batch([0.0, 0.0], [1.0, 1.0], [1, 1], 16, even=True, multiples=[4, 4]) == [8, 8]
