"""The data frame of a study, one row per search, and the queries of reports."""

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from experiments.studies.frame.search import Measured, SearchSpec

_FIGURES = ("step_time_s", "tokens_per_s", "mfu", "bound_s", "runtime_s", "first_plan_s", "peak_gib", "steps", "cpu_s")


def frame(specs: Sequence[SearchSpec], found: Mapping[str, Measured]) -> pd.DataFrame:
    """One row per search: its labels, specification and measurements; NaN where it has no plan."""
    rows = pd.DataFrame(
        {
            **spec.labels,
            "solver": spec.solver,
            "seed": spec.seed,
            "time_limit_s": spec.time_limit_s,
            **found[spec.sha256],
            "search_sha256": spec.sha256,
        }
        for spec in specs
    )
    rows = rows.reindex(columns=[*rows.columns, *(name for name in _FIGURES if name not in rows)])
    return rows.astype(dict.fromkeys(_FIGURES, float))


def points_frame(rows: pd.DataFrame) -> pd.DataFrame:
    """Every improvement of every search: seconds since the start of the search, and its best step time then."""
    points = rows[["search_sha256", "solver", "seed", "trajectory"]].explode("trajectory").dropna()
    both = pd.DataFrame(points["trajectory"].tolist(), columns=["runtime_s", "step_time_s"], index=points.index)
    return pd.concat([points.drop(columns="trajectory"), both], axis=1)


def grid(rows: pd.DataFrame, index: str, columns: str, values: str = "step_time_s") -> pd.DataFrame:
    """`values` by two labels, in the labels' order of appearance; NaN where there is no such row."""
    return rows.pivot(index=index, columns=columns, values=values).reindex(
        index=rows[index].unique(), columns=rows[columns].unique()
    )


def credited(found: pd.DataFrame, inside: Mapping[str, Sequence[str]]) -> pd.DataFrame:
    """Step times of nested plan spaces (rows), each the best of the spaces `inside` it.

    A plan of a restricted space is valid in every larger one; a search of that may have missed it.
    """
    own = {
        name: found.loc[[other for other in others if other in found.index]].min() for name, others in inside.items()
    }
    return pd.DataFrame({name: best for name, best in own.items() if name in found.index}).T


def best_at(trajectory: Sequence[tuple[float, float]], times_s: Iterable[float]) -> list[float]:
    """The best step time at each of `times_s`; infinite before the first plan."""
    return [min((best for at, best in trajectory if at <= time_s), default=float("inf")) for time_s in times_s]


def time_to_s(trajectory: Sequence[tuple[float, float]], step_time_s: float) -> float:
    """Seconds until the best step time was at most `step_time_s`; NaN if it never was."""
    return next((at for at, best in trajectory if best <= step_time_s), float("nan"))
