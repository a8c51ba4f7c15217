"""A plan as one HTML file that loads nothing: its pictures are drawn in it, its one script is its own."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jinja2

from hexiopt.cost.cost import Cost
from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.files.problem_file import problem_sha256, problem_to_dict
from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.report import style, table
from hexiopt.report.machine_map import MAX_SQUARES, machine_kinds, machine_notes, most_telling, network_notes
from hexiopt.report.money import money
from hexiopt.report.notes import notes, recorded_notes
from hexiopt.report.page.lanes import LANE, WIDTH, page_lanes, ticks
from hexiopt.report.rows import PlanRows, plan_rows, unused_devices
from hexiopt.report.step_parts import step_parts
from hexiopt.report.time_axis import time_axis
from hexiopt.report.timeline import last_phase
from hexiopt.solving.result import Point

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
    ("lower bound", "a step time that no plan of the plan space can beat, proven without looking at any plan"),
    ("gap", "the distance from the lower bound to the step time, as a share of the step time: the most that a better "
     "plan could still save"),
    ("MFU", "the model's own FLOPs, without recomputation, over what all GPUs of the cluster could do in the step"),
    ("GB/s", "decimal gigabytes per second; network rates are of one interface, in one direction"),
)  # fmt: skip


def report_html(
    problem: Problem,
    plan: Plan,
    cost: Cost,
    *,
    solver: Mapping[str, Any] | None = None,
    trajectory: Sequence[Point] = (),
    command: str | None = None,
) -> str:
    """The page of a plan: summary, cluster, pipelines with timeline, stages and memory, search and problem.

    `solver` is the plan file's object of that name, `trajectory` the improvements of the search. `command` is the one
    that made the plan, shown as the way to reproduce it.
    """
    unused = unused_devices(problem, plan)
    rows = plan_rows(problem, plan, cost, group_above=12, max_pipelines=_MAX_PIPELINES, max_stages=_MAX_STAGES)
    axis = time_axis(rows, cost)
    kinds = machine_kinds(problem, plan, rows)
    shown = most_telling(kinds, _MAX_MACHINES)
    return (
        _environment()
        .get_template(_TEMPLATE)
        .render(
            problem=problem,
            cost=cost,
            title=f"{problem.model.name} on {problem.cluster.name}",
            headline=table.headline(problem),
            tiles=_tiles(problem, plan, cost, solver),
            does_not_fit="" if cost.fits else table.misfit(problem, plan, cost),
            notes=[*notes(problem, plan, cost), *recorded_notes(solver)],
            unused=style.listed(style.device_ranges(problem.cluster, unused), 40),
            machine_map=[(problem.cluster.machines[members[0]], len(members), squares) for members, squares in shown],
            machines_left_out=sum(len(members) for members, _ in kinds) - sum(len(members) for members, _ in shown),
            max_squares=MAX_SQUARES,
            network=network_notes(problem.cluster),
            ending=last_phase(problem, plan),
            lanes=page_lanes(problem, plan, cost, rows, axis),
            unfolded=_unfolded(rows),
            ticks=ticks(axis),
            axis=axis,
            omitted=style.seconds(axis.resume - axis.cut) if axis.gap else "",
            svg=(WIDTH, LANE),
            summary=(
                [
                    *table.performance(problem, cost),
                    *table.bound(cost, solver),
                    *money(problem, plan, cost),
                ],
                [*table.choices(problem, plan), *table.origin(solver)],
            ),
            step=step_parts(problem, plan, cost),
            rows=rows,
            memory_parts=[(part, style.MEMORY_LABELS[part], style.MEMORY_COLOURS[part]) for part in MEMORY_PARTS],
            memory_words=style.memory_words(problem.space),
            bounds=_bounds(cost, solver),
            chart=_chart(trajectory, cost, solver or {}) if trajectory else None,
            machines=_machine_types(problem.cluster),
            model=_model(problem),
            workload=_workload(problem),
            problem_json=json.dumps(problem_to_dict(problem), indent=1, ensure_ascii=False, default=str),
            words=_WORDS,
            commands=_commands(solver or {}, command),
            sha256=problem_sha256(problem),
        )
    )


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.filters |= {function.__name__: function for function in _FILTERS}
    made.filters["count"] = style.count
    made.filters["machine_note"] = lambda machine: machine_notes(machine)[0]
    return made


def _unfolded(rows: PlanRows) -> set[int]:
    """The numbers of the pipelines that are unfolded at first: the longest, and as many others as are read easily."""
    room, found = _UNFOLDED_STAGES, set[int]()
    for row in sorted(rows.pipelines, key=lambda row: not row.longest):
        room -= len(row.stages)
        if room < 0 and found:
            break
        found.add(row.number)
    return found


def _tiles(problem: Problem, plan: Plan, cost: Cost, solver: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    gaps = [("gap to the bound", f"{gap:.1%}") for _, gap in table.known_bound(cost, solver, "lower_bound_s")]
    return [
        *table.performance(problem, cost)[:2],
        ("MFU", f"{cost.mfu:.1%}"),
        *gaps,
        ("pipelines", f"{len(plan.pipelines):,}"),
        ("GPUs used", f"{len(plan.devices()):,} of {problem.cluster.num_devices:,}"),
    ]


def _bounds(cost: Cost, solver: Mapping[str, Any] | None) -> list[str]:
    """One sentence for each bound that is proven."""
    of_all = "No plan of the space has a shorter step than the lower bound"
    return [*(f"{of_all}: {bound}." for _, bound in table.bound(cost, solver)), *table.restricted_bound(cost, solver)]


def _machine_types(cluster: Cluster) -> list[tuple[int, Machine]]:
    """The number of machines of each entry of the cluster file, and one of them."""
    members: dict[str, list[Machine]] = {}
    for machine in cluster.machines:
        members.setdefault(machine.spec_name, []).append(machine)
    return [(len(alike), alike[0]) for alike in list(members.values())[:_MAX_MACHINE_TYPES]]


def _model(problem: Problem) -> list[tuple[str, str]]:
    model = problem.model
    return [
        ("model", f"{model.name}, {model.num_params / 1e9:.3g} B parameters"),
        ("shape", f"{model.num_layers} layers, hidden {model.hidden_size:,}, {model.num_heads} heads"),
        ("", f"{model.num_kv_heads} KV heads, MLP {model.ffn_size:,}, vocabulary {model.vocab_size:,}"),
    ]


def _workload(problem: Problem) -> list[tuple[str, str]]:
    workload = problem.workload
    return [
        ("batch", f"{workload.global_batch:,} × {workload.seq_len:,} tokens"),
        ("precision", f"{workload.precision}, {workload.states.gradient}-byte gradients"),
        ("recompute", workload.recompute),
    ]


def _commands(solver: Mapping[str, Any], command: str | None) -> list[str]:
    if command is None and "name" in solver:
        command = f"hexiopt plan solver={solver['name']} seed={solver.get('seed', 0)}  # and this problem"
    return [*([command] if command else []), "hexiopt price plan=plan.json"]


@dataclass(frozen=True, slots=True)
class _Chart:
    """Best step time over search time in the SVG's coordinates: a stair with its corners, and horizontal lines."""

    left: ClassVar[int] = 80
    right: ClassVar[int] = 720
    top: ClassVar[int] = 12
    bottom: ClassVar[int] = 212

    stair: str
    dots: Sequence[tuple[float, float]]
    labels: Sequence[tuple[float, str]]  # y and text, of the first and the last step time
    bounds: Sequence[tuple[float, str]]  # y and text, of the lower bound where one is known
    end_s: float


