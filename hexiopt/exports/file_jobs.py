"""The problem and the plan of the job in another trainer's file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hexiopt.exports.formats import ImportContext, ImportedPlan
from hexiopt.exports.layout import NO_RECOMPUTE, BlockRecompute, JobLayout, LayoutStage, plan_of_layout, rank_groups
from hexiopt.plan.plan import Plan, Sharding
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Recompute, ranges_of
from hexiopt.problem.workload import AUTO
from hexiopt.schedules.registry import DEFAULT_SCHEDULE, schedule_by_name
from hexiopt.schedules.schedule import Schedule


@dataclass(frozen=True)
class FileJob:
    """What a file states of a job whose pipelines are all equal.

    `world` is the number of ranks. `parts` are the layers of each virtual stage in the order of the model (None:
    equally many, with `chunks` virtual stages a stage). The batch is `global_batch` sequences, or `num_micro_batches`
    of every pipeline, else one micro-batch of each. `workload` has other values of `Workload`. `labels` are the file's
    words for `tp`, `expert_devices`, `num_stages`, `micro_batch_size` and `global_batch` in messages.
    `expert_devices` in a row, each with whole experts, share those of a layer (0: none are shared); each replica among
    them has its own `micro_batch_size`.
    """

    model: ModelSpec
    tp: int = 1
    expert_devices: int = 0
    num_stages: int = 1
    chunks: int = 1
    parts: Sequence[int] | None = None
    recompute: BlockRecompute = NO_RECOMPUTE
    micro_batch_size: int = 1
    num_micro_batches: int | None = None
    global_batch: int | None = None
    schedule: Schedule = DEFAULT_SCHEDULE
    sharding: int = 0
    pipeline_major: bool = False
    world: int | None = None
    workload: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def label(self, name: str) -> str:
        """The file's word for a field."""
        return self.labels.get(name, name)


