"""Solvers compared on one problem: a table, and a picture of their step times over search time."""

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from hexiopt.report.panels.canvas import Picture, plain_axes
from hexiopt.report.style import INK, MUTED, PAPER, PIPELINE_HUES, clip, count, seconds
from hexiopt.report.table import bound_in_words
from hexiopt.report.tabular import plain_table
from hexiopt.solving.result import Result

AXES = {"seconds": ("runtime_s", "search time (s)"), "steps": ("steps", "steps of the search")}
_HEADER = ("Solver", "Step time", "Over best", "Tokens/s", "MFU", "Gap", "Best after", "Search", "Steps", "Status")


def comparison_table(results: Sequence[Result]) -> Table:
    """A table of results for a terminal, the solver with the shortest step first."""
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
        if result.overrun_s:
            status += f", {seconds(result.overrun_s)} past the time limit"
        rows.append([result.solver, *achieved, seconds(result.runtime_s), f"{result.steps:,}", status])
    return plain_table(_HEADER, rows, left=("Solver", "Status"))


def operators_table(results: Sequence[Result]) -> Table:
    """The outcomes of each solver's search operators; those that improved its best plan most often come first."""
    header = ("Solver", "Operator", "Proposed", "Valid", "Priced", "Accepted", "Improved", "Time")
    rows = [
        [result.solver, operator.operator, *map("{:,}".format, counts), seconds(operator.seconds)]
        for result in results
        for operator in sorted(result.operators, key=lambda operator: (-operator.improved, -operator.seconds))
        for counts in [(operator.proposed, operator.valid, operator.priced, operator.accepted, operator.improved)]
    ]
    return plain_table(header, rows, left=header[:2])


def restricted_bounds(results: Sequence[Result]) -> list[str]:
    """A sentence for each solver that proved a bound only for the part of the plan space that it searched."""
    return [
        f"{result.solver}: {bound_in_words(bound.space, bound.bound_s, result.restricted_gap)}"
        for result in results
        if (bound := result.restricted_bound) is not None
    ]


def comparison_figure(results: Sequence[Result], title: str) -> Figure:
    """Trajectories over search time on the left, one bar per solver on the right."""
    figure = Picture(figsize=(11, 4.6), facecolor=PAPER, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    draw_trajectories(results, left)
    draw_bars(results, right)
    figure.suptitle(clip(title, 120), color=INK, fontsize=12, x=0.01, ha="left")
    return figure


def by_solver(results: Iterable[Result]) -> dict[str, list[Result]]:
    """The results of each solver, one per seed, in the given order."""
    runs: dict[str, list[Result]] = {}
    for result in results:
        runs.setdefault(result.solver, []).append(result)
    return runs


def draw_trajectories(results: Sequence[Result], ax: Axes, over: str = "seconds") -> Axes:
    """Draw best step time over search time or steps, up to the end of each search, and the best lower bound.

    With several seeds the line is their median and the band spans best to worst.
    """
    field, label = AXES[over]
    at = attrgetter(field)
    ends = [at(result) for result in results]
    start = min((at(point) for result in results for point in result.trajectory), default=1e-3)
    for k, (name, runs) in enumerate(by_solver(results).items()):
        solved = [run for run in runs if run.trajectory]
        if not solved:
            continue
        colour, end = _colour(k), max(at(run) for run in solved)
        times = sorted({at(point) for run in solved for point in run.trajectory} | {end})
        best_s = np.array([_best_at(run, times, at) for run in solved])
        middle = np.median(best_s, axis=0)
        finite = np.isfinite(middle)
        ax.step(np.array(times)[finite], middle[finite], where="post", color=colour, label=name)
        if len(solved) == 1:
            points = solved[0].trajectory
            ax.plot([at(p) for p in points], [p.step_time_s for p in points], ".", color=colour, markersize=4)
            continue
        whole = np.isfinite(best_s).all(axis=0)
        low, high = best_s.min(axis=0), best_s.max(axis=0)
        ax.fill_between(
            np.array(times)[whole], low[whole], high[whole], step="post", color=colour, alpha=0.2, linewidth=0
        )
    bound_s = max((result.bound_s for result in results), default=0.0)
    if bound_s > 0:
        ax.axhline(bound_s, color=MUTED, linestyle=":", linewidth=1, label="lower bound")
    ends_s = [result.objective for result in results if result.trajectory]
    if ends_s:  # first plans are often far worse, and would squeeze all later ones
        first_s = max(result.trajectory[0].step_time_s for result in results if result.trajectory)
        low_s, high_s = bound_s or min(ends_s), min(2.0 * max(ends_s), first_s)
        if high_s > low_s:
            ax.set_ylim(low_s - 0.05 * (high_s - low_s), high_s + 0.05 * (high_s - low_s))
    ax.set_xscale("log")
    ax.set_xlim(max(start / 2, 1e-4), max([*ends, start * 2]) * 1.1)
    ax.set_xlabel(label)
    ax.set_ylabel("best step time (s)")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=9)
    return plain_axes(ax, colors=MUTED)


def _best_at(run: Result, times: Sequence[float], at: Callable[[Any], float]) -> list[float]:
    """The best step time of a run at each of `times`, infinite before its first plan; `at` is the time of a point."""
    points = list(reversed(run.trajectory))
    return [next((point.step_time_s for point in points if at(point) <= time), float("inf")) for time in times]


def draw_bars(results: Sequence[Result], ax: Axes) -> Axes:
    """Draw the step time of each solver in the given order, or its status if it has no plan.

    With several seeds the bar is the median of the runs with a plan, and a line spans best to worst.
    """
    top = max((result.objective for result in results if result.cost), default=1.0)
    solvers = by_solver(results)
    for k, runs in enumerate(solvers.values()):
        y = len(solvers) - 1 - k
        times_s = [run.objective for run in runs if run.cost]
        if times_s:
            middle_s = median(times_s)
            ax.barh(y, middle_s, color=_colour(k), height=0.6)
            if len(times_s) > 1:
                ax.plot([min(times_s), max(times_s)], [y, y], color=INK, linewidth=1.2)
            ax.text(max(times_s) + 0.01 * top, y, seconds(middle_s), va="center", color=INK)
        else:
            ax.text(0.01 * top, y, f"{runs[0].status}", va="center", color=MUTED)
    ax.set_yticks(range(len(solvers)), list(reversed(solvers)))
    ax.set_xlim(0, top * 1.2)
    ax.set_xlabel(f"step time (s), {count(len(solvers), 'solver')}")
    return plain_axes(ax, colors=MUTED)


def _colour(k: int) -> str:
    return PIPELINE_HUES[k % len(PIPELINE_HUES)]
