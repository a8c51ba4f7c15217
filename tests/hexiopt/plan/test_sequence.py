"""Sequence layouts: shards divide the sequence, sub-rings divide the heads, and pairs are counted as by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.token_layout import (
    RingSchedule,
    group_ranges,
    head_ranges,
    kv_heads_of,
    kv_range,
    members,
    merge_runs,
    misfit,
    ring_holders,
    sub_rings,
    token_ranges,
    uneven_kv_copies,
)
from tests.hexiopt.plan.layouts import causal_pairs, layouts


@given(layouts())
def test_every_token_is_held_once_and_as_many_as_stated(case: tuple[SequenceParallel, int, int]) -> None:
    layout, seq_len, heads = case
    assert misfit(layout, seq_len, heads) is None
    held: list[int] = []
    for group, shards in zip(layout.groups, token_ranges(layout), strict=True):
        for tokens, runs in zip(group.tokens, shards, strict=True):
            positions = [token for first, end in runs for token in range(first, end)]
            assert len(positions) == tokens
            assert positions == sorted(positions)
            held += positions
    assert sorted(held) == list(range(seq_len))


@given(layouts())
def test_a_group_has_few_runs(case: tuple[SequenceParallel, int, int]) -> None:
    layout = case[0]
    for runs in group_ranges(layout):
        assert len(runs) <= (1 if layout.order == "contiguous" else 2)


@given(layouts(), st.sampled_from((1, 2, 3)))
def test_sub_rings_divide_the_heads_and_have_one_holder_in_every_group(
    case: tuple[SequenceParallel, int, int], per_kv: int
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
        return [causal_pairs(runs, whole) for runs in group_ranges(SequenceParallel(groups, order))]

    assert work("contiguous") == [136, 392, 648, 904]
    assert work("zigzag") == [520] * 4


def test_small_parts() -> None:
    assert merge_runs([(4, 6), (0, 2), (2, 4), (7, 7), (8, 9)]) == ((0, 6), (8, 9))
    assert kv_range((3, 5), 8, 2) == (0, 2)
    assert kv_range((4, 8), 8, 2) == (1, 2)


@pytest.mark.parametrize(
    ("tokens", "heads", "message"),
    [
        (((4, 4), (7,)), ((1, 3), (4,)), "the groups have 15 tokens, a sequence 16"),
        (((4, 4), (8,)), ((1, 2), (4,)), "group 0 has 3 heads, the model 4"),
        (((2, 1, 1, 2, 2), (8,)), ((1,) * 5, (4,)), "group 0 has 5 devices for 4 heads; a device computes at least"),
    ],
)
def test_what_does_not_fit_is_said(
    tokens: tuple[tuple[int, ...], ...], heads: tuple[tuple[int, ...], ...], message: str
) -> None:
    groups = tuple(SequenceGroup(tuple(range(len(h))), t, h) for t, h in zip(tokens, heads, strict=True))
    assert (misfit(SequenceParallel(groups), 16, 4) or "").startswith(message)


@given(layouts())
def test_blocks_are_those_counted_token_by_token(case: tuple[SequenceParallel, int, int]) -> None:
    layout = case[0]
    runs, count = group_ranges(layout), len(layout.groups)
    schedule = RingSchedule(members(layout), layout.order)
    each = schedule.blocks(np.arange(count))
    needed = np.zeros(count, int)
    for step in range(count):
        for g in range(count):
            keys = runs[schedule.source(np.arange(count))[step, g]]
            seen = [(q, k) for a in runs[g] for q in range(*a) for b in keys for k in range(*b) if k <= q]
            blocks = [(a, b) for a in runs[g] for b in keys if causal_pairs([a], [b])]
            diagonal = sum(q == k for q, k in seen)
            by_hand = (
                len(seen) - diagonal / 2,
                sum((a[1] - a[0]) * (b[1] - b[0]) for a, b in blocks),
                len(blocks),
                len({q for q, _ in seen}),
            )
            assert tuple(values[step, g] for values in each) == by_hand
            if seen:
                needed[(g - step) % count] = step
    assert schedule.last_step().tolist() == needed.tolist()


@given(layouts(), st.sampled_from((1, 2, 3, 4)))
def test_arrays_say_what_rings_and_ranges_say(case: tuple[SequenceParallel, int, int], per_kv: int) -> None:
    layout, _, heads = case
    kv_heads = heads // per_kv if heads % per_kv == 0 else heads
    group_members, rings = members(layout), sub_rings(layout, heads, kv_heads)
    holders = ring_holders(group_members, heads, kv_heads)
    assert (holders.place - group_members.starts[:, None]).T.tolist() == [list(ring.places) for ring in rings]
    assert holders.kv_heads.tolist() == [ring.kv_heads[1] - ring.kv_heads[0] for ring in rings]
    ranges = [held for group in layout.groups for held in head_ranges(group.heads)]
    read = kv_heads_of(group_members, heads, kv_heads)
    copies = uneven_kv_copies(group_members, read, heads, kv_heads)
    for held, number, more in zip(ranges, read.tolist(), copies.tolist(), strict=True):
        first, end = kv_range(held, heads, kv_heads)
        assert number == end - first
        served = [sum(head * kv_heads // heads == kv for head in range(*held)) for kv in range(first, end)]
        assert more == (0 if len(set(served)) == 1 else sum(served) - number)
