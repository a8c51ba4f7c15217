"""Pictures of plans and comparisons on matplotlib axes, for papers and notebooks.

Every function draws on `ax` and returns it; without `ax` it creates a figure, available as `ax.figure`. matplotlib is
imported on the first call.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from hexiopt.errors import InputError, quoted
from hexiopt.toolkit.comparing import Comparison
from hexiopt.toolkit.solution import PlacedPlan, Solution

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["cluster", "layers", "memory", "step_times", "timeline", "trajectories"]

_LEFT_INCHES = {"timeline": 1.5, "memory": 1.5, "layers": 0.8, "cluster": 0.0}  # room for labels left of the axes


def cluster(found: Solution | PlacedPlan, ax: "Axes | None" = None) -> "Axes":
    """Draw the machines and the stage of each GPU. Raises InputError where there is no plan."""
    return _panel("cluster", found, ax)


def layers(found: Solution | PlacedPlan, ax: "Axes | None" = None) -> "Axes":
    """Draw the layers of each stage, one bar per pipeline. Raises InputError where there is no plan."""
    return _panel("layers", found, ax)


def timeline(found: Solution | PlacedPlan, ax: "Axes | None" = None) -> "Axes":
    """Draw the predicted step over time, one lane per stage. Raises InputError where there is no plan."""
    return _panel("timeline", found, ax)


def memory(found: Solution | PlacedPlan, ax: "Axes | None" = None) -> "Axes":
    """Draw the memory of the fullest GPU of each stage, by kind. Raises InputError where there is no plan."""
    return _panel("memory", found, ax)


def trajectories(compared: Comparison, ax: "Axes | None" = None) -> "Axes":
    """Draw the best step time over search time: one line per solver, a band over seeds, and the lower bound."""
    from hexiopt.report.comparison import draw_trajectories

    return draw_trajectories(compared.results, _new_axes() if ax is None else ax)


def step_times(compared: Comparison, ax: "Axes | None" = None) -> "Axes":
    """Draw the final step time of each solver as a bar: the median over seeds, and the range from best to worst."""
    from hexiopt.report.comparison import draw_bars

    return draw_bars(compared.results, _new_axes() if ax is None else ax)


def _new_axes() -> "Axes":
    from hexiopt.report.panels.canvas import new_figure

    return new_figure(7.0, 4.2).add_axes((0.12, 0.14, 0.85, 0.8))


def _panel(name: str, found: Solution | PlacedPlan, ax: "Axes | None") -> "Axes":
    if not isinstance(found, Solution | PlacedPlan):
        raise InputError(
            f"plot: {quoted(found)} is neither a result nor a plan; give one of hexiopt.solve or load_plan"
        )
    from hexiopt.report.panels.canvas import new_figure
    from hexiopt.report.panels.stages import shown_rows

    plan = found.found() if isinstance(found, Solution) else found
    if ax is None:
        lanes = sum(len(row.stages) for row in shown_rows(plan.problem, plan, plan.cost).pipelines)
        high = 1.12 + (min(0.9 + 0.2 * lanes, 8.0) if name == "timeline" else 2.6)
        ax = new_figure(14.0, high).add_axes((0.0, 0.62 / high, 0.99, (high - 1.12) / high))
    figure = ax.get_figure(root=True)
    assert figure is not None
    box, left = ax.get_position(), (_LEFT_INCHES[name] + 0.15) / figure.get_size_inches()[0]
    left = max(box.x0, left)
    ax.set_position((left, box.y0, max(box.x1 - left, 0.1), box.height))
    draw = getattr(import_module(f"hexiopt.report.panels.{name}"), f"draw_{name}")
    axes: Axes = draw(plan.problem, plan, plan.cost, ax, letter="")
    return axes
