"""Which depths are tried on a plan, and which are taken."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers.completion.depths import best_depths


class Tries:
    """Depths that take `seconds` each, one after another; None stands for those of 1F1B."""

    def __init__(self, seconds: list[float | None]) -> None:
        self.seconds, self.shares, self.tried = seconds, list[float](), list[int]()

    def deepen(self, share: float) -> int | None:
        self.shares.append(share)
        number = min(len(self.shares), len(self.seconds)) - 1
        return None if self.seconds[number] is None else number

    def step_s(self, number: int) -> float:
        self.tried.append(number)
        seconds = self.seconds[number]
        assert seconds is not None
        return seconds

    def best(self, usual_s: float, enough_s: float = inf) -> int | None:
        return best_depths(self.deepen, self.step_s, usual_s, enough_s)


@pytest.mark.parametrize(
    ("seconds", "best", "tried"),
    [
        ([9.0, 8.0, 7.0, 7.5, 1.0], 2, 4),  # the last one is never seen
        ([11.0, 8.0, 9.0], 1, 3),  # what a period asks for is not always better, more may be
        ([11.0, 12.0, 1.0], None, 2),
        ([None, None, 9.0, 9.5], 2, 2),
        ([9.0], 0, 1),  # all shares ask for the same
        ([None], None, 0),
    ],
)
def test_shorter_periods_are_tried_until_one_is_worse(
    seconds: list[float | None], best: int | None, tried: int
) -> None:
    tries = Tries(seconds)
    assert tries.best(10.0) == best
    assert len(tries.tried) == tried


def test_a_plan_far_from_the_best_has_one_try() -> None:
    for enough_s, count in ((8.5, 1), (9.5, 3)):
        tries = Tries([9.0, 8.0, 8.5])
        assert tries.best(10.0, enough_s) == (0 if count == 1 else 1)
        assert len(tries.tried) == count


@given(st.lists(st.none() | st.floats(1.0, 20.0), min_size=1, max_size=9), st.floats(1.0, 20.0))
def test_the_best_of_what_was_tried_is_taken_if_it_is_better(seconds: list[float | None], usual_s: float) -> None:
    tries = Tries(seconds)
    best = tries.best(usual_s)
    took = [s for n in tries.tried if (s := seconds[n]) is not None]
    least = min(took, default=inf)
    assert (best is None) == (least >= usual_s)
    assert best is None or seconds[best] == least
    assert tries.shares[0] == 1.0
    assert tries.shares == sorted(set(tries.shares), reverse=True)
    assert len(set(tries.tried)) == len(tries.tried)
