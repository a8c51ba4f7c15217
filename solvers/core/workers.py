"""Further processes for a search, which do their share and send back what they found. No other module starts one."""

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol

from hexiopt.cores import usable_cores
from hexiopt.solving import Progress
from solvers.core.exchange import HubExchange, MemberExchange
from solvers.core.search import Search

_GRACE_S = 0.5  # how long another process may take to notice that it shall stop
_FIRST_PLAN_S = 10.0  # CPU time that it may take past the time limit while there is no plan
_LATEST_S = 100.0  # how long this one then waits for it, since CPU time passes slowly on a busy machine
_NOTICE_S = 0.02  # how often this one looks whether the others have ended
ParallelWork = Callable[[Search], Any]


class Answers(Protocol):
    """Waits for the answers of other processes."""

    def __call__(self, at_once: bool = False) -> list[Any]:
        """The answers, in order."""


def can_fork() -> bool:
    """Whether another process can go on with what this one has in memory."""
    return hasattr(os, "fork")


def num_processes() -> int:
    """How many processes can run at once for a search."""
    return usable_cores() if can_fork() else 1


@contextmanager
def in_parallel(run: Search, *works: ParallelWork) -> Iterator[Answers]:
    """Do each of `works` in a process of its own while the body of the `with` runs in this one.

    Each gets a search of its own that knows the best plan so far; the searches exchange what they find
    (`Search.exchange`). Where no process can be forked they are done here, after the body, and exchange nothing. The
    body gets a function that waits for the answers, or asks for them `at_once`, and merges what was found into `run`.
    An answer is None if the run is stopped or its time is over first. Where there is no plan yet, a process may take
    `_FIRST_PLAN_S` seconds of CPU time more.
    It raises the error of another process, if any.
    """
    if not can_fork():
        yield lambda at_once=False: [_absorbed(run, work) for work in works]
        return
    counted, before = run.budget.max_steps is not None, run.exchange
    others: list[_Other] = []
    try:
        for work in works:
            others.append(_Other(run, work, counted))
        hub = HubExchange([other.exchange for other in others], counted)
        run.exchange = hub

        def answers(at_once: bool = False) -> list[Any]:
            for other in others if at_once else ():
                other.stop()
            return [other.answer(run, hub) for other in others]

        yield answers
    finally:
        run.exchange = before
        for other in others:
            other.end()


def _absorbed(run: Search, work: ParallelWork) -> Any:
    own = run.child()
    found = work(own)
    run.absorb(own.outcome())
    return found


class _Other:
    """Another process, seen from this one."""

    def __init__(self, run: Search, work: ParallelWork, counted: bool) -> None:
        self._here, there = Pipe()
        self.exchange, asks = Pipe()
        self._ended = False
        own = run.child()
        self._pid = os.fork()
        if self._pid == 0:
            _work(own, work, there, MemberExchange(asks, counted))
        there.close()
        asks.close()

    def answer(self, run: Search, hub: HubExchange) -> Any:
        """What it found, merged into `run`."""
        deadline_s = math.inf
        while not self._here.poll(_NOTICE_S) and time.monotonic() < deadline_s:
            run.should_continue()  # tells the listener
            hub.serve()
            late_s = -run.left_s() - (_LATEST_S if run.plan is None else 0.0)
            if deadline_s == math.inf and (run.stopped or late_s >= 0.0):
                deadline_s = time.monotonic() + _GRACE_S
                hub.release()
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
        self.exchange.close()
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


def _work(own: Search, work: ParallelWork, pipe: Connection, exchange: MemberExchange) -> NoReturn:
    """In the other process: work until the first says a word, or has ended.

    Past the time limit, `_FIRST_PLAN_S` seconds of CPU time at most.
    """
    code, late_cpu_s = 1, math.inf

    def goes_on(_: Progress) -> bool:
        nonlocal late_cpu_s
        if late_cpu_s == math.inf and own.left_s() <= 0.0:
            late_cpu_s = time.process_time() + _FIRST_PLAN_S
        return not (pipe.poll() or time.process_time() > late_cpu_s)

    try:
        own.on_progress = goes_on
        own.exchange = exchange
        found = work(own)
        exchange.close()  # else each might wait for the other to read: the hub its reply, this one its answer
        pipe.send((found, own.outcome()))
        code = 0
    except BaseException as error:
        with suppress(Exception):
            pipe.send(error)
    finally:
        os._exit(code)
