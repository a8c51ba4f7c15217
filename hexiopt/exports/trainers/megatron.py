"""Megatron-LM: arguments of `pretrain_gpt.py`, and the same values as overrides of Megatron-Bridge.

Layers are always stated by `--pipeline-model-parallel-layout`. Ranks are t + T·(p + P·s), or with
`--use-tp-pp-dp-mapping` t + T·(s + S·p); whichever takes fewer agents to start is written
(`megatron/core/parallel_state.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hexiopt.errors import InputError
from hexiopt.exports.file_jobs import FileJob, import_job
from hexiopt.exports.formats import EVEN, ImportContext, ImportedPlan, Program, Trainer
from hexiopt.exports.layout import (
    UNIFORM_RECOMPUTE,
    BlockRecompute,
    JobLayout,
    LayoutStage,
    block_recompute,
    check_experts,
    grid_of,
    note_lines,
    schedule_of,
    tied_notes,
    uniform_tp,
    zero_stage,
)
from hexiopt.exports.rank_table import num_agents
from hexiopt.exports.shell.scripts import read_script
from hexiopt.exports.trainer_schedules import TRAINER_SCHEDULES
from hexiopt.exports.trainers.megatron_arguments import MegatronArguments
from hexiopt.exports.trainers.megatron_kinds.composition import is_hybrid
from hexiopt.exports.trainers.megatron_kinds.reading import pattern_of
from hexiopt.exports.trainers.megatron_kinds.writing import blocks_of_layer, hybrid_pattern, kinds_notes
from hexiopt.exports.trainers.megatron_layers import read_parts, read_recompute
from hexiopt.exports.trainers.megatron_model import (
    Arguments,
    model_arguments,
    read_model,
    takes_tp,
    unsuitable,
    unsuitable_kinds,
)
from hexiopt.exports.trainers.megatron_yaml import read_yaml
from hexiopt.exports.trainers.pipeline_layout import layout_text
from hexiopt.plan.plan import Plan
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem

TARGET = "Megatron-LM with Megatron-Core 0.16 to 0.19"
FILE = "megatron.sh"
_PRECISIONS: dict[str, Arguments] = {"bf16": {"bf16": []}, "fp16": {"fp16": []}, "fp32": {}}
_SHARDING = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def plan_arguments(problem: Problem, plan: Plan, trainer: Trainer) -> tuple[Arguments, JobLayout, tuple[int, ...]]:
    """The arguments that state a plan, its grid, and its devices in the order of ranks. Raises InputError."""
    refuse = trainer.refuse
    grid = grid_of(plan, refuse)
    tp, recompute = uniform_tp(problem, grid, takes_tp, refuse), block_recompute(grid, refuse)
    schedule = schedule_of(plan, trainer.schedules, refuse)
    zero = zero_stage(plan, (1, 0), refuse)
    trainer.check_precision(problem)
    model, hybrid = problem.model, is_hybrid(problem.model)
    arguments: Arguments = {
        "tensor-model-parallel-size": [str(tp)],
        "pipeline-model-parallel-size": [str(grid.num_stages)],
        "micro-batch-size": [str(grid.samples)],
        "global-batch-size": [str(grid.global_batch)],
        **_PRECISIONS[problem.workload.precision],
    }
    if tp > 1 and problem.workload.sequence_parallel:
        arguments["sequence-parallel"] = []
    if model.shares_experts:
        arguments |= expert_arguments(problem, grid.stages)
    if hybrid:
        arguments["hybrid-layer-pattern"] = [hybrid_pattern(model, grid.parts)]
    elif grid.num_stages > 1:
        arguments["pipeline-model-parallel-layout"] = [layout_text(grid.parts, len(model.extra_layers))]
    assert schedule.chunked or grid.num_chunks == 1
    blocks = blocks_of_layer(model) if hybrid else 1
    if not blocks and (recompute.block or recompute.together > 1):
        refuse("it recomputes some of its layers, which are of unequally many blocks", UNIFORM_RECOMPUTE)
    if recompute.block is not None:
        arguments |= {"recompute-granularity": ["full"], "recompute-method": ["block"]}
        arguments["recompute-num-layers"] = [str(recompute.block * blocks)]
    elif recompute.policy == "full":
        arguments |= {"recompute-granularity": ["full"], "recompute-method": ["uniform"]}
        arguments["recompute-num-layers"] = [str(recompute.together * max(1, blocks))]
    elif recompute.policy == "selective":
        arguments |= {"recompute-granularity": ["selective"], "recompute-modules": ["core_attn"]}
    if zero:
        arguments["use-distributed-optimizer"] = []
    orders = {"": grid.stage_major()}
    if grid.stages[0].cell <= 1:  # else ranks that share experts would not stand together
        orders["use-tp-pp-dp-mapping"] = grid.pipeline_major()
    order = min(orders, key=lambda flag: (num_agents(problem.cluster, orders[flag]), flag))
    if order:
        arguments[order] = []
    return arguments, grid, orders[order]


def expert_arguments(problem: Problem, stages: Sequence[LayoutStage]) -> Arguments:
    """The arguments by which devices share experts, each with whole ones; degrees of the first stage.

    Raises InputError where the devices of a stage do not divide the experts, and for TP without sequence parallelism,
    which the program refuses beside experts (`moe_layer.py`).
    """
    check_experts(problem.model, stages)
    if any(stage.tp > 1 for stage in stages) and not problem.workload.sequence_parallel:
        raise InputError(
            "export.format: Megatron-LM has experts beside tensor parallelism only with sequence parallelism; plan "
            "with workload.sequence_parallel=true, or constraints.max_tp=1"
        )
    forced: Arguments = {"moe-router-force-load-balancing": []} if problem.workload.routing == "forced" else {}
    return {
        "expert-model-parallel-size": [str(stages[0].expert_devices)],
        "expert-tensor-parallel-size": ["1"],
        **forced,
    }


def difference_notes(problem: Problem, tp: int) -> tuple[str, ...]:
    """Notes on differences between Megatron-LM and the plan as priced; `tp` is the TP degree of the embedding."""
    vocab = problem.model.vocab_size
    padded = -(-vocab // tp) * tp
    notes = [f"the vocabulary is padded from {vocab} to {padded}, a multiple of the TP degree"] * (padded > vocab)
    if problem.workload.precision != "fp32" and problem.workload.gradient_bytes == 2:
        notes.append("gradients are reduced in fp32 by default, 4 bytes where the plan was priced with 2")
    return (*notes, *(kinds_notes(problem.model) if problem.model.layers else ()))


def words(arguments: Mapping[str, list[str]]) -> str:
    """Arguments as one line; a value that begins with a dash is joined to its name."""
    return " ".join(
        f"--{name}={values[0]}" if values and values[0].startswith("-") else " ".join((f"--{name}", *values))
        for name, values in arguments.items()
    )


# ----------------------------------------------------------------------------- reading


CORE = (
    "num-layers",
    "hidden-size",
    "micro-batch-size",
    "global-batch-size",
    "tensor-model-parallel-size",
    "pipeline-model-parallel-size",
)
"""Arguments by which a training run is known."""


def import_arguments(
    arguments: MegatronArguments, context: ImportContext, world: int | None, notes: Sequence[str] = ()
) -> ImportedPlan:
    """The problem and plan of Megatron-LM arguments. Raises InputError for arguments that our plans cannot express."""
    tp = arguments.whole(_name_in_use(arguments, "tensor-model-parallel-size", "model-parallel-size"), 1)
    stages = arguments.whole("pipeline-model-parallel-size", 1)
    model, assumed = read_model(arguments, context, tp)
    parts = read_parts(arguments, model, stages)
    precision, gradient_bytes = read_precision(arguments, context)
    if any(name in arguments for name in ("rampup-batch-size", "step-batch-size-schedule")):
        assumed.append("the batch size is the last one of its ramp")
    sharding, why = _sharding(arguments, precision)
    if "global-batch-size" not in arguments:
        arguments.by_default("global-batch-size", "a micro-batch of each pipeline")
    plain, interleaved = TRAINER_SCHEDULES["megatron"]
    job = FileJob(
        model,
        tp=tp,
        expert_devices=read_expert_devices(arguments, model, tp),
        num_stages=stages,
        parts=parts,
        recompute=_of_layers(arguments, model, read_recompute(arguments)),
        micro_batch_size=arguments.whole(_name_in_use(arguments, "micro-batch-size", "batch-size"), 1),
        global_batch=arguments.whole("global-batch-size", 0) or None,
        schedule=interleaved if len(parts) > stages else plain,
        sharding=sharding,
        pipeline_major=arguments.flag("use-tp-pp-dp-mapping"),
        world=world,
        workload={
            "seq_len": arguments.whole("seq-length", context.workload.seq_len),
            "precision": precision,
            "gradient_bytes": gradient_bytes,
            "sequence_parallel": arguments.flag("sequence-parallel") or tp == 1,
            **read_routing(arguments, model),
        },
        labels={
            "tp": arguments.label("tensor-model-parallel-size"),
            "expert_devices": arguments.label("expert-model-parallel-size"),
            "num_stages": arguments.label("pipeline-model-parallel-size"),
            "micro_batch_size": arguments.label("micro-batch-size"),
            "global_batch": arguments.label("global-batch-size"),
        },
        notes=(*notes, *assumed, *why),
    )
    layout = import_job(context, job)
    return replace(layout, notes=(*layout.notes, *arguments.notes()))


def read_expert_devices(arguments: MegatronArguments, model: ModelSpec, tp: int) -> int:
    """The devices in a row that share experts, each with whole ones; 0 for models without. Raises InputError where
    experts are cut by columns (the degree for that is the TP degree, unless it is stated)."""
    degree = arguments.whole("expert-model-parallel-size", 1, noted=model.shares_experts)
    columns = arguments.whole("expert-tensor-parallel-size", tp, noted=model.shares_experts)
    if not model.shares_experts:
        if degree > 1:
            arguments.fail("expert-model-parallel-size", f"{degree} shares experts, which {model.name} has not")
        return 0
    check_whole_experts(arguments, columns)
    return degree


def check_whole_experts(arguments: MegatronArguments, columns: int) -> None:
    """Raise InputError where `columns`, the TP degree of experts, is above 1."""
    if columns > 1:
        name = "expert-tensor-parallel-size"
        degree = f"{columns}" if name in arguments else f"is not stated, so that the TP degree {columns}"
        arguments.fail(
            name,
            f"{degree} cuts experts by columns, which is not modelled; state 1 with {columns} times the EP degree, for "
            "whole experts on the same GPUs",
        )


def read_routing(arguments: MegatronArguments, model: ModelSpec) -> dict[str, str]:
    """The workload's routing, for models with experts."""
    forced = arguments.flag("moe-router-force-load-balancing")
    return {"routing": "forced" if forced else "natural"} if model.shares_experts else {}


