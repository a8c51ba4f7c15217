"""A plan as text for a terminal or a log."""

from itertools import islice

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from hexiopt.numbers.messages import TRAINING
from hexiopt.problem.problem import Problem
from hexiopt.report.facts import MemoryUse, PlanFacts, StageFacts, is_full, largest_parts, memory_of_limit
from hexiopt.report.notes import plan_notes
from hexiopt.report.rows import PipelineKind, PipelineRow, PlanRows, chain, pipeline_kinds, plan_rows
from hexiopt.report.style import (
    PIPELINE_HUES,
    clip,
    count,
    gib,
    join_names,
    memory_words,
    milliseconds,
    percent,
    seconds,
)

_BAR = 5
_SHARE_BAR = 24
_NOTE = "F+B and send (next stage and back): per micro-batch. Busy: of the step. Memory: fullest device, {}."
_HEADERS = ("Stage", "Devices", "TP", "Layers", "Recomp.", "F+B ms", "Busy %", "Send ms", "Memory GiB", "Binds")
_LEFT = (True, True, False, False, True, False, False, False, False, True)
_DEVICES, _BINDS = 1, 9
_LEAST = {1: 9, 2: 2, 3: 11, 4: 7, 9: 5}  # columns of words and the widths to which they may shrink
_MOST_LINES = {"wide": 20, "narrow": 12}  # of the table of stages, so that all that `plan` prints fits a screen
_GROUP_ABOVE = 4  # pipelines from which equal ones are shown once
_MIN_DEVICES = 12
_MOST_KINDS = 10
_KIND_HEADERS = ("", "GPUs", "Stages", "Layers", "Sequences", "Ends at", "Memory")
_KIND_NOTE = (
    "N ×: pipelines with the same GPU types and parallelism of their stages. Layers: of a stage. Sequences: of a "
    "pipeline in a step. Memory: the fullest device, GiB of its limit, {}. Every stage: print=full."
)

_SHORT = 68  # characters of a line of `in_short`, without its label

Pairs = list[tuple[str, str]]  # labels and texts


def plan_table(facts: PlanFacts, *, full: bool = False) -> RenderableType:
    """One row per stage, grouped by pipeline; if there are many pipelines, equal ones are shown once.

    A table that would not fit a screen has one row per kind of pipelines instead, unless `full`: then every stage has a
    row.
    """
    number = len(facts.plan.pipelines)
    group_above = number if full else _GROUP_ABOVE
    rows = plan_rows(facts, group_above=group_above, max_pipelines=number, max_stages=facts.num_stages)
    note = _NOTE.format(memory_words(facts.problem.space))
    return _PlanTable(rows, note, None if full else kinds_table(facts))


