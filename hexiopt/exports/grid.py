"""Grids: pipelines that are all alike, which is what most trainers express, taken from a plan and made into one.

A replicated stage whose replicas take equally many samples is that many pipelines of smaller micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hexiopt.exports.formats import Refusal, stage_name
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.space import Recompute, recompute_groups
from hexiopt.problem.workload import JOINED
from hexiopt.schedules.registry import INTERLEAVED
from hexiopt.schedules.schedule import Schedule

Ranges = tuple[tuple[int, int], ...]
TpGroup = tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """`tp_groups[p][s]` are the devices of stage s of pipeline p; layers and recompute policies are by stage, and the
    micro-batches those of every pipeline."""

    tp_groups: tuple[tuple[TpGroup, ...], ...]
    layers: tuple[Ranges, ...]
    recompute: tuple[Recompute, ...]
    num_micro_batches: int
    micro_batch_size: int
    folded: bool = False
    """Whether replicas of the plan have become pipelines."""

    @property
    def num_pipelines(self) -> int:
        """Number of pipelines: the data-parallel degree."""
        return len(self.tp_groups)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.layers)

    @property
    def num_chunks(self) -> int:
        """Layer ranges of every stage."""
        return len(self.layers[0])

    @property
    def degrees(self) -> tuple[int, ...]:
        """TP degree of each stage."""
        return tuple(map(len, self.tp_groups[0]))

    @property
    def parts(self) -> list[int]:
        """Layers of each virtual stage, in the order of the model."""
        return [own[c][1] - own[c][0] for c in range(self.num_chunks) for own in self.layers]

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.num_pipelines * self.num_micro_batches * self.micro_batch_size

    def stage_major(self) -> tuple[int, ...]:
        """Devices in the order of ranks t + T · (p + P · s)."""
        return tuple(d for stage in zip(*self.tp_groups, strict=True) for group in stage for d in group)

    def pipeline_major(self) -> tuple[int, ...]:
        """Devices in the order of ranks t + T · (s + S · p)."""
        return tuple(d for pipeline in self.tp_groups for group in pipeline for d in group)

    def notes(self) -> tuple[str, ...]:
        """What differs from the plan."""
        return ("replicas of a stage are written as data-parallel pipelines of smaller micro-batches",) * self.folded


def grid_of(plan: Plan, refuse: Refusal) -> Grid:
    """The grid that a plan is. Raises InputError, by `refuse`, where its pipelines differ."""
    widths = {_width(p, s, stage, refuse) for p, own in enumerate(plan.pipelines) for s, stage in enumerate(own.stages)}
    if len(widths) > 1:
        refuse(f"stages have {' or '.join(map(str, sorted(widths)))} replicas", "space.replicas=false")
    [width] = widths
    first = plan.pipelines[0]
    for p, pipeline in enumerate(plan.pipelines):
        if len(pipeline.stages) != len(first.stages):
            said = f"pipeline {p} has {len(pipeline.stages)} stages, pipeline 0 has {len(first.stages)}"
            refuse(said, "space.uneven_structure=false")
        for s, (stage, own) in enumerate(zip(pipeline.stages, first.stages, strict=True)):
            if stage.layers != own.layers:
                refuse(f"{stage_name(p, s)} has other layers than that of pipeline 0", "space.uneven_structure=false")
            if stage.tp != own.tp:
                said = f"{stage_name(p, s)} has TP degree {stage.tp}, that of pipeline 0 has {own.tp}"
                refuse(said, "space.uneven_structure=false")
            if stage.policies() != own.policies():
                said = f"{stage_name(p, s)} recomputes other layers than that of pipeline 0"
                refuse(said, "space.recompute_per_stage=false")
        if pipeline.micro_batch_size != first.micro_batch_size:
            said = f"pipeline {p} has micro-batches of {pipeline.micro_batch_size} sequences, pipeline 0 of"
            refuse(f"{said} {first.micro_batch_size}", "space.uneven_batch=false")
        if pipeline.num_micro_batches != first.num_micro_batches:
            said = f"pipeline {p} has {pipeline.num_micro_batches} micro-batches, pipeline 0 has"
            switches = "space.uneven_batch=false space.batch_remainder=false"
            refuse(f"{said} {first.num_micro_batches}", switches)
    groups = tuple(
        tuple(stage.executors[r] for stage in pipeline.stages) for pipeline in plan.pipelines for r in range(width)
    )
    layers = tuple(stage.layers for stage in first.stages)
    recompute = tuple(stage.recompute for stage in first.stages)
    size = first.micro_batch_size // width
    return Grid(groups, layers, recompute, first.num_micro_batches, size, folded=width > 1)


def _width(p: int, s: int, stage: Stage, refuse: Refusal) -> int:
    """The number of equal replicas of a stage."""
    if stage.sequence:
        refuse(f"{stage_name(p, s)} has a sequence layout", "space.sequence=false")
    replicas = stage.replicas
    if len({(len(replica.devices), replica.samples) for replica in replicas}) > 1:
        refuse(f"{stage_name(p, s)} has unequal replicas", "space.replicas=false")
    return len(replicas)


def one_tp(grid: Grid, refuse: Refusal) -> int:
    """The TP degree of all stages. Raises InputError where they differ."""
    for s, degree in enumerate(grid.degrees):
        if degree != grid.degrees[0]:
            said = f"{stage_name(0, s)} has TP degree {degree}, stage 0 has {grid.degrees[0]}"
            refuse(said, "space.uneven_tp=false")
    return grid.degrees[0]


@dataclass(frozen=True, slots=True)
class BlockRecompute:
    """`policy` for all layers or, where `block` is stated, for the first `block` layers of every layer range, and none
    for the others. Of full recompute of all layers, so many of a range are recomputed `together`."""

    policy: str
    block: int | None = None
    together: int = 1

    def of(self, ranges: Ranges) -> Recompute:
        """The policies of a stage."""
        if self.together > 1:
            starts = [k % self.together == 0 for first, end in ranges for k in range(end - first)]
            return ("full",) if all(starts) else tuple("full" if own else JOINED for own in starts)
        if self.block is None:
            return (self.policy,)
        each = [k < self.block for first, end in ranges for k in range(end - first)]
        return (self.policy,) if all(each) else tuple(self.policy if own else "none" for own in each)


def first_layers(policies: Sequence[str], policy: str = "full") -> int | None:
    """The number of first layers that have `policy` where all others have none; None where that is not so."""
    count = next((k for k, own in enumerate(policies) if own != policy), len(policies))
    return count if set(policies[count:]) <= {"none"} else None


def one_recompute(grid: Grid, refuse: Refusal) -> BlockRecompute:
    """The recompute of all stages: one policy, full of the first layers, or full of groups of equally many layers.
    Raises InputError where it is none of them."""
    ranges = [
        (s, own)
        for s, (layers, policies) in enumerate(zip(grid.layers, grid.recompute, strict=True))
        for own in policies_by_range(layers, policies)
    ]
    policies = {policy for _, own in ranges for policy in own}
    if len(policies) == 1:
        return BlockRecompute(policies.pop())
    if JOINED in policies:
        groups = {length for _, own in ranges for length in recompute_groups(own)}
        if policies != {"full", JOINED} or len(groups) > 1:
            said = f"layers are recomputed in groups of {' and '.join(map(str, sorted(groups)))}"
            refuse(f"{said}; it takes groups of equally many", "space.recompute_per_layer=false")
        return BlockRecompute("full", together=groups.pop())
    most = max(first_layers(own) or 0 for _, own in ranges)
    for s, own in ranges:
        count = first_layers(own)
        if count is None and len(set(own)) > 1:
            said = (
                f"layers of {stage_name(0, s)} differ in recompute, and not as full of the first and none of the rest"
            )
            refuse(said, "space.recompute_per_layer=false")
        if count is None:
            said = f"{stage_name(0, s)} has recompute {own[0]}, another stage has another"
            refuse(said, "space.recompute_per_stage=false")
        if count != min(most, len(own)):
            said = f"{stage_name(0, s)} has full recompute of {count} layers, another stage of its first {most}"
            refuse(said, "space.recompute_per_stage=false space.recompute_per_layer=false")
    return BlockRecompute("full", most)


def policies_by_range(ranges: Ranges, policies: Recompute) -> list[Recompute]:
    """The policy of every layer, range by range."""
    each = policies * sum(end - first for first, end in ranges) if len(policies) == 1 else policies
    ends = [0, *accumulate(end - first for first, end in ranges)]
    return [each[a:b] for a, b in pairwise(ends)]


def zero_stage(plan: Plan, allowed: Sequence[int], refuse: Refusal) -> int:
    """The ZeRO stage of a plan. Raises InputError where it is not `allowed`, or inside groups of devices only."""
    stage = plan.sharding.stage
    if stage not in allowed:
        refuse(f"it shards with ZeRO-{stage}", f"workload.optimizer_sharding={allowed[0]}")
    if stage and plan.sharding.groups != "all":
        refuse("it shards the optimizer within groups of devices", "space.machine_sharding=false")
    return stage


def one_schedule(plan: Plan, allowed: Sequence[Schedule], refuse: Refusal) -> Schedule:
    """The schedule of a plan; interleaved with one layer range a stage counts as 1F1B. Raises InputError."""
    if plan.schedule == INTERLEAVED and plan.pipelines[0].num_chunks == 1:
        return allowed[0]
    if plan.schedule not in allowed:
        refuse(f"it has the {plan.schedule} schedule", f"workload.schedule={allowed[0]}")
    return plan.schedule


def plan_of(grid: Grid, schedule: Schedule, sharding: int) -> Plan:
    """The plan that a grid is. Raises InputError as the classes of a plan do."""
    pipelines = tuple(
        Pipeline(
            tuple(
                Stage(TensorParallel(group), ranges, policies)
                for group, ranges, policies in zip(groups, grid.layers, grid.recompute, strict=True)
            ),
            grid.num_micro_batches,
            grid.micro_batch_size,
        )
        for groups in grid.tp_groups
    )
    return Plan(pipelines, schedule, Sharding(sharding))
