"""The clock of time limits: seconds of the wall, or of CPU time, so that a limit is the same search on a busy machine.

With CPU time, each process of a search gets the seconds of its budget.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_carried_s = 0.0  # what the processes before this one had used when they forked
_forking_s = 0.0
_clock: Callable[[], float] = time.perf_counter


def search_clock_s() -> float:
    """Seconds since some moment, by the clock that searches in this process go by."""
    return _clock()


def cpu_seconds() -> float:
    """CPU seconds of this process, and of those that it was forked from until then."""
    return _carried_s + time.process_time()


@contextmanager
def cpu_time(counts: bool = True) -> Iterator[None]:
    """A context in which searches go by CPU time if it `counts`."""
    global _clock
    before = _clock
    if counts:
        _clock = cpu_seconds
    try:
        yield
    finally:
        _clock = before


def _at_fork() -> None:
    global _carried_s
    _carried_s = _forking_s - time.process_time()


def _before_fork() -> None:
    global _forking_s
    _forking_s = cpu_seconds()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_at_fork)
