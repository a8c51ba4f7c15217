"""Hugging Face Accelerate: a template of its YAML configuration, for plans without pipeline parallelism.

`accelerate launch` takes equal machines alone, so ranks are started by torchrun. The batch is the training script's:
the numbers stand in a comment and are read from there. Ranks are t + T·p. FSDP of both versions, DDP, and what it hands
to DeepSpeed and Megatron-LM are read.

Models with experts are sharded by transformers as they are loaded, and Accelerate leaves them so: the script gives
`from_pretrained` the `DistributedConfig` in the comment. An EP group is `ep_size` consecutive ranks, whose TP groups
have batches of their own (huggingface/transformers 5.23.0, `distributed/utils.py`, `initialize_distributed_mesh`, and
`distributed/expert_parallel.py`, `AllToAllEP`). Without `ep_size`, and before huggingface/transformers#48792, all ranks
share one batch and each computes all but the experts, which no plan has.
"""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from hexiopt.errors import InputError
from hexiopt.exports.expert_groups import NO_FURTHER_LAYERS, divides_layers, expert_degree, with_expert_groups
from hexiopt.exports.file_jobs import FileJob, import_job, shard_within
from hexiopt.exports.formats import EVEN, ImportContext, ImportedPlan, Program, Trainer, divides_model, stage_name
from hexiopt.exports.layout import (
    BlockRecompute,
    JobLayout,
    devices_of_experts,
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
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.reading import as_mapping, parse

TARGET, MODELS_TARGET = "Accelerate 1.15", "transformers 5.23"
FILE = "accelerate.yaml"
_LAYERS = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_BATCH = re.compile(r"(per_device_train_batch_size|gradient_accumulation_steps)=(\d{1,7})\b")
_RECOMPUTE = re.compile(r"gradient_checkpointing=(True|False)\b")
_MODEL = "DistributedConfig"
_MODEL_CALL = re.compile(rf"\b{_MODEL}\([^()\n]*\)")
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
    ep: int = 1
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


def _of_model(settings: FileSettings, model: ModelSpec, world: int) -> _Kind:
    """What the `DistributedConfig` of transformers says, by which the model is sharded as it is loaded."""
    kind = settings.word("distributed_type", {"MULTI_GPU": 1, "NO": 1}, "MULTI_GPU")
    tp, shard, replicas = (
        settings.whole(f"{_MODEL}.{name}", 1) for name in ("tp_size", "fsdp_size", "dp_replicate_size")
    )
    settings.require(kind * tp * shard * replicas == world, _MODEL, f"has not {world} GPUs in its sizes; correct them")
    key, shares = f"{_MODEL}.ep_size", f"{_MODEL}.enable_expert_parallel"
    if key not in settings and shares in settings and settings.flag(shares, default=False):
        what = "gives all ranks one batch, and all but the experts to each to compute, which is not modelled"
        settings.fault(shares, f"{what}; state ep_size")
    ep = settings.whole(key, 1) if key in settings or model.shares_experts else 1
    ep = expert_degree(settings, key, model, ep=ep, tp=tp, shard=shard)
    mixed = settings.flag(f"{_MODEL}.fsdp_mixed_precision", default=False)
    if shard * replicas > 1 and mixed != (_precision(settings) == "bf16"):
        settings.fault(f"{_MODEL}.fsdp_mixed_precision {mixed}", "is not what mixed_precision says; state bf16 in both")
    return _Kind(tp, sharding=3 if shard > 1 else 0, replicas=replicas, ep=ep, gradient_bytes=4)


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


def _call(text: str, context: ImportContext) -> dict[str, Any]:
    """The arguments of a `DistributedConfig` in the comments of a file, by dotted names; empty where there is none."""
    if (match := _MODEL_CALL.search(text)) is None:
        return {}
    try:
        call = ast.parse(match[0], mode="eval").body
        keywords = call.keywords if isinstance(call, ast.Call) and not call.args else [ast.keyword(None, call)]
        return {f"{_MODEL}.{keyword.arg}": ast.literal_eval(keyword.value) for keyword in keywords}
    except (SyntaxError, ValueError):
        context.fail(f"{_MODEL} has other arguments than names with values; write them out")


# ----------------------------------------------------------------------------- writing


_Parts = tuple[dict[str, Any], str, tuple[str, ...]]  # the document, further arguments of the script, notes


def _document(problem: Problem, kind: str, num_processes: int) -> dict[str, Any]:
    precision = problem.workload.precision
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "mixed_precision": "no" if precision == "fp32" else precision,
        "num_machines": 1,
        "num_processes": num_processes,
        "machine_rank": 0,
    }


