"""The pipelines of a plan that tables and pictures show: equal ones, or those of a kind, may share a row."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from hexiopt.plan.parallelism import ExpertParallel, SequenceParallel
from hexiopt.plan.plan import Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.report.facts import PlanFacts, StageFacts
from hexiopt.report.style import count, operation_colour, stage_colour

_MOST_RUNS = 5  # of equal stages, in a row


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """Equal pipelines, represented by the slowest one, whose index in the plan is `number`."""

    number: int
    hue: int
    members: tuple[int, ...]
    num_micro_batches: int
    micro_batch_size: int
    end_s: float
    longest: bool
    stages: tuple[StageFacts, ...]

    @property
    def title(self) -> str:
        """`2`, or `2 ×32` where it stands for 32 pipelines."""
        return f"{self.number}" + (f" ×{len(self.members)}" if len(self.members) > 1 else "")

    @property
    def batch(self) -> str:
        """Micro-batches times their size."""
        return f"{self.num_micro_batches:,} × {self.micro_batch_size}"

    def stage_colour(self, stage: StageFacts) -> str:
        """The stage's shade of the pipeline's hue."""
        return stage_colour(self.hue, stage.number, len(self.stages))

    def operation_colour(self, stage: int, kind: str) -> str:
        """The colour of a stage's operations of a kind."""
        return operation_colour(self.hue, self.stages[stage].number, len(self.stages), kind)


@dataclass(frozen=True, slots=True)
class PlanRows:
    """The pipelines to show, and the number of those left out."""

    pipelines: tuple[PipelineRow, ...]
    num_left_out: int

    @property
    def is_grouped(self) -> bool:
        """Whether a row may stand for several pipelines."""
        return self.num_left_out > 0 or any(len(row.members) > 1 for row in self.pipelines)

    @property
    def note(self) -> str:
        """A note on pipelines that are grouped or left out; empty where every pipeline has a row."""
        parts = []
        if any(len(row.members) > 1 for row in self.pipelines):
            parts.append("×N: pipelines equal in machine kinds, TP, layers and micro-batches; the slowest is shown")
        if self.num_left_out:
            parts.append(f"{self.num_left_out:,} pipelines of other shapes left out")
        return "; ".join(parts)


