"""Searches of one run hear what the others have found."""

import threading
from multiprocessing import Pipe
from typing import Any

from hexiopt.solving import Budget
from solvers.core.exchange import HubExchange, MemberExchange
from solvers.core.search import Search
from solvers.core.workers import in_parallel
from tests.solvers.problems import easy


def ends(count: int, *, counted: bool) -> tuple[HubExchange, list[MemberExchange]]:
    pairs = [Pipe() for _ in range(count)]
    return HubExchange([here for here, _ in pairs], counted), [MemberExchange(there, counted) for _, there in pairs]


def test_where_steps_are_counted_everyone_hears_the_round_of_all_others() -> None:
    hub, members = ends(2, counted=True)
    heard: dict[int, list[Any]] = {}

    def ask(number: int) -> None:
        heard[number] = [members[number].swap(f"{number}-{turn}" if turn != 1 else None) for turn in range(3)]

    threads = [threading.Thread(target=ask, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    own = [hub.swap(f"hub-{turn}") for turn in range(3)]
    for thread in threads:
        thread.join()
    assert own == [["0-0", "1-0"], [], ["0-2", "1-2"]]
    assert heard[0] == [["hub-0", "1-0"], ["hub-1"], ["hub-2", "1-2"]]
    assert heard[1] == [["hub-0", "0-0"], ["hub-1"], ["hub-2", "0-2"]]


def test_where_time_is_limited_nobody_waits() -> None:
    hub, [member] = ends(1, counted=False)
    assert member.swap("first") == []  # asks
    assert member.swap("second") == []  # has not been answered
    assert hub.swap("hub") == ["first"]
    assert member.swap("third") == ["hub"]  # of unsent news, the latest
    assert member.swap(None) == []
    assert hub.swap(None) == ["third"]


def test_who_has_ended_is_not_waited_for() -> None:
    hub, [member] = ends(1, counted=True)
    member._end.close()
    assert hub.swap("news") == []
    assert hub.swap("news") == []
    assert member.swap("news") == []


def test_processes_hear_each_other_and_the_answers_come_in_order() -> None:
    run = Search("t", easy(), Budget(3600.0, 1000), 0)

    def work(number: int) -> Any:
        def of(own: Search) -> tuple[int, list[Any]]:
            assert own.exchange is not None
            return number, own.exchange.swap((float(number), f"from {number}"))

        return of

    with in_parallel(run, work(1), work(2)) as answers:
        assert run.exchange is not None
        heard = run.exchange.swap((0.0, "from the first"))
        found = answers()
    assert heard == [(1.0, "from 1"), (2.0, "from 2")]
    assert found == [
        (1, [(0.0, "from the first"), (2.0, "from 2")]),
        (2, [(0.0, "from the first"), (1.0, "from 1")]),
    ]
    assert run.exchange is None
