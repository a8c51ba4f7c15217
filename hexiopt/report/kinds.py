"""Kinds of pipelines: those through the same types of GPUs with the same parallelism, as one row with a count.

Nothing is left out: kinds beyond those shown are counted together, with their GPUs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hexiopt.cost.cost import Cost
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.report.style import FULL_MEMORY, count, gib, gpu_names, memory_words, seconds

_MOST_KINDS = 10
_MOST_RUNS = 5  # of like stages, in a row
_HEADERS = ("", "GPUs", "Stages", "Layers", "Sequences", "Ends at", "Memory")
_NOTE = (
    "N ×: pipelines with the same GPU types and parallelism of their stages. Layers: of a stage. Sequences: of a "
    "pipeline in a step. Memory: the fullest device, GiB of its limit, {}. Every stage: print=full."
)

Kind = tuple[str, ...]  # of a pipeline, the words for each stage


@dataclass(frozen=True, slots=True)
class PipelineKind:
    """Pipelines of a kind, by their indices, with what spans all of them. `fullest` is the (pipeline, stage) with the
    least free memory."""

    stages: Kind
    members: tuple[int, ...]
    num_gpus: int
    layers: tuple[int, int]
    sequences: tuple[int, int]
    end_s: float
    fullest: tuple[int, int]


def pipeline_kinds(problem: Problem, plan: Plan, cost: Cost) -> list[PipelineKind]:
    """The kinds of a plan's pipelines, those with most GPUs first."""
    members: dict[Kind, list[int]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        members.setdefault(tuple(_stage(problem, stage) for stage in pipeline.stages), []).append(p)
    found = [_kind(plan, cost, kind, own) for kind, own in members.items()]
    return sorted(found, key=lambda kind: (-kind.num_gpus, kind.members))


def _stage(problem: Problem, stage: Stage) -> str:
    devices = stage.devices
    degrees = stage.parallelism.degrees
    words = degrees if isinstance(stage.parallelism, SequenceParallel) else f"TP {degrees}"
    return f"{words} {gpu_names(problem.cluster, devices)}" if len(devices) > 1 else gpu_names(problem.cluster, devices)


def _kind(plan: Plan, cost: Cost, kind: Kind, own: Sequence[int]) -> PipelineKind:
    pipelines = [plan.pipelines[p] for p in own]
    layers = [stage.num_layers for pipeline in pipelines for stage in pipeline.stages]
    sequences = [pipeline.num_micro_batches * pipeline.micro_batch_size for pipeline in pipelines]
    places = [(p, s) for p in own for s in range(len(plan.pipelines[p].stages))]
    return PipelineKind(
        stages=kind,
        members=tuple(own),
        num_gpus=sum(len(stage.devices) for pipeline in pipelines for stage in pipeline.stages),
        layers=(min(layers), max(layers)),
        sequences=(min(sequences), max(sequences)),
        end_s=max(cost.pipelines[p].end_s for p in own),
        fullest=max(places, key=lambda at: cost.pipelines[at[0]].stages[at[1]].excess_bytes),
    )


def kinds_table(problem: Problem, plan: Plan, cost: Cost) -> RenderableType:
    """A row per kind of pipelines; the kinds that end last and that have least free memory are always among them."""
    kinds = pipeline_kinds(problem, plan, cost)
    last, tightest = max(kinds, key=lambda kind: kind.end_s), cost.binding_stage()[0]
    urgent = [kind for kind in kinds if kind is last or tightest in kind.members]
    kept = [*urgent, *(kind for kind in kinds if kind not in urgent)][:_MOST_KINDS]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in _HEADERS:
        words = name == "Stages"
        table.add_column(name, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    for kind in kinds:
        if kind in kept:
            table.add_row(*_row(cost, kind, kind is last and len(plan.pipelines) > 1))
    left = [kind for kind in kinds if kind not in kept]
    if left:
        pipelines, gpus = sum(len(kind.members) for kind in left), sum(kind.num_gpus for kind in left)
        others = f"of {count(len(left), 'other kind')}, which end earlier and have more free memory"
        table.add_row(f"{pipelines:,} ×", f"{gpus:,}", Text(others, style="italic"))
    title = f"{count(len(plan.pipelines), 'pipeline')} of {count(len(kinds), 'kind')}"
    return Group(Text(title, style="bold"), table, Text(_NOTE.format(memory_words(problem.space)), style="dim"))


def _row(cost: Cost, kind: PipelineKind, is_last: bool) -> list[Text]:
    p, s = kind.fullest
    stage = cost.pipelines[p].stages[s]
    share = stage.memory.total / stage.limit_bytes
    colour = "green" if share <= FULL_MEMORY else "yellow" if share <= 1 else "red"
    return [
        Text(f"{len(kind.members):,} ×", style="bold"),
        Text(f"{kind.num_gpus:,}"),
        Text(chain(kind.stages) + (" · longest" if is_last else "")),
        Text(_span(kind.layers)),
        Text(_span(kind.sequences)),
        Text(seconds(kind.end_s)),
        Text(f"{gib(stage.memory.total)}/{gib(stage.limit_bytes)}", style=colour),
    ]


def chain(stages: Iterable[str]) -> str:
    """Stages in words, runs of like ones with their number: `3 × TP 4 h100 → a100`."""
    runs = [(words, len(list(same))) for words, same in groupby(stages)]
    told = [f"{number} × {words}" if number > 1 else words for words, number in runs[:_MOST_RUNS]]
    rest = sum(number for _, number in runs[_MOST_RUNS:])
    return " → ".join([*told, *([f"{count(rest, 'stage')} more"] if rest else [])])


def _span(ends: tuple[int, int]) -> str:
    low, high = ends
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"