def identical_pipelines(problem: Problem, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Pipelines grouped by machine kinds, TP, layers, recompute, depths and micro-batches, in the plan's order."""
    cluster = problem.cluster
    numbers: dict[Hashable, int] = {}
    kinds = [numbers.setdefault(machine.kind, len(numbers)) for machine in cluster.machines]
    machine_of: list[int] = cluster.machine_of.tolist()

    def stage_key(stage: Stage) -> Hashable:
        parts: tuple[Hashable, ...] = tuple(
            (kinds[machine_of[replica.devices[0]]], len(replica.devices), replica.samples, replica.heads)
            for replica in stage.parallelism.replicas
        )
        match stage.parallelism:
            case SequenceParallel(groups, order):
                shares = ((g.tokens, g.heads, tuple(kinds[machine_of[d]] for d in g.devices)) for g in groups)
                parts += (order, *shares)
            case ExpertParallel(members):
                parts += tuple((m.samples, m.experts, tuple(kinds[machine_of[d]] for d in m.devices)) for m in members)
        return parts, stage.layers, stage.recompute, stage.in_flight

    groups: dict[Hashable, list[int]] = {}
    for index, pipeline in enumerate(plan.pipelines):
        stages = tuple(map(stage_key, pipeline.stages))
        groups.setdefault((stages, pipeline.num_micro_batches, pipeline.micro_batch_size), []).append(index)
    return tuple(map(tuple, groups.values()))


def plan_rows(facts: PlanFacts, *, group_above: int, max_pipelines: int, max_stages: int) -> PlanRows:
    """One row per pipeline, or per group of equal pipelines where there are more than `group_above` pipelines.

    Where the groups are more than `max_pipelines`, or have more than `max_stages` stages together, at least one is
    shown: first the longest pipeline's, then that with the least free memory, then the most frequent ones.
    """
    plan, priced = facts.plan, facts.cost.pipelines
    groups: tuple[tuple[int, ...], ...] = tuple((index,) for index in range(len(priced)))
    if len(groups) > group_above or facts.num_stages > max_stages:
        groups = identical_pipelines(facts.problem, plan)
    longest_s, tightest = max(pipeline.end_s for pipeline in priced), facts.cost.binding_stage()[0]

    def urgency(group: tuple[int, ...]) -> tuple[bool, bool, int]:
        return all(priced[index].end_s != longest_s for index in group), tightest not in group, -len(group)

    shown: list[tuple[int, ...]] = []
    free = max_stages
    for group in sorted(groups, key=urgency):
        need = len(plan.pipelines[group[0]].stages)
        if shown and (len(shown) == max_pipelines or need > free):
            break
        shown.append(group)
        free -= need
    rows = []
    for hue, group in enumerate(sorted(shown)):
        number = max(group, key=lambda index: priced[index].end_s)
        pipeline, end_s = plan.pipelines[number], priced[number].end_s
        # A single pipeline is not marked as the longest.
        longest = end_s == longest_s and len(priced) > 1
        size = pipeline.num_micro_batches, pipeline.micro_batch_size
        rows.append(PipelineRow(number, hue, group, *size, end_s, longest, facts.stages(number)))
    return PlanRows(tuple(rows), len(priced) - sum(map(len, shown)))


@dataclass(frozen=True, slots=True)
class PipelineKind:
    """Pipelines through the same types of GPUs with the same parallelism.

    `members` are their indices, `stages` has words for each stage, `layers` and `sequences` are the least and the
    greatest number of a stage and of a pipeline, and `fullest` is the stage with the least free memory.
    """

    stages: tuple[str, ...]
    members: tuple[int, ...]
    num_gpus: int
    layers: tuple[int, int]
    sequences: tuple[int, int]
    end_s: float
    fullest: StageFacts


def pipeline_kinds(facts: PlanFacts) -> list[PipelineKind]:
    """The kinds of a plan's pipelines, those with most GPUs first."""
    kinds: dict[tuple[str, ...], list[tuple[StageFacts, ...]]] = {}
    for p in range(len(facts.plan.pipelines)):
        stages = facts.stages(p)
        kinds.setdefault(tuple(map(_in_words, stages)), []).append(stages)
    every = [_kind(facts, *kind) for kind in kinds.items()]
    return sorted(every, key=lambda kind: (-kind.num_gpus, kind.members))


def _in_words(stage: StageFacts) -> str:
    return f"{stage.parallelism} {stage.gpus}" if len(stage.devices) > 1 else stage.gpus


def _kind(facts: PlanFacts, words: tuple[str, ...], pipelines: Sequence[tuple[StageFacts, ...]]) -> PipelineKind:
    members = tuple(stages[0].pipeline for stages in pipelines)
    stages = [stage for pipeline in pipelines for stage in pipeline]
    layers = [stage.num_layers for stage in stages]
    sizes = [(facts.plan.pipelines[p].num_micro_batches, facts.plan.pipelines[p].micro_batch_size) for p in members]
    sequences = [number * size for number, size in sizes]
    return PipelineKind(
        stages=words,
        members=members,
        num_gpus=sum(len(stage.devices) for stage in stages),
        layers=(min(layers), max(layers)),
        sequences=(min(sequences), max(sequences)),
        end_s=max(facts.cost.pipelines[p].end_s for p in members),
        fullest=max(stages, key=lambda stage: stage.cost.excess_bytes),
    )


def chain(stages: Iterable[str]) -> str:
    """Stages in words, runs of equal ones with their number: `3 × TP 4 h100 → a100`."""
    runs = [(words, len(list(same))) for words, same in groupby(stages)]
    texts = [f"{number} × {words}" if number > 1 else words for words, number in runs[:_MOST_RUNS]]
    rest = sum(number for _, number in runs[_MOST_RUNS:])
    return " → ".join([*texts, *([f"{count(rest, 'stage')} more"] if rest else [])])
