"""A training run that has ended: a table, and the loss as a picture."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import RenderableType
from rich.table import Table

from hexiopt.report.progress import StepLike
from hexiopt.report.style import FAINT, INK, MUTED, PIPELINE_HUES, seconds, small_percent

_WINDOW = 10  # steps over which the loss is averaged


def training_table(ended: Sequence[StepLike], predicted_s: float, whose: str) -> RenderableType:
    """Steps, first and last loss, and the median step beside the one predicted for the devices named by `whose`."""
    usual = sorted(ended, key=lambda one: one.seconds)[len(ended) // 2]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("steps", f"{len(ended)}")
    table.add_row("loss", f"{ended[0].loss:.4f} → {ended[-1].loss:.4f} nats per token")
    table.add_row("step", f"{seconds(usual.seconds)} (median); predicted for {whose}: {seconds(predicted_s)}")
    table.add_row("throughput", f"{usual.tokens_per_s:,.0f} tokens/s")
    table.add_row("MFU", f"{small_percent(usual.mfu)} of the peak of {whose}")
    return table


def draw_training(steps: Sequence[int], losses: Sequence[float], path: str | Path) -> None:
    """Write loss.png: the loss of every step and its running mean."""
    figure = Figure(figsize=(7.0, 3.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color=PIPELINE_HUES[0], alpha=0.45, linewidth=1.0)
    smooth = [statistics.fmean(losses[max(0, k + 1 - _WINDOW) : k + 1]) for k in range(len(losses))]
    axes.plot(steps, smooth, color=PIPELINE_HUES[0], linewidth=2.0)
    axes.annotate(
        f"{smooth[-1]:.3f}", (steps[-1], smooth[-1]), xytext=(4, 0), textcoords="offset points", color=INK, va="center"
    )
    axes.set_xlabel("step", color=MUTED)
    axes.set_title("loss, nats per token: each step, and the mean of the last ten", loc="left", fontsize=10, color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=MUTED, length=0)
    figure.savefig(path, format="png", metadata={"Software": None})
