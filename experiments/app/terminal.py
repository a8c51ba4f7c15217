"""Printing for people: tables, and nothing more once the reader has gone."""

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hexiopt.errors import RenamedWarning

_WIDTH = 120  # of tables, where the output is no terminal


def show(*renderables: Any) -> None:
    """Print tables and text. Raises BrokenPipeError where the reader went away."""
    from rich.console import Console

    class Terminal(Console):
        """Tells of a reader that went away, instead of ending the program."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    console = Terminal(highlight=False, width=None if sys.stdout.isatty() else _WIDTH)
    for renderable in renderables:
        console.print(renderable, markup=False)


def mute() -> None:
    """Send what is still printed nowhere: whoever read it (`| head`) has enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Within, an old name is told in one line on standard error, without the line of code that uses it."""
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
