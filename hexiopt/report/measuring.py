"""How a measurement is going, on stderr, and what it has found as a table."""

import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from hexiopt.report.progress import PLAIN_INTERVAL_S


class MeasuringProgress:
    """Shows what is being measured, in a context: a live line in a terminal, now and then a plain line elsewhere."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._quiet, self._console = quiet, console or Console(stderr=True)
        self._live: Status | None = None
        self._began = self._told = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._live = self._console.status("measuring: processes start")
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, what: str) -> None:
        """Show what is measured next."""
        now = time.monotonic()
        line = f"measuring: {what} · {now - self._began:.0f} s"
        if self._live is not None:
            self._live.update(line)
        elif not self._quiet and now - self._told >= PLAIN_INTERVAL_S:
            self._told = now
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def rows_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Plain columns under a header."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in header:
        table.add_column(name)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
