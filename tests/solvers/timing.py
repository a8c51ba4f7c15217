"""Time limits on machines that others use too: what counts is the work of this process after a limit."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE_S = 10.0  # that anything may end late on a busy machine, if it does not work that long


@contextmanager
def late_work(limit_s: float) -> Iterator[Callable[[], float]]:
    """Processor seconds that this process uses after `limit_s` seconds from now, none before; infinite where it waits.

    On an idle machine that is how late it is; on a busy one it does not count the work of others.
    """
    at_limit: list[float] = []
    timer = threading.Timer(limit_s, lambda: at_limit.append(time.process_time()))
    timer.daemon = True
    began_s = time.perf_counter()
    timer.start()

    def used_s() -> float:
        if time.perf_counter() - began_s > limit_s + PATIENCE_S:
            return float("inf")
        return time.process_time() - at_limit[0] if at_limit else 0.0

    try:
        yield used_s
    finally:
        timer.cancel()
