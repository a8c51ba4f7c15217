"""Small tables, printed as text or HTML and exported to CSV or pandas."""

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Self

from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.value import Value

_MOST_ROWS = 60  # of a table as text
_MOST_SIGNS = 60  # of its cells


@dataclass(frozen=True, repr=False)
class Frame(Value):
    """An immutable table with named columns; missing values are None. Iterating yields each row as a dictionary.

    Raises InputError for a row of the wrong length and for duplicate column names.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    title: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if len(set(self.columns)) < len(self.columns):
            raise InputError(f"frame: columns: {quoted(self.columns)}: a name appears twice; give each column its own")
        for row in self.rows:
            if len(row) != len(self.columns):
                raise InputError(f"frame: rows: {quoted(row)} has {len(row)} of {len(self.columns)} values; give all")

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = (), **more: Any) -> Self:
        """A frame from mappings: `columns` come first, then other keys in order of appearance."""
        names = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
        return cls(tuple(names), tuple(tuple(row.get(name) for name in names) for row in rows), **more)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def __getitem__(self, column: str) -> tuple[Any, ...]:
        """The values of a column. Raises InputError for an unknown name."""
        if column not in self.columns:
            raise InputError(f"frame: {quoted(column)} is not a column; {did_you_mean(str(column), self.columns)}")
        k = self.columns.index(column)
        return tuple(row[k] for row in self.rows)

    def to_pandas(self) -> Any:
        """The table as a `pandas.DataFrame`. Raises InputError where pandas is not installed."""
        try:
            import pandas as pd
        except ImportError:
            raise InputError('to_pandas: needs the package pandas; install it with "pip install pandas"') from None
        return pd.DataFrame(list(self.rows), columns=list(self.columns))

    def to_csv(self) -> str:
        """The table as CSV with a header; None becomes an empty cell."""
        return csv_text([self.columns, *self.rows])

    def __repr__(self) -> str:
        cells = [self.columns, *(tuple(map(_clip, row)) for row in self.rows[:_MOST_ROWS])]
        right = [_is_number(self[name]) for name in self.columns]
        lines = [*([self.title] if self.title else []), *align(cells, right)]
        if len(self.rows) > _MOST_ROWS:
            lines.append(f"... and {len(self.rows) - _MOST_ROWS:,} more rows")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        right = [_is_number(self[name]) for name in self.columns]

        def line(cells: Sequence[str], tag: str) -> str:
            styled = zip(cells, right, strict=True)
            return "".join(
                f'<{tag} style="text-align: {"right" if numeric else "left"}">{escape(cell)}</{tag}>'
                for cell, numeric in styled
            )

        head = f"<thead><tr>{line(self.columns, 'th')}</tr></thead>"
        body = "".join(f"<tr>{line(tuple(map(_cell_text, row)), 'td')}</tr>" for row in self.rows[:_MOST_ROWS])
        caption = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        rest = len(self.rows) - _MOST_ROWS
        more = f"<p>... and {rest:,} more rows</p>" if rest > 0 else ""
        return f"<table>{caption}{head}<tbody>{body}</tbody></table>{more}"


def align(cells: Sequence[Sequence[str]], right: Sequence[bool], first: int = 0) -> list[str]:
    """Rows of cells as lines, with two spaces between columns.

    `right` says which columns are aligned right; the first column has at least `first` characters. Raises ValueError
    for rows of unequal length.
    """
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[0] = max(first, widths[0])

    def line(row: Sequence[str]) -> str:
        columns = zip(row, widths, right, strict=True)
        return "  ".join(cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in columns)

    return [line(row).rstrip() for row in cells]


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """The content of a CSV file with `rows`, the header first; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _is_number(column: Sequence[Any]) -> bool:
    values = [value for value in column if value is not None]
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _clip(value: Any) -> str:
    text = _cell_text(value)
    return text if len(text) <= _MOST_SIGNS else text[: _MOST_SIGNS - 1] + "…"


def _cell_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return " ".join(str(value).split())
