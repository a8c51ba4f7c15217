"""Megatron-LM: arguments of `pretrain_gpt.py`, and the same values as overrides of Megatron-Bridge.

Layers are always stated by `--pipeline-model-parallel-layout`. Ranks are t + T·(p + P·s), or with
`--use-tp-pp-dp-mapping` t + T·(s + S·p); whichever takes fewer agents to start is written
(`megatron/core/parallel_state.py`).
"""

from collections.abc import Mapping
from dataclasses import replace

from hexiopt.errors import InputError
from hexiopt.exports.formats import ImportContext, ImportedPlan, Program, Refusal, Trainer
from hexiopt.exports.grid import (
    BlockRecompute,
    Grid,
    grid_of,
    one_recompute,
    one_schedule,
    one_tp,
    plan_of,
    zero_stage,
)
from hexiopt.exports.rank_table import num_agents
from hexiopt.exports.trainers.megatron_model import (
    Arguments,
    integer,
    model_arguments,
    read_model,
    takes_tp,
    unsuitable,
)
from hexiopt.exports.trainers.pipeline_layout import layout_text, read_layout
from hexiopt.exports.trainers.shell_arguments import shell_arguments
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import ranges_of
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B

TARGET = "Megatron-LM with Megatron-Core 0.16 to 0.19"
FILE = "megatron.sh"
_PRECISIONS: dict[str, Arguments] = {"bf16": {"bf16": []}, "fp16": {"fp16": []}, "fp32": {}}
_SHARDING = {"optim": "1", "optim_grads": "2", "optim_grads_params": "3"}

EVEN = {
    "space.tp_degrees": ("powers_of_two",),
    "space.uneven_tp": (False,),
    "space.uneven_structure": (False,),
    "space.uneven_batch": (False,),
    "space.batch_remainder": (False,),
    "space.recompute_per_stage": (False,),
    "space.recompute_per_layer": (False,),
    "space.replicas": (False,),
    "space.machine_sharding": (False,),
    "space.sequence": (False,),
}
PRESET = EVEN | {
    "workload.schedule": (ONE_F_ONE_B.name, INTERLEAVED.name),
    "workload.optimizer_sharding": ("1", "0"),
}


def plan_arguments(problem: Problem, plan: Plan, trainer: str) -> tuple[Arguments, Grid, tuple[int, ...]]:
    """The arguments that state a plan, its grid, and its devices in the order of ranks. Raises InputError."""
    refuse = Refusal(trainer)
    grid = grid_of(plan, refuse)
    tp, recompute = one_tp(grid, refuse), one_recompute(grid, refuse)
    if not takes_tp(problem, tp):
        refuse(f"TP degree {tp} does not divide the model's heads and columns", "constraints.max_tp")
    schedule = one_schedule(plan, (ONE_F_ONE_B, INTERLEAVED), refuse)
    zero = zero_stage(plan, (1, 0), refuse)
    if problem.workload.precision not in _PRECISIONS:
        raise InputError(
            f"export.format: {trainer} is written for bf16, fp16 and fp32; plan with workload.precision=bf16"
        )
    found: Arguments = {
        "tensor-model-parallel-size": [str(tp)],
        "pipeline-model-parallel-size": [str(grid.num_stages)],
        "micro-batch-size": [str(grid.micro_batch_size)],
        "global-batch-size": [str(grid.global_batch)],
        **_PRECISIONS[problem.workload.precision],
    }
    if tp > 1 and problem.workload.sequence_parallel:
        found["sequence-parallel"] = []
    if grid.num_stages > 1:
        found["pipeline-model-parallel-layout"] = [layout_text(grid.parts)]
        assert schedule == INTERLEAVED or grid.num_chunks == 1
    if recompute.block is not None:
        found |= {"recompute-granularity": ["full"], "recompute-method": ["block"]}
        found["recompute-num-layers"] = [str(recompute.block)]
    elif recompute.policy == "full":
        found |= {"recompute-granularity": ["full"], "recompute-method": ["uniform"]}
        found["recompute-num-layers"] = [str(recompute.together)]
    elif recompute.policy == "selective":
        found |= {"recompute-granularity": ["selective"], "recompute-modules": ["core_attn"]}
    if zero:
        found["use-distributed-optimizer"] = []
    orders = {"": grid.stage_major(), "use-tp-pp-dp-mapping": grid.pipeline_major()}
    order = min(orders, key=lambda flag: (num_agents(problem.cluster, orders[flag]), flag))
    if order:
        found[order] = []
    return found, grid, orders[order]


