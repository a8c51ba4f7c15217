"""What hexiopt's executor trains: models, workloads, and plans of them. What it does not is named in one line, with a
remedy."""

import json
from collections.abc import Iterator
from itertools import chain

from hexiopt.errors import InputError
from hexiopt.files.huggingface import model_from_config
from hexiopt.files.models.execution import TRAINED, execution_of
from hexiopt.numbers.optimizers import ADAMW
from hexiopt.plan.parallelism import ExpertParallel, SequenceParallel
from hexiopt.plan.plan import Plan
from hexiopt.problem.architectures import DECODER
from hexiopt.problem.execution import Execution, RouterRule
from hexiopt.problem.form import LLAMA
from hexiopt.problem.kinds import Attention, Channels, Dense, Experts, Mixer, Recurrent
from hexiopt.problem.lora import OF_COLUMNS
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section

NO_TENSOR_PARALLELISM = (
    "workload.sequence_parallel: false cannot be trained with tensor parallelism; take true, or constraints.max_tp=1"
)
OPTIMIZERS = ("adamw", "adamw_bf16", "sgd", "momentum", "adafactor", "muon")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu2")
_FREE = ("gated_mlp", "norms", "qk_norm", "output_bias", "positions")  # fields of `Form` in which trained models differ
_FUSED_MLPS = ("granitemoehybrid",)


def untrainable(
    model: ModelSpec, workload: Workload, plan: Plan | None = None, *, document_masking: bool = False
) -> str | None:
    """Why a model, workload and valid plan cannot be trained, with a remedy; None if they can."""
    try:
        execution = execution_of(model)
    except InputError as error:
        return str(error)
    if execution is None:
        kind = "its type" if model.architecture == DECODER else model.architecture
        return (
            f"model {model.name}: {kind} cannot be trained, only planned; take the config.json of one of "
            f"{', '.join(TRAINED)}"
        )
    faults = chain(
        (f"model {model.name}: {fault}" for fault in _of_model(model, execution, document_masking)),
        _of_adapters(execution, workload),
        _of_workload(workload, plan, any(kind.experts for kind in model.kinds)),
        () if plan is None else _of_plan(plan, document_masking),
    )
    return next(faults, None)


def _of_model(model: ModelSpec, execution: Execution, document_masking: bool) -> Iterator[str]:
    if model.activation not in ACTIVATIONS:
        yield f"activation {model.activation} cannot be trained; take one of {', '.join(ACTIVATIONS)}"
    form, usual = model.decoder_form.to_dict(), LLAMA.to_dict()
    for name, value in usual.items():
        if name not in _FREE and form[name] != value:
            yield f"{name} {str(form[name]).lower()} cannot be trained; take a model with {str(value).lower()}"
    if model.extra_layers:
        yield "layers that predict further tokens cannot be trained; set their number in config.json to 0"
    parts = dict.fromkeys(part for kind in model.kinds for part in kind.parts)
    for part in parts:
        for feature in _features(part):
            yield f"{feature} cannot be trained, only planned; take a model without"
    experts = [part for part in parts if isinstance(part, Experts)]
    if len(counts := {part.count for part in experts}) > 1:
        both = " and ".join(map(str, sorted(counts)))
        yield f"layers of {both} experts cannot be trained together; give all equally many"
    for part in experts:
        if execution.router is not None:
            yield from _misfits(part, execution.router)
    if model.architecture == DECODER and not _is_as_read(model):
        yield "it is not that of its config.json any more; state its changes there"
    knows_documents = execution.score_cap is None and not any(isinstance(p, Attention) and p.sinks for p in parts)
    if document_masking and not knows_documents:
        yield "attention with sinks or capped scores knows no documents; set train.document_masking=false"
    if document_masking and any(isinstance(part, Recurrent) for part in parts):
        yield "a recurrence knows no documents; set train.document_masking=false"


def _features(part: Mixer | Channels) -> list[str]:
    """What of a part is not trained, in words."""
    features: dict[str, bool] = {}
    match part:
        case Attention():
            features = {
                f"qk_norm {part.qk_norm}": part.qk_norm not in ("none", "plain", "head", "whole"),
                "bias of the norm of queries and keys": part.qk_norm != "none" and part.qk_norm_vectors != 1,
                "one projection for keys and values": part.keys_are_values,
            }
        case Recurrent():
            features = {"the delta rule without a norm": part.delta and not part.norm}
        case Experts():
            features = {"scales of a router's input or of experts": bool(part.router_vectors or part.expert_scales)}
        case Dense():
            pass
        case _:
            features = {f"the part {part.name} of a layer": True}
    return [name for name, is_there in features.items() if is_there]


def _misfits(part: Experts, rule: RouterRule) -> Iterator[str]:
    """Why a router cannot choose of these experts."""
    size, rest = divmod(part.count, rule.num_groups)
    if rest:
        yield f"{part.count} experts are not {rule.num_groups} equal groups; state another n_group"
    elif not rule.top_groups <= rule.num_groups or part.top_k > rule.top_groups * size:
        yield (
            f"{part.top_k} experts are not among {rule.top_groups} of {rule.num_groups} groups of {size}; "
            "state another topk_group"
        )


def _is_as_read(model: ModelSpec) -> bool:
    return model_from_config(Section(json.loads(model.config), "config"), model.name).replace(name=model.name) == model


def _of_workload(workload: Workload, plan: Plan | None, has_experts: bool) -> Iterator[str]:
    if workload.precision not in ("bf16", "fp32"):
        yield f"workload.precision: {workload.precision} cannot be trained; take bf16 or fp32"
    if workload.optimizer not in OPTIMIZERS:
        yield (
            f"workload.optimizer: {workload.optimizer} cannot be trained, only planned, as torch does not have it; "
            f"take one of {', '.join(OPTIMIZERS)}"
        )
    if workload.adapters is not None and workload.adapters.frozen_storage.element_bytes is not None:
        yield (
            f"workload.lora.storage: {workload.adapters.storage} cannot be trained, only planned: products of such "
            "matrices need kernels of bitsandbytes or torchao, which training does not use; take 16bit"
        )
    if has_experts and workload.optimizer != ADAMW:
        name = workload.optimizer
        yield f"workload.optimizer: {name} cannot be trained yet beside experts, only planned; take {ADAMW}"
    if has_experts and workload.routing != "natural":
        yield f"workload.routing: {workload.routing} cannot be trained, only planned; take natural"
    if not workload.sequence_parallel and plan is not None and plan.has_tensor_parallelism:
        yield NO_TENSOR_PARALLELISM


def _of_adapters(execution: Execution, workload: Workload) -> Iterator[str]:
    lora = workload.adapters
    if lora is not None and execution.type in _FUSED_MLPS and OF_COLUMNS & set(lora.matrices):
        yield (
            f"workload.lora.targets: gate and up are one matrix in files of {execution.type}, where adapters of each "
            "have no place; take attention"
        )


def _of_plan(plan: Plan, document_masking: bool) -> Iterator[str]:
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            at = f"stage {s} of pipeline {p}"
            match stage.parallelism:
                case ExpertParallel() as group if group.waves > 1:
                    yield f"{at} has two waves, which cannot be trained, only planned; state one in the plan"
                case SequenceParallel() if document_masking:
                    yield (
                        f"train.document_masking: {at} has a sequence layout, whose attention knows no documents; "
                        "plan with space.sequence=false, or leave out the masking"
                    )
