"""A training run that has ended: a table, and the loss as a picture."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.ticker import MaxNLocator
from rich.console import RenderableType
from rich.table import Table

from hexiopt.report.panels.canvas import new_figure, plain_axes, save
from hexiopt.report.style import FAINT, INK, MUTED, PIPELINE_HUES, seconds, small_percent

if TYPE_CHECKING:
    from runtime.training.session import TrainedStep, ValidatedStep

_WINDOW = 10  # steps over which the loss is averaged


def training_table(
    ended: "Sequence[TrainedStep]", validated: "Sequence[ValidatedStep]", predicted_s: float, whose: str
) -> RenderableType:
    """Steps, first and last loss, also of validation, if any, and the median step beside the one predicted for the
    devices named by `whose`."""
    usual = sorted(ended, key=lambda step: step.seconds)[len(ended) // 2]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("steps", f"{len(ended)}")
    table.add_row("loss", f"{ended[0].loss:.4f} → {ended[-1].loss:.4f} nats per token")
    if validated:
        table.add_row("validation", f"{validated[0].loss:.4f} → {validated[-1].loss:.4f} nats per token")
    table.add_row("step", f"{seconds(usual.seconds)} (median); predicted for {whose}: {seconds(predicted_s)}")
    table.add_row("throughput", f"{usual.tokens_per_s:,.0f} tokens/s")
    if usual.mfu is not None:
        table.add_row("MFU", f"{small_percent(usual.mfu)} of the peak of {whose}")
    return table


def draw_training(ended: "Sequence[TrainedStep]", validated: "Sequence[ValidatedStep]", path: str | Path) -> None:
    """Write loss.png: the loss of every step and its running mean, and that of validation, if any."""
    steps, losses = [step.step for step in ended], [step.loss for step in ended]
    figure = new_figure(7.0, 3.6, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color=PIPELINE_HUES[0], alpha=0.45, linewidth=1.0)
    smooth = [statistics.fmean(losses[max(0, k + 1 - _WINDOW) : k + 1]) for k in range(len(losses))]
    axes.plot(steps, smooth, color=PIPELINE_HUES[0], linewidth=2.0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    final, title = [(smooth[-1], steps[-1], INK)], "loss, nats per token: each step, and the mean of the last ten"
    if validated:
        points = [(step.step, step.loss) for step in validated]
        hue = PIPELINE_HUES[1]
        axes.plot(*zip(*points, strict=True), color=hue, linewidth=1.5, marker="o", markersize=4)
        final, title = [*final, (*points[-1][::-1], hue)], f"{title}; with dots: validation"
    # Apart from each other, the higher number above.
    for (loss, step, color), side in zip(sorted(final), ("top", "bottom"), strict=False):
        va = side if len(final) > 1 else "center"
        axes.annotate(f"{loss:.3f}", (step, loss), xytext=(6, 0), textcoords="offset points", color=color, va=va)
    axes.set_xlabel("step", color=MUTED)
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    plain_axes(axes, "left", colors=MUTED, length=0)
    save(figure, path)
