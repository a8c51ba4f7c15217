"""Progress and interruption of long calls: progress goes to stderr, and Ctrl-C keeps the best plan so far."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hexiopt.solving import OnProgress

LONG_S = 60.0  # searches longer than this show their progress in a log too


class Interrupt:
    """Ctrl-C as a flag while a search runs: the first press asks the search to stop, the second raises."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, number: int, frame: object) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True

    @contextmanager
    def caught(self) -> Iterator["Interrupt"]:
        """A context in which Ctrl-C sets the flag, if the main thread enters it and SIGINT has its default handler.

        It yields this interrupt, or the outer one inside the context of another, since that one sees the press.
        """
        before = signal.getsignal(signal.SIGINT)
        if isinstance(before, Interrupt):
            yield before
            return
        if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
            yield self
            return
        signal.signal(signal.SIGINT, self)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def status_line(progress: bool | None) -> Iterator[Callable[[str], None]]:
    """A context with a function that replaces the status line of a long call on stderr.

    The line is shown if `progress` is true or, if that is None, on a terminal and in a notebook.
    """
    if not _shows(progress):
        yield lambda text: None
        return
    from hexiopt.report.progress import LiveLine  # here, because rich is slow to import

    with LiveLine() as line:
        yield line.change


@contextmanager
def listener(tokens: int, time_limit_s: float, progress: bool | None = None) -> Iterator[tuple[OnProgress, Interrupt]]:
    """A context with a listener for one or more searches, and the interrupt after which it stops them.

    The listener shows progress if `progress` is true. If it is None, it does so on a terminal, in a notebook and, for
    time limits above a minute, in a log. `tokens` is the number of tokens per step, for showing tokens/s.
    """
    with Interrupt().caught() as interrupt:
        if not _shows(progress, time_limit_s):
            yield lambda _: not interrupt.pressed, interrupt
            return
        from hexiopt.report.progress import SearchProgress

        with SearchProgress(tokens, notebook=in_notebook()) as show:
            yield lambda report: show(report) and not interrupt.pressed, interrupt


def _shows(progress: bool | None, time_limit_s: float = 0.0) -> bool:
    return sys.stderr.isatty() or in_notebook() or time_limit_s > LONG_S if progress is None else progress


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
