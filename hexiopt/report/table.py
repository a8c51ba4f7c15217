"""A plan as text for a terminal or a log."""

from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from hexiopt.cost.cost import Cost, StageCost
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.report.kinds import kinds_table
from hexiopt.report.money import money
from hexiopt.report.notes import notes, recorded_notes
from hexiopt.report.rows import PipelineRow, PlanRows, StageRow, plan_rows, unused_devices
from hexiopt.report.step_parts import step_parts
from hexiopt.report.style import (
    FULL_MEMORY,
    PIPELINE_HUES,
    clipped,
    count,
    device_ranges,
    gib,
    listed,
    memory_words,
    milliseconds,
    seconds,
)

_BAR = 5
_SHARE_BAR = 24
_NOTE = "F+B and send (next stage and back): per micro-batch. Busy: of the step. Memory: fullest device, {}."
_HEADERS = (
    "Stage",
    "Devices",
    "TP",
    "Layers",
    "Recomp.",
    "F+B ms",
    "Busy %",
    "Send ms",
    "Memory GiB",
    "Binds",
)
_LEFT = (True, True, False, False, True, False, False, False, False, True)
_DEVICES, _BINDS = 1, 9
_LEAST = {1: 9, 2: 2, 3: 11, 4: 7, 9: 5}  # columns of words and the widths to which they may shrink
_MOST_LINES = {"wide": 20, "narrow": 12}  # of the table of stages, so that all that `plan` prints fits a screen
_GROUP_ABOVE = 4  # pipelines from which equal ones are shown once
_MIN_DEVICES = 12


def plan_table(problem: Problem, plan: Plan, cost: Cost, *, full: bool = False) -> RenderableType:
    """One row per stage, grouped by pipeline; of many pipelines equal ones are shown once.

    Where that would not fit a screen, it is one row per kind of pipelines, unless `full`: then every stage has a row.
    """
    every = sum(len(pipeline.stages) for pipeline in plan.pipelines)
    limits = {"max_pipelines": len(plan.pipelines), "max_stages": every}
    rows = plan_rows(problem, plan, cost, group_above=len(plan.pipelines) if full else _GROUP_ABOVE, **limits)
    note = _NOTE.format(memory_words(problem.space))
    return _PlanTable(rows, note, None if full else kinds_table(problem, plan, cost))


class _PlanTable:
    """A table as wide as the console: the column of devices takes the width that the others leave.

    `note` says what its columns are; `instead` is shown where it has too many lines.
    """

    def __init__(self, rows: PlanRows, note: str, instead: RenderableType | None) -> None:
        self._rows, self._note, self._instead = rows, note, instead

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = [[_cells(row, stage) for stage in row.stages] for row in self._rows.pipelines]
        header = [Text(name, style="bold") for name in _HEADERS]
        widths = _widths([header, *(line for part in parts for line in part)])
        free = options.max_width - sum(widths) + widths[_DEVICES] - (len(widths) - 1)
        narrow = free < min(widths[_DEVICES], _MIN_DEVICES)
        most = _MOST_LINES["narrow" if narrow else "wide"]
        if self._instead is not None and sum(len(row.stages) + 1 for row in self._rows.pipelines) > most:
            yield self._instead
            return
        if narrow:
            parts = [[_cells(row, stage, bar=False) for stage in row.stages] for row in self._rows.pipelines]
            header = [Text(name.replace(" ", "\n"), style="bold") for name in _HEADERS]
            widths = _narrowed([header, *(line for part in parts for line in part)], options.max_width)
        else:
            widths[_DEVICES] = min(widths[_DEVICES], max(_MIN_DEVICES, free))
        total = sum(widths) + len(widths) - 1
        yield _grid(widths, [header])
        for row, part in zip(self._rows.pipelines, parts, strict=True):
            yield Text(_title(row, total), style=f"bold {PIPELINE_HUES[row.hue % len(PIPELINE_HUES)]}")
            yield _grid(widths, part, fold=narrow or not self._rows.grouped)
        if self._rows.note:
            yield Text(self._rows.note[0].upper() + self._rows.note[1:] + ".", style="italic")
        yield Text(self._note, style="dim")


def _widths(lines: list[list[Text]]) -> list[int]:
    """The width of each column."""
    widths = [max(cell_len(part) for line in lines for part in line[k].plain.split("\n")) for k in range(len(_HEADERS))]
    widths[_BINDS] = min(widths[_BINDS], len("+0.0 GiB"))
    return widths


