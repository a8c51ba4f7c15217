"""Pictures of plans and comparisons on matplotlib axes, for papers and notebooks.

Every function draws on `ax` and returns it; without `ax` it creates a figure, available as `ax.figure`. matplotlib is
imported on the first call.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.study.compare import Comparison
from hexiopt.study.solution import PlacedPlan, Solution

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["bars", "cluster", "layers", "memory", "step_times", "timeline", "trajectories"]

_LEFT_INCHES = {"timeline": 1.5, "memory": 1.5, "layers": 0.8, "cluster": 0.0}  # for labels left of the axes


def cluster(result: Solution | PlacedPlan, ax: "Axes | None" = None) -> "Axes":
    """Draw the machines and the stage of each GPU. Raises InputError where there is no plan."""
    return _panel("cluster", result, ax)


def layers(result: Solution | PlacedPlan, ax: "Axes | None" = None) -> "Axes":
    """Draw the layers of each stage, one bar per pipeline. Raises InputError where there is no plan."""
    return _panel("layers", result, ax)


def timeline(result: Solution | PlacedPlan, ax: "Axes | None" = None) -> "Axes":
    """Draw the predicted step over time, one lane per stage. Raises InputError where there is no plan."""
    return _panel("timeline", result, ax)


def memory(result: Solution | PlacedPlan, ax: "Axes | None" = None) -> "Axes":
    """Draw the memory of the fullest GPU of each stage, by kind. Raises InputError where there is no plan."""
    return _panel("memory", result, ax)


def trajectories(
    comparison: Comparison, ax: "Axes | None" = None, over: Literal["seconds", "steps"] = "seconds"
) -> "Axes":
    """Draw the best step time over search time: one line per solver, a band over seeds, and the lower bound.

    `over="steps"` counts the solver's own steps instead of seconds: for solvers of one kind, the same on any machine.
    Raises InputError for anything else.
    """
    from hexiopt.report.compared.comparison import AXES, draw_trajectories

    if over not in AXES:
        raise InputError(f"plot: over: {quoted(over)} is not known; {did_you_mean(str(over), AXES)}")
    return draw_trajectories(comparison.results, _new_axes() if ax is None else ax, over)


def step_times(comparison: Comparison, ax: "Axes | None" = None) -> "Axes":
    """Draw the final step time of each solver as a bar: the median over seeds, and the range from best to worst."""
    from hexiopt.report.compared.comparison import draw_bars

    return draw_bars(comparison.results, _new_axes() if ax is None else ax)


def bars(
    groups: Mapping[str, Mapping[str, float | Sequence[float] | None]],
    ax: "Axes | None" = None,
    *,
    unit: str = "",
    reference: float | None = None,
) -> "Axes":
    """Draw groups of horizontal bars from top to bottom: `{group: {series: number}}`.

    Several numbers, as of several seeds, are drawn as their median and a line from least to most, None as a dash.
    `unit` is the label of the axis; a dashed line marks `reference`. Raises InputError for numbers that are not finite,
    and for none.
    """
    from hexiopt.report.compared.bars import draw_bars_of

    if ax is None:
        most, series = max(map(len, groups.values()), default=0), {name for group in groups.values() for name in group}
        count, top = len(groups) * most, 0.45 if len(series) > 1 else 0.12
        letters = max((len(str(name)) for name in groups), default=0)
        ax = _new_axes(9.0, min(0.85 + top + 0.22 * count, 12.0), letters, top)
    return draw_bars_of(groups, ax, unit, reference)


def _new_axes(width: float = 7.0, height: float = 4.2, letters: int = 0, top: float = 0.25) -> "Axes":
    """The axes of a new figure of `width` by `height` inches, with space for labels of `letters` characters on the left
    and `top` inches above."""
    from hexiopt.report.panels.canvas import new_figure

    left, right, low = max(0.84, 0.3 + 0.085 * letters), 0.21, 0.59
    box = (left / width, low / height, (width - left - right) / width, (height - low - top) / height)
    return new_figure(width, height).add_axes(box)


def _panel(name: str, result: Solution | PlacedPlan, ax: "Axes | None") -> "Axes":
    if not isinstance(result, Solution | PlacedPlan):
        raise InputError(
            f"plot: {quoted(result)} is neither a result nor a plan; give one of hexiopt.solve or load_plan"
        )
    from hexiopt.report.panels.canvas import new_figure
    from hexiopt.report.panels.cluster import draw_cluster
    from hexiopt.report.panels.stages import draw_layers, draw_memory, picture_rows
    from hexiopt.report.panels.timeline import draw_timeline

    plan = result.found() if isinstance(result, Solution) else result
    facts = plan.facts
    if ax is None:
        lanes = sum(len(row.stages) for row in picture_rows(facts).pipelines)
        high = 1.12 + (min(0.9 + 0.2 * lanes, 8.0) if name == "timeline" else 2.6)
        ax = new_figure(14.0, high).add_axes((0.0, 0.62 / high, 0.99, (high - 1.12) / high))
    figure = ax.get_figure(root=True)
    assert figure is not None
    box, left = ax.get_position(), (_LEFT_INCHES[name] + 0.15) / figure.get_size_inches()[0]
    left = max(box.x0, left)
    ax.set_position((left, box.y0, max(box.x1 - left, 0.1), box.height))
    draw = {"cluster": draw_cluster, "layers": draw_layers, "memory": draw_memory, "timeline": draw_timeline}[name]
    return draw(facts, ax, letter="")
