"""What is computed once, and how much of it is remembered."""

import pickle
from operator import neg

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.memo import Memo


def test_a_value_is_computed_once() -> None:
    asked = list[int]()

    def square(n: int) -> int:
        asked.append(n)
        return n * n

    memo = Memo(square)
    assert [memo[n] for n in (3, 4, 3, 3, 4)] == [9, 16, 9, 9, 16]
    assert asked == [3, 4]


@given(st.lists(st.integers(0, 40)), st.integers(1, 8))
def test_values_are_right_and_never_more_than_the_limit(keys: list[int], limit: int) -> None:
    memo: Memo[int, int] = Memo(neg, limit)
    for key in keys:
        assert memo[key] == -key
        assert key in memo
        assert len(memo) <= limit


def test_the_older_half_is_dropped() -> None:
    memo: Memo[int, int] = Memo(neg, 4)
    for key in range(5):
        _ = memo[key]
    assert list(memo) == [2, 3, 4]


def test_what_fails_is_not_remembered() -> None:
    memo = Memo(lambda n: 1 // n)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            _ = memo[0]
    assert not memo


def test_a_memo_may_be_filled_while_it_computes() -> None:
    memo: Memo[int, int] = Memo(lambda n: n if n < 2 else memo[n - 1] + memo[n - 2], 3)
    assert memo[30] == 832_040


def test_a_memo_goes_to_another_process() -> None:
    memo: Memo[int, int] = Memo(neg)
    _ = memo[1]
    again = pickle.loads(pickle.dumps(memo))
    assert dict(again) == {1: -1}
    assert again[2] == -2
