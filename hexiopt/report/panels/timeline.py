"""The predicted step over time, one lane per stage."""

from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from hexiopt.report.facts import PlanFacts
from hexiopt.report.panels import canvas
from hexiopt.report.panels.stages import draw_chip, in_line, omission_notes, picture_rows
from hexiopt.report.rows import PipelineRow
from hexiopt.report.style import INK, MUTED, OPTIMIZER_COLOUR, PAPER, SYNC_COLOUR, ink_on, mix, seconds
from hexiopt.report.timeline import MOST_OPERATIONS, TimeAxis, num_operations, pipeline_spans

_ENDS: dict[str, dict[str, Any]] = {
    "gradient_sync": {"facecolor": PAPER, "edgecolor": SYNC_COLOUR, "hatch": "/////", "linewidth": 0},
    "optimizer": {"facecolor": SYNC_COLOUR, "edgecolor": OPTIMIZER_COLOUR, "hatch": "xxxxx", "linewidth": 0},
}


@rc_context(canvas.STYLE)
def draw_timeline(facts: PlanFacts, ax: Axes | None = None, letter: str = "c") -> Axes:
    """Draw one lane per stage with forward, backward, messages, gradient sync and optimizer; a long step is cut.

    Replicas of a stage are stacked in its lane; later layer ranges are paler.
    """
    ax = canvas.new_axes(ax, 14, 4)
    rows = picture_rows(facts)
    axis = TimeAxis.of(facts, rows)
    width, height = canvas.inches(ax)
    lanes, bottom = in_line(rows, 0.45)
    ax.set(xlim=(0, axis.width), ylim=(bottom, 0))
    lane_inches = height / bottom
    for row in rows.pipelines:
        at = [y for y, lane_row, _ in lanes if lane_row is row]
        _draw_pipeline(ax, axis, facts, row, at, lane_inches)
    if axis.gap:
        ax.axvspan(axis.cut, axis.cut + axis.gap, color=PAPER, zorder=4, linewidth=0)
        for edge in (axis.cut, axis.cut + axis.gap):
            ax.axvline(edge, color=MUTED, linewidth=0.8, linestyle=(0, (2, 2)), zorder=5)
    size = min(canvas.NORMAL, lane_inches * 72 * 0.62)
    small, inch = min(canvas.SMALL, size), axis.width / width
    ax.set_yticks([])
    for y, row, stage in lanes:
        box = (-0.32 * inch, y + 0.06, 0.26 * inch, 0.84)
        draw_chip(ax, row, stage, box, (-0.19 * inch, y + 0.5), 0.24, size)
        kind = canvas.clip_to(stage.kind, canvas.LABELS - 0.37, small)
        ax.text(-0.37 * inch, y + 0.5, kind, fontsize=small, ha="right", va="center")
    _ticks(ax, axis, width)
    canvas.plain_axes(ax, "left")
    notes = [f"{seconds(axis.resume - axis.cut)} omitted at the cut"] if axis.gap else []
    canvas.title(ax, letter, "Predicted step", "; ".join([*notes, *omission_notes(rows)]), outdent=canvas.LABELS)
    sync = f"gradient sync and waiting for it ({seconds(facts.cost.gradient_sync_s)} after the last pipeline)"
    ending = f"{facts.last_phase} ({seconds(facts.cost.optimizer_s)})"
    entries = [
        Patch(facecolor="#C9CFD6", label="forward"),
        Patch(facecolor="#7B8794", label="backward"),
        *([Patch(facecolor="#4A535D", label="gradients of weights")] if facts.plan.schedule.splits else []),
        Patch(facecolor=INK, label="message (thin)"),
        *([Patch(label=sync, **_ENDS["gradient_sync"])] if facts.has_gradient_sync else []),
        Patch(label=ending, **_ENDS["optimizer"]),
    ]
    canvas.legend(ax, entries)
    return ax


def _draw_pipeline(
    ax: Axes, axis: TimeAxis, facts: PlanFacts, row: PipelineRow, at: list[float], lane_inches: float
) -> None:
    """Draw one pipeline's spans; `at` has the position of each stage's lane."""
    pipeline, per_second = facts.plan.pipelines[row.number], canvas.inches(ax)[0] / axis.width
    boxes: dict[tuple[int, int, str, int], list[tuple[float, float]]] = {}
    labels: list[tuple[float, int, int, str, int]] = []
    size = min(6.0, lane_inches * 72 * 0.45 / max(len(stage.parallelism.executors) for stage in pipeline.stages))
    label_inches = canvas.text_inches("0" * len(str(pipeline.num_micro_batches - 1)), size) + 0.03

    def place(stage: int, executor: int) -> tuple[float, float]:
        """The start and height of an executor's part of its stage's lane."""
        height = 0.72 / len(pipeline.stages[stage].parallelism.executors)
        return at[stage] + 0.12 + executor * height, height

    for span in pipeline_spans(facts, row.number, num_operations(facts, row.number) <= MOST_OPERATIONS):
        visible = axis.visible(span.start_s, span.end_s)
        boxes.setdefault((span.stage, span.executor, span.kind, span.chunk), []).extend(visible)
        if span.kind in ("forward", "backward"):
            for left, width in visible:
                if width * per_second > label_inches:
                    labels.append((left + width / 2, span.stage, span.executor, span.kind, span.micro_batch))
    for (k, e, kind, chunk), spans in boxes.items():
        if kind.startswith("send"):
            line = (at[k] + (0.86 if kind == "send_forward" else 0.0), 0.1)
            ax.broken_barh(spans, line, facecolors=INK, linewidth=0, zorder=3)
        elif kind in _ENDS:
            ax.broken_barh(spans, place(k, e), zorder=1 if kind == "gradient_sync" else 2, **_ENDS[kind])
        else:
            colour = mix(row.operation_colour(k, kind), PAPER, 0.5 * chunk / pipeline.num_chunks)
            edge = 0.35 if spans and min(w for _, w in spans[1:-1] or spans) * per_second > 0.04 else 0.0
            ax.broken_barh(spans, place(k, e), facecolors=colour, edgecolors=PAPER, linewidth=edge, zorder=2)
    if size >= 4:
        for x, k, e, kind, batch in labels:
            colour = ink_on(row.operation_colour(k, kind))
            low, height = place(k, e)
            ax.text(x, low + height / 2, f"{batch}", fontsize=size, color=colour, ha="center", va="center", zorder=3)


def _ticks(ax: Axes, axis: TimeAxis, width: float) -> None:
    """Ticks at round times and at the end of the step, on axes `width` inches wide."""
    unit, scale = ("s", 1.0) if axis.end >= 1 else ("ms", 1e3)
    number = max(4, int(width / (1.0 if not axis.gap else 0.8)))
    times = MaxNLocator(number).tick_values(0.0, axis.width * scale)
    step = (times[1] - times[0]) / scale
    moments = [k * step for k in range(int(axis.end / step + 1e-9) + 1)] if axis.end / step < 1e5 else [0.0]
    places = [(moment, axis.at(moment)) for moment in moments if moment <= axis.end]
    last = axis.width
    shown = [(moment, x) for moment, x in places if x is not None and (last - x) * width / last > 0.9]
    labels = [f"{moment * scale:g}" for moment, _ in shown] + [f"{axis.end * scale:.4g} {unit}"]
    ax.set_xticks([x for _, x in shown] + [last], labels)
    ax.get_xticklabels()[-1].set_horizontalalignment("right")
