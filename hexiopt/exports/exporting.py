"""A plan in the files of other systems, and the layout of another system as a plan: formats by name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError, blame, did_you_mean
from hexiopt.exports.formats import ImportContext, ImportedPlan, LaunchOptions, Program, Trainer, stage_name
from hexiopt.exports.launchers.registry import LAUNCHERS
from hexiopt.exports.rank_table import FILE as RANKS
from hexiopt.exports.rank_table import devices_of_table, rank_rows, table_text
from hexiopt.exports.trainers.registry import EXECUTOR, TRAINERS
from hexiopt.numbers.messages import TRAINING
from hexiopt.plan.holdings import Holdings
from hexiopt.plan.parallelism import ExpertParallel, TensorParallel
from hexiopt.plan.plan import Plan, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space, recompute_groups, with_equal_chunks
from hexiopt.problem.workload import JOINED, Workload
from hexiopt.reading import read_text

ONLY_RANKS = "ranks"
FORMATS = (ONLY_RANKS, *LAUNCHERS, *(name for name in TRAINERS if name != EXECUTOR))
READ = tuple(name for name, trainer in TRAINERS.items() if trainer.can_read)


@dataclass(frozen=True)
class Exported:
    """The `files` of a plan by name, the `start` command of a launcher, and `notes` on what differs from the plan."""

    files: Mapping[str, str]
    start: str = ""
    notes: tuple[str, ...] = ()


def trainer_of(format: str, trainer: str | None) -> Trainer:
    """The trainer whose program is exported. Raises InputError for unknown names, and two that do not go together."""
    if format not in FORMATS:
        raise InputError(f"export.format: {format!r} is not known; {did_you_mean(format, FORMATS)}")
    if trainer is not None and trainer not in TRAINERS:
        raise InputError(f"export.trainer: {trainer!r} is not known; {did_you_mean(trainer, TRAINERS)}")
    if format in TRAINERS and trainer not in (None, format):
        raise InputError(
            f"export.trainer: {trainer} does not go with export.format={format}, which is a trainer too; "
            f"take export.format=torchrun, or another launcher, with export.trainer={trainer}"
        )
    if format not in TRAINERS and trainer is not None and not TRAINERS[trainer].is_launched:
        raise InputError(
            f"export.trainer: {trainer} is one process, which no launcher starts; take export.format={trainer}"
        )
    return TRAINERS[format if format in TRAINERS else trainer or EXECUTOR]


def write_program(problem: Problem, plan: Plan, trainer: Trainer) -> Program:
    """Write the plan in the trainer's terms. Raises InputError if the trainer cannot train the model, or express it."""
    if trainer.name != EXECUTOR:
        _check_expressible(problem, plan, trainer)
    return trainer.write(problem, PlanPricer(problem).with_degrees(plan) if problem.model.shares_experts else plan)