def _narrowed(lines: list[list[Text]], max_width: int) -> list[int]:
    """The widths in a narrow console: the widest columns of words give way, and their cells fold; numbers are whole."""
    widths = _widths(lines)
    while sum(widths) + len(widths) - 1 > max_width:
        widest = max(_LEAST, key=lambda k: widths[k] - _LEAST[k])
        if widths[widest] <= _LEAST[widest]:
            break
        widths[widest] -= 1
    return widths


def _title(row: PipelineRow, width: int) -> str:
    text = (
        f"── pipeline {row.title} · {row.batch} micro-batches · ends at {seconds(row.end_s)}"
        f"{' · longest' if row.longest else ''} "
    )
    return text + "─" * (width - cell_len(text))


def _grid(widths: list[int], lines: list[list[Text]], fold: bool = True) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    for width, left in zip(widths, _LEFT, strict=True):
        table.add_column(
            width=width,
            justify="left" if left else "right",
            overflow="fold" if fold else "ellipsis",
            no_wrap=not fold,
        )
    for line in lines:
        table.add_row(*line)
    return table


def _cells(row: PipelineRow, stage: StageRow, bar: bool = True) -> list[Text]:
    more = " …" if len(row.members) > 1 else ""
    binds = Text(" ".join(stage.binds), style="red" if stage.cost.excess_bytes > 0 else "yellow")
    return [
        Text(row.stage_name(stage)),
        Text(stage.place + more),
        Text(stage.tp),
        Text(f"{stage.layers} {stage.num_layers:2d}"),
        Text(stage.recompute.replace("selective", "select.")),
        Text(milliseconds(stage.compute_s)),
        Text(f"{100 * stage.busy:.0f}"),
        Text("–" if stage.send_s is None else milliseconds(stage.send_s)),
        _memory(stage.cost, bar),
        binds,
    ]


def _memory(cost: StageCost, bar: bool) -> Text:
    share = cost.memory.total / cost.limit_bytes
    filled = min(_BAR, max(0, round(share * _BAR)))
    colour = "green" if share <= FULL_MEMORY else "yellow" if share <= 1 else "red"
    taken = f"{gib(cost.memory.total)}/{gib(cost.limit_bytes)}"
    if not bar:
        return Text(taken, colour)
    text = Text(f"{taken} ")
    return text.append("█" * filled, colour).append("░" * (_BAR - filled), "dim")


def summary_table(problem: Problem, plan: Plan, cost: Cost, solver: Mapping[str, Any] | None = None) -> RenderableType:
    """The performance, choices and origin of a plan; `solver` is the plan file's object of that name."""
    left = [*performance(problem, cost), *bound(cost, solver)]
    right = [*choices(problem, plan), *origin(solver)]
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False, expand=False)
    for kind in ("label", "value", "label", "value"):
        table.add_column(style="dim" if kind == "label" else "", justify="left", overflow="fold")
    for k in range(max(len(left), len(right))):
        pair = [side[k] if k < len(side) else ("", "") for side in (left, right)]
        (a, b), (c, d) = pair
        table.add_row(Text(a), Text(b, "bold" if k == 0 else ""), Text(c), Text(d))
    lines: list[RenderableType] = [Text(headline(problem), style="bold"), table]
    lines += [Text(f"{name}: {said}") for name, said in money(problem, plan, cost)]
    lines += [Text(proved) for proved in restricted_bound(cost, solver)]
    if not cost.fits:
        lines.append(Text(misfit(problem, plan, cost), style="bold red"))
    unused = unused_devices(problem, plan)
    if unused:
        lines.append(Text(f"unused: {listed(device_ranges(problem.cluster, unused), 8)}", style="yellow"))
    every = [*notes(problem, plan, cost), *recorded_notes(solver)]
    lines += [Text(f"note: {note}", style="yellow") for note in every]
    return Group(*lines)


def breakdown_table(problem: Problem, plan: Plan, cost: Cost) -> RenderableType:
    """The parts of the step time with bars of their shares; the figures add up to the step time."""
    spent = step_parts(problem, plan, cost)
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    longest = max(part.share for part in spent.parts)
    for part in spent.parts:
        bar = "█" * max(1, round(part.share / longest * _SHARE_BAR))
        table.add_row(part.name, part.duration, part.percent, Text(bar, part.colour))
    where = f"Where the {seconds(cost.step_time_s)} of a step go: {spent.executor}, which ends last"
    return Group(Text(where, style="bold"), table)


