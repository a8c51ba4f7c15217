"""Collectives inside a TP group."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.executors.collectives import ring_collective_s, tree_depth


def test_ring_by_hand() -> None:
    """Four ranks, 8 GB, 2 GB/s, 1 ms: three messages of 2 GB, each 1 s and 1 ms."""
    assert ring_collective_s(8e9, 4, 2e9, 1e-3) == pytest.approx(3 * (1.0 + 1e-3))


def test_one_rank_communicates_nothing() -> None:
    assert ring_collective_s(1e12, 1, float("inf"), 0.0) == 0.0
    assert tree_depth(1) == 0


@given(st.integers(1, 64), st.floats(1.0, 1e12), st.floats(1e6, 1e12), st.floats(0.0, 1.0))
def test_a_ring_grows_with_ranks_and_bytes_and_never_beats_its_link(
    ranks: int, num_bytes: float, bandwidth: float, latency_s: float
) -> None:
    seconds = ring_collective_s(num_bytes, ranks, bandwidth, latency_s)
    assert seconds <= ring_collective_s(num_bytes, ranks + 1, bandwidth, latency_s)
    assert seconds <= ring_collective_s(2 * num_bytes, ranks, bandwidth, latency_s)
    assert seconds <= num_bytes / bandwidth + (ranks - 1) * latency_s


@pytest.mark.parametrize(("ranks", "levels"), [(2, 1), (3, 2), (4, 2), (5, 3), (1024, 10), (1025, 11)])
def test_a_tree_doubles_per_level(ranks: int, levels: int) -> None:
    assert tree_depth(ranks) == levels
