"""A plan as a picture: its devices, layers, timeline and memory."""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hexiopt.report.facts import PlanFacts
from hexiopt.report.machine_map import MAX_MACHINES
from hexiopt.report.panels.canvas import LABELS, STYLE, clip_to, new_figure, save, text_inches
from hexiopt.report.panels.cluster import draw_cluster
from hexiopt.report.panels.stages import draw_layers, draw_memory, picture_rows
from hexiopt.report.panels.timeline import draw_timeline
from hexiopt.report.style import INK, count, seconds

WIDTH_INCHES = 14.0
_MARGIN = 0.35  # inches around the figure


def draw_plan(facts: PlanFacts, path: str | Path) -> None:
    """Write plan.png: `plan_figure` at 150 dots per inch."""
    save(plan_figure(facts), path)


@rc_context(STYLE)
def plan_figure(facts: PlanFacts) -> Figure:
    """Cluster, layers, timeline and memory in the same colours, 14 inches wide and about 10 high."""
    rows = picture_rows(facts)
    machines = min(MAX_MACHINES, len(facts.problem.cluster.machines))
    lanes = sum(len(row.stages) for row in rows.pipelines)
    top = max(1.5 + 0.5 * (machines > 4) + 1.0 * (machines > 8), 0.4 + 0.28 * len(rows.pipelines))
    middle = min(1.4 + 0.2 * lanes, 5.8)
    bottom = 1.8
    # From the lower edge: the memory panel, the timeline, then cluster and layers side by side; a title above each.
    y_memory = 0.62
    y_timeline = y_memory + bottom + 0.85
    y_top = y_timeline + middle + 0.55
    height = y_top + top + 0.95
    figure = new_figure(WIDTH_INCHES, height)

    def panel(x: float, y: float, wide: float, high: float) -> Axes:
        return figure.add_axes((x / WIDTH_INCHES, y / height, wide / WIDTH_INCHES, high / height))

    right = WIDTH_INCHES - _MARGIN
    draw_cluster(facts, panel(_MARGIN, y_top, 7.3, top))
    draw_layers(facts, panel(8.75, y_top + 0.28, right - 8.75, top - 0.28))
    left = _MARGIN + LABELS
    draw_timeline(facts, panel(left, y_timeline, right - left, middle))
    draw_memory(facts, panel(left, y_memory, right - left, bottom))
    cost = facts.cost
    summary = (
        f"{seconds(cost.step_time_s)} per step · {cost.tokens_per_s:,.0f} tokens/s · MFU {cost.mfu:.1%} · "
        f"{count(len(facts.plan.pipelines), 'pipeline')} · {facts.used_devices} GPUs"
    )
    line = (height - 0.32) / height
    name = clip_to(facts.title, right - _MARGIN - text_inches(summary, 11) - 0.3, 15, bold=True)
    figure.text(_MARGIN / WIDTH_INCHES, line, name, fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(right / WIDTH_INCHES, line, summary, fontsize=11, va="center", ha="right")
    return figure
