"""Frame, colours, axes and bars of all studies' figures."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, NullLocator

from experiments.studies.frame.rows import best_at
from hexiopt.report.style import FAINT, INK, MUTED, PAPER, PIPELINE_HUES

MARKERS = ("o", "s", "^", "D", "v", "X", ">", "*")
PAPER_COLOUR, GRID, BAND = "#E8DFC8", "#ECEEF1", "#F5F6F8"
_DPI = 150
_LINE_INCHES = 0.24
_GROUP, _BAR = 0.84, 0.92  # widths of a group of bars and of a bar, as shares of the space for each
_CURVE = 300  # points
_UPRIGHT = 32  # with more bars side by side, labels are rotated


def hue(k: int) -> str:
    """The k-th colour; neighbours differ for colour-blind readers too."""
    return PIPELINE_HUES[k % len(PIPELINE_HUES)]


def line(k: int) -> dict[str, Any]:
    """The k-th line with its points."""
    return {"color": hue(k), "marker": MARKERS[k % len(MARKERS)], "markersize": 5.5, "linewidth": 1.5}


def framed(
    title: str, below: str, *, columns: int = 1, width: float = 10.5, height: float = 4.8
) -> tuple[Figure, list[Axes]]:
    """A figure with a title, below it a line on the conditions, and axes side by side; sizes are in inches."""
    below_title = (0.0, 0.0, 1.0, 1 - (2 * _LINE_INCHES + 0.12) / height)
    figure = Figure(figsize=(width, height), facecolor=PAPER, layout=ConstrainedLayoutEngine(rect=below_title))
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False)[0]
    figure.text(0.12 / width, 1 - 0.08 / height, title, fontsize=13, fontweight="bold", color=INK, va="top")
    figure.text(
        0.12 / width, 1 - (0.12 + _LINE_INCHES) / height, below, fontsize=9, color=MUTED, va="top", parse_math=False
    )
    for ax in axes:
        plain(ax)
    return figure, list(axes)


def plain(ax: Axes) -> Axes:
    """Two faint spines, muted ticks, a grid behind the data."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(colors=MUTED, labelsize=9)
    ax.xaxis.label.set_color(INK)
    ax.yaxis.label.set_color(INK)
    ax.set_axisbelow(True)
    return ax


