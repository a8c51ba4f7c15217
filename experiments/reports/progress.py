"""The progress of measuring, of tokenising a corpus, and of training."""

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn

from hexiopt.report.progress import LiveLine
from hexiopt.report.style import seconds, small_percent

if TYPE_CHECKING:
    from runtime.training.session import TrainedStep


class MeasuringProgress(LiveLine):
    """What `profile` is measuring."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        super().__init__(SpinnerColumn(), first="measuring: starting processes", quiet=quiet, console=console)

    def __call__(self, what: str) -> None:
        """Show what is measured next."""
        self.change(f"measuring: {what} · {time.monotonic() - self.began_s:.0f} s")


class TokenisingProgress(LiveLine):
    """How many tokens a corpus has so far."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        super().__init__(SpinnerColumn(), quiet=quiet, console=console)

    def __call__(self, num_tokens: int) -> None:
        """Show their number."""
        self.change(f"tokenising: {num_tokens:,} tokens · {time.monotonic() - self.began_s:.0f} s")


class TrainingProgress(LiveLine):
    """The steps of a training run as they end."""

    def __init__(self, steps: int, *, quiet: bool = False, console: Console | None = None) -> None:
        columns = TextColumn("training"), BarColumn(bar_width=20)
        super().__init__(*columns, first="starting processes", total=steps, quiet=quiet, console=console)
        self._steps = steps

    def step(self, ended: "TrainedStep") -> None:
        """Show a step."""
        mfu = "" if ended.mfu is None else f" · MFU {small_percent(ended.mfu)}"
        self.change(
            f"step {ended.step} of {self._steps} · loss {ended.loss:.4f} · gradient norm {ended.norm:.3g} · "
            f"{seconds(ended.seconds)} · {ended.tokens_per_s:,.0f} tokens/s{mfu}",
            completed=ended.step,
        )
