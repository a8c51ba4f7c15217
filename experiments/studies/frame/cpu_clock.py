"""A clock of CPU time for searches, whose budgets then hold on a busy machine too: each process of a search gets the
seconds of its budget."""

import os
import time

_carried_s = 0.0  # what the processes before this one had used when they forked


def cpu_seconds() -> float:
    """CPU seconds of this process, and of those that it was forked from until then."""
    return _carried_s + time.process_time()


def _at_fork() -> None:
    global _carried_s, _forking_s
    _carried_s = _forking_s - time.process_time()


def _before_fork() -> None:
    global _forking_s
    _forking_s = cpu_seconds()


_forking_s = 0.0
os.register_at_fork(before=_before_fork, after_in_child=_at_fork)
