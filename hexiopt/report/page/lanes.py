"""The predicted step of a pipeline as one SVG: a lane for each stage, a rectangle for each operation."""

from collections.abc import Iterator
from dataclasses import dataclass

from hexiopt.cost.cost import Cost
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.rows import PipelineRow, PlanRows, num_operations
from hexiopt.report.style import OPTIMIZER_COLOUR, PAPER, SYNC_COLOUR, mix, seconds_scale
from hexiopt.report.time_axis import TimeAxis
from hexiopt.report.timeline import has_gradient_sync, last_phase
from hexiopt.simulation.engine import simulate_pipeline

WIDTH, LANE = 1000.0, 20.0  # of the SVG's coordinates; it is stretched to the page
MOST_OPERATIONS = 7_000  # of all pipelines of a page that are drawn one by one
_MESSAGE = {"send_forward": "message to the next stage", "send_backward": "message to the previous stage"}


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


def page_lanes(problem: Problem, plan: Plan, cost: Cost, rows: PlanRows, axis: TimeAxis) -> list[Lanes]:
    """The lanes of every row, in order."""
    syncs, ending = has_gradient_sync(problem, plan), last_phase(problem, plan)
    found, room = [], MOST_OPERATIONS
    for row in rows.pipelines:
        pipeline = plan.pipelines[row.number]
        drawn = list(_operations(plan, cost, row, axis)) if num_operations(pipeline) <= 100_000 else None
        whole = drawn is not None and len(drawn) <= room
        room -= len(drawn) if drawn is not None and whole else 0
        boxes = drawn if drawn is not None and whole else list(_blocks(plan, cost, row, axis))
        boxes = [*boxes, *_ends(plan, cost, row, axis, syncs, ending)]
        found.append(Lanes(row, LANE * len(row.stages), tuple(boxes), whole))
    return found


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
    shares = [(100 * at / axis.width, said) for at, said in placed if at is not None]
    return [*(pair for pair in shares if pair[0] < 84), (100.0, f"{axis.end / scale:.4g} {unit}")]


def _boxes(
    axis: TimeAxis,
    place: tuple[float, float],
    colour: str,
    kind: str,
    stage: str,
    micro_batch: int,
    start_s: float,
    end_s: float,
) -> Iterator[Box]:
    """The visible parts of an operation; `place` is its top and its height."""
    scale = WIDTH / axis.width
    for left, span in axis.spans(start_s, end_s):
        yield Box(left * scale, *(place[0], span * scale, place[1]), colour, kind, stage, micro_batch, start_s, end_s)


def _place(plan: Plan, row: PipelineRow, stage: int, replica: int) -> tuple[float, float]:
    height = 0.72 * LANE / len(plan.pipelines[row.number].stages[stage].parallelism.executors)
    return stage * LANE + 0.12 * LANE + replica * height, height


def _operations(plan: Plan, cost: Cost, row: PipelineRow, axis: TimeAxis) -> Iterator[Box]:
    pipeline, priced = plan.pipelines[row.number], cost.pipelines[row.number]
    for event in simulate_pipeline(row.number, pipeline, priced, plan.schedule):
        name = row.stage_name(row.stages[event.stage])
        if event.kind.startswith("send"):
            top = (event.stage + (0.86 if event.kind == "send_forward" else 0.0)) * LANE
            place, colour, kind = (top, 0.11 * LANE), "var(--ink)", _MESSAGE[event.kind]
        else:
            place = _place(plan, row, event.stage, event.replica)
            colour, kind = row.operation_colours(event.stage)[event.kind == "backward"], event.kind
            colour = mix(colour, PAPER, 0.5 * event.chunk / pipeline.num_chunks)
        yield from _boxes(axis, place, colour, kind, name, event.micro_batch, event.start_s, event.end_s)


def _blocks(plan: Plan, cost: Cost, row: PipelineRow, axis: TimeAxis) -> Iterator[Box]:
    """One rectangle per replica, from the start to its end."""
    batch = f"{row.batch} micro-batches"
    for k, ends in enumerate(cost.pipelines[row.number].replica_end_s):
        for r, end_s in enumerate(ends):
            colour = row.operation_colours(k)[True]
            name = row.stage_name(row.stages[k])
            yield from _boxes(axis, _place(plan, row, k, r), colour, batch, name, -1, 0.0, end_s)


def _ends(plan: Plan, cost: Cost, row: PipelineRow, axis: TimeAxis, syncs: bool, ending: str) -> Iterator[Box]:
    """Gradient synchronisation, with the wait for it, and `ending`, what follows."""
    synced_s = cost.pipeline_s + cost.gradient_sync_s
    for k, ends in enumerate(cost.pipelines[row.number].replica_end_s):
        name = row.stage_name(row.stages[k])
        for r, end_s in enumerate(ends):
            place = _place(plan, row, k, r)
            if syncs:
                said = "gradient sync and waiting for it"
                yield from _boxes(axis, place, SYNC_COLOUR, said, name, -1, end_s, synced_s)
            yield from _boxes(axis, place, OPTIMIZER_COLOUR, ending, name, -1, synced_s, cost.step_time_s)
