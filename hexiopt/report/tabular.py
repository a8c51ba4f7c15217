"""Rows of cells as a table for a terminal."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text


class _FittedTable(Table):
    """A table that a console narrower than `full_width` shows as `compact` instead."""

    full_width = 0
    compact: Table | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self if self.compact is None or options.max_width >= self.full_width else self.compact
        yield from Table.__rich_console__(shown, console, options)


def plain_table(
    header: Sequence[str], rows: Iterable[Iterable[str]] = (), *, left: Collection[str] | None = None, **options: Any
) -> Table:
    """A table without rules; the columns named in `left` (None: all) are aligned left, the others right.

    Cells are plain text, never markup. `options` are those of `rich.table.Table`. In a console that is too narrow,
    headers have one word a line and columns aligned left wrap, so that no number is cut.
    """
    rows = [list(row) for row in rows]
    table = _FittedTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), **options)
    table.compact = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), **options)
    for name in header:
        is_left = left is None or name in left
        table.add_column(name, justify="left" if is_left else "right")
        split = name.replace(" ", "\n")
        table.compact.add_column(split, justify="left" if is_left else "right", no_wrap=not is_left, overflow="fold")
    for row in rows:
        for view in (table, table.compact):
            view.add_row(*map(Text, row))
    columns = zip(*[header, *rows], strict=True)
    table.full_width = sum(max(map(cell_len, column)) + 2 for column in columns) - 2
    return table
