"""Sequence layouts: shards divide the sequence, sub-rings divide the heads, and pairs are counted as by hand."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.plan import SequenceGroup, SequenceLayout
from hexiopt.sequence import (
    ORDERS,
    causal_pairs,
    group_ranges,
    head_ranges,
    joined,
    kv_range,
    misfit,
    sub_rings,
    token_ranges,
)


def parts(total: int, count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """`count` numbers of at least 1 that sum to `total`."""
    cuts = st.lists(st.integers(1, total - 1), min_size=count - 1, max_size=count - 1, unique=True)
    return cuts.map(lambda given: tuple(b - a for a, b in pairwise([0, *sorted(given), total])))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[SequenceLayout, int, int]:
    """A layout, its sequence length and its number of heads."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    heads = draw(st.integers(max(sizes), 12))
    seq_len = draw(st.integers(sum(sizes) + 1, 60))
    tokens = iter(draw(parts(seq_len, sum(sizes))) if sum(sizes) > 1 else (seq_len,))
    groups, device = [], 0
    for size in sizes:
        own = draw(parts(heads, size)) if size > 1 else (heads,)
        groups.append(SequenceGroup(tuple(range(device, device + size)), tuple(next(tokens) for _ in own), own))
        device += size
    return SequenceLayout(tuple(groups), draw(st.sampled_from(ORDERS))), seq_len, heads


@given(layouts())
def test_every_token_is_held_once_and_as_many_as_stated(case: tuple[SequenceLayout, int, int]) -> None:
    layout, seq_len, heads = case
    assert misfit(layout, seq_len, heads) is None
    held: list[int] = []
    for group, shards in zip(layout.groups, token_ranges(layout), strict=True):
        for tokens, runs in zip(group.tokens, shards, strict=True):
            own = [token for first, end in runs for token in range(first, end)]
            assert len(own) == tokens
            assert own == sorted(own)
            held += own
    assert sorted(held) == list(range(seq_len))


@given(layouts())
def test_a_group_has_few_runs(case: tuple[SequenceLayout, int, int]) -> None:
    layout = case[0]
    for runs in group_ranges(layout):
        assert len(runs) <= (1 if layout.order == "contiguous" else 2)


@given(layouts(), st.sampled_from((1, 2, 3)))
def test_sub_rings_divide_the_heads_and_have_one_holder_in_every_group(
    case: tuple[SequenceLayout, int, int], per_kv: int
) -> None:
    layout, _, heads = case
    kv_heads = heads // per_kv if heads % per_kv == 0 else heads
    rings = sub_rings(layout, heads, kv_heads)
    assert [ring.heads for ring in rings] == list(head_ranges([b - a for a, b in (ring.heads for ring in rings)]))
    assert rings[-1].heads[1] == heads
    for ring in rings:
        for group, place in zip(layout.groups, ring.places, strict=True):
            first, end = head_ranges(group.heads)[place]
            assert first <= ring.heads[0] < ring.heads[1] <= end
        read = {head * kv_heads // heads for head in range(*ring.heads)}
        assert set(range(*ring.kv_heads)) == read


RANGE = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (min(pair), max(pair)))


@given(st.lists(RANGE, max_size=3), st.lists(RANGE, max_size=3))
def test_pairs_are_those_counted_by_hand(queries: list[tuple[int, int]], keys: list[tuple[int, int]]) -> None:
    by_hand = sum(k <= q for a in queries for q in range(*a) for b in keys for k in range(*b))
    assert causal_pairs(queries, keys) == by_hand


def test_zigzag_balances_equal_shards() -> None:
    groups = tuple(SequenceGroup((d,), (16,), (2,)) for d in range(4))
    whole = [(0, 64)]

    def work(order: str) -> list[int]:
        return [causal_pairs(runs, whole) for runs in group_ranges(SequenceLayout(groups, order))]

    assert work("contiguous") == [136, 392, 648, 904]
    assert work("zigzag") == [520] * 4


def test_small_parts() -> None:
    assert joined([(4, 6), (0, 2), (2, 4), (7, 7), (8, 9)]) == ((0, 6), (8, 9))
    assert kv_range((3, 5), 8, 2) == (0, 2)
    assert kv_range((4, 8), 8, 2) == (1, 2)


@pytest.mark.parametrize(
    ("tokens", "heads", "order", "said"),
    [
        (((4, 4), (8,)), ((1, 3), (4,)), "spiral", "order 'spiral'; choose contiguous or zigzag"),
        (((4, 4), (7,)), ((1, 3), (4,)), "zigzag", "the groups have 15 tokens, a sequence 16"),
        (((4, 4), (8,)), ((1, 2), (4,)), "zigzag", "group 0 has 3 heads, the model 4"),
        (((8, 0), (8,)), ((1, 3), (4,)), "zigzag", "group 0 has tokens [8, 0]; give every device at least 1"),
        (((8,), (8,)), ((1, 3), (4,)), "zigzag", "group 0 states 1 tokens for 2 devices"),
    ],
)
def test_what_does_not_fit_is_said(
    tokens: tuple[tuple[int, ...], ...], heads: tuple[tuple[int, ...], ...], order: str, said: str
) -> None:
    groups = tuple(SequenceGroup(tuple(range(len(h))), t, h) for t, h in zip(tokens, heads, strict=True))
    assert (misfit(SequenceLayout(groups, order), 16, 4) or "").startswith(said)
    assert misfit(SequenceLayout(()), 16, 4) == "no group; name at least one"
