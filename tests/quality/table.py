"""Step times before beside those of now, and when they are worse."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.quality.runs import panel_problem

WORSE, WORST = 1.002, 1.01  # of before: the geometric mean of all problems, and the mean over seeds of one
_WIDTH = 80


@dataclass(frozen=True)
class Row:
    """A problem's step times in seconds, of each seed, before and now; infinite where there was no plan."""

    problem: str
    before_s: tuple[float, ...]
    now_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The mean now over the mean before; 1 where neither always has a plan."""
        before_s, now_s = mean(self.before_s), mean(self.now_s)
        return 1.0 if before_s == now_s else now_s / before_s


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def geometric_mean(rows: Sequence[Row]) -> float:
    """Of the ratios of all rows; infinite, or 0, where one has no plan now, or had none before."""
    ratios = [row.ratio for row in rows]
    if float("inf") in ratios or 0.0 in ratios:
        return max(ratios) if float("inf") in ratios else 0.0
    return math.exp(mean([math.log(ratio) for ratio in ratios]))


def worse(rows: Sequence[Row]) -> list[str]:
    """What makes the panel red, in words: the geometric mean, and each problem beyond what one may lose."""
    faults = [f"{row.problem}: {row.ratio:.4f} of before" for row in rows if row.ratio > WORST]
    whole = geometric_mean(rows)
    return [*([f"geometric mean: {whole:.4f} of before"] if whole > WORSE else []), *faults]


def table(rows: Sequence[Row], before: str = "stored", now: str = "now") -> str:
    """A line a problem, 80 columns wide at most: GPUs, mean step times in seconds, their ratio, and the least and the
    greatest of now; then the geometric mean and the worst."""
    lines = [_line("problem", "GPUs", f"{before} (s)", f"{now} (s)", "ratio", f"seeds, {now}"), "-" * _WIDTH]
    for row in rows:
        gpus = str(len(panel_problem(row.problem).usable_devices))
        seeds = f"{_seconds(min(row.now_s))} to {_seconds(max(row.now_s))}"
        numbers = (_seconds(mean(row.before_s)), _seconds(mean(row.now_s)), f"{row.ratio:.4f}")
        lines.append(_line(row.problem, gpus, *numbers, seeds))
    last = max(rows, key=lambda row: row.ratio)
    lines += ["-" * _WIDTH, f"geometric mean {geometric_mean(rows):.4f}, worst {last.ratio:.4f} ({last.problem})"]
    return "\n".join(lines)


def _line(name: str, *cells: str) -> str:
    widths: Iterable[int] = (5, 12, 12, 9, 22)
    return f"{name:<20}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def _seconds(value: float) -> str:
    return "no plan" if value == float("inf") else f"{value:.4g}" if value < 1000 else f"{value:.0f}"
