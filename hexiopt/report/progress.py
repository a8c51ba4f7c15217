"""How a search is going, on stderr: a live line in a terminal or a notebook, now and then a plain line elsewhere."""

import sys
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from hexiopt.report.style import seconds

PLAIN_INTERVAL_S = 5.0
NOTEBOOK_INTERVAL_S = 0.3


class ProgressLike(Protocol):
    """What a solver tells while it works (`solvers/core/search.py` has ours)."""

    @property
    def solver(self) -> str:
        """The solver's name."""

    @property
    def runtime_s(self) -> float:
        """Seconds since the start."""

    @property
    def time_limit_s(self) -> float:
        """Seconds that it may take."""

    @property
    def steps(self) -> int:
        """Steps of the solver's own unit."""

    @property
    def best_s(self) -> float:
        """The best step time so far, infinite before the first plan."""

    @property
    def bound_s(self) -> float:
        """A step time that no plan can beat, 0 where none is known."""


class SearchProgress:
    """Shows what a solver tells. Used as a context manager, and itself as the solver's `listen`.

    `tokens` of a step turn step times into tokens/s. The live line disappears at the end; a `notebook` has no cursor to
    move, but overwrites a line after a carriage return.
    """

    def __init__(self, tokens: int, console: Console | None = None, *, notebook: bool = False) -> None:
        self._tokens, self._notebook, self._width = tokens, notebook, 0
        self._console = console or Console(stderr=True)
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._told = time.monotonic()

    def __enter__(self) -> Self:
        self._told = time.monotonic()
        if self._console.is_terminal and not self._notebook:
            self._live = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[line]}", markup=False),
                console=self._console,
                transient=True,
                refresh_per_second=8,
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = self._task = None
        if self._width:
            self._overwrite("")

    def __call__(self, progress: ProgressLike) -> bool:
        """Show `progress`; never stops the search."""
        if self._live is not None:
            line = self._line(progress)
            if self._task is None:
                self._task = self._live.add_task(progress.solver, total=progress.time_limit_s, line=line)
            self._live.update(
                self._task,
                description=progress.solver,
                completed=min(progress.runtime_s, progress.time_limit_s),
                total=progress.time_limit_s,
                line=line,
            )
        elif time.monotonic() - self._told >= (NOTEBOOK_INTERVAL_S if self._notebook else PLAIN_INTERVAL_S):
            self._told = time.monotonic()
            if self._notebook:
                self._overwrite(f"{progress.solver}: {self._line(progress)}")
                return True
            self._console.print(
                f"{progress.solver}: {self._line(progress)}", markup=False, highlight=False, soft_wrap=True
            )
        return True

    def _overwrite(self, line: str) -> None:
        print(f"\r{line.ljust(self._width)}" + ("" if line else "\r"), end="", file=sys.stderr, flush=True)
        self._width = len(line)

    def _line(self, progress: ProgressLike) -> str:
        parts = [f"{progress.runtime_s:.0f} of {progress.time_limit_s:.0f} s", f"{progress.steps:,} steps"]
        if progress.best_s < float("inf"):
            parts += [f"best {seconds(progress.best_s)}", f"{self._tokens / progress.best_s:,.0f} tokens/s"]
            if progress.bound_s > 0:
                parts.append(f"gap {max(0.0, 1 - progress.bound_s / progress.best_s):.1%}")
        else:
            parts.append("no plan yet")
        return " · ".join(parts)
