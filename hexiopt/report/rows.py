"""A plan as rows of numbers for tables and pictures; equal pipelines may share a row."""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from hexiopt.cost.cost import Cost, StageCost
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_groups
from hexiopt.problem.workload import JOINED
from hexiopt.report.style import FULL_MEMORY, PAPER, gib, gpu_names, mix, place, stage_colour

# Stages within this share of the slowest stage's time are marked as slowest too.
_TIE = 1e-3


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage: its choices in words, its costs in seconds per micro-batch and in bytes."""

    stage: int
    devices: tuple[int, ...]
    place: str  # b:0-3 (rtx_3090)
    gpus: str
    tp: str
    layers: str
    num_layers: int
    recompute: str
    compute_s: float  # forward and backward
    busy: float  # share of the step
    send_s: float | None  # to the next stage and back; None after the last
    cost: StageCost
    binds: tuple[str, ...]
    is_sequence: bool = False

    @property
    def parallelism(self) -> str:
        """`TP 4`, or the layout of a sequence stage."""
        return self.tp if self.is_sequence else f"TP {self.tp}"

    @property
    def kind(self) -> str:
        """The number and types of its devices, or its sequence layout and types."""
        return f"{self.tp} on {self.gpus}" if self.is_sequence else f"{self.tp} × {self.gpus}"


@dataclass(frozen=True, slots=True)
class PipelineRow:
    """Equal pipelines, represented by the slowest of them, whose index in the plan is `number`."""

    number: int
    hue: int
    members: tuple[int, ...]
    num_micro_batches: int
    micro_batch_size: int
    end_s: float
    longest: bool
    stages: tuple[StageRow, ...]

    @property
    def title(self) -> str:
        """`2`, or `2 ×32` where it stands for 32 pipelines."""
        return f"{self.number}" + (f" ×{len(self.members)}" if len(self.members) > 1 else "")

    @property
    def batch(self) -> str:
        """Micro-batches times their size."""
        return f"{self.num_micro_batches:,} × {self.micro_batch_size}"

    def stage_name(self, stage: StageRow) -> str:
        """`2·1`: the numbers of the pipeline and of the stage."""
        return f"{self.number}·{stage.stage}"

    def stage_colour(self, stage: StageRow) -> str:
        """The stage's shade of the pipeline's hue."""
        return stage_colour(self.hue, stage.stage, len(self.stages))

    def operation_colours(self, stage: int) -> tuple[str, str]:
        """Colours of forward and backward: the stage's colour lightened, and one nearer to the pipeline's hue."""
        colour = self.stage_colour(self.stages[stage])
        return mix(colour, PAPER, 0.5), mix(colour, stage_colour(self.hue, 0, 1), 0.45)


@dataclass(frozen=True, slots=True)
class PlanRows:
    """The pipelines to show, and the number of those left out."""

    pipelines: tuple[PipelineRow, ...]
    num_left_out: int

    @property
    def grouped(self) -> bool:
        """Whether a row may stand for several pipelines."""
        return self.num_left_out > 0 or any(len(row.members) > 1 for row in self.pipelines)

    @property
    def note(self) -> str:
        """A note on pipelines that are grouped or left out; empty where every pipeline has a row."""
        parts = []
        if any(len(row.members) > 1 for row in self.pipelines):
            alike = "×N: pipelines equal in machine kinds, TP, layers and micro-batches; the slowest is shown"
            parts.append(alike)
        if self.num_left_out:
            parts.append(f"{self.num_left_out:,} pipelines of other shapes left out")
        return "; ".join(parts)


def identical_pipelines(problem: Problem, plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Pipelines grouped by machine kinds, TP, layers, recompute and micro-batches, in the plan's order."""
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
                parts += (
                    order,
                    *(
                        (group.tokens, group.heads, tuple(kinds[machine_of[d]] for d in group.devices))
                        for group in groups
                    ),
                )
        return parts, stage.layers, stage.recompute

    groups: dict[Hashable, list[int]] = {}
    for index, pipeline in enumerate(plan.pipelines):
        key = (
            tuple(stage_key(stage) for stage in pipeline.stages),
            pipeline.num_micro_batches,
            pipeline.micro_batch_size,
        )
        groups.setdefault(key, []).append(index)
    return tuple(tuple(group) for group in groups.values())