def import_job(context: ImportContext, job: FileJob) -> ImportedPlan:
    """The problem and the plan of a job. Raises InputError where degrees, layers and batch do not fit together."""
    ranks, notes = context.ranks_of(job.world)
    tp, num_stages, size = job.tp, job.num_stages, job.micro_batch_size
    for name in ("tp", "num_stages", "chunks", "micro_batch_size"):
        if getattr(job, name) < 1:
            context.fail(f"{job.label(name)}: {getattr(job, name)} is below 1; state at least 1")
    if len(ranks) % (tp * num_stages):
        context.fail(
            f"{len(ranks)} GPUs are not divided by TP {tp} times PP {num_stages}; "
            "give ranks=ranks.tsv, or the cluster that it runs on"
        )
    groups = rank_groups(ranks, tp, num_stages, job.pipeline_major)
    dp = len(groups[0])
    batch = job.global_batch or size * dp * (job.num_micro_batches or 1)
    if "global_batch" not in context.stated_keys and batch % (size * dp):
        context.fail(
            f"{job.label('global_batch')} {batch} is not divided by {dp} pipelines times "
            f"{job.label('micro_batch_size')} {size}; correct one of them, or give ranks=ranks.tsv"
        )
    ranges = ranges_of(_parts(context, job), num_stages)
    cell = job.expert_devices // tp
    if job.expert_devices % tp or (cell and dp % cell):
        context.fail(
            f"{job.label('expert_devices')} {job.expert_devices} is not a multiple of TP {tp} that divides {dp} "
            f"replicas of {tp} GPUs; correct one of them, or give ranks=ranks.tsv"
        )
    stages = tuple(
        LayoutStage(g, stage_ranges, job.recompute.of(stage_ranges), cell)
        for g, stage_ranges in zip(groups, ranges, strict=True)
    )
    layout = JobLayout(stages, max(1, batch // (size * dp)), size * dp)
    values = {"global_batch": batch, **job.workload}
    return import_layout(context, job.model, layout, job.schedule, job.sharding, values, (*notes, *job.notes))


def _parts(context: ImportContext, job: FileJob) -> Sequence[int]:
    num_layers, stages = job.model.num_layers, job.num_stages
    if job.parts is None:
        count = stages * job.chunks
        if num_layers % count:
            context.fail(
                f"{num_layers} layers are not divided by {count} virtual stages of {stages} stages; state them"
            )
        return [num_layers // count] * count
    if sum(job.parts) != num_layers or len(job.parts) % stages or min(job.parts) < 1:
        context.fail(
            f"its stages hold {' + '.join(map(str, job.parts))} = {sum(job.parts)} layers, for {stages} stages and "
            f"{num_layers} layers of {job.model.name}; make parts a multiple of the stages, and layers the model's"
        )
    return job.parts


def import_layout(
    context: ImportContext,
    model: ModelSpec,
    layout: JobLayout,
    schedule: Schedule,
    sharding: int,
    workload: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> ImportedPlan:
    """The problem and the plan of a layout; see `import_plan`."""
    schedule = schedule if layout.num_chunks > 1 else schedule.plain()
    with context.blame_file():
        plan = plan_of_layout(layout, schedule, sharding)
    return import_plan(context, model, plan, workload, notes)


def import_plan(
    context: ImportContext, model: ModelSpec, plan: Plan, workload: Mapping[str, Any], notes: Sequence[str] = ()
) -> ImportedPlan:
    """The problem of a plan, and the plan with the user's choices in place of the file's.

    `workload` has the values that the file states, `global_batch` among them. Raises InputError as the constructors of
    plans and problems do.
    """
    notes = list(notes)
    with context.blame_file():
        whole_workload, overrules = context.workload_of(**workload)
    if whole_workload.global_batch != sum(pipeline.num_sequences for pipeline in plan.pipelines):
        plan = _with_batch(context, plan, whole_workload.global_batch)
    chosen = {key: word for key in ("recompute", "schedule", "optimizer_sharding") if (word := _choice(context, key))}
    if "recompute" in chosen:
        policies = sorted({policy for pipeline in plan.pipelines for s in pipeline.stages for policy in s.recompute})
        notes += [context.overrule_note("recompute", " and ".join(policies))] * (policies != [chosen["recompute"]])
        plan = _with_recompute(plan, (chosen["recompute"],))
    if chosen.get("schedule", str(plan.schedule)) != str(plan.schedule):
        notes.append(context.overrule_note("schedule", plan.schedule))
        plan = replace(plan, schedule=schedule_by_name(chosen["schedule"]))
    if chosen.get("optimizer_sharding", str(plan.sharding.stage)) != str(plan.sharding.stage):
        notes.append(context.overrule_note("optimizer_sharding", plan.sharding.stage))
        plan = replace(plan, sharding=replace(plan.sharding, stage=int(chosen["optimizer_sharding"])))
    with context.blame_file():
        problem = Problem(context.cluster, model, whole_workload, context.space)
    return ImportedPlan(problem, plan, (*notes, *overrules))


def _with_batch(context: ImportContext, plan: Plan, batch: int) -> Plan:
    """The plan with another number of micro-batches, the same in all pipelines, so that they have `batch` sequences."""
    size = sum(pipeline.micro_batch_size for pipeline in plan.pipelines)
    if len({pipeline.num_micro_batches for pipeline in plan.pipelines}) > 1:
        context.fail(f"workload.global_batch={batch} is not its own, of unequally many micro-batches; leave it out")
    if batch % size:
        context.fail(
            f"workload.global_batch={batch} is not divided by the {size} sequences of a micro-batch of all pipelines; "
            "state a multiple"
        )
    return replace(plan, pipelines=tuple(replace(p, num_micro_batches=batch // size) for p in plan.pipelines))


def _with_recompute(plan: Plan, recompute: Recompute) -> Plan:
    pipelines = (
        replace(pipeline, stages=tuple(replace(stage, recompute=recompute) for stage in pipeline.stages))
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=tuple(pipelines))


def _choice(context: ImportContext, key: str) -> str | None:
    """The user's choice for the whole plan; None if it is left open."""
    word: str = getattr(context.workload, key)
    return word if key in context.stated_keys and word != AUTO else None


def shard_within(layout: ImportedPlan, groups: int | str) -> ImportedPlan:
    """Shard the parameters within `groups`: a number of groups of consecutive pipelines, or a name as in
    `Sharding.groups`."""
    sharding_groups: str | tuple[tuple[int, ...], ...] = groups if isinstance(groups, str) else ()
    pipelines = layout.plan.pipelines
    if isinstance(groups, int):
        group_size = len(pipelines) // groups
        sharding_groups = tuple(
            tuple(d for pipeline in pipelines[k : k + group_size] for stage in pipeline.stages for d in stage.devices)
            for k in range(0, len(pipelines), group_size)
        )
    return replace(layout, plan=replace(layout.plan, sharding=Sharding(layout.plan.sharding.stage, sharding_groups)))
