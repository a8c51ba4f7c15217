"""Printing tables for people, until the reader of the output closes it."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hexiopt.errors import RenamedWarning

_WIDTH = 120  # of tables, where the output is not a terminal and COLUMNS is not set


def show(*renderables: Any) -> None:
    """Print tables and text. Raises BrokenPipeError where the reader has closed the output."""
    from rich.console import Console

    class Terminal(Console):
        """A console that raises BrokenPipeError instead of exiting when the reader has closed the output."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = Terminal(highlight=False, width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _WIDTH)
    for renderable in renderables:
        console.print(renderable, markup=False)


def mute() -> None:
    """Discard further output: its reader, such as `head`, has closed it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def plain_warnings() -> Iterator[None]:
    """A context in which a deprecation is one line on standard error, without the line of code that caused it."""
    with warnings.catch_warnings():
        quoted = warnings.showwarning

        def show_plainly(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if issubclass(category, RenamedWarning):
                print(f"hexiopt: {message}", file=sys.stderr)
            else:
                quoted(message, category, *where)

        warnings.simplefilter("always", RenamedWarning)
        warnings.showwarning = show_plainly  # type: ignore[assignment]
        yield
