"""Printing for people: tables, and nothing more once the reader has gone."""

import os
import sys
from typing import Any

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
