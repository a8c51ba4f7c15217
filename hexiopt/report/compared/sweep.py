"""The jobs of a sweep as a table and as a picture of their step times."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from hexiopt.frame import Frame
from hexiopt.report.panels.canvas import Picture, plain_axes
from hexiopt.report.style import INK, MUTED, PAPER, PIPELINE_HUES, clip, seconds
from hexiopt.report.tabular import plain_table

_MOST_ROWS = 40  # of the table
_MOST_LINES = 60  # of the picture
_SIGNS = 28  # of a value
_SEED = "seed"
_FIXED = ("folder", "exit_code", "message", "num_pipelines", "num_stages")


def swept_keys(frame: Frame) -> list[str]:
    """The overridden keys whose values differ between jobs, and the solver where jobs compare several."""
    keys = [name for name in frame.columns if name not in _FIXED and not name.startswith("result.")]
    swept = [name for name in keys if len(set(map(str, frame[name]))) > 1]
    compared = "solver" not in swept and len(set(filter(None, frame["result.solver"]))) > 1
    return [*swept, "result.solver"] if compared else swept


def sweep_table(frame: Frame) -> tuple[Table, int]:
    """The jobs, fastest first, with the keys in which they differ; and the number of jobs left out."""
    keys = swept_keys(frame)
    rows = sorted(frame, key=lambda row: (row["result.step_time_s"] is None, row["result.step_time_s"] or 0.0))
    cells = [[*(_word(row[key]) for key in keys), *_outcome(row)] for row in rows[:_MOST_ROWS]]
    header = [*(key.rpartition(".")[2] for key in keys), "Step time", "Gap", "Ended"]
    return plain_table(header, cells, left=(*header[: len(keys)], "Ended")), max(0, len(rows) - _MOST_ROWS)


def _outcome(row: dict[str, Any]) -> list[str]:
    time_s, gap, bound_s = row["result.step_time_s"], row["result.gap"], row["result.lower_bound_s"]
    words = clip(str(row["message"] or ""), 60) or str(row["result.status"] or "")
    return ["–" if time_s is None else seconds(time_s), f"{gap:.1%}" if gap is not None and bound_s else "", words]


def _word(value: Any) -> str:
    return "" if value is None else clip(str(value), _SIGNS)


def sweep_figure(frame: Frame, title: str) -> Figure:
    """A line per combination of values, fastest median first: a dot per seed, and the number of jobs without a plan."""
    keys = [key for key in swept_keys(frame) if key != _SEED]
    lines: dict[str, list[float | None]] = {}
    for row in frame:
        label = ", ".join(f"{key.rpartition('.')[2]}={_word(row[key])}" for key in keys if row[key] is not None)
        lines.setdefault(label or "all jobs", []).append(row["result.step_time_s"])
    ordered = sorted(lines.items(), key=lambda line: _middle(line[1]))
    shown = ordered[:_MOST_LINES]
    figure = Picture(figsize=(11, 1.4 + 0.26 * len(shown)), facecolor=PAPER, layout="constrained")
    ax = figure.subplots()
    most = max((time_s for _, times_s in shown for time_s in times_s if time_s is not None), default=1.0)
    for k, (_, times_s) in enumerate(shown):
        solved_s = [time_s for time_s in times_s if time_s is not None]
        if solved_s:
            ax.plot([min(solved_s), max(solved_s)], [k, k], color=MUTED, linewidth=1, zorder=2)
            ax.plot(solved_s, [k] * len(solved_s), "o", color=PIPELINE_HUES[0], markersize=5, alpha=0.8, zorder=3)
            ax.text(max(solved_s) + 0.012 * most, k, seconds(median(solved_s)), va="center", fontsize=8, color=INK)
        if len(solved_s) < len(times_s):
            x = max(solved_s, default=0.0) + (0.12 if solved_s else 0.012) * most
            ax.text(x, k, f"{len(times_s) - len(solved_s)} without a plan", va="center", fontsize=8, color=MUTED)
    ax.set_yticks(range(len(shown)), [clip(name, 60) for name, _ in shown], parse_math=False)
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.set_xlim(0, 1.18 * most)
    ax.set_xlabel("step time (s); the number is the median")
    left_out = f"; {len(ordered) - len(shown)} slower combinations left out" if len(ordered) > len(shown) else ""
    ax.set_title(clip(title, 90) + left_out, loc="left", color=INK, fontsize=12)
    plain_axes(ax, colors=MUTED)
    return figure


def _middle(times_s: Sequence[float | None]) -> float:
    solved_s = [time_s for time_s in times_s if time_s is not None]
    return median(solved_s) if solved_s else float("inf")
