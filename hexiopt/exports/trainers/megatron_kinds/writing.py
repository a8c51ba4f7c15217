"""Layers by kinds, as arguments of Megatron-LM: names of core_v0.16.0 to core_v0.19.0, `--hybrid-layer-pattern` of
core_v0.17.0 on."""

from collections.abc import Sequence
from math import gcd

from hexiopt.exports.trainers.megatron_kinds.composition import (
    DELTA_CHUNK,
    MAMBA_CHUNK,
    Composition,
    composition_of,
    is_hybrid,
)
from hexiopt.exports.trainers.megatron_kinds.patterns import hybrid_text, pattern_text
from hexiopt.problem.kinds import Attention, Experts, Recurrent
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem

Arguments = dict[str, list[str]]

HYBRID_SPEC = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]


def kinds_arguments(model: ModelSpec) -> Arguments:
    """The arguments that state the layers of a model, but for those that all models have."""
    parts, form = composition_of(model), model.decoder_form
    arguments: Arguments = {"normalization": ["RMSNorm" if form.norm == "rms" else "LayerNorm"]}
    if form.gated_mlp:
        arguments["swiglu"] = []
    elif model.activation == "relu2":
        arguments["squared-relu"] = []
    arguments |= _positions(model, parts) | _attention(parts.attention)
    if parts.window is not None:
        arguments["window-size"] = [f"{parts.window - 1},0"]
        windowed = [kind.attention is not None and kind.attention.window is not None for kind in model.layers]
        if not all(windowed):
            arguments["window-attn-skip-freq"] = [pattern_text(windowed)]
    if not parts.has_biases:
        arguments["disable-bias-linear"] = []
        arguments |= {"add-qkv-bias": []} if parts.attention.bias else {}
    if parts.recurrent is not None:
        arguments |= _recurrence(parts.recurrent)
    if parts.experts is not None:
        arguments |= _experts(parts.experts) | router_arguments(model)
    if is_hybrid(model):
        return arguments | {"spec": HYBRID_SPEC}
    if parts.recurrent is not None:
        arguments["experimental-attention-variant"] = ["gated_delta_net"]
        arguments["linear-attention-freq"] = [pattern_text(kind.recurrent is not None for kind in model.layers)]
    with_experts = [kind.experts is not None for kind in model.layers]
    if any(with_experts) and not all(with_experts):
        arguments["moe-layer-freq"] = [pattern_text(with_experts)]
    if model.extra_layers:
        arguments["mtp-num-layers"] = [str(len(model.extra_layers))]
    return arguments


def hybrid_pattern(model: ModelSpec, parts: Sequence[int]) -> str:
    """The blocks of a hybrid model whose virtual stages hold `parts` layers each."""
    return hybrid_text(model.layers, model.extra_layers, parts)


def blocks_of_layer(model: ModelSpec) -> int:
    """The blocks that each layer of a hybrid model is; 0 where layers differ in it."""
    counts = {len(kind.parts) for kind in model.layers}
    return counts.pop() if len(counts) == 1 else 0


def _positions(model: ModelSpec, parts: Composition) -> Arguments:
    positions = model.decoder_form.positions
    if positions != "rope":
        return {"position-embedding-type": ["none" if positions == "none" else "learned_absolute"]}
    base = {"rotary-base": [f"{model.rope_theta:.0f}"]}
    if parts.attention.kv_rank:
        kind = "yarn" if model.rope_type == "yarn" else "rope"
        return {"position-embedding-type": ["rope"], "rope-type": [kind], **base}
    kind = "yarn" if model.rope_type == "yarn" else "rope"
    scaled: Arguments = {"use-rope-scaling": []} if model.rope_type == "llama3" else {}
    return {"position-embedding-type": [kind], **base, **scaled}


def _attention(part: Attention) -> Arguments:
    if part.kv_rank:
        return {
            "multi-latent-attention": [],
            **({"q-lora-rank": [str(part.q_rank)]} if part.q_rank else {}),
            "kv-lora-rank": [str(part.kv_rank)],
            "qk-head-dim": [str(part.qk_dim - part.rope_dim)],
            "qk-pos-emb-head-dim": [str(part.rope_dim)],
            "v-head-dim": [str(part.v_dim)],
            "qk-layernorm": [],  # of latent vectors
        }
    arguments: Arguments = {"kv-channels": [str(part.qk_dim)]}
    if part.kv_heads != part.heads:
        arguments |= {"group-query-attention": [], "num-query-groups": [str(part.kv_heads)]}
    if part.qk_norm != "none":
        arguments["qk-layernorm" if part.qk_norm == "head" else "qk-l2-norm"] = []
    if part.gated:
        arguments["attention-output-gate"] = []
    if part.sinks:
        arguments["softmax-type"] = ["learnable"]
    return arguments


def _recurrence(part: Recurrent) -> Arguments:
    if not part.delta:
        return {
            "mamba-num-heads": [str(part.heads)],
            "mamba-num-groups": [str(part.groups)],
            "mamba-state-dim": [str(part.key_dim)],
            "mamba-head-dim": [str(part.value_dim)],
        }
    return {
        "linear-num-value-heads": [str(part.heads)],
        "linear-num-key-heads": [str(part.groups)],
        "linear-key-head-dim": [str(part.key_dim)],
        "linear-value-head-dim": [str(part.value_dim)],
        "linear-conv-kernel-dim": [str(part.conv)],
    }


