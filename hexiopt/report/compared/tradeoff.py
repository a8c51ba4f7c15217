"""A picture of choices as points of time and money, and of the choices that no other beats in both."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hexiopt.report.panels.canvas import Picture, plain_axes
from hexiopt.report.style import INK, MUTED, PAPER, PIPELINE_HUES, clip

_LISTED = 48  # names beside the picture
_SIGN, _LINE = 5.0, 8.0  # width of a digit and height of a line of numbers, in points


@dataclass(frozen=True, slots=True)
class Choice:
    """A point: seconds per step, and a price or another quantity to be small. `group` gives its colour."""

    name: str
    step_time_s: float
    price: float
    group: str


def unbeaten(choices: Sequence[Choice]) -> list[Choice]:
    """The Pareto front, fastest first: choices than which no other is as fast and as cheap and better in one."""
    front: list[Choice] = []
    for choice in sorted(choices, key=lambda option: (option.step_time_s, option.price)):
        if not front or choice.price < front[-1].price:
            front.append(choice)
    return front


def tradeoff_figure(choices: Sequence[Choice], title: str, quantity: str) -> Figure:
    """`quantity` over step time with a stair through the unbeaten choices, and the names of the numbered points.

    The first choice is the present one.
    """
    figure = Picture(figsize=(12, max(5.6, 0.9 + 0.2 * min(len(choices), _LISTED))), facecolor=PAPER)
    ax = draw_tradeoff(choices, quantity, figure.add_axes((0.075, 0.1, 0.6, 0.8)))
    ax.set_title(clip(title, 100), loc="left", color=INK, fontsize=12)
    _list(choices, figure.add_axes((0.69, 0.1, 0.3, 0.8)))
    return figure


def draw_tradeoff(choices: Sequence[Choice], quantity: str, ax: Axes) -> Axes:
    """Draw the points on `ax`, numbered in their order from 1."""
    front = unbeaten(choices)
    if len(front) > 1:
        stair = [choice.step_time_s for choice in front], [choice.price for choice in front]
        ax.step(*stair, where="post", color=MUTED, linewidth=1.2, zorder=2, label="beaten by none in both")
    colours = _colours(choices)
    for group, colour in colours.items():
        members = [choice for choice in choices if choice.group == group]
        present = members[0] is choices[0]
        marker, size = ("*", 190) if present else ("o", 46)
        places = [choice.step_time_s for choice in members], [choice.price for choice in members]
        ax.scatter(*places, s=size, marker=marker, color=colour, zorder=4 if present else 3, label=group)
    ax.set_xlabel("seconds per step (less is better)", color=INK)
    ax.set_ylabel(f"{quantity} (less is better)", color=INK)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    ax.margins(x=0.08, y=0.1)
    plain_axes(ax, colors=MUTED)
    _number(choices, front, ax)
    if choices:
        ax.legend(frameon=False, fontsize=9)
    return ax


def _colours(choices: Sequence[Choice]) -> dict[str, str]:
    """The colour of each group; the present choice has that of the text."""
    groups = list(dict.fromkeys(choice.group for choice in choices))
    return {group: PIPELINE_HUES[k % len(PIPELINE_HUES)] if k else INK for k, group in enumerate(groups)}


def _number(choices: Sequence[Choice], front: Sequence[Choice], ax: Axes) -> None:
    """Write the points' numbers next to them, numbers of one place together, so that none covers another."""
    numbers: dict[tuple[float, float], list[int]] = {}
    for number, choice in enumerate(choices, 1):
        numbers.setdefault((choice.step_time_s, choice.price), []).append(number)
    figure = ax.get_figure(root=True)
    assert figure is not None
    points = 72.0 / figure.dpi
    at = {place: tuple(float(value) * points for value in ax.transData.transform(place)) for place in numbers}
    boxes = [(x - 4, y - 5, 8.0) for x, y in at.values()]  # left, bottom and width, in points: first of the points
    best = {(choice.step_time_s, choice.price) for choice in front}
    for place, members in sorted(numbers.items(), key=lambda item: item[0] not in best):
        text = ", ".join(map(str, members[:3])) + ("…" if len(members) > 3 else "")
        x, y = at[place]
        wide = _SIGN * len(text)
        spots = [(dx, dy) for far in range(6) for dy in (4 + 10 * far, -12 - 10 * far) for dx in (6, -6 - wide)]
        dx, dy = next((spot for spot in spots if _free(x + spot[0], y + spot[1], wide, boxes)), spots[0])
        boxes.append((x + dx, y + dy, wide))
        ax.annotate(
            text,
            place,
            xytext=(dx, dy),
            textcoords="offset points",
            fontsize=8,
            fontweight="bold" if place in best else "normal",
            color=INK if place in best else MUTED,
        )


def _free(x: float, y: float, wide: float, boxes: Sequence[tuple[float, float, float]]) -> bool:
    return all(x + wide < left or left + width < x or abs(y - bottom) > _LINE for left, bottom, width in boxes)


def _list(choices: Sequence[Choice], ax: Axes) -> None:
    """Write the names of the points by number, the unbeaten ones in bold."""
    front, colours = unbeaten(choices), _colours(choices)
    ax.set_axis_off()
    shown = choices[:_LISTED]
    for k, choice in enumerate(shown):
        y = 1 - (k + 0.5) / max(len(shown), 20)
        ax.text(0.06, y, f"{k + 1}", ha="right", va="center", fontsize=8.5, color=colours[choice.group])
        weight = "bold" if choice in front else "normal"
        name = clip(choice.name, 44)
        ax.text(0.09, y, name, va="center", fontsize=8.5, color=INK, fontweight=weight, parse_math=False)
    if len(choices) > len(shown):
        ax.text(0.09, -0.02, f"and {len(choices) - len(shown):,} more", va="center", fontsize=8.5, color=MUTED)
