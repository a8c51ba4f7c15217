"""DeepSpeed: its JSON configuration of runs with a pipeline, or with experts, which AutoEP shares among ranks.

`PipelineModule` balances stages by weight; other bounds need a subclass that sets `self.parts`. Layers of that list are
the embedding, the decoder layers, and the final norm with the head. Ranks are t + T·(p + P·s)
(`deepspeed/runtime/pipe/topology.py`), started by torchrun, since DeepSpeed's launcher rotates unequal machines.

AutoEP replaces the blocks of experts in models of transformers, which have no pipelines. An EP group is so many
consecutive ranks (`expected_folding_group_tables`, `deepspeed/module_inject/auto_ep_folding.py`); the TP groups in it
have batches of their own. TP is AutoTP's, which goes up to ZeRO-2, and has no sequence parallelism.
"""

import json
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from hexiopt.exports.expert_groups import NO_FURTHER_LAYERS, divides_layers, expert_degree, with_expert_groups
from hexiopt.exports.file_jobs import FileJob, import_job
from hexiopt.exports.formats import EVEN, ImportContext, ImportedPlan, Program, Trainer
from hexiopt.exports.layout import (
    BlockRecompute,
    JobLayout,
    devices_of_experts,
    grid_of,
    schedule_of,
    tied_notes,
    uniform_policy,
    uniform_tp,
    zero_stage,
)
from hexiopt.exports.settings import FileSettings, script_notes
from hexiopt.exports.trainer_schedules import TRAINER_SCHEDULES
from hexiopt.exports.trainers.vocabularies.deepspeed import VOCABULARY
from hexiopt.plan.plan import Plan
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload

TARGET = "DeepSpeed 0.19"
FILE = "deepspeed.json"
_FP32_GRADIENTS: dict[str, Any] = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
_OWN = "hexiopt"  # DeepSpeed ignores unknown keys at the top level
_AUTO_EP = "mixtral, qwen2_moe, qwen3_moe, deepseek_v2 and deepseek_v3"  # presets for models whose parts are modelled


# ----------------------------------------------------------------------------- reading


def _batch(settings: FileSettings, num_gpus: int, gpus_a_pipeline: int) -> tuple[int, int, int | None]:
    """Sequences of a micro-batch, micro-batches of a pipeline, and the number of GPUs if the batch implies it.

    Of the batch, the micro-batch and their number, DeepSpeed computes the missing one from the others
    (`deepspeed/runtime/config.py`, `_set_batch_related_parameters`).
    """
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    batch, size, count = (settings.whole(name) if name in settings else None for name in names)
    if batch is None and size is None:
        settings.fault(names[1], f"is missing; state it, or {names[0]}")
    if batch is None or (size is not None and count is not None):
        if count is None:
            settings.by_default(names[2], count := 1)
        size = size or 1
        world, rest = divmod((batch or size * count) * gpus_a_pipeline, size * count)
        if rest:
            settings.refuse_value(names[0], f"is not divided by {size} × {count}; correct one of the three")
        return size, count, None if batch is None else world
    pipelines = max(1, num_gpus // gpus_a_pipeline)
    factor = size or count or 1
    derived, rest = divmod(batch, pipelines * factor)
    if rest or not derived:
        settings.refuse_value(
            names[0], f"is not divided by {factor} × {pipelines} pipelines; correct it, or give ranks=ranks.tsv"
        )
    if size is None:
        settings.by_default(names[1], derived)
        if count is None:
            settings.by_default(names[2], 1)
        return max(1, derived), factor, None
    settings.by_default(names[2], derived)
    return size, max(1, derived), None


def _workload(settings: FileSettings, context: ImportContext) -> dict[str, Any]:
    """Precision and width of gradients; by default gradients have the precision of the weights."""
    names = {"bf16": settings.name_in_use("bf16.enabled", "bfloat16.enabled"), "fp16": "fp16.enabled"}
    on = [precision for precision, name in names.items() if settings.flag(name, default=False)]
    if len(on) > 1:
        settings.fault("bf16.enabled and fp16.enabled", "are both true; keep one")
    precision = on[0] if on else "fp32"
    widths = {"fp32": 4, "bf16": 2, "fp16": 2, "float32": 4, "bfloat16": 2, "float16": 2}
    widths_given = [
        settings.word(name, widths, precision) for name in ("data_types.grad_accum_dtype", "communication_data_type")
    ]
    if len(set(widths_given)) > 1 and "gradient_bytes" not in context.stated_keys:
        settings.fault(
            "data_types.grad_accum_dtype and communication_data_type",
            "gradients are kept and sent in different widths, "
            "which is not modelled; state both as one, or workload.gradient_bytes=2 or 4",
        )
    return {"precision": precision} | ({"gradient_bytes": widths_given[0]} if on else {})


def _expert_degree(settings: FileSettings, model: ModelSpec, tp: int, shard: int) -> int:
    enabled, key = "expert_parallel.enabled", "expert_parallel.autoep_size"
    shares = enabled in settings and settings.flag(enabled, default=False)
    return expert_degree(settings, key, model, ep=settings.whole(key, 1) if shares else 1, tp=tp, shard=shard)


# ----------------------------------------------------------------------------- writing


_Parts = tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]  # keys of DeepSpeed, keys of ours, notes


