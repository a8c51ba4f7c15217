"""Predictions compared with measured runs: tables of errors, a CSV file and a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.table import Table

from hexiopt.frame import csv_text
from hexiopt.report.panels.canvas import new_figure, plain_axes, save
from hexiopt.report.style import FAINT, INK, MUTED, PIPELINE_HUES, clip, count, index_ranges, join_names
from hexiopt.report.tabular import plain_table

_COLUMNS = (
    *("line", "source", "gpu", "gpus", "model", "precision", "framework", "micro_batch_size", "recompute", "chunks"),
    *("metric", "measured", "predicted", "error", "measured_step_s", "predicted_step_s", "reason"),
)
_WITHIN = 0.1  # half width of the band drawn around equality
_MAX_RANGES = 8  # of lines that a reason names


@dataclass(frozen=True)
class Prediction:
    """A measured run and its prediction, or the `reason` why there is none."""

    line: int
    source: str
    gpu: str
    gpus: int | None
    model: str
    precision: str
    metric: str
    measured: float
    framework: str = ""
    micro_batch_size: int = 0
    recompute: str = ""
    chunks: int = 0
    predicted: float = 0.0
    measured_step_s: float = 0.0
    predicted_step_s: float = 0.0
    reason: str = ""

    @property
    def error(self) -> float:
        """Predicted over measured, less one, in the run's own metric."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Errors:
    """A line of the table of errors in percent; `rho` is the least ρ of its families with enough rows, if any."""

    name: str
    gpu: str
    num_rows: int
    mean_percent: float
    median_percent: float
    p90_percent: float
    bias_percent: float
    rho: float | None


def validation_csv(rows: Sequence[Prediction]) -> str:
    """One row per run, in the order of the file; a run that could not be predicted has empty cells and the reason."""
    written: list[Sequence[Any]] = [_COLUMNS]
    for row in rows:
        known = row.line, row.source, row.gpu, row.gpus or "", row.model, row.precision
        if row.reason:
            written.append((*known, *[""] * 4, row.metric, row.measured, *[""] * 4, row.reason))
            continue
        chosen = row.framework, row.micro_batch_size, row.recompute, row.chunks
        seconds = row.measured_step_s, row.predicted_step_s
        written.append((*known, *chosen, row.metric, row.measured, row.predicted, row.error, *seconds, ""))
    return csv_text(written)


def errors_table(lines: Sequence[Errors], title: str) -> Table:
    """Errors by source and GPU."""
    rows = [
        [
            line.name,
            line.gpu,
            str(line.num_rows),
            *(f"{value:.1f} %" for value in (line.mean_percent, line.median_percent, line.p90_percent)),
            f"{line.bias_percent:+.1f} %",
            "" if line.rho is None else f"{line.rho:.3f}",
        ]
        for line in lines
    ]
    header = ("Source", "GPU", "Rows", "Mean", "Median", "90th", "Bias", "ρ")
    return plain_table(header, rows, left=("Source", "GPU"), title=title, title_justify="left")


def left_out_table(reasons: Mapping[str, Sequence[int]]) -> Table:
    """Lines of the file whose runs are not predicted, by reason, the most frequent first."""
    ordered = sorted(reasons.items(), key=lambda item: -len(item[1]))
    rows = [(str(len(lines)), reason, join_names(index_ranges(lines), _MAX_RANGES)) for reason, lines in ordered]
    title = f"Skipped: {count(sum(map(len, reasons.values())), 'row')}"
    return plain_table(("Rows", "Reason", "Lines"), rows, left=("Reason", "Lines"), title=title, title_justify="left")


def draw_validation(rows: Sequence[Prediction], title: str, path: Path) -> None:
    """Write `validation_figure` as a PNG."""
    save(validation_figure(rows, title), path)


def validation_figure(rows: Sequence[Prediction], title: str) -> Figure:
    """Predicted over measured step time, and errors by source and GPU."""
    known = [row for row in rows if not row.reason]
    gpus = sorted({row.gpu for row in known})
    hues = {gpu: PIPELINE_HUES[k % len(PIPELINE_HUES)] for k, gpu in enumerate(gpus)}
    groups = sorted({(row.gpu, row.source) for row in known})
    figure = new_figure(13, max(5.5, 1.8 + 0.3 * len(groups)))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    low = 0.8 * min(min(row.measured_step_s, row.predicted_step_s) for row in known)
    high = 1.25 * max(max(row.measured_step_s, row.predicted_step_s) for row in known)
    line = np.array([low, high])
    band = line * (1 - _WITHIN), line * (1 + _WITHIN)
    left.fill_between(line, *band, color=FAINT, lw=0, label=f"within {_WITHIN:.0%}")
    left.plot(line, line, color=MUTED, lw=0.8)
    for gpu in gpus:
        of_gpu = [row for row in known if row.gpu == gpu]
        times = [row.measured_step_s for row in of_gpu], [row.predicted_step_s for row in of_gpu]
        left.scatter(*times, s=16, color=hues[gpu], alpha=0.75, lw=0, label=f"{clip(gpu, 28)} ({len(of_gpu)})")
    left.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    left.set_xlabel("measured step, s", color=MUTED)
    left.set_ylabel("predicted step, s", color=MUTED)
    left.legend(frameon=False, fontsize=8, labelcolor=INK)
    for y, (gpu, source) in enumerate(groups):
        ratios = [row.predicted_step_s / row.measured_step_s for row in known if (row.gpu, row.source) == (gpu, source)]
        right.scatter(ratios, [y] * len(ratios), s=16, color=hues[gpu], alpha=0.6, lw=0)
        right.plot([float(np.median(ratios))] * 2, [y - 0.3, y + 0.3], color=INK, lw=1.2)
    right.axvspan(1 - _WITHIN, 1 + _WITHIN, color=FAINT, lw=0, zorder=0)
    right.set_yticks(range(len(groups)), [f"{clip(source, 30)}, {clip(gpu, 16)}" for gpu, source in groups])
    right.set_xscale("log")
    ticks = [0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0]
    right.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    right.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    right.set_xlabel("predicted / measured step; the line is the median", color=MUTED)
    right.invert_yaxis()
    for axes in (left, right):
        plain_axes(axes, colors=MUTED, labelsize=8)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=12)
    figure.tight_layout()
    return figure