def legend(figure: Figure, ax: Axes, columns: int) -> None:
    """The legend of `ax` below all axes."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def png(figure: Figure) -> bytes:
    """The figure as a PNG."""
    sink = BytesIO()
    figure.savefig(sink, format="png", dpi=_DPI, metadata={"Software": None})
    return sink.getvalue()


def spread(count: int, width: float) -> Sequence[float]:
    """Offsets of `count` items side by side, centred on 0 and `width` wide together."""
    step = width / count
    return [(k - (count - 1) / 2) * step for k in range(count)]


def relative_bars(ax: Axes, ratios: pd.DataFrame) -> None:
    """One group of bars per row of `ratios`, one bar per column; NaN means that there is no plan."""
    is_crowded = ratios.size > _UPRIGHT
    without = "no plan" if is_crowded else "no\nplan"
    for k, (offset, label) in enumerate(zip(spread(len(ratios.columns), _GROUP), ratios, strict=True)):
        heights = ratios[label]
        middles = [x + offset for x in range(len(ratios))]
        bars = ax.bar(middles, heights.fillna(0.0), _BAR * _GROUP / len(ratios.columns), color=hue(k), label=label)
        texts = [without if pd.isna(ratio) else f"{ratio:.2f}" for ratio in heights]
        ax.bar_label(bars, texts, fontsize=7.5, padding=2 if is_crowded else 1, rotation=90 if is_crowded else 0)
    ax.set_xticks(range(len(ratios)), list(ratios.index), fontsize=9)
    ax.set_ylim(0, ax.get_ylim()[1] * (1.1 if is_crowded else 1.05))


def row_bars(ax: Axes, shares: pd.DataFrame) -> None:
    """Horizontal bars of shares in percent, one group per row of `shares` from the top; NaN means no plan."""
    least, most = min(0.0, shares.min().min()), max(0.001, shares.max().max())
    offsets = reversed(spread(len(shares.columns), 0.8))
    for k, (offset, label) in enumerate(zip(offsets, shares, strict=True)):
        ys = [y + offset for y in reversed(range(len(shares)))]
        ends = 100 * shares[label].fillna(0.0)
        ax.barh(ys, ends, 0.8 / len(shares.columns) * 0.9, color=hue(k), label=label)
        for y, end, value in zip(ys, ends, shares[label], strict=True):
            text = "no plan" if pd.isna(value) else f"{end:.1f}"
            ax.text(max(end, 0.0) + 0.8 * most, y, text, va="center", fontsize=8, color=INK)
    ax.set_yticks(range(len(shares)), list(reversed(shares.index)))
    ax.set_ylim(-0.5, len(shares) - 0.5)
    ax.set_xlim(100 * least, 100 * (most + 0.12 * (most - least)))


def row_marks(ax: Axes, ratios: pd.DataFrame, marks: Sequence[tuple[float, dict[str, Any]]]) -> None:
    """A row of marks per row of `ratios` from the top, with a line for the geometric mean and how many have no plan;
    `marks` are an offset and a style for each column."""
    labels = list(reversed(ratios.index))
    for column, (offset, style) in zip(ratios, marks, strict=True):
        ys = [y + offset for y in range(len(labels))]
        ax.plot(ratios[column].loc[labels], ys, **style, linestyle="none", markersize=6.5, markeredgecolor="white")
    for y, label in enumerate(labels):
        known = ratios.loc[label].dropna()
        if y % 2:
            ax.axhspan(y - 0.5, y + 0.5, color=BAND, zorder=-1)
        if len(known):
            ax.plot([np.exp(np.log(known).mean())] * 2, [y - 0.42, y + 0.42], color=INK, linewidth=1.4, zorder=3)
        if missing := ratios.shape[1] - len(known):
            text, at = f"no plan at {missing} of {ratios.shape[1]}", ax.get_yaxis_transform()
            ax.text(0.99, y, text, color=MUTED, fontsize=9, transform=at, va="center", ha="right")
    ax.plot([], [], color=INK, linewidth=1.4, label="geometric mean")
    ax.axvline(1.0, color=MUTED, linewidth=1)
    ax.set_yticks(range(len(labels)), labels)
    ax.set_ylim(-0.5, len(labels) - 0.5)
    ax.grid(axis="x", color=GRID)


def progress(ax: Axes, runs: pd.DataFrame, k: int, label: str) -> list[float]:
    """The best step time so far over search time, from where all runs have a plan: the k-th line is the median, a band
    the range. Returns where the band ends."""
    end_s = runs["time_limit_s"].max()
    at_s = np.geomspace(end_s / 1000, end_s * 1.02, _CURVE)
    best_s = np.array([best_at(points, at_s) for points in runs["trajectory"]])
    ready = np.isfinite(best_s).all(axis=0)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_xlabel("search time (s)")
    ax.grid(color=GRID)
    ax.plot(at_s[ready], np.median(best_s, axis=0)[ready], color=hue(k), linewidth=1.8, label=label)
    if not ready.any():
        return []
    low_s, high_s = best_s.min(axis=0)[ready], best_s.max(axis=0)[ready]
    ax.fill_between(at_s[ready], low_s, high_s, color=hue(k), alpha=0.2, linewidth=0)
    return [low_s[-1], high_s[-1]]


def sizes_axis(ax: Axes, label: str, names: Mapping[int, str]) -> None:
    """Make x a logarithmic axis of cluster sizes, each labelled."""
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(sorted(names)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: names.get(round(value), ""))
    ax.set_xlabel(label)
    ax.grid(color=GRID)


def gpus_axis(ax: Axes, gpus: Sequence[int]) -> None:
    """Numbers of GPUs along x."""
    sizes_axis(ax, "GPUs", {n: f"{n:,}" for n in gpus})


def seconds_axis(ax: Axes, label: str) -> None:
    """Seconds along y, logarithmic."""
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set_ylabel(label)