def _with_pipeline(workload: Workload, grid: JobLayout, tp: int, policy: str) -> _Parts:
    bounds = [0, *(end + 1 for end in accumulate(grid.parts))]
    bounds[-1] += 1
    notes = (
        "the TP degree is the model's, such as Megatron's, to which it must be given",
        *("sequence parallelism is the model's: turn it off",) * (tp > 1 and not workload.sequence_parallel),
        f"a subclass of PipelineModule must set self.parts = {bounds}, the bounds of stages over its layers",
    )
    keys = {"pipeline": {"activation_checkpoint_interval": int(policy == "full")}}
    return keys, {"pipe": grid.num_stages, "model": tp, "parts": bounds}, notes


def _with_experts(workload: Workload, ep: int, tp: int, policy: str) -> _Parts:
    keys: dict[str, Any] = {"expert_parallel": {"enabled": True, "autoep_size": ep}}
    if tp > 1:
        keys["tensor_parallel"] = {"autotp_size": tp}
    notes = (
        f"the model is your script's, of transformers: AutoEP knows {_AUTO_EP}, and others by patterns",
        *("AutoTP has no sequence parallelism, with which the plan was priced",)
        * (tp > 1 and workload.sequence_parallel),
        *("recompute is the model's: call its gradient_checkpointing_enable()",) * (policy == "full"),
        *("experts are chosen by the router, where the plan was priced with workload.routing=forced",)
        * (workload.routing == "forced"),
    )
    return keys, {"recompute": policy}, notes


