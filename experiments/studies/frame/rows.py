"""Queries of reports on the rows of a study."""

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd


def grid(rows: pd.DataFrame, index: str, columns: str, values: str = "step_time_s") -> pd.DataFrame:
    """`values` by two labels, in the labels' order of appearance; NaN where there is no such row."""
    return rows.pivot(index=index, columns=columns, values=values).reindex(
        index=rows[index].unique(), columns=rows[columns].unique()
    )


def credited(step_s: pd.DataFrame, inside: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """Step times of nested plan spaces (rows), each the best of the spaces `inside` it.

    A plan of a restricted space is valid in every larger one; a search of that may have missed it.
    """
    best_s = {
        name: step_s.loc[[other for other in others if other in step_s.index]].min() for name, others in inside.items()
    }
    return pd.DataFrame({name: best for name, best in best_s.items() if name in step_s.index}).T


def best_at(trajectory: Sequence[tuple[float, float]], times_s: Iterable[float]) -> list[float]:
    """The best step time at each of `times_s`; infinite before the first plan."""
    return [min((best for at, best in trajectory if at <= time_s), default=float("inf")) for time_s in times_s]


def time_to_s(trajectory: Sequence[tuple[float, float]], step_time_s: float) -> float:
    """Seconds until the best step time was at most `step_time_s`; NaN if it never was."""
    return next((at for at, best in trajectory if best <= step_time_s), float("nan"))