def _by_accelerate(problem: Problem, grid: JobLayout, degrees: tuple[int, int, int], policy: str) -> _Parts:
    tp, _, zero = degrees
    document = _document(problem, "FSDP", grid.dp * tp) | {
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
    return document, "", ()


def _by_model(problem: Problem, grid: JobLayout, degrees: tuple[int, int, int], policy: str) -> _Parts:
    """Of models with experts, which transformers shards. Raises InputError for FP16, which it does not state."""
    (tp, ep, _), workload = degrees, problem.workload
    if workload.precision == "fp16":
        raise InputError(
            f"export.format: accelerate is written for bf16 and fp32 where models have experts ({MODELS_TARGET}); plan "
            "with workload.precision=bf16"
        )
    mixed = workload.precision == "bf16"
    sizes = f"tp_size={tp}, fsdp_size={grid.dp}, ep_size={ep}, fsdp_mixed_precision={mixed}"
    notes = (
        f"Accelerate shards nothing: load your model, in FP32, by {MODELS_TARGET}, whose from_pretrained takes "
        f"distributed_config={_MODEL}({sizes})",
        *("gradients are reduced in float32, 4 bytes where the plan was priced with 2",)
        * (mixed and workload.gradient_bytes == 2),
        *("experts are chosen by the router, where the plan was priced with workload.routing=forced",)
        * (workload.routing == "forced"),
    )
    kind = "MULTI_GPU" if grid.dp * tp > 1 else "NO"
    return _document(problem, kind, grid.dp * tp), f" gradient_checkpointing={policy == 'full'}", notes


def _environment(document: Mapping[str, Any]) -> dict[str, str]:
    """The variables by which `accelerate launch` hands the document to ranks, which it would start itself
    (`accelerate/utils/launch.py`, `prepare_multi_gpu_env`)."""
    variables = {"ACCELERATE_MIXED_PRECISION": document["mixed_precision"]}
    if "fsdp_config" in document:
        variables |= {"ACCELERATE_USE_FSDP": True, "ACCELERATE_USE_PARALLELISM_CONFIG": True}
        fsdp = {
            key.replace("transformer_layer_cls", "transformer_cls"): v for key, v in document["fsdp_config"].items()
        }
        variables |= {key.upper(): value for key, value in {**fsdp, **document["parallelism_config"]}.items()}
    return {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in variables.items()}


class AccelerateFormat(Trainer):
    """Accelerate's configuration of FSDP2."""

    name = "accelerate"
    target = TARGET
    expresses = "data parallelism with one TP degree, ZeRO-2 or 3 (FSDP2), with experts one EP degree; no pipelines"
    schedules = TRAINER_SCHEDULES["accelerate"]
    choices = EVEN | {
        "space.uneven_layers": (False,),
        "constraints.num_stages": (1,),
        "workload.optimizer_sharding": ("3", "2"),
        "workload.recompute": ("full", "none"),
    }
    optional_sequence_parallelism = True

    def takes_tp(self, problem: Problem, tp: int) -> bool:
        model = problem.model
        return divides_layers(model, tp) if model.shares_experts else divides_model(problem, tp)

    def unsuitable(self, problem: Problem) -> str | None:
        model = problem.model
        known = ", ".join(_LAYERS)
        wrong = model.architecture not in _LAYERS and not model.layers
        return f"model {model.name}: the template is for {known}; take one" if wrong else None

    def unsuitable_kinds(self, problem: Problem) -> str | None:
        model = problem.model
        if not model.shares_experts:
            return super().unsuitable_kinds(problem)
        return NO_FURTHER_LAYERS if model.extra_layers else None

    def preset(self, problem: Problem) -> Mapping[str, tuple[Any, ...]]:
        preset = super().preset(problem)
        return {**preset, "workload.optimizer_sharding": ("3",)} if problem.model.shares_experts else preset

    def write(self, problem: Problem, plan: Plan) -> Program:
        refuse = self.refuse
        for p, pipeline in enumerate(plan.pipelines):
            if len(pipeline.stages) > 1:
                refuse(f"{stage_name(p, 1)} is a second stage", "constraints.num_stages=1")
        schedule_of(plan, self.schedules, refuse)
        experts, grid = problem.model.shares_experts, grid_of(plan, refuse)
        ep, zero = devices_of_experts(problem, grid), zero_stage(plan, (3,) if experts else (3, 2), refuse)
        tp, policy = uniform_tp(problem, grid, self.takes_tp, refuse), uniform_policy(grid, refuse)
        self.check_precision(problem)
        write = _by_model if experts else _by_accelerate
        document, arguments, notes = write(problem, grid, (tp, ep, zero), policy)
        notes = (
            *grid.notes(),
            *(_NO_SEQUENCE_PARALLELISM,) * (tp > 1 and problem.workload.sequence_parallel),
            *notes,
            "the batch is your script's: give its TrainingArguments per_device_train_batch_size="
            f"{grid.samples} gradient_accumulation_steps={grid.num_micro_batches}{arguments}",
        )
        header = [f"# For {TARGET}. Ranks that torchrun starts know it by their environment.", *note_lines(notes)]
        text = "\n".join(header) + "\n" + yaml.safe_dump(document, sort_keys=False)
        command = '"${TRAIN:-train.py}"'
        return Program(grid.stage_major(), command, {FILE: text}, environment=_environment(document), notes=notes)

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
        model = context.require_model("Accelerate")
        settings = FileSettings(context, dict(flat(data)) | _call(text, context), VOCABULARY)
        for key in twice:
            settings.fault(f"fsdp_config.{key}", "is stated with the prefix fsdp_ too; keep one")
        for key in data:
            if key not in TOP and not key.startswith("tpu_"):
                settings.fault(key, unknown_key(key, TOP))  # Accelerate refuses it too
        world = settings.whole("num_processes") if "num_processes" in settings else None
        if "distributed_type" not in settings:
            settings.fault("distributed_type", "is missing; state it")
        if any(name.startswith(f"{_MODEL}.") for name in settings):
            kind = _of_model(settings, model, world or len(context.devices))
        else:
            kind = settings.word("distributed_type", _KINDS, "MULTI_GPU")(settings, world or len(context.devices))
            if kind.tp > 1:
                expert_degree(settings, "EP", model, ep=1, tp=kind.tp, shard=1)
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
        recompute = kind.recompute
        if recompute is None and (match := _RECOMPUTE.search(text)) is not None:
            recompute = "full" if match[1] == "True" else "none"
        if recompute is None:
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
                recompute=BlockRecompute(recompute or "none"),
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
        layout = with_expert_groups(layout, kind.tp, kind.ep)
        return shard_within(layout, kind.replicas if kind.replicas > 1 else kind.groups)


TRAINER = AccelerateFormat()