class DeepSpeedFormat(Trainer):
    """DeepSpeed's configuration of a run with a pipeline."""

    name = "deepspeed"
    target = TARGET
    expresses = (
        "pipelines all alike with one TP degree, one recompute policy; uneven layers by bounds set in Python; with "
        "experts one stage and one EP degree (AutoEP)"
    )
    schedules = TRAINER_SCHEDULES["deepspeed"]
    choices = EVEN | {
        "space.uneven_layers": (False,),
        "workload.optimizer_sharding": ("1", "0"),
        "workload.recompute": ("full", "none"),
    }
    optional_sequence_parallelism = True

    def takes_tp(self, problem: Problem, tp: int) -> bool:
        if problem.model.shares_experts:
            return divides_layers(problem.model, tp)
        return problem.model.num_heads % tp == problem.model.ffn_size % tp == 0

    def unsuitable_kinds(self, problem: Problem) -> str | None:
        model = problem.model
        if not model.shares_experts:
            return super().unsuitable_kinds(problem)
        for part in (kind.experts for kind in model.kinds if kind.experts is not None):
            if part.bias or part.router_bias or part.latent or part.router_vectors or not part.gated:
                return (
                    "shares experts by AutoEP, which takes gated ones without biases, on hidden states, not those of "
                    f"{model.name}; export to another trainer"
                )
        return NO_FURTHER_LAYERS if model.extra_layers else None

    def preset(self, problem: Problem) -> Mapping[str, tuple[Any, ...]]:
        preset = super().preset(problem)
        if not problem.model.shares_experts:
            return preset
        return {**preset, "constraints.num_stages": (1,), "workload.optimizer_sharding": ("1", "2", "0")}

    def write(self, problem: Problem, plan: Plan) -> Program:
        refuse, workload = self.refuse, problem.workload
        schedule_of(plan, self.schedules, refuse)
        grid = grid_of(plan, refuse)
        ep = devices_of_experts(problem, grid)
        tp, policy = uniform_tp(problem, grid, self.takes_tp, refuse), uniform_policy(grid, refuse)
        self.check_precision(problem)
        if problem.model.shares_experts:
            if grid.num_stages > 1:
                refuse(f"it has {grid.num_stages} stages, where AutoEP has one", "constraints.num_stages=1")
            zero = zero_stage(plan, (1, 2, 0) if tp > 1 else (1, 2, 0, 3), refuse)
            keys, of_ours, notes = _with_experts(workload, ep, tp, policy)
        else:
            zero = zero_stage(plan, (1, 0), refuse)
            keys, of_ours, notes = _with_pipeline(workload, grid, tp, policy)
        notes = (*grid.notes(), *notes, *tied_notes(problem, plan))
        mixed = workload.precision != "fp32"
        document = {
            "train_batch_size": grid.global_batch,
            "train_micro_batch_size_per_gpu": grid.samples,
            "gradient_accumulation_steps": grid.num_micro_batches,
            **({workload.precision: {"enabled": True}} if mixed else {}),
            **(_FP32_GRADIENTS if mixed and workload.gradient_bytes == 4 else {}),
            "zero_optimization": {"stage": zero},
            **keys,
            _OWN: {"target": TARGET, "sequence_parallel": workload.sequence_parallel, **of_ours, "notes": list(notes)},
        }
        command = f'"${{TRAIN:-train.py}}" --deepspeed --deepspeed_config "$HERE/{FILE}"'
        return Program(grid.stage_major(), command, {FILE: json.dumps(document, indent=1) + "\n"}, notes=notes)

    def read(self, text: str, context: ImportContext) -> ImportedPlan:
        settings = FileSettings.of_json(text, context, VOCABULARY)
        model = context.require_model("DeepSpeed")
        exported = any(name.startswith(f"{_OWN}.") for name in settings)
        with_pipeline = exported and not model.shares_experts
        stages = settings.whole("hexiopt.pipe", 1) if with_pipeline else 1
        of_tp = settings.name_in_use("hexiopt.model", "tensor_parallel.autotp_size")
        tp = max(1, settings.whole(of_tp, 1, at_least=0)) if with_pipeline or of_tp in settings else 1
        bounds = settings.get("hexiopt.parts")
        if bounds is None and with_pipeline:
            settings.by_default("hexiopt.parts", "of equally many layers")
        parts = None
        if bounds is not None:
            whole = (
                isinstance(bounds, list) and len(bounds) == stages + 1 and all(type(bound) is int for bound in bounds)
            )
            settings.require(whole, "hexiopt.parts", f"is not a list of {stages + 1} bounds; write them as exported")
            parts = [b - a for a, b in pairwise(bounds)]
            parts[0] -= 1  # the embedding
            parts[-1] -= 1  # norm and head
        size, count, world = _batch(settings, len(context.devices), tp * stages)
        ep = _expert_degree(settings, model, tp, (world or len(context.devices)) // tp)
        stage = settings.get("zero_optimization")
        zero = int(stage) if isinstance(stage, bool) else settings.whole("zero_optimization.stage", 0, at_least=0)
        if zero > 3:
            settings.refuse_value("zero_optimization.stage", "is not 0, 1, 2 or 3; take one")
        of_model = exported and settings.word("hexiopt.recompute", {"none": False, "full": True}, "none")
        interval = settings.whole("pipeline.activation_checkpoint_interval", 0, at_least=0)
        if interval > 1:
            settings.refuse_value(
                "pipeline.activation_checkpoint_interval",
                f"keeps one input in {interval} layers, which is not modelled; take 0 or 1",
            )
        workload = _workload(settings, context)
        parallel = exported and settings.flag("hexiopt.sequence_parallel", default=True)
        if tp > 1:  # AutoTP has none
            workload["sequence_parallel"] = parallel
        settings.refuse()
        assumed = {"seq_len": context.workload.seq_len} | ({} if interval or of_model else {"recompute": "none"})
        notes = [*script_notes(context, **assumed), *settings.notes()]
        if not exported and of_tp not in settings:
            notes.insert(0, "stages and TP are not in the file: data parallelism alone is assumed")
        layout = import_job(
            context,
            FileJob(
                model,
                tp=tp,
                num_stages=stages,
                parts=parts,
                recompute=BlockRecompute("full" if interval or of_model else "none"),
                micro_batch_size=size,
                num_micro_batches=count,
                sharding=zero,
                world=world,
                workload=workload,
                notes=tuple(notes),
            ),
        )
        return with_expert_groups(layout, tp, ep)


TRAINER = DeepSpeedFormat()
