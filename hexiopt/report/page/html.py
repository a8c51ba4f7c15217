"""A plan as one HTML file that loads nothing: its pictures and its script are inside."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.files.problem_file import problem_sha256, problem_to_dict
from hexiopt.problem.machine import spec_spans
from hexiopt.report import style, table
from hexiopt.report.facts import PlanFacts
from hexiopt.report.machine_map import machine_map, machine_notes, network_notes
from hexiopt.report.notes import plan_notes
from hexiopt.report.rows import PipelineRow, PlanRows, plan_rows
from hexiopt.report.timeline import MOST_OPERATIONS, TimeAxis, num_operations, pipeline_spans
from hexiopt.solving.result import Point

_WIDTH, _LANE = 1000.0, 20.0  # of the SVG's coordinates; it is stretched to the page
_MOST_BOXES = 7_000  # of the operations of a page's pipelines that are drawn one by one
_SPAN_NAMES = {
    "send_forward": "message to the next stage",
    "send_backward": "message to the previous stage",
    "weights": "gradients of a layer's weights",
    "gradient_sync": "gradient sync and waiting for it",
}
_TEMPLATE = "plan_page.html.jinja"
_FILTERS = (style.seconds, style.milliseconds, style.gib, style.rate, style.ink_on)
_MAX_PIPELINES, _MAX_STAGES = 200, 600
_MAX_MACHINE_TYPES = 200
_MAX_MACHINES = 60  # on the map
_UNFOLDED_STAGES = 40  # of the pipelines that are shown at first
_MAX_POINTS, _MAX_DOTS = 500, 100
_WORDS = (
    ("pipeline", "a copy of the whole model on some GPUs; pipelines share the batch"),
    ("stage", "consecutive layers of a pipeline, and the GPUs that hold them; with TP 2, two GPUs divide each matrix"),
    ("busy", "the share of the step in which a stage computes; the rest it waits, sends and synchronises"),
    ("bubble", "the time in which a stage waits for its neighbours, as pipelines fill and drain or stages are unequal"),
    ("binds", "what limits a plan: the slowest stage sets its pipeline's pace, and a stage full to the last has no "
     "memory left for more layers or less recomputation"),
    ("lower bound", "a step time that no plan under the schedules named can beat, proven without looking at any plan"),
    ("gap", "the distance from the lower bound to the step time, as a share of the step time: the most that a better "
     "plan could still save"),
    ("MFU", "the model's own FLOPs, without recomputation, over what all GPUs of the cluster could do in the step"),
    ("GB/s", "decimal gigabytes per second; network rates are of one interface, in one direction"),
)  # fmt: skip


def report_html(facts: PlanFacts, *, trajectory: Sequence[Point] = (), command: str | None = None) -> str:
    """The page of a plan: summary, cluster, pipelines with timeline, stages and memory, search and problem.

    `trajectory` has the improvements of the search. `command` made the plan, and is shown as the way to reproduce it.
    """
    problem, specs = facts.problem, list(spec_spans(facts.problem.cluster.machines).values())
    rows = plan_rows(facts, group_above=12, max_pipelines=_MAX_PIPELINES, max_stages=_MAX_STAGES)
    axis = TimeAxis.of(facts, rows)
    machines, machines_left_out = machine_map(facts, rows, _MAX_MACHINES)
    results, origins = [*table.performance(facts), *table.bound(facts)], table.origin(facts)
    page = _environment().get_template(_TEMPLATE)
    return page.render(
        facts=facts,
        headline=table.headline(problem),
        tiles=_tiles(facts),
        does_not_fit="" if facts.cost.fits else table.misfit(facts),
        notes=plan_notes(facts),
        unused=facts.unused_ranges(40),
        machine_map=machines,
        machines_left_out=machines_left_out,
        network=network_notes(problem.cluster),
        lanes=_lanes(facts, rows, axis),
        unfolded=_open_pipelines(rows),
        ticks=_ticks(axis),
        axis=axis,
        svg=(_WIDTH, _LANE),
        summary=([*results, *facts.money], [*table.choices(facts), *origins]),
        rows=rows,
        memory_parts=[(part, style.MEMORY_LABELS[part], style.MEMORY_COLOURS[part]) for part in MEMORY_PARTS],
        memory_words=style.memory_words(problem.space),
        bounds=table.known_bounds(facts),
        chart=_chart(trajectory, facts) if trajectory else None,
        machines=[(len(span), problem.cluster.machines[span[0]]) for span in specs[:_MAX_MACHINE_TYPES]],
        problem_json=json.dumps(problem_to_dict(problem), indent=1, ensure_ascii=False, default=str),
        words=_WORDS,
        commands=_commands(facts.solver, command),
        sha256=problem_sha256(problem),
    )


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {function.__name__: function for function in _FILTERS}
    environment.filters["count"] = style.count
    environment.filters["machine_note"] = lambda machine: machine_notes(machine)[0]
    return environment


def _open_pipelines(rows: PlanRows) -> set[int]:
    """The numbers of the pipelines that are unfolded at first: the longest, and as many others as are read easily."""
    free, unfolded = _UNFOLDED_STAGES, set[int]()
    for row in sorted(rows.pipelines, key=lambda row: not row.longest):
        free -= len(row.stages)
        if free < 0 and unfolded:
            break
        unfolded.add(row.number)
    return unfolded


def _tiles(facts: PlanFacts) -> list[tuple[str, str]]:
    bound = facts.bound()
    return [
        *table.performance(facts)[:2],
        ("MFU", f"{facts.cost.mfu:.1%}"),
        *([("gap to the bound", f"{bound[1]:.1%}")] if bound else []),
        ("pipelines", f"{len(facts.plan.pipelines):,}"),
        ("GPUs used", facts.used_devices),
    ]


def _commands(solver: Mapping[str, Any], command: str | None) -> list[str]:
    if command is None and "name" in solver:
        command = f"hexiopt plan solver={solver['name']} seed={solver.get('seed', 0)}  # and this problem"
    return [*([command] if command else []), "hexiopt price plan=plan.json"]


def _chart(trajectory: Sequence[Point], facts: PlanFacts) -> dict[str, Any]:
    """Best step time over search time in the SVG's coordinates: a stair with its corners `dots`, `labels` (y and text)
    of the first and the last step time, and `bounds` (y and text), the lower bound where one is known."""
    left, right, top, bottom = 80, 720, 12, 212
    points = [(point.runtime_s, point.step_time_s) for point in trajectory]
    if len(points) > _MAX_POINTS:
        stride = len(points) / _MAX_POINTS
        points = [points[int(k * stride)] for k in range(_MAX_POINTS)] + points[-1:]
    bound, runtime_s = facts.bound(), facts.solver.get("runtime_s")
    bounds = [bound[0]] if bound else []
    end_s = max(points[-1][0], float(runtime_s) if isinstance(runtime_s, int | float) else 0.0, 1e-9)
    values = [value for _, value in points] + bounds
    margin = 0.08 * ((max(values) - min(values)) or max(values) or 1.0)
    low, high = min(values) - margin, max(values) + margin

    def x(time_s: float) -> float:
        return round(left + (right - left) * time_s / end_s, 1)

    def y(step_s: float) -> float:
        return round(top + (bottom - top) * (high - step_s) / (high - low), 1)

    corners = [(x(time_s), y(step_s)) for time_s, step_s in points]
    (first_x, first_y), *later = corners
    stair = f"M{first_x} {first_y}" + "".join(f"H{x}V{y}" for x, y in later) + f"H{right}"
    return {
        "left": left,
        "right": right,
        "top": top,
        "bottom": bottom,
        "end_s": end_s,
        "stair": stair,
        "dots": corners[:_MAX_DOTS],
        "labels": [(y(value), style.seconds(value)) for value in dict.fromkeys((points[0][1], points[-1][1]))],
        "bounds": [(y(value), style.seconds(value)) for value in bounds],
    }


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, and its text under the mouse: an operation with its micro-batch (-1: none), start and end."""

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
    """The lanes of one pipeline; `whole` is False if its operations are too many to be drawn one by one."""

    row: PipelineRow
    height: float
    boxes: tuple[Box, ...]
    whole: bool


