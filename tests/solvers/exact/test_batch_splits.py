"""Splitting the batch, for all choices at once, against trying all splits."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from solvers.exact.splits import least_longest

TIMES = st.lists(st.sampled_from([1.0, 2.0, 3.5, 7.0, np.inf]), min_size=6, max_size=6)


@given(st.lists(st.lists(TIMES, min_size=1, max_size=3), min_size=1, max_size=3))
def test_equals_all_splits(choices: list[list[list[float]]]) -> None:
    total = 5
    found = least_longest([np.array(own) for own in choices], total)
    combinations = list(itertools.product(*choices))
    assert found.shape == (len(combinations),)
    for value, times in zip(found, combinations, strict=True):
        splits = [s for s in itertools.product(range(total + 1), repeat=len(times)) if sum(s) == total]
        assert value == min(max(own[n] for own, n in zip(times, split, strict=True)) for split in splits)
