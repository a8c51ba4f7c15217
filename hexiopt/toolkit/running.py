"""How long calls run: with their progress on standard error, until done or Ctrl-C, which keeps the best so far."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hexiopt.solving import OnProgress

LONG_S = 60.0  # a search from which on a log tells its progress


class Interrupt:
    """Ctrl-C as a flag while a search runs: the first one asks it to stop, the second one raises."""

    def __init__(self) -> None:
        self.pressed = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Within, Ctrl-C sets the flag (where the main thread runs this, and nobody else handles it)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.default_int_handler:
            yield
            return

        def press(number: int, frame: Any) -> None:
            if self.pressed:
                raise KeyboardInterrupt
            self.pressed = True

        signal.signal(signal.SIGINT, press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def listening(
    interrupt: Interrupt, tokens: int, time_limit_s: float, progress: bool | None = None
) -> Iterator[OnProgress]:
    """What a search tells its progress to, and Ctrl-C stops: `interrupt` then is pressed.

    Progress is shown in a terminal and in a notebook, and in a log where the time limit is above a minute; `progress`
    says otherwise. `tokens` of a step turn step times into tokens/s.
    """
    with interrupt.caught():
        if progress is None:
            progress = sys.stderr.isatty() or in_notebook() or time_limit_s > LONG_S
        if not progress:
            yield lambda _: not interrupt.pressed
            return
        from hexiopt.report.progress import SearchProgress  # only here, as tables take long to import

        with SearchProgress(tokens, notebook=in_notebook()) as shown:
            yield lambda told: shown(told) and not interrupt.pressed


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: its output is no terminal, and yet watched."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