class _PlanTable:
    """A table as wide as the console: the column of devices takes the width that the others leave.

    `note` explains the columns; `instead` is shown if the table would have too many lines.
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
            widths = _narrow_widths([header, *(line for part in parts for line in part)], options.max_width)
        else:
            widths[_DEVICES] = min(widths[_DEVICES], max(_MIN_DEVICES, free))
        total = sum(widths) + len(widths) - 1
        yield _grid(widths, [header])
        for row, part in zip(self._rows.pipelines, parts, strict=True):
            yield Text(_title(row, total), style=f"bold {PIPELINE_HUES[row.hue % len(PIPELINE_HUES)]}")
            yield _grid(widths, part, fold=narrow or not self._rows.is_grouped)
        if self._rows.note:
            yield Text(self._rows.note[0].upper() + self._rows.note[1:] + ".", style="italic")
        yield Text(self._note, style="dim")


def _widths(lines: list[list[Text]]) -> list[int]:
    """The width of each column."""
    widths = [max(cell_len(part) for line in lines for part in line[k].plain.split("\n")) for k in range(len(_HEADERS))]
    widths[_BINDS] = min(widths[_BINDS], len("+0.0 GiB"))
    return widths


def _narrow_widths(lines: list[list[Text]], max_width: int) -> list[int]:
    """The widths in a narrow console: the widest columns of words shrink and their cells fold; numbers stay whole."""
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
        justify: JustifyMethod = "left" if left else "right"
        table.add_column(width=width, justify=justify, overflow="fold" if fold else "ellipsis", no_wrap=not fold)
    for line in lines:
        table.add_row(*line)
    return table


def _cells(row: PipelineRow, stage: StageFacts, bar: bool = True) -> list[Text]:
    more = " …" if len(row.members) > 1 else ""
    return [
        Text(stage.name),
        Text(stage.place + more),
        Text(stage.degrees),
        Text(f"{stage.layers} {stage.num_layers:2d}"),
        Text(stage.recompute.replace("selective", "select.")),
        Text(milliseconds(stage.compute_s)),
        Text(f"{100 * stage.busy:.0f}"),
        Text("–" if stage.send_s is None else milliseconds(stage.send_s)),
        _memory(stage.cost, bar),
        Text(" ".join(stage.binds), style="red" if stage.cost.excess_bytes > 0 else "yellow"),
    ]


def _memory(use: MemoryUse, bar: bool = False) -> Text:
    """The memory of the fullest device over its limit, in the colour of its share."""
    text = f"{gib(use.memory.total)}/{gib(use.limit_bytes)}"
    colour = "red" if use.memory.total > use.limit_bytes else "yellow" if is_full(use) else "green"
    if not bar:
        return Text(text, colour)
    filled = min(_BAR, max(0, round(use.memory.total / use.limit_bytes * _BAR)))
    return Text(f"{text} ").append("█" * filled, colour).append("░" * (_BAR - filled), "dim")


def kinds_table(facts: PlanFacts) -> RenderableType:
    """A row per kind of pipelines, among them always the kinds that end last and that have least free memory."""
    kinds, number = pipeline_kinds(facts), len(facts.plan.pipelines)
    last, tightest = max(kinds, key=lambda kind: kind.end_s), facts.tightest.pipeline
    urgent = [kind for kind in kinds if kind is last or tightest in kind.members]
    shown = [*urgent, *(kind for kind in kinds if kind not in urgent)][:_MOST_KINDS]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in _KIND_HEADERS:
        words = name == "Stages"
        table.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for kind in kinds:
        if kind in shown:
            table.add_row(*_kind_cells(kind, kind is last and number > 1))
    rest = [kind for kind in kinds if kind not in shown]
    if rest:
        pipelines, gpus = sum(len(kind.members) for kind in rest), sum(kind.num_gpus for kind in rest)
        others = f"of {count(len(rest), 'other kind')}, which end earlier and have more free memory"
        table.add_row(f"{pipelines:,} ×", f"{gpus:,}", Text(others, style="italic"))
    title = f"{count(number, 'pipeline')} of {count(len(kinds), 'kind')}"
    note = _KIND_NOTE.format(memory_words(facts.problem.space))
    return Group(Text(title, style="bold"), table, Text(note, style="dim"))


def _kind_cells(kind: PipelineKind, is_last: bool) -> list[Text]:
    return [
        Text(f"{len(kind.members):,} ×", style="bold"),
        Text(f"{kind.num_gpus:,}"),
        Text(chain(kind.stages) + (" · longest" if is_last else "")),
        *(Text(f"{low:,}" if low == high else f"{low:,}–{high:,}") for low, high in (kind.layers, kind.sequences)),
        Text(seconds(kind.end_s)),
        _memory(kind.fullest.cost),
    ]


def summary_table(facts: PlanFacts) -> RenderableType:
    """The performance, choices and origin of a plan."""
    left, right = [*performance(facts), *bound(facts)], [*choices(facts), *origin(facts)]
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False, expand=False)
    for kind in ("label", "value", "label", "value"):
        table.add_column(style="dim" if kind == "label" else "", justify="left", overflow="fold")
    for k in range(max(len(left), len(right))):
        (a, b), (c, d) = (side[k] if k < len(side) else ("", "") for side in (left, right))
        table.add_row(Text(a), Text(b, "bold" if k == 0 else ""), Text(c), Text(d))
    lines: list[RenderableType] = [Text(headline(facts.problem), style="bold"), table]
    lines += [Text(f"{label}: {text}") for label, text in facts.money]
    lines += map(Text, known_bounds(facts))
    if not facts.cost.fits:
        lines.append(Text(misfit(facts), style="bold red"))
    if facts.unused_devices:
        lines.append(Text(f"unused: {facts.unused_ranges(8)}", style="yellow"))
    lines += [Text(f"note: {note}", style="yellow") for note in plan_notes(facts)]
    return Group(*lines)


def breakdown_table(facts: PlanFacts) -> RenderableType:
    """The parts of the step time with bars of their shares; the figures add up to the step time."""
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    longest = max(part.share for part in facts.step.parts)
    for part in facts.step.parts:
        bar = "█" * max(1, round(part.share / longest * _SHARE_BAR))
        table.add_row(part.name, part.duration, part.percent, Text(bar, part.colour))
    where = f"Where the {seconds(facts.cost.step_time_s)} of a step go: {facts.step.executor}, which ends last"
    return Group(Text(where, style="bold"), table)


def headline(problem: Problem) -> str:
    """The model and the cluster in one line."""
    cluster, model = problem.cluster, problem.model
    gpus: dict[str, int] = {}
    for machine in cluster.machines:
        gpus[machine.gpu.name] = gpus.get(machine.gpu.name, 0) + machine.num_gpus
    types = join_names([f"{number:,} × {name}" for name, number in gpus.items()], 6)
    return (
        f"{clip(model.name, 100)} ({model.num_params / 1e9:.3g} B) on {clip(cluster.name, 100)}: "
        f"{count(cluster.num_devices, 'GPU')} ({types})"
    )


def performance(facts: PlanFacts) -> Pairs:
    """Step time, throughput and MFU."""
    cost = facts.cost
    return [
        ("step time", seconds(cost.step_time_s)),
        ("tokens/s", f"{cost.tokens_per_s:,.0f}"),
        ("MFU", f"{cost.mfu:.1%} of all {facts.problem.cluster.num_devices:,} GPUs"),
    ]


def bound(facts: PlanFacts) -> Pairs:
    """The lower bound on the step time of every plan, and the gap to it; empty where none is known."""
    known = facts.bound()
    return [("lower bound", f"{seconds(known[0])} (gap {known[1]:.1%})")] if known else []


def known_bounds(facts: PlanFacts) -> list[str]:
    """A sentence for each lower bound that is known: of every plan, and of the part of the plan space that the solver
    searched."""
    problem, known, known_part = facts.problem, facts.bound(), facts.bound("own_lower_bound_s")
    part = clip(str(facts.solver.get("own_space", "")), 200)
    return [
        *([bound_in_words(problem.plans_in_words, *known)] if known else []),
        *([bound_in_words(part, *known_part)] if known_part else []),
    ]


def bound_in_words(space: str, bound_s: float, gap: float) -> str:
    """A lower bound in seconds for `space`, a part of the plan space in words, and a plan's gap to it."""
    return f"Among {space}, none has a step shorter than {seconds(bound_s)} (gap {gap:.1%})."


