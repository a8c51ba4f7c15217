"""Groups of horizontal bars: one number per group and series, or its median and range over seeds."""

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes

from hexiopt.errors import InputError, quoted
from hexiopt.report.panels.canvas import plain_axes
from hexiopt.report.style import INK, MUTED, PIPELINE_HUES, amount

Values = Mapping[str, Mapping[str, float | Sequence[float] | None]]

_GROUP = 0.84  # of the space of a group that its bars fill
_MOST_BARS = 400


def draw_bars_of(groups: Values, ax: Axes, unit: str = "", reference: float | None = None) -> Axes:
    """Draw `groups` from top to bottom: {group: {series: number or numbers}}.

    Several numbers are drawn as their median, with a line from least to most; None and no numbers as a dash. A group
    may lack a series. A dashed line marks `reference`. Raises InputError where there is nothing to draw, or too much.
    """
    series = list(dict.fromkeys(name for members in groups.values() for name in members))
    if not series or len(series) * len(groups) > _MOST_BARS:
        raise InputError(f"bars: {len(groups)} groups of {len(series)} series; give 1 to {_MOST_BARS} bars in all")
    cells = {
        group: {name: _numbers(group, name, value) for name, value in members.items()}
        for group, members in groups.items()
    }
    numbers = [number for members in cells.values() for bar in members.values() for number in bar]
    most, thick = max(map(abs, numbers), default=1.0) or 1.0, _GROUP / max(map(len, cells.values()))
    labelled = set[str]()
    for g, members in enumerate(cells.values()):
        for k, (name, bar) in enumerate(members.items()):
            y, middle = g + (k + 0.5 - len(members) / 2) * thick, median(bar) if bar else 0.0
            colour = PIPELINE_HUES[series.index(name) % len(PIPELINE_HUES)]
            ax.barh(y, middle, thick * 0.9, color=colour, label=None if name in labelled else name)
            labelled.add(name)
            if len(bar) > 1:
                ax.plot([min(bar), max(bar)], [y, y], color=INK, linewidth=1.1, solid_capstyle="butt")
            label = amount(middle) if bar else "–"
            ax.text(max([*bar, 0.0]) + 0.008 * most, y, label, va="center", fontsize=8, color=MUTED)
    if reference is not None:
        ax.axvline(reference, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)
    ax.set_yticks(range(len(groups)), list(groups))
    ax.set_ylim(len(groups) - 0.5, -0.5)
    ax.margins(x=0.12)
    ax.set_xlabel(unit, color=INK)
    plain_axes(ax, colors=MUTED)
    if len(series) > 1:
        ax.legend(
            frameon=False,
            fontsize=9,
            labelcolor=MUTED,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=min(4, len(series)),
        )
    return ax


def _numbers(group: str, name: str, value: float | Sequence[float] | None) -> list[float]:
    numbers = [] if value is None else [value] if isinstance(value, int | float) else list(value)
    for number in numbers:
        if not isinstance(number, int | float) or not abs(number) < float("inf"):
            raise InputError(
                f"bars: {group}: {name}: {quoted(number)} is not a finite number; leave it out, or say None"
            )
    return numbers
