"""Predicted step times and those measured on an emulated cluster: a table, a CSV file and a picture."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from hexiopt.frame import csv_text
from hexiopt.report.panels.canvas import new_figure, plain_axes, save
from hexiopt.report.style import FAINT, INK, MUTED, PIPELINE_HUES, clip, seconds
from hexiopt.report.tabular import plain_table

SYMMETRIC = "megatron"  # whose plans are symmetric
_COLUMNS = ["plan", "predicted_s", "measured_s", "error", "least_s", "most_s", "steps", "late", "dilation"]
_NOTE = (
    "Compute is paced to the predicted times, so that the comparison checks schedule, overlap, communication and "
    "sharing. Late: by how much the slowest rank exceeded its compute time."
)


@dataclass(frozen=True)
class Emulated:
    """A plan's predicted step time; its measured step times in seconds on the cluster; and the share by which the
    slowest rank exceeded its compute time."""

    name: str
    predicted_s: float
    steps_s: tuple[float, ...]
    late: float

    @property
    def measured_s(self) -> float:
        """The median step."""
        return statistics.median(self.steps_s)

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


def emulated_csv(rows: Sequence[Emulated], dilation: float) -> str:
    """One row per plan."""
    written: list[Sequence[Any]] = [_COLUMNS]
    for row in rows:
        spread = min(row.steps_s), max(row.steps_s), len(row.steps_s)
        measured = row.measured_s, row.error, *spread, row.late
        written.append((row.name, row.predicted_s, *measured, dilation))
    return csv_text(written)


def emulated_table(rows: Sequence[Emulated]) -> Table:
    """The same for a terminal, the fastest plan first; speeds are relative to the symmetric plan if there is one."""
    symmetric_s = next((row.measured_s for row in rows if row.name == SYMMETRIC), None)
    header = ["Plan", "Predicted", "Measured", "Error", "Least to most", "Late"]
    cells = []
    for row in sorted(rows, key=lambda row: row.measured_s):
        spread = f"{seconds(min(row.steps_s))} to {seconds(max(row.steps_s))}"
        times = [seconds(row.predicted_s), seconds(row.measured_s), f"{row.error:+.1%}", spread]
        faster = [] if symmetric_s is None else [f"{symmetric_s / row.measured_s:.2f}×"]
        cells.append([row.name, *times, f"{row.late:.1%}", *faster])
    if symmetric_s is not None:
        header.append("Over symmetric")
    return plain_table(header, cells, left=("Plan",), caption=_NOTE, caption_justify="left")


def draw_emulated(rows: Sequence[Emulated], title: str, path: str | Path) -> None:
    """Write a PNG with two bars per plan, predicted and measured."""
    figure = new_figure(7.5, 1.6 + 0.62 * len(rows), layout="constrained")
    axes = figure.subplots()
    ordered = sorted(rows, key=lambda row: row.measured_s)
    for k, row in enumerate(ordered):
        low, high = row.measured_s - min(row.steps_s), max(row.steps_s) - row.measured_s
        axes.barh(k - 0.19, row.predicted_s, 0.36, color=FAINT)
        axes.barh(k + 0.19, row.measured_s, 0.36, color=PIPELINE_HUES[0], xerr=[[low], [high]], ecolor=INK)
        text = f" {seconds(row.measured_s)} measured, {seconds(row.predicted_s)} predicted ({row.error:+.1%})"
        axes.text(max(row.predicted_s, max(row.steps_s)), k, text, color=INK, va="center", fontsize=9)
    axes.set_yticks(range(len(ordered)), [row.name for row in ordered], color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.75 * max(max(row.predicted_s, *row.steps_s) for row in rows))
    axes.set_xlabel("step time on the cluster (s)", color=MUTED)
    plain_axes(axes, "left", colors=MUTED, length=0)
    figure.suptitle(clip(title, 90), color=INK, fontsize=11, x=0.01, ha="left")
    save(figure, path)
