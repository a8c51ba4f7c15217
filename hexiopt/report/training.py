"""How a training goes and went: a live line, a table, and the loss as a picture."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from matplotlib.figure import Figure
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from hexiopt.report.progress import PLAIN_INTERVAL_S
from hexiopt.report.style import FAINT, INK, MUTED, PIPELINE_HUES, seconds

_WINDOW = 10  # steps of the smoothed loss


class StepLike(Protocol):
    """A step that has ended (`runtime/launch/session.py` has ours)."""

    @property
    def step(self) -> int:
        """Its number, from 1."""

    @property
    def loss(self) -> float:
        """Mean loss per token, in nats."""

    @property
    def norm(self) -> float:
        """Norm of all gradients, before clipping."""

    @property
    def seconds(self) -> float:
        """What the step took."""

    @property
    def tokens_per_s(self) -> float:
        """Of the whole batch."""

    @property
    def mfu(self) -> float:
        """Model FLOPs over what all devices of the plan's cluster could do in that time."""


class TrainingProgress:
    """Shows steps on stderr as they end: a live line in a terminal, now and then a plain line elsewhere."""

    def __init__(self, steps: int, *, quiet: bool = False, console: Console | None = None) -> None:
        self._steps, self._quiet = steps, quiet
        self._console = console or Console(stderr=True)
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._told = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._live = Progress(
                TextColumn("training"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[line]}", markup=False),
                console=self._console,
                transient=True,
            )
            self._task = self._live.add_task("training", total=self._steps, line="processes start")
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def step(self, ended: StepLike) -> None:
        """Show a step."""
        line = (
            f"step {ended.step} of {self._steps} · loss {ended.loss:.4f} · gradient norm {ended.norm:.3g} · "
            f"{seconds(ended.seconds)} · {ended.tokens_per_s:,.0f} tokens/s · MFU {share(ended.mfu)}"
        )
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=ended.step, line=line)
        elif time.monotonic() - self._told >= PLAIN_INTERVAL_S:
            self._told = time.monotonic()
            self.tell(line)

    def tell(self, line: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def training_table(ended: Sequence[StepLike]) -> RenderableType:
    """Steps, first and last loss, and the median step."""
    usual = sorted(ended, key=lambda one: one.seconds)[len(ended) // 2]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("steps", f"{len(ended)}")
    table.add_row("loss", f"{ended[0].loss:.4f} → {ended[-1].loss:.4f} nats a token")
    table.add_row("step", f"{seconds(usual.seconds)} (median)")
    table.add_row("throughput", f"{usual.tokens_per_s:,.0f} tokens/s")
    table.add_row("MFU", f"{share(usual.mfu)} of the peak of the plan's cluster")
    return table


def share(value: float) -> str:
    """A share in percent, with two digits however small: a plan for GPUs may well be trained on a CPU."""
    return f"{value:.1%}" if value >= 0.01 else f"{100 * value:.2g}%"


def draw_training(steps: Sequence[int], losses: Sequence[float], path: str | Path) -> None:
    """Write loss.png: the loss of every step, and its running mean."""
    figure = Figure(figsize=(7.0, 3.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color=PIPELINE_HUES[0], alpha=0.45, linewidth=1.0)
    smooth = [statistics.fmean(losses[max(0, k + 1 - _WINDOW) : k + 1]) for k in range(len(losses))]
    axes.plot(steps, smooth, color=PIPELINE_HUES[0], linewidth=2.0)
    axes.annotate(
        f"{smooth[-1]:.3f}", (steps[-1], smooth[-1]), xytext=(4, 0), textcoords="offset points", color=INK, va="center"
    )
    axes.set_xlabel("step", color=MUTED)
    axes.set_title("loss, nats a token: each step, and the mean of the last ten", loc="left", fontsize=10, color=INK)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=MUTED, length=0)
    figure.savefig(path, format="png", metadata={"Software": None})