def _experts(part: Experts) -> Arguments:
    arguments: Arguments = {
        "num-experts": [str(part.count)],
        "moe-router-topk": [str(part.top_k)],
        "moe-ffn-hidden-size": [str(part.ffn_size)],
        "moe-grouped-gemm": [],
        "moe-token-dispatcher-type": ["alltoall"],
        **({"moe-router-pre-softmax": []} if part.top_k == 1 else {}),  # behind top-1 a softmax would be 1
    }
    if part.shared:
        arguments["moe-shared-expert-intermediate-size"] = [str(part.shared)]
        arguments |= {"moe-shared-expert-gate": []} if part.shared_gate else {}
    if part.latent:
        arguments["moe-latent-size"] = [str(part.latent)]
    return arguments


def router_arguments(model: ModelSpec) -> Arguments:
    """The arguments that state what the model's file says of its router (`moe_router_*` of `transformer_config.py`)."""
    says, arguments = dict(model.router), dict[str, list[str]]()
    if says.get("scoring_func") in ("softmax", "sigmoid"):
        arguments["moe-router-score-function"] = [says["scoring_func"]]
    if says.get("scoring_func") == "softmax" and says.get("norm_topk_prob") is False:
        arguments["moe-router-pre-softmax"] = []
    if says.get("scoring_func") == "sigmoid" and says.get("topk_method") == "noaux_tc":
        arguments["moe-router-enable-expert-bias"] = []
    if says.get("n_group", 1) > 1 and "topk_group" in says:
        arguments["moe-router-num-groups"] = [str(says["n_group"])]
        arguments["moe-router-group-topk"] = [str(says["topk_group"])]
    if says.get("routed_scaling_factor", 1.0) != 1.0:
        arguments["moe-router-topk-scaling-factor"] = [repr(float(says["routed_scaling_factor"]))]
    return arguments


_SAYS = {  # the keys of a model's file that decide whether an argument is stated
    "moe-router-score-function": ("scoring_func",),
    "moe-router-pre-softmax": ("scoring_func", "norm_topk_prob"),
    "moe-router-topk-scaling-factor": ("routed_scaling_factor",),
    "moe-router-num-groups": ("n_group", "topk_group"),
    "moe-router-group-topk": ("n_group", "topk_group"),
    "moe-router-enable-expert-bias": ("scoring_func", "topk_method"),
    "moe-router-load-balancing-type": ("",),
    "moe-aux-loss-coeff": ("",),
}


def divides_kinds(problem: Problem, tp: int) -> bool:
    """Whether a TP degree divides heads, MLP and shared columns, heads and groups of recurrences, and tokens, and
    divides or is divided by the key-value heads; and whether as many devices divide the experts."""
    parts = composition_of(problem.model)
    counts = [parts.attention.heads, problem.workload.seq_len]
    counts += [parts.dense.ffn_size] if parts.dense is not None else []
    counts += [parts.recurrent.heads, parts.recurrent.groups] if parts.recurrent is not None else []
    counts += [parts.experts.shared, parts.experts.count] if parts.experts is not None else []
    groups = parts.attention.kv_heads
    return all(count % tp == 0 for count in counts) and gcd(groups, tp) in (groups, tp)


def kinds_notes(model: ModelSpec) -> tuple[str, ...]:
    """Notes on what the plan does not state of a model's numbers, and what the program fixes otherwise."""
    parts, notes = composition_of(model), []
    if parts.experts is not None:
        says = dict(model.router)
        names = ", ".join(f"--{name}" for name, keys in _SAYS.items() if not all(key in says for key in keys))
        notes.append(f"the model's file does not say all of its router: set by hand, as the model has them, {names}")
    if model.decoder_form.positions == "rope" and not parts.attention.kv_rank:
        notes.append("the plan does not say which share of a head is rotated: --rotary-percent, by default all of it")
    if parts.attention.sinks and model.activation == "silu":
        notes.append(
            "an activation with a clamp (gpt-oss) is set by hand: --quick-geglu --glu-linear-offset "
            "--activation-func-clamp-value in place of --swiglu"
        )
    if model.rope_type == "yarn" and model.decoder_form.positions == "rope":
        latent = "--rotary-scaling-factor, --mscale and --mscale-all-dim"
        scaling = latent if parts.attention.kv_rank else "yarn_rotary_scaling_factor and others, in code,"
        notes.append(f"scaled positions are set by hand: {scaling} as the model has them")
        if not parts.attention.kv_rank:
            notes.append("--position-embedding-type yarn is of Megatron-Core 0.18 and later")
    if parts.recurrent is not None:
        fixed = DELTA_CHUNK if parts.recurrent.delta else MAMBA_CHUNK
        if parts.recurrent.chunk != fixed:
            notes.append(f"recurrences are scanned in chunks of {fixed}, priced with {parts.recurrent.chunk}")
    if is_hybrid(model):
        notes.append("--hybrid-layer-pattern is of Megatron-Core 0.17 and later, full recompute of such models of 0.18")
    return tuple(notes)