def choices(facts: PlanFacts) -> Pairs:
    """The workload, and the choices made once for the plan."""
    workload, plan = facts.problem.workload, facts.plan
    precision = workload.precision
    if workload.message_precision != TRAINING:
        precision += f", messages {workload.message_precision}"
    return [
        ("batch", f"{workload.global_batch:,} × {workload.seq_len:,} tokens, {precision}"),
        *([("training", training)] if (training := facts.problem.parameters.in_words) else []),
        ("plan", f"{count(len(plan.pipelines), 'pipeline')}, {count(facts.num_stages, 'stage')}"),
        ("devices", f"{facts.used_devices} used"),
        ("schedule", plan.schedule.name),
        ("sharding", facts.sharding),
    ]


def origin(facts: PlanFacts) -> Pairs:
    """The solver that found the plan, and its search."""
    solver = facts.solver
    if "name" not in solver:
        return []
    status, seed = clip(str(solver.get("status", "")), 40), clip(str(solver.get("seed", "")), 20)
    rows = [("solver", f"{clip(str(solver['name']), 60)}, seed {seed}")]
    runtime_s = solver.get("runtime_s")  # null in a plan file
    if status:
        rows.append(("search", f"{seconds(runtime_s)}, {status}" if isinstance(runtime_s, int | float) else status))
    if solver.get("pricer"):
        rows.append(("cost model", clip(str(solver["pricer"]), 60)))
    return rows


def misfit(facts: PlanFacts) -> str:
    """A sentence on the stage that exceeds its memory most."""
    stage = facts.tightest
    return f"does not fit: stage {stage.name} ({stage.where(4)}) is {gib(stage.cost.excess_bytes)} GiB over its memory"


def in_short(facts: PlanFacts) -> Pairs:
    """Labels and texts of at most ten lines, which fit 80 columns."""
    cost, plan, tight = facts.cost, facts.plan, facts.tightest
    parts = sorted(facts.step.parts, key=lambda part: -part.share)[:3]
    sizes = (len(plan.pipelines), "pipeline"), (len(pipeline_kinds(facts)), "kind"), (facts.num_stages, "stage")
    pipelines, kinds, stages = (count(*size) for size in sizes)
    rows = [
        ("problem", facts.title),
        ("step", f"{seconds(cost.step_time_s)}, {cost.tokens_per_s:,.0f} tokens/s, MFU {cost.mfu:.1%} of all GPUs"),
        *((label, f"{text} of {facts.problem.plans_in_words}") for label, text in bound(facts)),
        ("plan", f"{pipelines} of {kinds}, {stages}, {plan.schedule.name}, sharding {facts.sharding}"),
        ("time", ", ".join(f"{part.name} {part.percent}" for part in parts) + f" ({facts.step.executor})"),
        ("slowest", _slowest(facts)),
        ("memory", f"stage {tight.name} {memory_of_limit(tight.cost)}: {largest_parts(tight.cost, 2)}"),
        *facts.money,
        (
            "unused",
            f"{count(len(facts.unused_devices), 'GPU')}: {facts.unused_ranges(3)}"
            if facts.unused_devices
            else "no GPU",
        ),
    ]
    return [(label, clip(text, _SHORT)) for label, text in islice(rows, 10)]


def short_table(facts: PlanFacts) -> Table:
    """`in_short` for a terminal."""
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for label, text in in_short(facts):
        table.add_row(Text(label, style="dim"), Text(text, style="bold" if label == "step" else ""))
    return table


def _slowest(facts: PlanFacts) -> str:
    """The slowest stage of the pipeline that ends last, or its slowest message if that takes longer, in words."""
    stage, message = facts.slowest, facts.slowest_message
    if message is not None and message.send_s is not None:
        ends = f"{message.name} and {message.pipeline}·{message.number + 1}"
        return f"messages of stages {ends} take {milliseconds(message.send_s)} ms a micro-batch"
    time_and_share = f"{milliseconds(stage.compute_s)} ms a micro-batch, busy {percent(stage.busy)}"
    return f"stage {stage.name} ({stage.where(1)}) {time_and_share}"