def _lanes(facts: PlanFacts, rows: PlanRows, axis: TimeAxis) -> list[Lanes]:
    """The lanes of every row, in order."""
    lanes, free = [], _MOST_BOXES
    for row in rows.pipelines:
        whole = num_operations(facts, row.number) <= MOST_OPERATIONS
        boxes = tuple(_boxes(facts, row, axis, whole))
        operations = sum(1 for box in boxes if box.micro_batch >= 0)
        if whole and operations > free:
            whole, boxes = False, tuple(_boxes(facts, row, axis, False))
        elif whole:
            free -= operations
        lanes.append(Lanes(row, _LANE * len(row.stages), boxes, whole))
    return lanes


def _ticks(axis: TimeAxis) -> list[tuple[float, str]]:
    """Positions in percent and labels: round times at most eight, and the end of the step."""
    scale, _, unit = style.seconds_scale(axis.end)
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
    pipeline, scale = facts.plan.pipelines[row.number], _WIDTH / axis.width
    names = {**_SPAN_NAMES, "micro_batches": f"{row.batch} micro-batches", "optimizer": facts.last_phase}
    colours = {"gradient_sync": style.SYNC_COLOUR, "optimizer": style.OPTIMIZER_COLOUR}
    for span in pipeline_spans(facts, row.number, whole):
        height = 0.72 * _LANE / len(pipeline.stages[span.stage].parallelism.executors)
        y, colour = span.stage * _LANE + 0.12 * _LANE + span.executor * height, colours.get(span.kind, "")
        if span.is_message:
            y, height = (span.stage + (0.86 if span.kind == "send_forward" else 0.0)) * _LANE, 0.11 * _LANE
            colour = "var(--ink)"
        elif not colour:
            colour = row.operation_colour(span.stage, span.kind)
            colour = style.mix(colour, style.PAPER, 0.5 * span.chunk / pipeline.num_chunks)
        text = names.get(span.kind, span.kind), row.stages[span.stage].name, span.micro_batch
        for left, width in axis.visible(span.start_s, span.end_s):
            yield Box(left * scale, y, width * scale, height, colour, *text, span.start_s, span.end_s)
