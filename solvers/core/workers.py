"""Further processes for a search, which do their share and send back what they found. No other module starts one."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from hexiopt.cores import usable_cores
from solvers.core.search import Search

_GRACE_S = 0.5  # how long another process may take to notice that it shall stop
_NOTICE_S = 0.02  # how often this one looks whether the others have ended
ParallelWork = Callable[[Search], Any]
Answers = Callable[[], list[Any]]


def can_fork() -> bool:
    """Whether another process can go on with what this one has in memory."""
    return hasattr(os, "fork")


def num_processes() -> int:
    """How many processes can run at once for a search."""
    return usable_cores() if can_fork() else 1


@contextmanager
def in_parallel(run: Search, *works: ParallelWork) -> Iterator[Answers]:
    """Do each of `works` in a process of its own while the body of the `with` runs in this one.

    Each gets a search of its own that knows the best plan so far. Where no process can be forked they are done here,
    after the body. The body gets a function that waits for the answers, in order, and merges what was found into `run`.
    An answer is None if the run is stopped or its time is over first. It raises the error of another
    process, if any.
    """
    if not can_fork():
        yield lambda: [_do_here(run, work) for work in works]
        return
    others: list[_Other] = []
    try:
        for work in works:
            others.append(_Other(run, work))
        yield lambda: [other.answer(run) for other in others]
    finally:
        for other in others:
            other.end()


def _do_here(run: Search, work: ParallelWork) -> Any:
    own = run.child()
    found = work(own)
    run.absorb(own.outcome())
    return found


class _Other:
    """Another process, seen from this one."""

    def __init__(self, run: Search, work: ParallelWork) -> None:
        self._here, there = Pipe()
        self._ended = False
        own = run.child()
        self._pid = os.fork()
        if self._pid == 0:
            _work(own, work, there)
        there.close()

    def answer(self, run: Search) -> Any:
        """What it found, merged into `run`."""
        deadline_s = math.inf
        while not self._here.poll(_NOTICE_S) and time.monotonic() < deadline_s:
            run.should_continue()  # tells the listener
            if deadline_s == math.inf and (run.stopped or run.left_s() <= 0.0):
                deadline_s = time.monotonic() + _GRACE_S
                self.stop()
        try:
            message = self._here.recv() if self._here.poll() else None
        except EOFError:
            message = None
        if isinstance(message, BaseException):
            raise message
        if message is None:
            return None
        found, outcome = message
        run.absorb(outcome)
        return found

    def stop(self) -> None:
        """Ask it to end and answer."""
        with suppress(OSError):
            self._here.send(None)

    def end(self) -> None:
        """End it."""
        self._here.close()
        deadline_s = time.monotonic() + 0.05
        while not self._over() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        if not self._ended:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def _over(self) -> bool:
        if not self._ended:
            self._ended = os.waitpid(self._pid, os.WNOHANG)[0] != 0
        return self._ended


def _work(own: Search, work: ParallelWork, pipe: Connection) -> NoReturn:
    """In the other process: work until the first says a word, or has ended."""
    code = 1
    try:
        own.on_progress = lambda _: not pipe.poll()
        found = work(own)
        pipe.send((found, own.outcome()))
        code = 0
    except BaseException as error:
        with suppress(Exception):
            pipe.send(error)
    finally:
        os._exit(code)
