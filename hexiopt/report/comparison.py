"""Solvers compared on one problem: a table, a CSV file, and a picture of their step times over search time."""

import math
from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from hexiopt.report.style import FAINT, INK, MUTED, PAPER, PIPELINE_HUES, clipped, count, seconds
from hexiopt.report.table import restricted_in_words
from hexiopt.report.tabular import csv_text, plain_table
from hexiopt.result import OperatorCounts, Result

_COLUMNS = (
    "solver",
    "status",
    "step_time_s",
    "tokens_per_s",
    "mfu",
    "over_best",
    "lower_bound_s",
    "gap",
    "runtime_s",
    "time_to_best_s",
    "steps",
    "seed",
    "reason",
)
_HEADER = ("Solver", "Step time", "Over best", "Tokens/s", "MFU", "Gap", "Best after", "Search", "Steps", "Status")


def comparison_csv(results: Sequence[Result]) -> str:
    """One row per solver; a solver without a plan has empty cells and its reason."""
    best_s = min((result.objective for result in results), default=math.inf)
    rows: list[Sequence[Any]] = [_COLUMNS]
    for result in results:
        cost = result.cost
        achieved = (cost.step_time_s, cost.tokens_per_s, cost.mfu, cost.step_time_s / best_s - 1) if cost else ("",) * 4
        bounds = result.bound_s or "", result.gap if cost else ""
        best_after_s = result.trajectory[-1].runtime_s if result.trajectory else ""
        searched = result.runtime_s, best_after_s, result.steps, result.seed, result.reason
        rows.append((result.solver, str(result.status), *achieved, *bounds, *searched))
    return csv_text(rows)


def operators_csv(results: Sequence[Result]) -> str:
    """One row per operator of a solver, with the counts of its candidates' outcomes."""
    rows = [(result.solver, *astuple(counts)) for result in results for counts in result.operators]
    return csv_text([("solver", *(field.name for field in fields(OperatorCounts))), *rows])


def comparison_table(results: Sequence[Result]) -> Table:
    """The same columns for a terminal, the solver with the shortest step first."""
    ordered = sorted(results, key=lambda result: result.objective)
    rows = []
    for result in ordered:
        achieved = ["–", *[""] * 5]
        if result.cost:
            over = result.cost.step_time_s / ordered[0].objective - 1
            achieved = [
                seconds(result.cost.step_time_s),
                f"+{over:.1%}" if over else "best",
                f"{result.cost.tokens_per_s:,.0f}",
                f"{result.cost.mfu:.1%}",
                f"{result.gap:.1%}" if result.bound_s else "",
                seconds(result.trajectory[-1].runtime_s) if result.trajectory else "",
            ]
        status = str(result.status) + (f": {result.reason}" if result.reason else "")
        rows.append([result.solver, *achieved, seconds(result.runtime_s), f"{result.steps:,}", status])
    return plain_table(_HEADER, rows, left=("Solver", "Status"))


def restricted_bounds(results: Sequence[Result]) -> list[str]:
    """A sentence for each solver that proved a bound only for the part of the plan space that it searched."""
    return [
        f"{result.solver}: {restricted_in_words(own.space, own.bound_s, result.restricted_gap)}"
        for result in results
        if (own := result.restricted_bound) is not None
    ]


def draw_comparison(results: Sequence[Result], title: str, path: str | Path) -> None:
    """Write a PNG of trajectories over time, and a bar per solver."""
    figure = Figure(figsize=(11, 4.6), facecolor=PAPER, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    draw_trajectories(results, left)
    draw_bars(results, right)
    figure.suptitle(clipped(title, 120), color=INK, fontsize=12, x=0.01, ha="left")
    figure.savefig(path, format="png", dpi=150, metadata={"Software": None})


def draw_trajectories(results: Sequence[Result], ax: Axes) -> Axes:
    """Best step time over search time, up to the end of each search, and the best lower bound."""
    ends = [result.runtime_s for result in results]
    start_s = min((p.runtime_s for result in results for p in result.trajectory), default=1e-3)
    for k, result in enumerate(results):
        if not result.trajectory:
            continue
        times = [point.runtime_s for point in result.trajectory]
        values = [point.step_time_s for point in result.trajectory]
        colour = _colour(k)
        ax.step([*times, result.runtime_s], [*values, values[-1]], where="post", color=colour, label=result.solver)
        ax.plot(times, values, ".", color=colour, markersize=4)
    bound_s = max((result.bound_s for result in results), default=0.0)
    if bound_s > 0:
        ax.axhline(bound_s, color=MUTED, linestyle=":", linewidth=1, label="lower bound")
    ax.set_xscale("log")
    ax.set_xlim(max(start_s / 2, 1e-4), max([*ends, start_s * 2]) * 1.1)
    ax.set_xlabel("search time (s)")
    ax.set_ylabel("best step time (s)")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=9)
    return _plain(ax)


def draw_bars(results: Sequence[Result], ax: Axes) -> Axes:
    """The step time of each solver in the given order, or its status where it has no plan."""
    top = max((result.objective for result in results if result.cost), default=1.0)
    for k, result in enumerate(results):
        y = len(results) - 1 - k
        if result.cost:
            ax.barh(y, result.cost.step_time_s, color=_colour(k), height=0.6)
            ax.text(
                result.cost.step_time_s + 0.01 * top,
                y,
                seconds(result.cost.step_time_s),
                va="center",
                color=INK,
            )
        else:
            ax.text(0.01 * top, y, f"{result.status}", va="center", color=MUTED)
    ax.set_yticks(range(len(results)), [result.solver for result in reversed(results)])
    ax.set_xlim(0, top * 1.2)
    ax.set_xlabel(f"step time (s), {count(len(results), 'solver')}")
    return _plain(ax)


def _colour(k: int) -> str:
    return PIPELINE_HUES[k % len(PIPELINE_HUES)]


def _plain(ax: Axes) -> Axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(colors=MUTED)
    return ax