def plan_rows(
    problem: Problem, plan: Plan, cost: Cost, *, group_above: int, max_pipelines: int, max_stages: int
) -> PlanRows:
    """One row per pipeline, or per group of equal pipelines where there are more than `group_above` pipelines.

    Where the groups are more than `max_pipelines`, or have more than `max_stages` stages together, at least one is
    kept: first the longest pipeline's, then that with the least free memory, then the most frequent ones.
    """
    if len(plan.pipelines) <= group_above and sum(len(p.stages) for p in plan.pipelines) <= max_stages:
        groups: tuple[tuple[int, ...], ...] = tuple((index,) for index in range(len(plan.pipelines)))
    else:
        groups = identical_pipelines(problem, plan)
    longest_s = max(priced.end_s for priced in cost.pipelines)
    tightest = cost.binding_stage()[0]

    def urgency(group: tuple[int, ...]) -> tuple[bool, bool, int]:
        is_longest = any(cost.pipelines[index].end_s == longest_s for index in group)
        return not is_longest, tightest not in group, -len(group)

    kept: list[tuple[int, ...]] = []
    room = max_stages
    for group in sorted(groups, key=urgency):
        need = len(plan.pipelines[group[0]].stages)
        if kept and (len(kept) == max_pipelines or need > room):
            break
        kept.append(group)
        room -= need
    kept.sort()
    quoted = {group: max(group, key=lambda index: cost.pipelines[index].end_s) for group in kept}
    rows = tuple(
        _pipeline_row(problem, plan, cost, number, hue, group, longest_s)
        for hue, (group, number) in enumerate(quoted.items())
    )
    return PlanRows(rows, len(plan.pipelines) - sum(len(group) for group in kept))


def _pipeline_row(
    problem: Problem,
    plan: Plan,
    cost: Cost,
    number: int,
    hue: int,
    members: tuple[int, ...],
    longest_s: float,
) -> PipelineRow:
    pipeline, priced = plan.pipelines[number], cost.pipelines[number]
    # A single pipeline is not marked as the longest.
    longest = priced.end_s == longest_s and len(plan.pipelines) > 1
    times = [stage.forward_s + stage.backward_s for stage in priced.stages]
    slow_s = max(times) * (1 - _TIE)
    uneven = min(times) < slow_s
    rows = []
    for index, (stage, stage_cost, compute_s) in enumerate(zip(pipeline.stages, priced.stages, times, strict=True)):
        binds = ["slowest"] if uneven and compute_s >= slow_s else []
        if stage_cost.excess_bytes > 0:
            binds.insert(0, f"+{gib(stage_cost.excess_bytes)} GiB")
        elif stage_cost.memory.total > FULL_MEMORY * stage_cost.limit_bytes:
            binds.insert(0, "memory")
        last = index == len(pipeline.stages) - 1
        devices = stage.devices
        rows.append(
            StageRow(
                stage=index,
                devices=devices,
                place=place(problem.cluster, devices),
                gpus=gpu_names(problem.cluster, devices),
                tp=stage.parallelism.degrees,
                layers=_layers(stage),
                num_layers=stage.num_layers,
                recompute=_recompute(stage.recompute),
                compute_s=compute_s,
                busy=pipeline.num_micro_batches * compute_s / cost.step_time_s,
                send_s=None if last else priced.send_forward_s[index] + priced.send_backward_s[index],
                cost=stage_cost,
                binds=tuple(binds),
                is_sequence=isinstance(stage.parallelism, SequenceParallel),
            )
        )
    return PipelineRow(
        number=number,
        hue=hue,
        members=members,
        num_micro_batches=pipeline.num_micro_batches,
        micro_batch_size=pipeline.micro_batch_size,
        end_s=priced.end_s,
        longest=longest,
        stages=tuple(rows),
    )


def _layers(stage: Stage) -> str:
    """The stage's layer ranges; of more than two, their number, the first and the last."""
    ranges = [f"[{first}, {end})" for first, end in stage.layers]
    return " ".join(ranges) if len(ranges) <= 2 else f"{len(ranges)}: {ranges[0]} … {ranges[-1]}"


def _recompute(policies: Sequence[str]) -> str:
    """The recompute policy; where layers differ, the number of layers with each, in order of appearance; of groups of
    equal length that are recomputed together, the length."""
    counts = Counter(policies)
    if counts.keys() == {"full", JOINED} and len(groups := set(recompute_groups(policies))) == 1:
        return f"full by {groups.pop()}"
    return policies[0] if len(counts) == 1 else ", ".join(f"{n} {policy}" for policy, n in counts.items())


def unused_devices(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """The cluster's devices that the plan does not use."""
    used = set(plan.devices())
    return tuple(device for device in range(problem.cluster.num_devices) if device not in used)


def num_operations(pipeline: Pipeline) -> int:
    """The number of forwards and backwards of one step, counted per replica and layer range."""
    replicas = sum(len(stage.parallelism.executors) for stage in pipeline.stages)
    return 2 * pipeline.num_micro_batches * pipeline.num_chunks * replicas
