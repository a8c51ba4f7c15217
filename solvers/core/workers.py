"""Half of a proof on a second core: a forked process that looks at its part, and sends back what it found."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

from hexiopt.cores import usable_cores
from solvers.core.search import Search

_GRACE_S = 0.2  # how long the other process may take to notice that it shall stop
_NOTICE_S = 0.02  # how often this one looks whether the other has ended
Work = Callable[[Search], Any]


def has_second_core(search: Search) -> bool:
    """Whether a forked process can help; not where steps are counted, for then the cores must not matter."""
    forks = "fork" in multiprocessing.get_all_start_methods()
    free = usable_cores() > 1 and not multiprocessing.current_process().daemon
    return search.budget.max_steps is None and forks and free


@contextmanager
def at_once(search: Search, work: Work) -> Iterator[Callable[[], Any]]:
    """Run `work` in another process, with a search of its own, while the body of the `with` runs in this one.

    The body gets a function that waits for the answer of `work`, or returns None where the budget ends before; the
    best plan of the other process is then known here.
    """
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_other, args=(search, work, stop, there), daemon=True)
    child.start()
    there.close()

    def answer() -> Any:
        while not here.poll(_NOTICE_S):
            if not search.go_on() or not child.is_alive():
                stop.set()
                break
        if not here.poll(_GRACE_S):
            return None
        message = here.recv()
        if isinstance(message, BaseException):
            raise message
        found, plan, steps = message
        search.steps += steps
        if plan is not None:
            search.offer(plan)
        return found

    try:
        yield answer
    finally:
        stop.set()
        if child.is_alive():
            child.join(0.05)
            child.terminate()
        child.join()
        here.close()


def _other(search: Search, work: Work, stop: Event, pipe: Connection) -> None:
    """In the other process: work with what is known so far until `stop`."""
    try:
        own = search.beside(lambda _: not stop.is_set())
        if search.plan is not None:
            own.offer(search.plan, search.cost)
        found = work(own)
        better = own.plan if own.best_s < search.best_s else None
        pipe.send((found, better, own.steps))
    except BaseException as error:
        pipe.send(error)
        raise
    finally:
        pipe.close()
