"""Which models are trained, and under which plans: the features that are not are named in one line."""

import json
from collections.abc import Iterator, Sequence

from hexiopt.errors import InputError
from hexiopt.files.huggingface import model_from_config
from hexiopt.files.models.execution import TRAINED, execution_of
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan
from hexiopt.problem.execution import Execution
from hexiopt.problem.form import LLAMA
from hexiopt.problem.kinds import Attention, Channels, Dense, Mixer, Recurrent
from hexiopt.problem.model import DECODER, ModelSpec
from hexiopt.reading import Section
from runtime.mapping.model_parts import layer_kinds
from runtime.mapping.parts import RankShard, shards

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu2")
_FREE = ("gated_mlp", "norms", "qk_norm", "output_bias", "positions")  # fields of `Form` in which trained models differ


def untrainable_model(model: ModelSpec, plan: Plan | None = None, *, document_masking: bool = False) -> str | None:
    """Why a model, or it under a plan, cannot be trained, with a remedy; None if it can."""
    try:
        execution = execution_of(model)
    except InputError as error:
        return str(error)
    if execution is None:
        known = ", ".join(TRAINED)
        kind = "its type" if model.architecture == DECODER else model.architecture
        return f"model {model.name}: {kind} cannot be trained, only planned; take the config.json of one of {known}"
    faults = (*_of_model(model, execution), *_of_plan(model, execution, plan, document_masking))
    return next((f"model {model.name}: {fault}" for fault in faults), None)


def _of_model(model: ModelSpec, execution: Execution) -> Iterator[str]:
    if model.activation not in ACTIVATIONS:
        yield f"activation {model.activation} cannot be trained; take one of {', '.join(ACTIVATIONS)}"
    form, usual = model.decoder_form.to_dict(), LLAMA.to_dict()
    for name, value in usual.items():
        if name not in _FREE and form[name] != value:
            yield f"{name} {str(form[name]).lower()} cannot be trained; take a model with {str(value).lower()}"
    if model.extra_layers:
        yield "layers that predict further tokens cannot be trained; set their number in config.json to 0"
    for part in dict.fromkeys(part for kind in layer_kinds(model) for part in kind.parts):
        if feature := _feature(part):
            yield f"{feature} cannot be trained, only planned; take a model without"
    if model.architecture == DECODER and not _is_as_read(model):
        yield "it is not that of its config.json any more; state its changes there"


def _feature(part: Mixer | Channels) -> str | None:
    match part:
        case Attention():
            features = {
                "attention to chunks of the sequence": part.chunked,
                f"qk_norm {part.qk_norm}": part.qk_norm not in ("none", "head", "whole"),
                "bias of the norm of queries and keys": part.qk_norm != "none" and part.qk_norm_vectors != 1,
                "one projection for keys and values": part.keys_are_values,
            }
            return next((name for name, is_there in features.items() if is_there), None)
        case Recurrent() if part.delta and not part.norm:
            return "the delta rule without a norm"
        case Dense() | Recurrent():
            return None
        case _:
            return f"the part {part.name} of a layer"


def _of_plan(model: ModelSpec, execution: Execution, plan: Plan | None, document_masking: bool) -> Iterator[str]:
    parts = list(dict.fromkeys(part for kind in layer_kinds(model) for part in kind.mixers))
    attentions = [part for part in parts if isinstance(part, Attention)]
    recurrences = [part for part in parts if isinstance(part, Recurrent)]
    if document_masking and (execution.score_cap is not None or any(part.sinks for part in attentions)):
        yield "attention with sinks or capped scores knows no documents; set train.document_masking=false"
    if document_masking and recurrences:
        yield "a recurrence knows no documents; set train.document_masking=false"
    stages = [stage.parallelism for pipeline in plan.pipelines for stage in pipeline.stages] if plan else []
    if plan is not None and plan.has_tensor_parallelism:
        if any(part.qk_norm == "whole" for part in attentions):
            yield "a norm of all heads together is not cut by tensor parallelism; plan with space.max_tp=1"
        for replica in (replica for parallelism in stages for replica in parallelism.replicas):
            cut = shards(model, len(replica.devices), replica.heads)
            if any(not _has_whole_groups(part, cut) for part in recurrences):
                yield "tensor parallelism cuts the groups that Mamba-2 norms together; plan with space.max_tp=1"
    if any(isinstance(parallelism, SequenceParallel) for parallelism in stages):
        heads = {(part.heads, part.kv_heads) for part in attentions}
        if recurrences or len(heads) > 1 or any(part.qk_dim != part.v_dim for part in attentions):
            yield (
                "a sequence layout needs layers that attend with equal heads, values as wide as keys; plan with "
                "space.sequence=false"
            )


def _has_whole_groups(part: Recurrent, cut: Sequence[RankShard]) -> bool:
    """Whether each rank has whole groups of heads, which a norm needs that is of all of a group."""
    size = part.heads // part.groups
    return part.delta or not part.norm or all(end % size == 0 for shard in cut for end in shard.share(part.heads))


def _is_as_read(model: ModelSpec) -> bool:
    return model_from_config(Section(json.loads(model.config), "config"), model.name).replace(name=model.name) == model
