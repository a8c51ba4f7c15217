"""A second process for a search, which does its share and sends back what it found. No other module starts one."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any

from hexiopt.cores import usable_cores
from solvers.core.search import Search

_GRACE_S = 0.5  # how long the other process may take to notice that it shall stop
_FIRST_PLAN_S = 10.0  # how long it may go on past the time limit until there is a plan
_NOTICE_S = 0.02  # how often this one looks whether the other has ended
ParallelWork = Callable[[Search], Any]


def has_second_core() -> bool:
    """Whether a process can be forked to run in parallel: two cores, fork, and not a daemon, which may not have
    children.
    """
    forks = "fork" in multiprocessing.get_all_start_methods()
    return forks and usable_cores() > 1 and not multiprocessing.current_process().daemon


@contextmanager
def in_parallel(run: Search, work: ParallelWork) -> Iterator[Callable[[], Any]]:
    """Run `work` in another process while the body of the `with` runs in this one.

    `work` gets a search of its own that knows the best plan so far. Without a second core it runs here, after the body.
    The body gets a function that waits for the answer of `work` and merges what was found into `run`. That function
    returns None if the run is stopped or its time is over first (some seconds later where there is no plan yet), and
    raises the error of the other process, if any.
    """
    own = run.child()
    if not has_second_core():
        yield lambda: _absorbed(run, work(own), own)
        return
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_work, args=(own, work, stop, there), daemon=True)
    child.start()
    there.close()

    def answer() -> Any:
        while not here.poll(_NOTICE_S):
            run.should_continue()  # tells the listener
            late_s = -run.left_s() - (_FIRST_PLAN_S if run.plan is None else 0.0)
            if run.stopped or late_s >= 0.0 or not child.is_alive():
                stop.set()
                break
        if not here.poll(_GRACE_S):
            return None
        message = here.recv()
        if isinstance(message, BaseException):
            raise message
        found, outcome = message
        run.absorb(outcome)
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


def _absorbed(run: Search, found: Any, own: Search) -> Any:
    run.absorb(own.outcome())
    return found


def _work(own: Search, work: ParallelWork, stop: Event, pipe: Connection) -> None:
    """In the other process: work until `stop`."""
    own.on_progress = lambda _: not stop.is_set()
    try:
        found = work(own)
        pipe.send((found, own.outcome()))
    except BaseException as error:
        pipe.send(error)
        raise
    finally:
        pipe.close()