def _check_expressible(problem: Problem, plan: Plan, trainer: Trainer) -> None:
    """Raise InputError for what plans of ours may have and the trainer cannot run."""
    kinds = trainer.unsuitable_kinds(problem)
    if kinds is not None:
        raise InputError(f"export.format: {trainer.name} {kinds}")
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            if isinstance(stage.parallelism, ExpertParallel):
                what = f"{trainer.name} cannot express the plan: {stage_name(p, s)} states the experts of each device"
                raise InputError(f"export.format: {what}; plan with space.uneven_experts=false")
    wrong = trainer.unsuitable(problem)
    if wrong is not None:
        raise InputError(f"export.format: {trainer.name}: {wrong}")
    if (
        not (problem.workload.sequence_parallel or trainer.optional_sequence_parallelism)
        and plan.has_tensor_parallelism
    ):
        raise InputError(
            f"export.format: {trainer.name} has no tensor parallelism without sequence parallelism; plan with "
            "workload.sequence_parallel=true, or constraints.max_tp=1"
        )
    if plan.joins_layers and not trainer.recomputes_together:
        raise InputError(
            f"export.format: {trainer.name} recomputes each layer by itself; recompute without joined layers"
        )
    for p, s in islice(plan.other_depths(), 1):
        what = f"{stage_name(p, s)} has {plan.pipelines[p].stages[s].in_flight} micro-batches in flight"
        trainer.refuse(f"{what}, as the schedule has not", "space.depth=false")
    for key, value in trainer.stated_training.items():
        if (other := getattr(problem.workload, key)) != value:
            rule = f"{trainer.name} is written for workload.{key}={value}; plan with that, not {other}"
            raise InputError(f"export.format: {rule}")
    precision = problem.workload.message_precision
    if precision != TRAINING and any(len(pipeline.stages) > 1 for pipeline in plan.pipelines):
        raise InputError(
            f"export.format: {trainer.name} cannot send messages between stages in {precision}; plan with "
            f"workload.message_precision={TRAINING}"
        )
    precision = problem.workload.gradient_precision
    trained = problem.parameters.trained_groups
    if precision != TRAINING and Holdings.of(plan.pipelines).shared_groups(trained):
        raise InputError(
            f"export.format: {trainer.name} cannot sum gradients in {precision}; plan with "
            f"workload.gradient_precision={TRAINING}"
        )


def export_files(problem: Problem, plan: Plan, format: str, program: Program, options: LaunchOptions) -> Exported:
    """The files of a launcher, of a trainer, or of the rank table alone. Raises InputError."""
    rows = rank_rows(problem.cluster, plan, program.devices)
    files = {RANKS: table_text(rows), **program.files}
    if format not in LAUNCHERS:
        return Exported(files, notes=program.notes)
    launch = LAUNCHERS[format].write(problem.cluster, rows, program, options)
    return Exported({**files, **launch.files}, launch.start, (*program.notes, *launch.notes))


def read_layout(
    format: str,
    file: Path,
    cluster: Cluster,
    model: ModelSpec | None,
    workload: Workload,
    space: Space,
    ranks: str | None,
    stated_keys: frozenset[str] = frozenset(),
) -> ImportedPlan:
    """Read the layout in a trainer's `file`.

    The table `ranks` has the GPU of each rank; without it, ranks are the usable GPUs in order. `workload` has what the
    file does not state; its `stated_keys`, and those that differ from the defaults, override the file. The first of the
    notes says what was read. Raises InputError.
    """
    if format not in READ:
        raise InputError(f"format: {format!r} is not read; {did_you_mean(format, READ)}")
    if ranks is None:
        excluded = {device for name in space.exclude for device in cluster.devices_named(name, "constraints.exclude")}
        devices = tuple(device for device in range(cluster.num_devices) if device not in excluded)
    else:
        devices = devices_of_table(read_text(Path(ranks)), cluster, ranks)
    stated_keys |= {name for name, value in vars(workload).items() if value != getattr(Workload(), name)}
    context = ImportContext(str(file), cluster, devices, model, workload, space, stated_keys, table=ranks is not None)
    trainer = TRAINERS[format]
    layout = _with_its_freedoms(trainer.read(read_text(file), context))
    if layout.problem.model.shares_experts and trainer.unsuitable_kinds(layout.problem) is not None:
        _check_experts(str(file), layout)
    return replace(layout, notes=(reading_note(layout.problem, layout.plan), *layout.notes))


def _check_experts(where: str, layout: ImportedPlan) -> None:
    """Raise InputError where devices would share experts in a TP group of which the format says no more."""
    stages = (stage.parallelism for pipeline in layout.plan.pipelines for stage in pipeline.stages)
    for group in stages:
        degree = group.degree if isinstance(group, TensorParallel) else None
        if degree is None and any(len(devices) > 1 for devices in group.executors):
            raise InputError(
                f"{where}: says not which GPUs share the experts of {layout.problem.model.name}, or cuts each by "
                "columns, which is not modelled; import a layout of TP 1, or of a format that states EP"
            )


