"""Layouts: the normal form of a plan in the files of other trainers, taken from a plan and made into one.

A layout is a chain of stages; the replicas of a stage take equally many samples. Equal pipelines form one chain, whose
stages have as many times the replicas. A grid, which is all that most trainers express, is a layout whose stages have
equally many replicas: their number is the data-parallel degree.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hexiopt.errors import InputError
from hexiopt.exports.formats import Refuse, stage_name
from hexiopt.plan.parallelism import Replica, Replicated, SequenceParallel, StageParallelism, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Recompute, recompute_groups
from hexiopt.problem.workload import JOINED
from hexiopt.schedules.schedule import Schedule

Ranges = tuple[tuple[int, int], ...]
Groups = tuple[tuple[int, ...], ...]  # the devices of each replica of a stage

EQUAL_CELLS = 'state one "degree" in all stages of the plan file, and price it again'
UNIFORM_RECOMPUTE = "space.recompute_per_stage=false space.recompute_per_layer=false"


@dataclass(frozen=True, slots=True)
class LayoutStage:
    """A stage: the devices of each replica, all of one TP degree; its half-open layer ranges; one recompute policy, or
    one for each layer."""

    replicas: Groups
    layers: Ranges
    recompute: Recompute
    cell: int = 0
    """Replicas in a row that share experts, of which each of their devices has some whole; 0: no experts are shared."""

    @property
    def tp(self) -> int:
        """TP degree of every replica."""
        return len(self.replicas[0])

    @property
    def dp(self) -> int:
        """Number of replicas."""
        return len(self.replicas)

    @property
    def copies(self) -> int:
        """Copies of the experts: cells, or replicas where none are shared."""
        return self.dp // max(1, self.cell)

    @property
    def expert_devices(self) -> int:
        """Devices that share a copy of the experts: the expert-parallel degree, with whole experts on each device."""
        return self.tp * max(1, self.cell)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return sum(end - first for first, end in self.layers)

    def policies(self) -> list[Recompute]:
        """The policy of every layer, range by range."""
        policy_of_layer = self.recompute * self.num_layers if len(self.recompute) == 1 else self.recompute
        ends = [0, *accumulate(end - first for first, end in self.layers)]
        return [policy_of_layer[a:b] for a, b in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class JobLayout:
    """Stages in order; all replicas of a stage together take `micro_batch_size` sequences of each micro-batch."""

    stages: tuple[LayoutStage, ...]
    num_micro_batches: int
    micro_batch_size: int
    folded: bool = False
    """Whether stages of the plan have replicas, which a grid expresses as pipelines."""

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def num_chunks(self) -> int:
        """Layer ranges of every stage."""
        return len(self.stages[0].layers)

    @property
    def dp(self) -> int:
        """Replicas of the first stage, and of a grid of all stages."""
        return self.stages[0].dp

    @property
    def samples(self) -> int:
        """Sequences of a micro-batch that each replica of the first stage takes."""
        return self.micro_batch_size // self.dp

    @property
    def parts(self) -> list[int]:
        """Layers of each virtual stage, in the order of the model."""
        ranges = [stage.layers[chunk] for chunk in range(self.num_chunks) for stage in self.stages]
        return [end - first for first, end in ranges]

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.num_micro_batches * self.micro_batch_size

    def stage_major(self) -> tuple[int, ...]:
        """Devices stage by stage, replica by replica: of a grid in the order of ranks t + T · (p + P · s)."""
        return tuple(d for stage in self.stages for replica in stage.replicas for d in replica)

    def pipeline_major(self) -> tuple[int, ...]:
        """Devices of a grid in the order of ranks t + T · (s + S · p)."""
        pipelines = zip(*(stage.replicas for stage in self.stages), strict=True)
        return tuple(d for pipeline in pipelines for group in pipeline for d in group)

    def notes(self) -> tuple[str, ...]:
        """Notes on how a grid differs from the plan."""
        folded = ("replicas of a stage are written as data-parallel pipelines of smaller micro-batches",) * self.folded
        return folded + self.cell_notes()

    def cell_notes(self) -> tuple[str, ...]:
        """A note on batches of replicas that share experts, where there are such."""
        if all(stage.cell <= 1 for stage in self.stages):
            return ()
        degrees = "/".join(map(str, sorted({stage.expert_devices for stage in self.stages})))
        what = f"EP {degrees}: each replica has a batch of its own, also those that share experts"
        sizes = {self.micro_batch_size // stage.dp for stage in self.stages}
        plan = self.micro_batch_size // self.stages[0].copies
        return (f"{what}: micro-batches of {' and '.join(map(str, sorted(sizes)))} where the plan has {plan}",)


def tied_notes(problem: Problem, plan: Plan) -> tuple[str, ...]:
    """A note on a tied matrix, whose states ZeRO-1 of trainers spreads over data parallelism alone: they sum its
    gradients over both ends by themselves (Megatron-LM, `finalize_model_grads.py`; DeepSpeed, `pipe/engine.py`)."""
    if plan.sharding.stage != 1 or not problem.parameters.tied_params or len(plan.pipelines[0].stages) == 1:
        return ()
    apart = "first and last stage each spread the states of the tied matrix over their own replicas alone"
    return (f"{apart}, where the plan was priced with those of both",)


def rank_groups(ranks: Sequence[int], tp: int, num_stages: int, pipeline_major: bool = False) -> tuple[Groups, ...]:
    """The devices of each replica of each stage of a grid, whose devices in the order of ranks are `ranks`.

    The inverse of `JobLayout.stage_major`, or of `pipeline_major`. TP times stages divides the number of ranks.
    """
    dp = len(ranks) // (tp * num_stages)

    def group(s: int, p: int) -> tuple[int, ...]:
        first = tp * (s + num_stages * p if pipeline_major else p + dp * s)
        return tuple(ranks[first : first + tp])

    return tuple(tuple(group(s, p) for p in range(dp)) for s in range(num_stages))


# ----------------------------------------------------------------------------- from plans


def layout_of(plan: Plan, refuse: Refuse) -> JobLayout:
    """The layout of a plan. Raises InputError, by `refuse`, where its pipelines or replicas differ."""
    first = plan.pipelines[0]
    for p, pipeline in enumerate(plan.pipelines):
        if len(pipeline.stages) != len(first.stages):
            what = f"pipeline {p} has {len(pipeline.stages)} stages, pipeline 0 has {len(first.stages)}"
            refuse(what, "space.uneven_structure=false")
        for s, stage in enumerate(pipeline.stages):
            _check(stage_name(p, s), stage, first.stages[s], refuse)
        batch = pipeline.num_micro_batches, pipeline.micro_batch_size
        if batch != (first.num_micro_batches, first.micro_batch_size):
            what = f"pipeline {p} has {batch[0]} micro-batches of {batch[1]}, pipeline 0 has {first.num_micro_batches}"
            refuse(f"{what} of {first.micro_batch_size}", "space.uneven_batch=false space.batch_remainder=false")
    stages = tuple(
        LayoutStage(
            tuple(
                devices for pipeline in plan.pipelines for devices in pipeline.stages[s].parallelism.parameter_copies
            ),
            stage.layers,
            stage.recompute,
            _cell(stage),
        )
        for s, stage in enumerate(first.stages)
    )
    size = first.micro_batch_size * len(plan.pipelines)
    folded = any(len(stage.parallelism.replicas) > 1 for stage in first.stages)
    return JobLayout(stages, first.num_micro_batches, size, folded)


def _cell(stage: Stage) -> int:
    """Replicas of a stage that share experts; 0 where it does not say so."""
    group = stage.parallelism
    return 0 if not isinstance(group, TensorParallel) or group.degree is None else group.num_replicas


def _check(name: str, stage: Stage, first: Stage, refuse: Refuse) -> None:
    """Refuse a stage whose replicas are unequal, or that differs from `first`, the same stage of the first pipeline."""
    if isinstance(stage.parallelism, SequenceParallel):
        refuse(f"{name} has a sequence layout", "space.sequence=false")
    if len({(len(replica.devices), replica.samples) for replica in stage.parallelism.replicas}) > 1:
        refuse(f"{name} has replicas of unequal TP degree or samples", "space.replicas=false")
    if stage.layers != first.layers:
        refuse(f"{name} has other layers than that of pipeline 0", "space.uneven_structure=false")
    if (stage.tp, len(stage.parallelism.replicas)) != (first.tp, len(first.parallelism.replicas)):
        what = f"{name} has TP degree {stage.tp} and {len(stage.parallelism.replicas)} replicas, that of pipeline 0"
        refuse(
            f"{what} has {first.tp} and {len(first.parallelism.replicas)}",
            "space.uneven_structure=false space.replicas=false",
        )
    if stage.parallelism.degrees != first.parallelism.degrees:
        what = (
            f"{name} shares experts by {stage.parallelism.degrees}, that of pipeline 0 by {first.parallelism.degrees}"
        )
        raise InputError(f"export.format: {what}; {EQUAL_CELLS}")
    if stage.policies() != first.policies():
        refuse(f"{name} recomputes other layers than that of pipeline 0", "space.recompute_per_stage=false")


def grid_of(plan: Plan, refuse: Refuse) -> JobLayout:
    """The grid of a plan. Raises InputError for a plan that is no grid."""
    layout = layout_of(plan, refuse)
    check_cells(layout)
    if len(widths := sorted({stage.dp for stage in layout.stages})) > 1:
        refuse(f"stages have {' or '.join(map(str, widths))} replicas", "space.replicas=false")
    return layout


def check_cells(layout: JobLayout) -> None:
    """Raise InputError where stages share experts among unequal numbers of replicas."""
    first = layout.stages[0]
    for s, stage in enumerate(layout.stages):
        if (stage.cell > 1 or first.cell > 1) and (stage.tp, stage.cell) != (first.tp, first.cell):
            what = f"stage {s} shares experts by {max(1, stage.cell)}×{stage.tp}, stage 0 by {max(1, first.cell)}"
            raise InputError(f"export.format: {what}×{first.tp}; {EQUAL_CELLS}")


def expert_counts(model: ModelSpec) -> set[int]:
    """The numbers of experts that layers have."""
    return {kind.experts.count for kind in model.kinds if kind.experts is not None}


def check_experts(model: ModelSpec, stages: Sequence[LayoutStage]) -> None:
    """Raise InputError where the devices of a stage cannot hold equally many experts."""
    for s, stage in enumerate(stages):
        if others := [count for count in expert_counts(model) if count % stage.expert_devices]:
            what = f"{stage_name(0, s)} shares {others[0]} experts among {stage.expert_devices} devices"
            raise InputError(
                f"export.format: {what}, which cannot hold equally many; plan with another constraints.max_tp"
            )


def devices_of_experts(problem: Problem, grid: JobLayout) -> int:
    """The devices that share the experts of a stage of a grid, 1 where the model has none. Raises InputError where they
    cannot hold equally many."""
    check_experts(problem.model, grid.stages)
    return grid.stages[0].expert_devices if problem.model.shares_experts else 1


def chain_of(plan: Plan, refuse: Refuse) -> JobLayout:
    """The layout of a plan whose stages have one layer range each. Raises InputError for other plans."""
    if plan.pipelines[0].num_chunks > 1:
        refuse(f"{stage_name(0, 0)} has several layer ranges", "workload.schedule=1f1b")
    return layout_of(plan, refuse)


def check_tp(problem: Problem, layout: JobLayout, takes_tp: Callable[[Problem, int], bool], refuse: Refuse) -> None:
    """Raise InputError where a TP degree does not suit the model."""
    for s, stage in enumerate(layout.stages):
        if not takes_tp(problem, stage.tp):
            what = f"{stage_name(0, s)} has TP degree {stage.tp}, which does not divide the model's heads and columns"
            refuse(what, "constraints.max_tp")


def uniform_tp(problem: Problem, layout: JobLayout, takes_tp: Callable[[Problem, int], bool], refuse: Refuse) -> int:
    """The TP degree of all stages. Raises InputError where they differ, or it does not suit the model."""
    first = layout.stages[0].tp
    for s, stage in enumerate(layout.stages):
        if stage.tp != first:
            refuse(f"{stage_name(0, s)} has TP degree {stage.tp}, stage 0 has {first}", "space.uneven_tp=false")
    check_tp(problem, layout, takes_tp, refuse)
    return first


def zero_stage(plan: Plan, allowed: Sequence[int], refuse: Refuse) -> int:
    """The ZeRO stage of a plan. Raises InputError if it is not `allowed`, or if it shards within groups of devices."""
    stage = plan.sharding.stage
    if stage not in allowed:
        refuse(f"it shards with ZeRO-{stage}", f"workload.optimizer_sharding={allowed[0]}")
    if stage and plan.sharding.groups != "all":
        refuse("it shards the optimizer within groups of devices", "space.machine_sharding=false")
    return stage


def schedule_of(plan: Plan, allowed: Iterable[Schedule], refuse: Refuse) -> Schedule:
    """The schedule of a plan, the plain one where stages hold one layer range. Raises InputError."""
    schedule = plan.schedule if plan.pipelines[0].num_chunks > 1 else plan.schedule.plain()
    first, *others = allowed
    if schedule not in (first, *others):
        refuse(f"it has the {plan.schedule} schedule", f"workload.schedule={first}")
    return schedule


# ----------------------------------------------------------------------------- recompute


@dataclass(frozen=True, slots=True)
class BlockRecompute:
    """The recompute policy of all layers or, with a `block`, of the first `block` layers of every layer range; the
    others have none. With full recompute of all layers, `together` layers of a range are recomputed at once."""

    policy: str
    block: int | None = None
    together: int = 1

    def of(self, ranges: Ranges) -> Recompute:
        """The policies of a stage."""
        if self.together > 1:
            starts = [k % self.together == 0 for first, end in ranges for k in range(end - first)]
            return ("full",) if all(starts) else tuple("full" if start else JOINED for start in starts)
        if self.block is None:
            return (self.policy,)
        in_block = [k < self.block for first, end in ranges for k in range(end - first)]
        return (self.policy,) if all(in_block) else tuple(self.policy if first else "none" for first in in_block)


NO_RECOMPUTE = BlockRecompute("none")


def first_layers(policies: Sequence[str], policy: str = "full") -> int | None:
    """The number of first layers that have `policy`; None if any later layer has a policy other than none."""
    count = next((k for k, layer_policy in enumerate(policies) if layer_policy != policy), len(policies))
    return count if set(policies[count:]) <= {"none"} else None


def uniform_policy(layout: JobLayout, refuse: Refuse) -> str:
    """The recompute policy of all layers, full or none. Raises InputError for other policies, and for several."""
    policies = sorted({policy for stage in layout.stages for policy in stage.recompute})
    if "selective" in policies:
        refuse("it recomputes selectively", "workload.recompute=full")
    if len(policies) > 1:
        refuse("stages or layers differ in recompute", UNIFORM_RECOMPUTE)
    return policies[0]


def block_recompute(layout: JobLayout, refuse: Refuse) -> BlockRecompute:
    """The recompute of all stages: one policy, full of the first layers, or full of groups of equally many layers.

    Raises InputError for anything else.
    """
    ranges = [(s, policies) for s, stage in enumerate(layout.stages) for policies in stage.policies()]
    every = {policy for _, policies in ranges for policy in policies}
    if len(every) == 1:
        return BlockRecompute(every.pop())
    if JOINED in every:
        return group_recompute(layout, refuse)
    most = max(first_layers(policies) or 0 for _, policies in ranges)
    for s, policies in ranges:
        name, count = stage_name(0, s), first_layers(policies)
        if count is None and len(set(policies)) > 1:
            what = f"layers of {name} differ in recompute, and not as full of the first and none of the rest"
            refuse(what, "space.recompute_per_layer=false")
        if count is None:
            refuse(f"{name} has recompute {policies[0]}, another stage has another", "space.recompute_per_stage=false")
        if count != min(most, len(policies)):
            refuse(f"{name} has full recompute of {count} layers, another stage of its first {most}", UNIFORM_RECOMPUTE)
    return BlockRecompute("full", most)


def group_recompute(layout: JobLayout, refuse: Refuse) -> BlockRecompute:
    """Full recompute of groups of equally many layers; the last group of a range may be smaller. Raises InputError."""
    lengths = [n for stage in layout.stages for policies in stage.policies() for n in recompute_groups(policies)]
    grouped = BlockRecompute("full", together=max(lengths))
    if any(grouped.of(stage.layers) != stage.recompute for stage in layout.stages):
        what = f"layers are recomputed in groups of {' and '.join(map(str, sorted(set(lengths))))}"
        refuse(f"{what}; it takes groups of equally many", "space.recompute_per_layer=false")
    return grouped


# ----------------------------------------------------------------------------- to plans


def plan_of_layout(layout: JobLayout, schedule: Schedule, sharding: int) -> Plan:
    """The plan of a layout: as many pipelines as stages have copies or, if these numbers differ, one pipeline.

    Raises InputError as the constructors of plans do, and where one pipeline has several copies of shared experts.
    """
    counts = {stage.copies for stage in layout.stages}
    if len(counts) == 1:
        [count] = counts
        pipelines = tuple(
            Pipeline(
                tuple(Stage(_copy(s, p), s.layers, s.recompute) for s in layout.stages),
                layout.num_micro_batches,
                layout.micro_batch_size // count,
            )
            for p in range(count)
        )
        return Plan(pipelines, schedule, Sharding(sharding))

    def parallelism(s: int, stage: LayoutStage) -> StageParallelism:
        if stage.copies == 1:
            return _copy(stage, 0)
        if stage.cell > 1:
            what = f"stage {s} has {stage.copies} copies of experts that {stage.cell} replicas each share"
            raise InputError(f"{what}, other stages have other numbers of copies; give all equally many")
        samples = layout.micro_batch_size // stage.dp
        return Replicated(tuple(Replica(devices, samples) for devices in stage.replicas))

    stages = tuple(Stage(parallelism(s, stage), stage.layers, stage.recompute) for s, stage in enumerate(layout.stages))
    pipeline = Pipeline(stages, layout.num_micro_batches, layout.micro_batch_size)
    return Plan((pipeline,), schedule, Sharding(sharding))


def _copy(stage: LayoutStage, number: int) -> TensorParallel:
    """The devices of a copy of a stage: a replica, or those that share experts."""
    if not stage.cell:
        return TensorParallel(stage.replicas[number])
    replicas = stage.replicas[number * stage.cell : (number + 1) * stage.cell]
    devices = tuple(device for replica in replicas for device in replica)
    return TensorParallel(devices, degree=stage.tp if len(devices) > 1 else None)


def note_lines(notes: Sequence[str]) -> list[str]:
    """Notes as comments at the head of a file."""
    return [f"# Note: {note}." for note in notes]