def _of_layers(arguments: MegatronArguments, model: ModelSpec, recompute: BlockRecompute) -> BlockRecompute:
    """Recompute by layers, which a hybrid model states by blocks."""
    blocks = blocks_of_layer(model) if pattern_of(arguments) is not None else 1
    counts = (recompute.block or 0, recompute.together if recompute.together > 1 else 0)
    if any(count and (not blocks or count % blocks) for count in counts):
        arguments.fail("recompute-num-layers", "recomputes a part of a layer, which is not modelled; take whole ones")
    if not any(counts):
        return recompute
    block = None if recompute.block is None else recompute.block // blocks
    return replace(recompute, block=block, together=max(1, recompute.together // blocks))


def _name_in_use(arguments: MegatronArguments, name: str, earlier: str) -> str:
    """The name by which a value is stated: the current or the earlier one."""
    return name if name in arguments or earlier not in arguments else earlier


def read_precision(arguments: MegatronArguments, context: ImportContext) -> tuple[str, int]:
    """The precision, and the bytes of a gradient element, which is reduced in FP32 by default beside bf16.

    Raises InputError for recipes of FP8 and FP4 that are not known.
    """
    flags = [name for name in ("bf16", "fp16") if arguments.flag(name)]
    gradients = 4 if arguments.flag("accumulate-allreduce-grads-in-fp32") else context.workload.gradient_bytes
    if "bf16" in flags:
        main_gradients = arguments.word("main-grads-dtype", "fp32", noted=False)
        gradients = 2 if arguments.flag("grad-reduce-in-bf16") or main_gradients == "bf16" else 4
    precision = flags[0] if flags else "fp32"
    if "fp8-format" in arguments or any([arguments.flag("fp8-hybrid"), arguments.flag("fp8-e4m3")]):
        arguments.word("fp8-format", "hybrid", ("hybrid", "e4m3"))
        recipe = arguments.word("fp8-recipe", "delayed", ("delayed", "tensorwise", "blockwise", "mxfp8"))
        precision = "mxfp8" if recipe == "mxfp8" else "fp8"
    if "fp4-format" in arguments:
        arguments.word("fp4-format", choices=("e2m1",))
        precision = arguments.word("fp4-recipe", "nvfp4", ("nvfp4",))
    return precision, gradients


def _sharding(arguments: MegatronArguments, precision: str) -> tuple[int, tuple[str, ...]]:
    """The ZeRO stage, and a note if it is not the stage that is named."""
    distributed = arguments.flag("use-distributed-optimizer")
    if arguments.flag("use-torch-fsdp2"):
        return 2 if arguments.flag("torch-fsdp2-no-reshard-after-forward") else 3, ()
    if any([arguments.flag("use-megatron-fsdp"), arguments.flag("use-custom-fsdp")]):
        return _SHARDING[arguments.word("data-parallel-sharding-strategy", "optim_grads_params", tuple(_SHARDING))], ()
    if "deepspeed" in arguments:
        stage = arguments.whole("zero-stage", 1)
        if stage == 0 and precision == "bf16":
            return 1, ("DeepSpeed's bf16 optimizer divides its states over replicas: ZeRO-1 for --zero-stage 0",)
        if stage > 3:
            arguments.fail("zero-stage", f"{stage} is not known; choose 0, 1, 2 or 3")
        return stage, ()
    return int(distributed), ()


class MegatronFormat(Trainer):
    """Megatron-LM's arguments."""

    name = "megatron"
    target = TARGET
    expresses = (
        "pipelines all alike with one TP degree and equally many replicas that share experts; uneven and interleaved "
        "layers, full recompute of first layers or groups"
    )
    schedules = TRAINER_SCHEDULES["megatron"]
    choices = EVEN | {"workload.optimizer_sharding": ("1", "0")}
    optional_sequence_parallelism = True
    recomputes_together = True
    takes_tp = staticmethod(takes_tp)
    unsuitable = staticmethod(unsuitable)

    def unsuitable_kinds(self, problem: Problem) -> str | None:
        """The reason why the program has no such layers."""
        return unsuitable_kinds(problem)

    def write(self, problem: Problem, plan: Plan) -> Program:
        arguments, grid, devices = plan_arguments(problem, plan, self)
        model = model_arguments(problem.model, problem.workload.seq_len)
        program = "pretrain_mamba.py" if is_hybrid(problem.model) else "pretrain_gpt.py"
        notes = (*grid.notes(), *difference_notes(problem, grid.stages[0].tp), *tied_notes(problem, plan))
        lines = [
            f"# For {TARGET}: arguments of {program}, with --data-path and the like still to add. Rank r runs on",
            "# the GPU of row r of ranks.tsv.",
            *note_lines(notes),
            "set -f  # the layout has asterisks",
            f'MODEL="{words(model)}"',
            f'PLAN="{words(arguments)}"',
        ]
        return Program(
            devices,
            f'"${{MEGATRON:-.}}/{program}" $MODEL $PLAN',
            {FILE: "\n".join(lines) + "\n"},
            setup=f'. "$HERE/{FILE}"',
            environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            notes=notes,
        )

    def read(self, text: str, context: ImportContext) -> ImportedPlan:
        script = read_yaml(text, context) or read_script(text, context.where, CORE)
        return import_arguments(MegatronArguments(context, script.arguments), context, script.world, script.notes)


TRAINER = MegatronFormat()
