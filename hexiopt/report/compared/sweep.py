"""The jobs of a sweep as a table and as a picture of their step times."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from hexiopt.frame import Frame
from hexiopt.report.panels.canvas import Picture
from hexiopt.report.style import FAINT, INK, MUTED, PAPER, PIPELINE_HUES, clipped, seconds
from hexiopt.report.tabular import plain_table

_MOST_ROWS = 40  # of the table
_MOST_LINES = 60  # of the picture
_SIGNS = 28  # of a value
_SEED = "seed"
_FIXED = ("folder", "exit_code", "message", "num_pipelines", "num_stages")


def swept_keys(frame: Frame) -> list[str]:
    """The overridden keys whose values differ between jobs, and the solver where jobs compare several."""
    own = [name for name in frame.columns if name not in _FIXED and not name.startswith("result.")]
    swept = [name for name in own if len(set(map(str, frame[name]))) > 1]
    compared = "solver" not in swept and len(set(filter(None, frame["result.solver"]))) > 1
    return [*swept, "result.solver"] if compared else swept


def sweep_table(frame: Frame) -> tuple[Table, int]:
    """The jobs, fastest first, with the keys in which they differ; and how many the table leaves out."""
    keys = swept_keys(frame)
    rows = sorted(frame, key=lambda row: (row["result.step_time_s"] is None, row["result.step_time_s"] or 0.0))
    cells = [[*(_word(row[key]) for key in keys), *_outcome(row)] for row in rows[:_MOST_ROWS]]
    header = [*(key.rpartition(".")[2] for key in keys), "Step time", "Gap", "Ended"]
    return plain_table(header, cells, left=(*header[: len(keys)], "Ended")), max(0, len(rows) - _MOST_ROWS)


def _outcome(row: dict[str, Any]) -> list[str]:
    time_s, gap, bound_s = row["result.step_time_s"], row["result.gap"], row["result.lower_bound_s"]
    words = clipped(str(row["message"] or ""), 60) or str(row["result.status"] or "")
    return ["–" if time_s is None else seconds(time_s), f"{gap:.1%}" if gap is not None and bound_s else "", words]


def _word(value: Any) -> str:
    return "" if value is None else clipped(str(value), _SIGNS)


def sweep_figure(frame: Frame, title: str) -> Figure:
    """A line per combination of values, fastest median first: a dot per seed, and how many jobs have no plan."""
    keys = [key for key in swept_keys(frame) if key != _SEED]
    lines: dict[str, list[float | None]] = {}
    for row in frame:
        named = ", ".join(f"{key.rpartition('.')[2]}={_word(row[key])}" for key in keys if row[key] is not None)
        lines.setdefault(named or "all jobs", []).append(row["result.step_time_s"])
    ordered = sorted(lines.items(), key=lambda line: _middle(line[1]))
    shown = ordered[:_MOST_LINES]
    figure = Picture(figsize=(11, 1.4 + 0.26 * len(shown)), facecolor=PAPER, layout="constrained")
    ax = figure.subplots()
    most = max((time_s for _, own in shown for time_s in own if time_s is not None), default=1.0)
    for k, (_, own) in enumerate(shown):
        found = [time_s for time_s in own if time_s is not None]
        if found:
            ax.plot([min(found), max(found)], [k, k], color=MUTED, linewidth=1, zorder=2)
            ax.plot(found, [k] * len(found), "o", color=PIPELINE_HUES[0], markersize=5, alpha=0.8, zorder=3)
            ax.text(max(found) + 0.012 * most, k, seconds(median(found)), va="center", fontsize=8, color=INK)
        if len(found) < len(own):
            x = max(found, default=0.0) + (0.12 if found else 0.012) * most
            ax.text(x, k, f"{len(own) - len(found)} without a plan", va="center", fontsize=8, color=MUTED)
    ax.set_yticks(range(len(shown)), [clipped(name, 60) for name, _ in shown], parse_math=False)
    ax.set_ylim(len(shown) - 0.5, -0.5)
    ax.set_xlim(0, 1.18 * most)
    ax.set_xlabel("step time (s); the number is the median")
    left_out = f"; {len(ordered) - len(shown)} slower combinations left out" if len(ordered) > len(shown) else ""
    ax.set_title(clipped(title, 90) + left_out, loc="left", color=INK, fontsize=12)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(colors=MUTED)
    return figure


def _middle(times_s: Sequence[float | None]) -> float:
    found = [time_s for time_s in times_s if time_s is not None]
    return median(found) if found else float("inf")
