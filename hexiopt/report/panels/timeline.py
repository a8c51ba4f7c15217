"""The predicted step over time, one lane per stage."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from hexiopt.cost.cost import Cost
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.panels.canvas import (
    LABELS,
    NORMAL,
    SMALL,
    clipped_to,
    inches,
    legend,
    new_axes,
    plain_axes,
    text_inches,
    title,
)
from hexiopt.report.panels.stages import draw_chip, in_line, left_out, shown_rows
from hexiopt.report.rows import PipelineRow, num_operations
from hexiopt.report.style import INK, MUTED, OPTIMIZER_COLOUR, PAPER, SYNC_COLOUR, ink_on, mix, seconds
from hexiopt.report.time_axis import TimeAxis, time_axis
from hexiopt.report.timeline import has_gradient_sync, last_phase
from hexiopt.simulation.engine import simulate_pipeline

_MAX_OPERATIONS = 100_000  # operations of a pipeline that are drawn one by one
_SYNC: dict[str, Any] = {"facecolor": PAPER, "edgecolor": SYNC_COLOUR, "hatch": "/////", "linewidth": 0}
_OPTIMIZER: dict[str, Any] = {"facecolor": SYNC_COLOUR, "edgecolor": OPTIMIZER_COLOUR, "hatch": "xxxxx", "linewidth": 0}


def draw_timeline(problem: Problem, plan: Plan, cost: Cost, ax: Axes | None = None, letter: str = "c") -> Axes:
    """Draw one lane per stage with forward, backward, messages, gradient sync and optimizer; a long step is cut.

    Replicas of a stage are stacked in its lane; later layer ranges are paler.
    """
    ax = new_axes(ax, 14, 4)
    rows = shown_rows(problem, plan, cost)
    axis = time_axis(rows, cost)
    width, height = inches(ax)
    lanes, bottom = in_line(rows, 0.45)
    ax.set(xlim=(0, axis.width), ylim=(bottom, 0))
    lane_inches = height / bottom
    per_second, syncs = width / axis.width, has_gradient_sync(problem, plan)

    for row in rows.pipelines:
        at = {stage.stage: y for y, lane_row, stage in lanes if lane_row is row}
        _draw_pipeline(ax, axis, plan, cost, row, at, per_second, lane_inches, syncs)
    if axis.gap:
        ax.axvspan(axis.cut, axis.cut + axis.gap, color=PAPER, zorder=4, linewidth=0)
        for edge in (axis.cut, axis.cut + axis.gap):
            ax.axvline(edge, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=5)
    size = min(NORMAL, lane_inches * 72 * 0.62)
    ax.set_yticks([])
    inch = axis.width / width
    for y, row, stage in lanes:
        box = (-0.32 * inch, y + 0.06, 0.26 * inch, 0.84)
        draw_chip(ax, row, stage, box, (-0.19 * inch, y + 0.5), 0.24, size)
        ax.text(
            -0.37 * inch,
            y + 0.5,
            clipped_to(stage.kind, LABELS - 0.37, min(SMALL, size)),
            fontsize=min(SMALL, size),
            color=MUTED,
            ha="right",
            va="center",
            parse_math=False,
        )
    _ticks(ax, axis, width)
    plain_axes(ax)
    ax.spines["left"].set_visible(False)
    hidden = seconds(axis.resume - axis.cut)
    notes = [f"{hidden} omitted at the cut"] if axis.gap else []
    title(ax, letter, "Predicted step", "; ".join([*notes, *left_out(rows)]), outdent=LABELS)
    entries = [
        Patch(facecolor="#C9CFD6", label="forward"),
        Patch(facecolor="#7B8794", label="backward"),
        Patch(facecolor=INK, label="message (thin)"),
    ]
    if syncs:
        sync = f"gradient sync and waiting for it ({seconds(cost.gradient_sync_s)} after the last pipeline)"
        entries.append(Patch(label=sync, **_SYNC))
    ending = f"{last_phase(problem, plan)} ({seconds(cost.optimizer_s)})"
    entries.append(Patch(label=ending, **_OPTIMIZER))
    legend(ax, entries)
    return ax


def _draw_pipeline(
    ax: Axes,
    axis: TimeAxis,
    plan: Plan,
    cost: Cost,
    row: PipelineRow,
    at: dict[int, float],
    per_second: float,
    lane_inches: float,
    syncs: bool,
) -> None:
    """Draw one pipeline's events; `at` has the position of each stage's lane."""
    pipeline, priced = plan.pipelines[row.number], cost.pipelines[row.number]
    boxes: dict[tuple[int, int, str, int], list[tuple[float, float]]] = {}
    labels: list[tuple[float, int, int, str, int]] = []
    most = max(len(stage.parallelism.executors) for stage in pipeline.stages)
    size = min(6.0, lane_inches * 72 * 0.45 / most)
    room = text_inches("0" * len(str(pipeline.num_micro_batches - 1)), size) + 0.03

    def place(stage: int, replica: int) -> tuple[float, float]:
        """The start and height of a replica's part of its stage's lane."""
        height = 0.72 / len(pipeline.stages[stage].parallelism.executors)
        return at[stage] + 0.12 + replica * height, height

    if num_operations(pipeline) <= _MAX_OPERATIONS:
        for event in simulate_pipeline(row.number, pipeline, priced, plan.schedule):
            spans = axis.spans(event.start_s, event.end_s)
            boxes.setdefault((event.stage, event.replica, event.kind, event.chunk), []).extend(spans)
            if not event.kind.startswith("send"):
                for left, span in spans:
                    if span * per_second > room:
                        labels.append((left + span / 2, event.stage, event.replica, event.kind, event.micro_batch))
    else:
        for k, ends in enumerate(priced.replica_end_s):
            for r, end_s in enumerate(ends):
                boxes[k, r, "backward", 0] = axis.spans(0.0, end_s)
    for (k, r, kind, chunk), spans in boxes.items():
        if kind.startswith("send"):
            line = (at[k] + (0.86 if kind == "send_forward" else 0.0), 0.1)
            ax.broken_barh(spans, line, facecolors=INK, linewidth=0, zorder=3)
        else:
            colour = row.operation_colours(k)[kind == "backward"]
            ax.broken_barh(
                spans,
                place(k, r),
                facecolors=mix(colour, PAPER, 0.5 * chunk / pipeline.num_chunks),
                edgecolors=PAPER,
                linewidth=0.35 if spans and min(w for _, w in spans[1:-1] or spans) * per_second > 0.04 else 0.0,
                zorder=2,
            )
    if size >= 4:
        for x, k, r, kind, batch in labels:
            colour = ink_on(row.operation_colours(k)[kind == "backward"])
            low, height = place(k, r)
            ax.text(x, low + height / 2, f"{batch}", fontsize=size, color=colour, ha="center", va="center", zorder=3)
    synced_s = cost.pipeline_s + cost.gradient_sync_s
    for k, ends in enumerate(priced.replica_end_s):
        for r, end_s in enumerate(ends):
            if syncs:
                ax.broken_barh(axis.spans(end_s, synced_s), place(k, r), zorder=1, **_SYNC)
            ax.broken_barh(axis.spans(synced_s, cost.step_time_s), place(k, r), zorder=2, **_OPTIMIZER)


def _ticks(ax: Axes, axis: TimeAxis, width: float) -> None:
    """Ticks at round times and at the end of the step, on axes `width` inches wide."""
    unit, scale = ("s", 1.0) if axis.end >= 1 else ("ms", 1e3)
    number = max(4, int(width / (1.0 if not axis.gap else 0.8)))
    times = MaxNLocator(number).tick_values(0.0, axis.width * scale)
    step = (times[1] - times[0]) / scale
    moments = [k * step for k in range(int(axis.end / step + 1e-9) + 1)] if axis.end / step < 1e5 else [0.0]
    places = [(moment, axis.at(moment)) for moment in moments]
    quoted = [(moment, x) for moment, x in places if x is not None and moment <= axis.end]
    last = axis.width
    quoted = [item for item in quoted if (last - item[1]) * width / axis.width > 0.9]
    ax.set_xticks(
        [x for _, x in quoted] + [last],
        [f"{moment * scale:g}" for moment, _ in quoted] + [f"{axis.end * scale:.4g} {unit}"],
    )
    ax.get_xticklabels()[-1].set_horizontalalignment("right")
