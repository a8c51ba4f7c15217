"""Progress and interruption of long calls: progress goes to stderr, and Ctrl-C keeps the best plan so far."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from hexiopt.solving import OnProgress

LONG_S = 60.0  # searches longer than this show their progress in a log too


class Interrupt:
    """Ctrl-C as a flag while a search runs: the first press asks the search to stop, the second raises."""

    def __init__(self) -> None:
        self.pressed = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        """A context in which Ctrl-C sets the flag, if the main thread enters it and SIGINT has its default handler."""
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


class StatusLine:
    """A line on stderr that says what a long call is at, overwritten by the next; a context that ends it.

    It is shown if `shown` is true or, if that is None, on a terminal and in a notebook.
    """

    def __init__(self, shown: bool | None) -> None:
        self._shown = sys.stderr.isatty() or in_notebook() if shown is None else shown
        self._width = 0

    def tell(self, text: str) -> None:
        """Replace the line by `text`."""
        if self._shown:
            print(f"\r{text.ljust(self._width)}", end="", file=sys.stderr, flush=True)
            self._width = len(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._shown and self._width:
            print(file=sys.stderr)


@contextmanager
def listening(
    interrupt: Interrupt, tokens: int, time_limit_s: float, progress: bool | None = None
) -> Iterator[OnProgress]:
    """A context with a listener for one or more searches, which stops them once `interrupt` is pressed.

    The listener shows progress if `progress` is true. If it is None, it does so on a terminal, in a notebook and, for
    time limits above a minute, in a log. `tokens` is the number of tokens per step, for showing tokens/s.
    """
    with interrupt.caught():
        if progress is None:
            progress = sys.stderr.isatty() or in_notebook() or time_limit_s > LONG_S
        if not progress:
            yield lambda _: not interrupt.pressed
            return
        from hexiopt.report.progress import SearchProgress  # here, because rich is slow to import

        with SearchProgress(tokens, notebook=in_notebook()) as shown:
            yield lambda told: shown(told) and not interrupt.pressed


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
