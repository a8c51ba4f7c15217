"""Rows of cells as a table for a terminal, and as CSV."""

import csv
import io
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text


def plain_table(
    header: Sequence[str],
    rows: Iterable[Iterable[str]] = (),
    *,
    left: Collection[str] | None = None,
    **options: Any,
) -> Table:
    """A table without rules; the columns named in `left` (None: all) are aligned left, the others right.

    Cells are plain text, never markup. `options` are those of `rich.table.Table`.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), **options)
    for name in header:
        table.add_column(name, justify="left" if left is None or name in left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """The content of a CSV file with the given rows, the header among them; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