def _with_its_freedoms(layout: ImportedPlan) -> ImportedPlan:
    """Allow in the plan space of a layout the uneven chunks that it has, and micro-batches as large as those of its
    replicas that share experts, all of them together; and say so in notes."""
    space, notes, pipelines = layout.problem.space, [], layout.plan.pipelines
    ranges = [[s.layers for s in pipeline.stages] for pipeline in pipelines]
    if not space.uneven_chunks and any(chunks != with_equal_chunks(chunks) for chunks in ranges):
        space = replace(space, uneven_chunks=True)
        notes.append("the layer ranges of a stage differ in length, so space.uneven_chunks=true")
    largest = max(pipeline.micro_batch_size for pipeline in pipelines)
    if largest > space.max_micro_batch_size and any(
        stage.parallelism.num_replicas > 1
        for pipeline in pipelines
        for stage in pipeline.stages
        if isinstance(stage.parallelism, TensorParallel)
    ):
        with blame(f"micro-batches of {largest} sequences, those of all replicas that share experts"):
            space = replace(space, max_micro_batch_size=largest)
        notes.append(
            f"replicas that share experts have micro-batches of {largest} together, so "
            f"space.max_micro_batch_size={largest}"
        )
    problem = replace(layout.problem, space=space)
    return replace(layout, problem=problem, notes=(*layout.notes, *notes))


def _ep_degree(stage: Stage, model: ModelSpec) -> int:
    return len(stage.parallelism.executors[0]) if model.shares_experts else 1


def _replica_samples(stage: Stage, micro_batch_size: int) -> int:
    group = stage.parallelism
    return group.samples(micro_batch_size)[0] * len(group.executors) // len(group.parameter_copies)


def reading_note(problem: Problem, plan: Plan) -> str:
    """The model, the degrees, the batch and the choices that an imported problem and its plan have."""
    model, workload, first = problem.model, problem.workload, plan.pipelines[0]
    degrees = {
        "TP": [
            len(devices) for p in plan.pipelines for stage in p.stages for devices in stage.parallelism.parameter_copies
        ],
        "EP": [_ep_degree(stage, model) for p in plan.pipelines for stage in p.stages],
        "PP": [len(pipeline.stages) for pipeline in plan.pipelines],
        "VP": [pipeline.num_chunks for pipeline in plan.pipelines],
        "DP": [sum(len(pipeline.stages[0].parallelism.parameter_copies) for pipeline in plan.pipelines)],
        "micro-batch": [_replica_samples(stage, p.micro_batch_size) for p in plan.pipelines for stage in p.stages],
    }
    degrees_in_words = {name: "/".join(map(str, sorted(set(values)))) for name, values in degrees.items()}
    layers = " + ".join(str(stage.num_layers) for stage in first.stages)
    same = len({stage.num_layers for stage in first.stages}) == 1
    policies = {policy for p in plan.pipelines for stage in p.stages for policy in stage.recompute}
    groups = [n for stage in first.stages for n in recompute_groups(stage.recompute)]
    recompute = f"full of {max(groups)} layers together" if JOINED in policies else " and ".join(sorted(policies))
    gradients = f"gradients of {workload.states.gradient} bytes"
    parts = [
        f"{model.name} of {model.num_params / 1e9:.2f} B parameters in {model.num_layers} layers",
        *(f"{name} {degrees_in_words[name]}" for name in ("TP", "PP", "VP", "DP", "EP")),
        "CP 1",
        *([] if same else [f"stages of {layers} layers"]),
        f"micro-batch {degrees_in_words['micro-batch']}",
        f"batch {workload.global_batch}",
        f"sequence {workload.seq_len}",
        f"recompute {recompute}",
        f"{workload.precision} with {gradients}",
        f"ZeRO-{plan.sharding.stage}",
        *(
            [f"sequence parallelism {'on' if workload.sequence_parallel else 'off'}"]
            if degrees_in_words["TP"] != "1"
            else []
        ),
        "no offload",
    ]
    return f"read: {', '.join(parts)}"
