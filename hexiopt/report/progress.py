"""Progress on stderr: a live line on a terminal or in a notebook, elsewhere a plain line every few seconds."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn

from hexiopt.report.style import count, seconds
from hexiopt.solving import Progress as SolverProgress

PLAIN_INTERVAL_S = 5.0
NOTEBOOK_INTERVAL_S = 0.3


class LiveLine:
    """A context in which a line of progress is shown, unless `quiet`; a live line disappears at the end.

    `columns` precede the line, `first` is its initial text, `total` the length of its bar.
    """

    def __init__(
        self,
        *columns: ProgressColumn,
        first: str = "",
        total: float | None = None,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        self._quiet, self._console = quiet, console or Console(stderr=True)
        self._is_live = self._console.is_terminal and not quiet
        line = TextColumn("{task.fields[line]}", markup=False)
        self._live = Progress(*columns, line, console=self._console, transient=True, refresh_per_second=8)
        self._task = self._live.add_task("", total=total, line=first, visible=bool(first))
        self.began_s = self._told = time.monotonic()

    def __enter__(self) -> Self:
        self.began_s = self._told = time.monotonic()
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_live:
            self._live.stop()

    def tell(self, line: str) -> None:
        """Print a line that stays."""
        if not self._quiet:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def change(self, line: str, plain: str = "", **task: Any) -> None:
        """Update the line and `task`, the fields of its bar. Off a terminal, print `plain`, by default the line."""
        if self._is_live:
            self._live.update(self._task, line=line, visible=True, **task)
        elif time.monotonic() - self._told >= PLAIN_INTERVAL_S:
            self._told = time.monotonic()
            self.tell(plain or line)


class SearchProgress(LiveLine):
    """The progress of a search, to be passed as `on_progress`. `tokens` is the number of tokens per step.

    A `notebook` has no cursor to move: there each line overwrites the one before.
    """

    def __init__(self, tokens: int, console: Console | None = None, *, notebook: bool = False) -> None:
        name = TextColumn("{task.description}", markup=False)
        super().__init__(SpinnerColumn(), name, BarColumn(bar_width=20), console=console)
        self._tokens, self._notebook, self._width = tokens, notebook, 0
        self._is_live = self._is_live and not notebook

    def __call__(self, progress: SolverProgress) -> bool:
        """Show `progress`; never stops the search."""
        line, limit_s = self._line(progress), progress.time_limit_s
        completed = min(progress.runtime_s, limit_s)
        self.change(line, f"{progress.solver}: {line}", description=progress.solver, completed=completed, total=limit_s)
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._width:
            self._overwrite("")

    def change(self, line: str, plain: str = "", **task: Any) -> None:
        if not self._notebook:
            super().change(line, plain, **task)
        elif time.monotonic() - self._told >= NOTEBOOK_INTERVAL_S:
            self._told = time.monotonic()
            self._overwrite(plain)

    def _overwrite(self, line: str) -> None:
        print(f"\r{line.ljust(self._width)}" + ("" if line else "\r"), end="", file=sys.stderr, flush=True)
        self._width = len(line)

    def _line(self, progress: SolverProgress) -> str:
        parts = [f"{progress.runtime_s:.0f} of {progress.time_limit_s:.0f} s", count(progress.steps, "step")]
        if progress.best_s < float("inf"):
            parts += [f"best {seconds(progress.best_s)}", f"{self._tokens / progress.best_s:,.0f} tokens/s"]
            if progress.bound_s > 0:
                parts.append(f"gap {max(0.0, 1 - progress.bound_s / progress.best_s):.1%}")
        else:
            parts.append("no plan yet")
        return " · ".join(parts)
