"""Groups of horizontal bars: one number per group and series, or its median and range over seeds."""

from collections.abc import Mapping, Sequence
from statistics import median

from matplotlib.axes import Axes

from hexiopt.errors import InputError, quoted
from hexiopt.report.style import FAINT, INK, MUTED, PIPELINE_HUES, amount

Values = Mapping[str, Mapping[str, float | Sequence[float] | None]]

_GROUP = 0.84  # of the space of a group that its bars fill
_MOST_BARS = 400


def draw_bars_of(groups: Values, ax: Axes, unit: str = "", reference: float | None = None) -> Axes:
    """Draw `groups` from top to bottom: {group: {series: number or numbers}}.

    Several numbers are drawn as their median, with a line from least to most; None and no numbers as a dash. A group
    may lack a series. A dashed line marks `reference`. Raises InputError where there is nothing to draw, or too much.
    """
    series = list(dict.fromkeys(name for own in groups.values() for name in own))
    if not series or len(series) * len(groups) > _MOST_BARS:
        raise InputError(f"bars: {len(groups)} groups of {len(series)} series; give 1 to {_MOST_BARS} bars in all")
    found = {group: {name: _numbers(group, name, one) for name, one in own.items()} for group, own in groups.items()}
    numbers = [number for own in found.values() for several in own.values() for number in several]
    most, thick = max(map(abs, numbers), default=1.0) or 1.0, _GROUP / max(map(len, found.values()))
    labelled = set[str]()
    for g, own in enumerate(found.values()):
        for k, (name, several) in enumerate(own.items()):
            y, middle = g + (k + 0.5 - len(own) / 2) * thick, median(several) if several else 0.0
            colour = PIPELINE_HUES[series.index(name) % len(PIPELINE_HUES)]
            ax.barh(y, middle, thick * 0.9, color=colour, label=None if name in labelled else name)
            labelled.add(name)
            if len(several) > 1:
                ax.plot([min(several), max(several)], [y, y], color=INK, linewidth=1.1, solid_capstyle="butt")
            said = amount(middle) if several else "–"
            ax.text(max([*several, 0.0]) + 0.008 * most, y, said, va="center", fontsize=8, color=MUTED)
    if reference is not None:
        ax.axvline(reference, color=INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)
    ax.set_yticks(range(len(groups)), list(groups))
    ax.set_ylim(len(groups) - 0.5, -0.5)
    ax.margins(x=0.12)
    ax.set_xlabel(unit, color=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(colors=MUTED)
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


def _numbers(group: str, name: str, stated: float | Sequence[float] | None) -> list[float]:
    numbers = [] if stated is None else [stated] if isinstance(stated, int | float) else list(stated)
    for number in numbers:
        if not isinstance(number, int | float) or not abs(number) < float("inf"):
            raise InputError(
                f"bars: {group}: {name}: {quoted(number)} is not a finite number; leave it out, or say None"
            )
    return numbers
