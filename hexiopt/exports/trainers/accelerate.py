"""Hugging Face Accelerate: a template of its YAML configuration, for plans without pipeline parallelism.

`accelerate launch` takes equal machines alone, so ranks are started by torchrun. The batch is the training script's:
the numbers stand in a comment and are read from there. Ranks are t + T·p. FSDP of both versions, DDP, and what it hands
to DeepSpeed and Megatron-LM are read.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from hexiopt.exports.file_jobs import FileJob, import_job, shard_within
from hexiopt.exports.formats import EVEN, ImportContext, ImportedPlan, Program, Trainer, divides_model, stage_name
from hexiopt.exports.layout import (
    BlockRecompute,
    grid_of,
    note_lines,
    schedule_of,
    uniform_policy,
    uniform_tp,
    zero_stage,
)
from hexiopt.exports.settings import FileSettings, flat, script_notes, unknown_key
from hexiopt.exports.trainer_schedules import TRAINER_SCHEDULES
from hexiopt.exports.trainers.vocabularies.accelerate import TOP, VOCABULARY
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.reading import as_mapping, parse

TARGET = "Accelerate 1.15"
FILE = "accelerate.yaml"
_LAYERS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_BATCH = re.compile(r"(per_device_train_batch_size|gradient_accumulation_steps)=(\d{1,7})\b")
_PRECISIONS = {"no": "fp32", "false": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
_NO_SEQUENCE_PARALLELISM = "TP of transformers has no sequence parallelism, with which the plan was priced"
# Of FSDP 1, by name and number: the ZeRO stage, and the groups within which it shards.
_STRATEGIES = {
    **dict.fromkeys(("FULL_SHARD", "1"), (3, "all")),
    **dict.fromkeys(("SHARD_GRAD_OP", "2"), (2, "all")),
    **dict.fromkeys(("NO_SHARD", "3"), (0, "all")),
    **dict.fromkeys(("HYBRID_SHARD", "4"), (3, "machine")),
    **dict.fromkeys(("HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", "5"), (2, "machine")),
}


# ----------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class _Kind:
    """The parallelism of the job by its `distributed_type`."""

    tp: int = 1
    stages: int = 1
    sharding: int = 0
    groups: str = "all"
    replicas: int = 1  # groups of pipelines that shard within themselves
    recompute: str | None = None  # None: the training script's
    accumulation: int | None = None
    gradient_bytes: int = 2
    sequence_parallel: bool = False
    notes: tuple[str, ...] = ()


def _precision(settings: FileSettings) -> str:
    default = "fp16" if "fp16" in settings and settings.flag("fp16", default=False) else "no"  # its name until 0.6
    precision = settings.word("mixed_precision", _PRECISIONS, default)
    if precision == "fp8":
        backend = settings.name_in_use("fp8_config.backend", "fp8_config.fp8_backend")
        settings.word(backend, {"TE": "te", "AO": "ao"}, "TE")
    return precision


def _fsdp(settings: FileSettings, world: int) -> _Kind:
    version = settings.whole("fsdp_config.fsdp_version", 1)
    policy = "full" if settings.flag("fsdp_config.fsdp_activation_checkpointing", default=False) else "none"
    wrap, by_layer = "fsdp_config.fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"
    if settings.get(wrap, "") != by_layer:
        settings.fault(f"{wrap} {settings.get(wrap, 'by default')}", f"does not shard by layer; take {by_layer}")
    notes = ("FSDP sends gradients in the precision of the run and keeps them in FP32, and both are priced as sent",)
    reshard = "fsdp_config.fsdp_reshard_after_forward"
    if version == 1:
        stage, groups = settings.word("fsdp_config.fsdp_sharding_strategy", _STRATEGIES, "FULL_SHARD")
        meant = _STRATEGIES.get(str(settings.get(reshard, "FULL_SHARD")).upper())
        if "fsdp_config.fsdp_sharding_strategy" not in settings and meant not in (None, (stage, groups)):
            settings.refuse_value(reshard, "is not what FSDP 1 goes by; state fsdp_sharding_strategy, which is")
        return _Kind(sharding=stage, groups=groups, recompute=policy, notes=notes)
    if version != 2:
        settings.refuse_value("fsdp_config.fsdp_version", "is not known; take 1 or 2")
    tp, replicas, shard = 1, 1, world
    if any(name.startswith("parallelism_config.") for name in settings):
        tp, replicas, shard = (
            settings.whole(f"parallelism_config.parallelism_config_{name}_size", 1)
            for name in ("tp", "dp_replicate", "dp_shard")
        )
    if tp * replicas * shard != world or replicas > shard == 1:
        settings.fault("parallelism_config", f"does not shard over {world} GPUs; correct its sizes")
    stage = 0 if shard == 1 else 3 if settings.flag(reshard, default=True) else 2
    return _Kind(tp, sharding=stage, replicas=replicas, recompute=policy, notes=notes)


def _ddp(settings: FileSettings, world: int) -> _Kind:
    return _Kind(gradient_bytes=4)


def _lone(settings: FileSettings, world: int) -> _Kind:
    if world != 1:
        settings.refuse_value("distributed_type", f"is of one GPU, not {world}; take MULTI_GPU, or num_processes 1")
    return _Kind(gradient_bytes=4)


def _deepspeed(settings: FileSettings, world: int) -> _Kind:
    stage = settings.whole("deepspeed_config.zero_stage", 2, at_least=0)
    if stage > 3:
        settings.refuse_value("deepspeed_config.zero_stage", "is not 0, 1, 2 or 3; take one")
    steps = "deepspeed_config.gradient_accumulation_steps"
    return _Kind(sharding=stage, accumulation=settings.whole(steps) if steps in settings else None)


def _megatron(settings: FileSettings, world: int) -> _Kind:
    def name(key: str) -> str:
        return f"megatron_lm_config.megatron_lm_{key}"

    tp, stages = settings.whole(name("tp_degree"), 1), settings.whole(name("pp_degree"), 1)
    sequence_parallel = tp > 1 and settings.flag(name("sequence_parallelism"), default=False)
    return _Kind(
        tp,
        stages,
        sharding=int(settings.flag(name("use_distributed_optimizer"), default=False)),
        recompute="selective" if settings.flag(name("recompute_activations"), default=False) else "none",
        accumulation=settings.whole(name("num_micro_batches"), 1),
        gradient_bytes=4,
        sequence_parallel=sequence_parallel,
    )


_KINDS: dict[str, Callable[[FileSettings, int], _Kind]] = {
    "FSDP": _fsdp,
    "MULTI_GPU": _ddp,
    "NO": _lone,
    "DEEPSPEED": _deepspeed,
    "MEGATRON_LM": _megatron,
}


class AccelerateFormat(Trainer):
    """Accelerate's configuration of FSDP2."""

    name = "accelerate"
    target = TARGET
    expresses = "data parallelism with one TP degree, ZeRO-2 or 3 (FSDP2); no pipelines"
    schedules = TRAINER_SCHEDULES["accelerate"]
    choices = EVEN | {
        "space.uneven_layers": (False,),
        "constraints.num_stages": (1,),
        "workload.optimizer_sharding": ("3", "2"),
        "workload.recompute": ("full", "none"),
    }
    optional_sequence_parallelism = True
    takes_tp = staticmethod(divides_model)

    def unsuitable(self, problem: Problem) -> str | None:
        model = problem.model
        known = ", ".join(_LAYERS)
        return None if model.architecture in _LAYERS else f"model {model.name}: the template is for {known}; take one"

    def write(self, problem: Problem, plan: Plan) -> Program:
        refuse = self.refuse
        for p, pipeline in enumerate(plan.pipelines):
            if len(pipeline.stages) > 1:
                refuse(f"{stage_name(p, 1)} is a second stage", "constraints.num_stages=1")
        schedule_of(plan, self.schedules, refuse)
        grid, zero = grid_of(plan, refuse), zero_stage(plan, (3, 2), refuse)
        tp, policy = uniform_tp(problem, grid, divides_model, refuse), uniform_policy(grid, refuse)
        devices = grid.stage_major()
        self.check_precision(problem)
        document = {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "mixed_precision": "no" if problem.workload.precision == "fp32" else problem.workload.precision,
            "num_machines": 1,
            "num_processes": len(devices),
            "machine_rank": 0,
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_reshard_after_forward": zero == 3,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_transformer_layer_cls_to_wrap": f"{_LAYERS[problem.model.architecture]}DecoderLayer",
                "fsdp_activation_checkpointing": policy == "full",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            },
            "parallelism_config": {
                "parallelism_config_dp_replicate_size": 1,
                "parallelism_config_dp_shard_size": grid.dp,
                "parallelism_config_tp_size": tp,
                "parallelism_config_cp_size": 1,
            },
        }
        notes = (
            *grid.notes(),
            *(_NO_SEQUENCE_PARALLELISM,) * (tp > 1 and problem.workload.sequence_parallel),
            "the batch is your script's: give its TrainingArguments per_device_train_batch_size="
            f"{grid.samples} gradient_accumulation_steps={grid.num_micro_batches}",
        )
        header = [f"# For {TARGET}: ACCELERATE_CONFIG_FILE, or --config_file.", *note_lines(notes)]
        text = "\n".join(header) + "\n" + yaml.safe_dump(document, sort_keys=False)
        setup = f'export ACCELERATE_CONFIG_FILE="$HERE/{FILE}"'
        command = f'-m accelerate.commands.launch --config_file "$HERE/{FILE}" "${{TRAIN:-train.py}}"'
        return Program(devices, command, {FILE: text}, setup=setup, notes=notes)

    def read(self, text: str, context: ImportContext) -> ImportedPlan:
        data = as_mapping(parse(text, context.where, as_json=False), context.where)
        twice: list[str] = []
        if isinstance(
            fsdp := data.get("fsdp_config"), dict
        ):  # the launcher takes its keys with and without their prefix
            twice = [key for key in fsdp if f"fsdp_{key}" in fsdp]
            data["fsdp_config"] = {
                key if key.startswith("fsdp") else f"fsdp_{key}": value for key, value in fsdp.items()
            }
        settings, model = FileSettings(context, dict(flat(data)), VOCABULARY), context.require_model("Accelerate")
        for key in twice:
            settings.fault(f"fsdp_config.{key}", "is stated with the prefix fsdp_ too; keep one")
        for key in data:
            if key not in TOP and not key.startswith("tpu_"):
                settings.fault(key, unknown_key(key, TOP))  # Accelerate refuses it too
        world = settings.whole("num_processes") if "num_processes" in settings else None
        if "distributed_type" not in settings:
            settings.fault("distributed_type", "is missing; state it")
        read_kind = settings.word("distributed_type", _KINDS, "MULTI_GPU")
        kind = read_kind(settings, world or len(context.devices))
        precision = _precision(settings)
        settings.refuse()
        comment = {name: int(value) for name, value in _BATCH.findall(text)}
        size = comment.get("per_device_train_batch_size", 1)
        count = kind.accumulation or comment.get("gradient_accumulation_steps")
        assumed: dict[str, Any] = {"seq_len": context.workload.seq_len}
        if count is None:
            pipelines = max(1, len(context.devices) // (kind.tp * kind.stages))
            count = max(1, context.workload.global_batch // (pipelines * size))
            assumed["global_batch"] = count * pipelines * size
        if kind.recompute is None:
            assumed["recompute"] = "none"
        workload = {"precision": precision, "gradient_bytes": kind.gradient_bytes}
        if kind.tp > 1:  # that of transformers has none
            workload["sequence_parallel"] = kind.sequence_parallel
        sizes = "the batch is the training script's: micro-batches of one sequence are assumed"
        layout = import_job(
            context,
            FileJob(
                model,
                tp=kind.tp,
                num_stages=kind.stages,
                recompute=BlockRecompute(kind.recompute or "none"),
                micro_batch_size=size,
                num_micro_batches=count,
                sharding=kind.sharding,
                world=world,
                workload=workload,
                notes=(
                    *([] if "per_device_train_batch_size" in comment else [sizes]),
                    *script_notes(context, **assumed),
                    *(kind.notes if precision != "fp32" else ()),
                    *settings.notes(),
                ),
            ),
        )
        return shard_within(layout, kind.replicas if kind.replicas > 1 else kind.groups)


TRAINER = AccelerateFormat()