def _notes(problem: Problem, grid: Grid) -> tuple[str, ...]:
    tp, vocab = grid.degrees[0], problem.model.vocab_size
    padded = -(-vocab // tp) * tp
    said = [f"the vocabulary is padded from {vocab} to {padded}, a multiple of the TP degree"] * (padded > vocab)
    if problem.workload.precision != "fp32" and problem.workload.gradient_bytes == 2:
        said.append("gradients are reduced in fp32 by default, 4 bytes where the plan was priced with 2")
    return (*grid.notes(), *said)


def _write(problem: Problem, plan: Plan) -> Program:
    arguments, grid, devices = plan_arguments(problem, plan, "megatron")
    model, notes = model_arguments(problem.model, problem.workload.seq_len), _notes(problem, grid)
    lines = [
        f"# For {TARGET}: arguments of pretrain_gpt.py, with --data-path and the like still to add. Rank r runs on",
        "# the GPU of row r of ranks.tsv.",
        *(f"# Note: {note}." for note in notes),
        "set -f  # the layout has asterisks",
        f'MODEL="{words(model)}"',
        f'PLAN="{words(arguments)}"',
    ]
    return Program(
        devices,
        '"${MEGATRON:-.}/pretrain_gpt.py" $MODEL $PLAN',
        {FILE: "\n".join(lines) + "\n"},
        setup=f'. "$HERE/{FILE}"',
        environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        notes=notes,
    )


def words(arguments: Mapping[str, list[str]]) -> str:
    """Arguments as one line."""
    return " ".join(" ".join((f"--{name}", *values)) for name, values in arguments.items())


# ----------------------------------------------------------------------------- reading


def _read(text: str, context: ImportContext) -> ImportedPlan:
    return imported(shell_arguments(text, context.where), context)


def imported(arguments: Mapping[str, list[str]], context: ImportContext) -> ImportedPlan:
    """The problem and plan of Megatron-LM arguments. Raises InputError for those that no plan of ours expresses."""

    def whole(name: str, default: int | None = None) -> int:
        return integer(arguments, name, context, default)

    model, notes = read_model(arguments, context)
    for name in ("context-parallel-size", "expert-model-parallel-size"):
        if whole(name, 1) > 1:
            context.fail(f"--{name} {whole(name)} is not modelled; import a layout without it")
    tp, stages = whole("tensor-model-parallel-size", 1), whole("pipeline-model-parallel-size", 1)
    world = len(context.devices)
    if not tp or not stages or world % (tp * stages):
        context.fail(f"{world} GPUs are not divided by TP {tp} times PP {stages}; give ranks=ranks.tsv or the cluster")
    pipelines = world // (tp * stages)
    size = whole("micro-batch-size", 1)
    batch = whole("global-batch-size", size * pipelines)
    if not size or batch % (size * pipelines):
        context.fail(
            f"--global-batch-size {batch} is not divided by {pipelines} pipelines times --micro-batch-size {size}"
        )
    parts = _parts(arguments, context, model.num_layers, stages)
    layers = ranges_of(parts, stages)
    recompute = _recompute(arguments, context)
    major = "use-tp-pp-dp-mapping" in arguments
    order = context.devices

    def group(p: int, s: int) -> tuple[int, ...]:
        first = tp * ((s + stages * p) if major else (p + pipelines * s))
        return tuple(order[first : first + tp])

    groups = tuple(tuple(group(p, s) for s in range(stages)) for p in range(pipelines))
    grid = Grid(groups, layers, tuple(map(recompute.of, layers)), batch // (size * pipelines), size)
    precision = next((name for name in ("bf16", "fp16") if name in arguments), "fp32")
    sharding = _sharding(arguments)
    schedule = INTERLEAVED if grid.num_chunks > 1 else ONE_F_ONE_B
    workload = replace(
        context.workload,
        global_batch=batch,
        seq_len=whole("seq-length", context.workload.seq_len),
        precision=precision,
        gradient_bytes=4 if "accumulate-allreduce-grads-in-fp32" in arguments else context.workload.gradient_bytes,
    )
    if "rampup-batch-size" in arguments:
        notes.append("the batch size is that after --rampup-batch-size")
    problem = Problem(context.cluster, model, workload, context.space)
    return ImportedPlan(problem, plan_of(grid, schedule, sharding), tuple(notes))


def _parts(arguments: Mapping[str, list[str]], context: ImportContext, num_layers: int, stages: int) -> list[int]:
    """Layers of every virtual stage, in the order of the model."""
    if "pipeline-model-parallel-layout" in arguments:
        where = f"{context.where}: --pipeline-model-parallel-layout"
        parts = read_layout("".join(arguments["pipeline-model-parallel-layout"]), where)
        if len(parts) % stages or sum(parts) != num_layers:
            context.fail(
                f"the layout has {len(parts)} parts with {sum(parts)} layers, for {stages} stages and {num_layers} "
                "layers; make parts a multiple of the stages, and layers the model's"
            )
        return parts
    ends = [integer(arguments, f"decoder-{end}-pipeline-num-layers", context, 0) for end in ("first", "last")]
    if any(ends):
        middle = stages - sum(1 for end in ends if end)
        rest = num_layers - sum(ends)
        if (middle and rest % middle) or rest < middle or (not middle and rest):
            context.fail(
                f"{rest} layers are not divided by {middle} stages between first and last; correct the numbers"
            )
        each = rest // middle if middle else 0
        first, last = ends[0] or each, ends[1] or each
        return [first, *[each] * (stages - 2), last] if stages > 1 else [num_layers]
    per = integer(arguments, "num-layers-per-virtual-pipeline-stage", context, 0)
    chunks = integer(arguments, "num-virtual-stages-per-pipeline-rank", context, 0)
    count = num_layers // per if per else stages * max(1, chunks)
    if num_layers % count or count % stages:
        context.fail(f"{num_layers} layers are not divided by {count} virtual stages of {stages} stages")
    return [num_layers // count] * count


def _recompute(arguments: Mapping[str, list[str]], context: ImportContext) -> BlockRecompute:
    granularity = arguments.get("recompute-granularity", [])
    if "recompute-activations" in arguments or granularity == ["selective"]:
        return BlockRecompute("selective")
    if granularity != ["full"]:
        return BlockRecompute("none")
    count = integer(arguments, "recompute-num-layers", context, 1)
    if arguments.get("recompute-method") == ["block"]:
        return BlockRecompute("full", count)
    if count > 1:
        context.fail(f"--recompute-num-layers {count} with method uniform keeps one input in {count} layers; take 1")
    return BlockRecompute("full")


def _sharding(arguments: Mapping[str, list[str]]) -> int:
    if "use-megatron-fsdp" in arguments or "use-custom-fsdp" in arguments:
        [strategy] = arguments.get("data-parallel-sharding-strategy", ["no_shard"])[:1] or ["no_shard"]
        return int(_SHARDING.get(strategy, "0"))
    return 1 if "use-distributed-optimizer" in arguments else 0


TRAINER = Trainer(
    name="megatron",
    target=TARGET,
    expresses=(
        "pipelines all alike with one TP degree; uneven and interleaved layers, "
        "full recompute of first layers or groups"
    ),
    preset=lambda problem: PRESET,
    takes_tp=takes_tp,
    write=_write,
    read=_read,
    unsuitable=unsuitable,
    optional_sequence_parallelism=True,
    recomputes_together=True,
)
