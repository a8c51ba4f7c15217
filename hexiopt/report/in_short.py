"""A plan in ten short lines: how fast it is, where its time goes, what binds time and memory, and what is unused."""

from itertools import islice

from rich.table import Table
from rich.text import Text

from hexiopt.report.facts import PlanFacts, largest_parts, taken
from hexiopt.report.rows import pipeline_kinds
from hexiopt.report.style import clipped, count, milliseconds, percent, seconds

_PARTS = {"time": 3, "memory": 2}  # the largest ones
_WIDTH = 68  # of a line beside its label


def in_short(facts: PlanFacts) -> list[tuple[str, str]]:
    """Labels and texts of at most ten lines, which hold at 80 columns."""
    cost, plan, tight, known = facts.cost, facts.plan, facts.tightest, facts.bound()
    parts = sorted(facts.step.parts, key=lambda part: -part.share)[: _PARTS["time"]]
    sizes = (len(plan.pipelines), "pipeline"), (len(pipeline_kinds(facts)), "kind"), (facts.num_stages, "stage")
    pipelines, kinds, stages = (count(*size) for size in sizes)
    rows = [
        ("problem", facts.title),
        ("step", f"{seconds(cost.step_time_s)}, {cost.tokens_per_s:,.0f} tokens/s, MFU {cost.mfu:.1%} of all GPUs"),
        *((("bound", _bound(known[0], cost.step_time_s)),) if known else ()),
        ("plan", f"{pipelines} of {kinds}, {stages}, {plan.schedule.name}, sharding {facts.sharding}"),
        ("time", ", ".join(f"{part.name} {part.percent}" for part in parts) + f" ({facts.step.executor})"),
        ("slowest", _slowest(facts)),
        ("memory", f"stage {tight.name} {taken(tight.cost)}: {largest_parts(tight.cost, _PARTS['memory'])}"),
        *((("price", facts.money),) if facts.money else ()),
        ("unused", f"{count(len(facts.unused), 'GPU')}: {facts.unused_where(3)}" if facts.unused else "no GPU"),
    ]
    return [(label, clipped(text, _WIDTH)) for label, text in islice(rows, 10)]


def summed_up(facts: PlanFacts) -> Table:
    """`in_short` for a terminal."""
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for label, text in in_short(facts):
        table.add_row(Text(label, style="dim"), Text(text, style="bold" if label == "step" else ""))
    return table


def _bound(bound_s: float, step_time_s: float) -> str:
    return f"at least {seconds(bound_s)} for any plan, so at most {step_time_s / bound_s - 1:.1%} above the best"


def _slowest(facts: PlanFacts) -> str:
    """The stage that takes longest in the pipeline that ends last; or its longest message where that takes longer."""
    stage, message = facts.slowest, facts.slowest_message
    if message is not None and message.send_s is not None:
        ends = f"{message.name} and {message.pipeline}·{message.number + 1}"
        return f"messages of stages {ends} take {milliseconds(message.send_s)} ms a micro-batch"
    took = f"{milliseconds(stage.compute_s)} ms a micro-batch, busy {percent(stage.busy)}"
    return f"stage {stage.name} ({stage.where(1)}) {took}"
