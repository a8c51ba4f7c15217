"""The predicted step of a pipeline as one SVG: a lane for each stage, a rectangle for each operation."""

from collections.abc import Iterator
from dataclasses import dataclass

from hexiopt.report.facts import PlanFacts
from hexiopt.report.rows import PipelineRow, PlanRows
from hexiopt.report.style import OPTIMIZER_COLOUR, PAPER, SYNC_COLOUR, mix, seconds_scale
from hexiopt.report.timeline import MOST_OPERATIONS, TimeAxis, num_operations, pipeline_spans

WIDTH, LANE = 1000.0, 20.0  # of the SVG's coordinates; it is stretched to the page
MOST_BOXES = 7_000  # of the operations of a page's pipelines that are drawn one by one
_NAMES = {
    "send_forward": "message to the next stage",
    "send_backward": "message to the previous stage",
    "gradient_sync": "gradient sync and waiting for it",
}


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, and what it says under the mouse: an operation with its micro-batch (-1: none), start and end."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    kind: str
    stage: str
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes of one pipeline; `whole` is False where its operations are too many to be drawn one by one."""

    row: PipelineRow
    height: float
    boxes: tuple[Box, ...]
    whole: bool


def page_lanes(facts: PlanFacts, rows: PlanRows, axis: TimeAxis) -> list[Lanes]:
    """The lanes of every row, in order."""
    lanes, free = [], MOST_BOXES
    for row in rows.pipelines:
        whole = num_operations(facts.plan.pipelines[row.number]) <= MOST_OPERATIONS
        boxes = tuple(_boxes(facts, row, axis, whole))
        operations = sum(1 for box in boxes if box.micro_batch >= 0)
        if whole and operations > free:
            whole, boxes = False, tuple(_boxes(facts, row, axis, False))
        elif whole:
            free -= operations
        lanes.append(Lanes(row, LANE * len(row.stages), boxes, whole))
    return lanes


def ticks(axis: TimeAxis) -> list[tuple[float, str]]:
    """Positions in percent and labels: round times at most eight, and the end of the step."""
    scale, _, unit = seconds_scale(axis.end)
    least = axis.width / scale / 7
    power = 10.0 ** len(f"{int(least)}") if least >= 1 else 1.0
    while power > least:
        power /= 10
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    moments = (k * step for k in range(int(axis.end / scale / step) + 1))
    placed = [(axis.at(moment * scale), f"{moment:.10g}") for moment in moments]
    shares = [(100 * at / axis.width, text) for at, text in placed if at is not None]
    return [*(pair for pair in shares if pair[0] < 84), (100.0, f"{axis.end / scale:.4g} {unit}")]


def _boxes(facts: PlanFacts, row: PipelineRow, axis: TimeAxis, whole: bool) -> Iterator[Box]:
    """The visible parts of a pipeline's spans."""
    pipeline, scale = facts.plan.pipelines[row.number], WIDTH / axis.width
    names = {**_NAMES, "micro_batches": f"{row.batch} micro-batches", "optimizer": facts.last_phase}
    colours = {"gradient_sync": SYNC_COLOUR, "optimizer": OPTIMIZER_COLOUR}
    for span in pipeline_spans(facts, row.number, whole):
        height = 0.72 * LANE / len(pipeline.stages[span.stage].executors)
        y, colour = span.stage * LANE + 0.12 * LANE + span.executor * height, colours.get(span.kind, "")
        if span.is_message:
            y, height = (span.stage + (0.86 if span.kind == "send_forward" else 0.0)) * LANE, 0.11 * LANE
            colour = "var(--ink)"
        elif not colour:
            colour = row.operation_colours(span.stage)[span.kind != "forward"]
            colour = mix(colour, PAPER, 0.5 * span.chunk / pipeline.num_chunks)
        text = names.get(span.kind, span.kind), row.stages[span.stage].name, span.micro_batch
        for left, width in axis.visible(span.start_s, span.end_s):
            yield Box(left * scale, y, width * scale, height, colour, *text, span.start_s, span.end_s)
