"""A plan in ten short lines: how fast it is, where its time goes, what binds time and memory, and what is unused."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

from rich.table import Table
from rich.text import Text

from hexiopt.cost.cost import Cost
from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.kinds import pipeline_kinds
from hexiopt.report.money import money
from hexiopt.report.rows import unused_devices
from hexiopt.report.step_parts import step_parts
from hexiopt.report.style import (
    MEMORY_LABELS,
    clipped,
    count,
    device_ranges,
    gib,
    listed,
    milliseconds,
    percent,
    seconds,
)
from hexiopt.report.table import known_bound, sharding

_PARTS = {"time": 3, "memory": 2}  # the largest ones
_WIDTH = 68  # of a line beside its label


def in_short(
    problem: Problem, plan: Plan, cost: Cost, solver: Mapping[str, Any] | None = None
) -> list[tuple[str, str]]:
    """Labels and texts of at most ten lines, which hold at 80 columns; `solver` is the plan file's object of that
    name."""
    rows = [
        ("problem", f"{problem.model.name} on {problem.cluster.name}"),
        ("step", f"{seconds(cost.step_time_s)}, {cost.tokens_per_s:,.0f} tokens/s, MFU {cost.mfu:.1%} of all GPUs"),
        *(
            ("bound", f"at least {seconds(bound_s)} for any plan, so at most {gap:.1%} above the best")
            for bound_s, gap in _above(cost, solver)
        ),
        ("plan", _plan(problem, plan, cost)),
        ("time", _time(problem, plan, cost)),
        ("slowest", _slowest(problem, plan, cost)),
        ("memory", _memory(problem, plan, cost)),
        *money(problem, plan, cost),
        ("unused", _unused(problem, plan)),
    ]
    return [(label, clipped(text, _WIDTH)) for label, text in islice(rows, 10)]


def summed_up(problem: Problem, plan: Plan, cost: Cost, solver: Mapping[str, Any] | None = None) -> Table:
    """`in_short` for a terminal."""
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for label, text in in_short(problem, plan, cost, solver):
        table.add_row(Text(label, style="dim"), Text(text, style="bold" if label == "step" else ""))
    return table


def _above(cost: Cost, solver: Mapping[str, Any] | None) -> list[tuple[float, float]]:
    return [(bound_s, cost.step_time_s / bound_s - 1) for bound_s, _ in known_bound(cost, solver, "lower_bound_s")]


def _plan(problem: Problem, plan: Plan, cost: Cost) -> str:
    kinds = count(len(pipeline_kinds(problem, plan, cost)), "kind")
    stages = count(sum(len(pipeline.stages) for pipeline in plan.pipelines), "stage")
    said = f"{count(len(plan.pipelines), 'pipeline')} of {kinds}, {stages}, {plan.schedule.name}"
    return f"{said}, sharding {sharding(plan)}"


def _time(problem: Problem, plan: Plan, cost: Cost) -> str:
    spent = step_parts(problem, plan, cost)
    largest = sorted(spent.parts, key=lambda part: -part.share)[: _PARTS["time"]]
    return ", ".join(f"{part.name} {part.percent.strip()}" for part in largest) + f" ({spent.executor})"


def _slowest(problem: Problem, plan: Plan, cost: Cost) -> str:
    """The stage that takes longest in the pipeline that ends last; or its longest message where that takes longer."""
    p = max(range(len(plan.pipelines)), key=lambda p: cost.pipelines[p].end_s)
    priced, pipeline = cost.pipelines[p], plan.pipelines[p]
    times = [stage.forward_s + stage.backward_s for stage in priced.stages]
    s = max(range(len(times)), key=times.__getitem__)
    busy = pipeline.num_micro_batches * times[s] / cost.step_time_s
    where = listed(device_ranges(problem.cluster, pipeline.stages[s].devices), 1)
    sends = [a + b for a, b in zip(priced.send_forward_s, priced.send_backward_s, strict=True)]
    if sends and max(sends) > times[s]:
        k = sends.index(max(sends))
        return f"messages of stages {p}·{k} and {p}·{k + 1} take {milliseconds(max(sends))} ms a micro-batch"
    return f"stage {p}·{s} ({where}) {milliseconds(times[s])} ms a micro-batch, busy {percent(busy)}"


def _memory(problem: Problem, plan: Plan, cost: Cost) -> str:
    p, s = cost.binding_stage()
    stage = cost.pipelines[p].stages[s]
    largest = sorted(MEMORY_PARTS, key=lambda part: -getattr(stage.memory, part))[: _PARTS["memory"]]
    held = ", ".join(f"{MEMORY_LABELS[part]} {gib(getattr(stage.memory, part))}" for part in largest)
    return f"stage {p}·{s} {gib(stage.memory.total)} of {gib(stage.limit_bytes)} GiB: {held}"


def _unused(problem: Problem, plan: Plan) -> str:
    unused = unused_devices(problem, plan)
    if not unused:
        return "no GPU"
    return f"{count(len(unused), 'GPU')}: {listed(device_ranges(problem.cluster, unused), 3)}"
