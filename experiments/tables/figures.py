"""What the pictures of all tables share: their frame, colours and axes."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from hexiopt.report.style import FAINT, INK, MUTED, PAPER, PIPELINE_HUES

MARKERS = ("o", "s", "^", "D", "v", "X", ">", "*")
PAPER_COLOUR, GRID, BAND = "#E8DFC8", "#ECEEF1", "#F5F6F8"
_DPI = 150
_LINE_INCHES = 0.24


def hue(k: int) -> str:
    """The k-th colour; neighbours can be told apart without seeing red or green."""
    return PIPELINE_HUES[k % len(PIPELINE_HUES)]


def framed(width: float, height: float, title: str, below: str, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with a title, a line on its conditions under it, and axes side by side; sizes in inches."""
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


def save(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    figure.savefig(path, format="png", dpi=_DPI, metadata={"Software": None})


def spread(count: int, width: float) -> Sequence[float]:
    """Offsets of `count` things side by side around 0, together `width` wide."""
    step = width / count
    return [(k - (count - 1) / 2) * step for k in range(count)]