def _chart(trajectory: Sequence[Point], cost: Cost, solver: Mapping[str, Any]) -> _Chart:
    points = [(point.runtime_s, point.step_time_s) for point in trajectory]
    if len(points) > _MAX_POINTS:
        stride = len(points) / _MAX_POINTS
        points = [points[int(k * stride)] for k in range(_MAX_POINTS)] + points[-1:]
    bounds = [bound_s for bound_s, _ in table.known_bound(cost, solver, "lower_bound_s")]
    runtime_s = solver.get("runtime_s")
    end_s = max(points[-1][0], float(runtime_s) if isinstance(runtime_s, int | float) else 0.0, 1e-9)
    values = [value for _, value in points] + bounds
    margin = 0.08 * ((max(values) - min(values)) or max(values) or 1.0)
    low, high = min(values) - margin, max(values) + margin

    def x(time_s: float) -> float:
        return round(_Chart.left + (_Chart.right - _Chart.left) * time_s / end_s, 1)

    def y(step_s: float) -> float:
        return round(_Chart.top + (_Chart.bottom - _Chart.top) * (high - step_s) / (high - low), 1)

    corners = [(x(time_s), y(step_s)) for time_s, step_s in points]
    (first_x, first_y), *later = corners
    stair = f"M{first_x} {first_y}" + "".join(f"H{x}V{y}" for x, y in later) + f"H{_Chart.right}"
    return _Chart(
        stair,
        corners[:_MAX_DOTS],
        [(y(value), style.seconds(value)) for value in dict.fromkeys((points[0][1], points[-1][1]))],
        [(y(value), style.seconds(value)) for value in bounds],
        end_s,
    )
