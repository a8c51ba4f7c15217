"""Figures, axes and text of all panels, measured in inches."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Patch

from hexiopt.report.style import FAINT, INK, MUTED, PAPER, clip

DPI = 150
SMALL, NORMAL, TITLE = 7.0, 8.0, 10.5
LABELS = 1.5  # inches left of the timeline and the memory panel
# Of texts and legends that state nothing else:
STYLE: dict[Any, Any] = {"font.size": SMALL, "text.color": MUTED, "text.parse_math": False}
STYLE |= {"legend.frameon": False, "legend.fontsize": SMALL, "legend.labelcolor": MUTED}


class Picture(Figure):
    """A figure that a notebook shows without pyplot, which is a figure manager of its own."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        return png(self)


def png(figure: Figure) -> bytes:
    """The figure as a PNG."""
    sink = BytesIO()
    save(figure, sink, figure.dpi)
    return sink.getvalue()


def save(figure: Figure, path: str | Path | BytesIO, dpi: float = DPI) -> None:
    """Write the figure as a PNG, the same bytes for the same picture."""
    figure.savefig(path, format="png", dpi=dpi, metadata={"Software": None})


def new_figure(width: float, height: float, **how: Any) -> Figure:
    """A blank figure; sizes are in inches, `how` has further arguments of `Figure`."""
    return Picture(figsize=(width, height), dpi=DPI, facecolor=PAPER, **how)


def new_axes(ax: Axes | None, width: float, height: float) -> Axes:
    """`ax`, or the axes of a new figure; sizes are in inches."""
    return new_figure(width, height).add_axes((0.1, 0.14, 0.875, 0.74)) if ax is None else ax


def inches(ax: Axes) -> tuple[float, float]:
    """Width and height of the axes."""
    box, figure = ax.get_position(), ax.get_figure(root=True)
    assert figure is not None
    width, height = figure.get_size_inches()
    return box.width * width, box.height * height


def title(ax: Axes, letter: str, text: str, note: str = "", outdent: float = 0.0) -> None:
    """Draw the panel's title at its upper left, `outdent` inches left of the axes, and the note next to it."""
    width, _ = inches(ax)
    heading = f"({letter})  {text}" if letter else text
    used = text_inches(heading, TITLE, bold=True) + 0.15 - outdent
    for x, words, size, weight in (
        (-outdent, heading, TITLE, "bold"),
        (used, clip_to(note, width - used, SMALL), SMALL, "normal"),
    ):
        how = {"fontsize": size, "fontweight": weight, "color": INK if weight == "bold" else MUTED}
        at = {"xycoords": "axes fraction", "textcoords": "offset points", "annotation_clip": False}
        ax.annotate(words, (x / width, 1), (0, 9), va="baseline", parse_math=False, **at, **how)  # type: ignore[arg-type]


def legend(ax: Axes, entries: Sequence[Patch]) -> None:
    """Draw the entries in one line above the upper right corner."""
    above = (1.0, 1 + 0.06 / inches(ax)[1])
    sizes = {"handlelength": 1.3, "handleheight": 0.9, "columnspacing": 1.3, "borderaxespad": 0}
    ax.legend(handles=entries, loc="lower right", bbox_to_anchor=above, ncols=len(entries), **sizes)


def plain_axes(ax: Axes, *hidden: str, **ticks: Any) -> Axes:
    """Hide the frame except for a faint left and lower edge, unless they are `hidden`; `ticks` are arguments of
    `tick_params`."""
    ax.spines[["top", "right", *hidden]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(**(ticks or {"labelsize": NORMAL, "colors": MUTED, "color": FAINT, "width": 0.8}))
    return ax


@lru_cache(maxsize=4096)
def text_inches(text: str, size: float, bold: bool = False) -> float:
    """The width of a line of text in inches."""
    font = FontProperties(size=size, weight="bold" if bold else "normal")
    width, _, _ = _renderer().get_text_width_height_descent(text, font, False)  # type: ignore[no-untyped-call]
    return float(width) / DPI


@lru_cache(maxsize=1)
def _renderer() -> RendererAgg:
    """A renderer that measures text as it will be drawn, with hinting."""
    return RendererAgg(16, 16, DPI)  # type: ignore[no-untyped-call]


def clip_to(text: str, width: float, size: float, bold: bool = False) -> str:
    """`text`, truncated with an ellipsis to fit `width` inches."""
    limit = len(text)
    while limit > 1 and text_inches(clip(text, limit), size, bold) > width:
        limit -= 1
    return clip(text, limit)


def first_fitting(choices: Iterable[str], width: float, size: float) -> str:
    """The first choice that fits `width` inches; empty where none does."""
    for text in choices:
        if max(text_inches(line, size) for line in text.split("\n")) <= width:
            return text
    return ""
