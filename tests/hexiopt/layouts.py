"""Random sequence layouts, for tests of their geometry, cost and bounds."""

from itertools import pairwise

from hypothesis import strategies as st

from hexiopt.plan import SequenceGroup, SequenceLayout
from hexiopt.sequence import ORDERS


def parts(total: int, count: int) -> st.SearchStrategy[tuple[int, ...]]:
    """`count` numbers of at least 1 that sum to `total`."""
    if count == 1:
        return st.just((total,))
    cuts = st.lists(st.integers(1, total - 1), min_size=count - 1, max_size=count - 1, unique=True)
    return cuts.map(lambda given: tuple(b - a for a, b in pairwise([0, *sorted(given), total])))


@st.composite
def layouts_of(draw: st.DrawFn, devices: tuple[int, ...], seq_len: int, heads: int) -> SequenceLayout:
    """A layout of all of `devices`, in groups of any sizes."""
    left, groups, tokens = list(devices), [], iter(draw(parts(seq_len, len(devices))))
    while left:
        size = draw(st.integers(1, min(heads, len(left))))
        own, left = tuple(left[:size]), left[size:]
        groups.append(SequenceGroup(own, tuple(next(tokens) for _ in own), draw(parts(heads, size))))
    return SequenceLayout(tuple(groups), draw(st.sampled_from(ORDERS)))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[SequenceLayout, int, int]:
    """A layout of a few devices, its sequence length and its number of heads."""
    heads, count = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    seq_len = draw(st.integers(count, 60))
    return draw(layouts_of(tuple(range(count)), seq_len, heads)), seq_len, heads
