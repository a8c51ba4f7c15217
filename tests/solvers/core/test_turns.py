"""Work shared in turns: each piece by one process at a time, those tried least first."""

import time
from multiprocessing import get_context

import pytest

from hexiopt.solving import Budget
from solvers.core.search import Search
from solvers.core.turns import Turns
from solvers.core.workers import in_parallel
from tests.solvers.problems import easy

MOST = 3


def nobody() -> None:
    raise AssertionError("there is nobody to wait for")


def test_those_tried_least_come_first() -> None:
    turns = Turns([1, 0, 0], MOST, shared=False)
    taken = []
    while (turn := turns.take(nobody)) is not None:
        taken.append(turn)
        turns.give_back(turn[0], done=turn == (2, 0))
    assert taken == [(1, 0), (2, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_what_others_are_at_is_waited_for() -> None:
    turns, asked = Turns([0, 0], MOST, shared=False), list[int]()
    assert turns.take(nobody) == (0, 0)
    assert turns.take(nobody) == (1, 0)

    def end_one() -> None:
        asked.append(0)
        turns.give_back(1, done=False)

    assert turns.take(end_one) == (1, 1)
    assert asked == [0]
    turns.close()
    turns.give_back(0, done=False)  # too late to be tried again
    assert turns.take(nobody) is None


def test_the_budget_ends_the_waiting() -> None:
    turns = Turns([0], MOST, shared=True)
    assert turns.take(nobody) == (0, 0)

    def time_out() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        turns.take(time_out)


def test_processes_share_all_of_it() -> None:
    """What one leaves open, any may try again; no piece is done twice."""
    count = 40
    turns = Turns([0] * count, MOST, shared=True)

    begun = get_context("fork").Barrier(3)

    def work(_: Search) -> list[tuple[int, int]]:
        taken: list[tuple[int, int]] = []
        while (turn := turns.take(lambda: None)) is not None:
            if not taken:
                begun.wait(60)  # on a busy machine the last to start would find nothing left
            time.sleep(0.001)
            taken.append(turn)
            turns.give_back(turn[0], done=turn[0] % 4 > 0)
        return taken

    run = Search("t", easy(), Budget(3600.0), 0)
    with in_parallel(run, work, work) as answers:
        every = [work(run), *answers()]
    assert all(every)
    expected = [(number, tries) for number in range(count) for tries in range(MOST if number % 4 == 0 else 1)]
    assert sorted(turn for taken in every for turn in taken) == expected
