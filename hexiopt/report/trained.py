"""A predicted step above the measured one, one lane per stage."""

from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from hexiopt.frame import Frame
from hexiopt.report.panels.canvas import STYLE, new_figure, plain_axes, title
from hexiopt.report.style import INK, PAPER, ink_on, mix, seconds_scale, stage_colour

_LANE, _FRAME = 0.3, 0.95  # inches of a lane, and of a panel's title and axis
_LEFT, _WIDTH = 2.0, 11.0
_TITLES = {False: "Predicted for the plan's GPUs", True: "Measured on the devices of the run"}


@rc_context(STYLE)
def training_figure(operations: Frame) -> Figure:
    """The figure of `read_operations`: both clocks begin with the step, and each panel has its own scale."""
    panels = [[row for row in operations if row["measured"] == measured] for measured in _TITLES]
    lanes = [sorted({(row["pipeline"], row["stage"]) for row in rows}) for rows in panels]
    heights = [_FRAME + _LANE * len(panel_lanes) for panel_lanes in lanes]
    figure = new_figure(_WIDTH, sum(heights))
    top = 1.0
    for measured, rows, panel_lanes, height in zip(_TITLES, panels, lanes, heights, strict=True):
        share = height / sum(heights)
        low, high = top - share * (1 - 0.42 / height), top - share * 0.4 / height
        ax = figure.add_axes((_LEFT / _WIDTH, low, 1 - (_LEFT + 0.3) / _WIDTH, high - low))
        _draw(ax, rows, panel_lanes)
        title(ax, "", _TITLES[measured], outdent=_LEFT - 0.1)
        top -= share
    kinds = [Patch(facecolor="#C9CFD6", label="forward"), Patch(facecolor="#7B8794", label="backward")]
    if any(row["kind"] == "weights" for rows in panels for row in rows):
        kinds.append(Patch(facecolor="#4A535D", label="gradients of weights"))
    figure.axes[0].legend(handles=kinds, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    return figure


def _draw(ax: Axes, rows: list[dict[str, Any]], lanes: list[tuple[int, str]]) -> None:
    end_s = max((row["end_s"] for row in rows), default=1.0)
    scale, _, unit = seconds_scale(end_s)
    for row in rows:
        lane = row["pipeline"], row["stage"]
        y, stages = lanes.index(lane), [other for other in lanes if other[0] == lane[0]]
        colour = stage_colour(lane[0], stages.index(lane), len(stages))
        colour = {"forward": mix(colour, PAPER, 0.5), "weights": mix(colour, INK, 0.35)}.get(row["kind"], colour)
        start, end = row["start_s"] / scale, row["end_s"] / scale
        ax.barh(y, end - start, 0.8, left=start, color=colour, edgecolor=PAPER, linewidth=0.5)
        if end - start > 0.02 * end_s / scale:
            middle, ink = (start + end) / 2, ink_on(colour)
            ax.text(middle, y, f"{row['micro_batch']}", fontsize=6, color=ink, ha="center", va="center")
    ax.set_yticks(range(len(lanes)), [f"{pipeline}·{stage}" for pipeline, stage in lanes])
    ax.set_ylim(len(lanes) - 0.5, -0.5)
    ax.set_xlim(0, end_s / scale)
    ax.set_xlabel(unit, color=INK, loc="right", labelpad=-8)
    plain_axes(ax)