def headline(problem: Problem) -> str:
    """The model and the cluster in one line."""
    cluster, model = problem.cluster, problem.model
    gpus: dict[str, int] = {}
    for machine in cluster.machines:
        gpus[machine.gpu.name] = gpus.get(machine.gpu.name, 0) + machine.num_gpus
    types = listed([f"{number:,} × {name}" for name, number in gpus.items()], 6)
    return (
        f"{clipped(model.name, 100)} ({model.num_params / 1e9:.3g} B) on {clipped(cluster.name, 100)}: "
        f"{count(cluster.num_devices, 'GPU')} ({types})"
    )


def performance(problem: Problem, cost: Cost) -> list[tuple[str, str]]:
    """Step time, throughput and MFU."""
    return [
        ("step time", seconds(cost.step_time_s)),
        ("tokens/s", f"{cost.tokens_per_s:,.0f}"),
        ("MFU", f"{cost.mfu:.1%} of all {problem.cluster.num_devices:,} GPUs"),
    ]


def known_bound(cost: Cost, solver: Mapping[str, Any] | None, key: str) -> list[tuple[float, float]]:
    """The lower bound in seconds that the plan file's `solver` states under `key`, and the plan's gap to it.

    Empty where there is none, or where it does not bound the price: a plan file may have been priced again.
    """
    bound_s = (solver or {}).get(key)
    if not isinstance(bound_s, int | float) or not 0 < bound_s <= cost.step_time_s * (1 + 1e-9):
        return []
    return [(bound_s, max(0.0, 1 - bound_s / cost.step_time_s))]


def bound(cost: Cost, solver: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The lower bound on the step time of every plan, and the gap to it; empty where none is known."""
    return [
        ("lower bound", f"{seconds(bound_s)} (gap {gap:.1%})")
        for bound_s, gap in known_bound(cost, solver, "lower_bound_s")
    ]


def restricted_bound(cost: Cost, solver: Mapping[str, Any] | None) -> list[str]:
    """The lower bound that the solver proved for the part of the plan space that it searched, as a sentence; empty
    where it proved none."""
    space = clipped(str((solver or {}).get("own_space", "")), 200)
    return [restricted_in_words(space, *known) for known in known_bound(cost, solver, "own_lower_bound_s")]


def restricted_in_words(space: str, bound_s: float, gap: float) -> str:
    """A lower bound in seconds for `space`, a part of the plan space in words, and a plan's gap to it."""
    return f"Among {space}, none has a step shorter than {seconds(bound_s)} (gap {gap:.1%})."


def choices(problem: Problem, plan: Plan) -> list[tuple[str, str]]:
    """The workload, and the choices made once for the plan."""
    workload = problem.workload
    stages = sum(len(pipeline.stages) for pipeline in plan.pipelines)
    used = len(plan.devices())
    return [
        ("batch", f"{workload.global_batch:,} × {workload.seq_len:,} tokens, {workload.precision}"),
        ("plan", f"{count(len(plan.pipelines), 'pipeline')}, {count(stages, 'stage')}"),
        ("devices", f"{used:,} of {problem.cluster.num_devices:,} used"),
        ("schedule", plan.schedule.name),
        ("sharding", sharding(plan)),
    ]


def sharding(plan: Plan) -> str:
    """ZeRO stage and sharding groups, in words."""
    stage, groups = plan.sharding.stage, plan.sharding.groups
    if not stage:
        return "none"
    within = {"all": "", "machine": " within machines"}.get(groups) if isinstance(groups, str) else None
    return f"ZeRO-{stage}" + (f" within {len(groups)} groups" if within is None else within)


def origin(solver: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Who found the plan."""
    if not solver or "name" not in solver:
        return []
    status = clipped(str(solver.get("status", "")), 40)
    seed = clipped(str(solver.get("seed", "")), 20)
    rows = [("solver", f"{clipped(str(solver['name']), 60)}, seed {seed}")]
    runtime_s = solver.get("runtime_s")  # null in a plan file
    if status:
        rows.append(("search", f"{seconds(runtime_s)}, {status}" if isinstance(runtime_s, (int, float)) else status))
    if solver.get("pricer"):
        rows.append(("cost model", clipped(str(solver["pricer"]), 60)))
    return rows


def misfit(problem: Problem, plan: Plan, cost: Cost) -> str:
    """A sentence on the stage that exceeds its memory most."""
    p, s = cost.binding_stage()
    devices = device_ranges(problem.cluster, plan.pipelines[p].stages[s].devices)
    where = f"stage {p}·{s} ({listed(devices, 4)})"
    return f"does not fit: {where} is {gib(cost.excess_bytes)} GiB over its memory"
