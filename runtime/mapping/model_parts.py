"""The parameters of a model by its layers, and which part of each a tensor-parallel rank holds.

A layer is its sublayers in order, each of them norms and parts that stand side by side. Attention is cut at heads, an
MLP at columns, embedding and LM head at rows of the vocabulary. A key-value head that query heads of several ranks
meet is held by each of them; norms, routers and output biases are held by all. Experts are whole: those of a layer are
one parameter, of which the ranks of a cell hold ranges. Names are those of Hugging Face's Llama, and of experts those
of transformers' own modules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hexiopt.files.models.execution import execution_of as model_execution
from hexiopt.problem.execution import Execution
from hexiopt.problem.kinds import Attention, Channels, Dense, Experts, LayerKind, Mixer, Recurrent
from hexiopt.problem.model import ModelSpec
from runtime.mapping.parts import Initial, ParameterPart, Range, RankShard

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ATTENTION, MLP, RECURRENT = "self_attn", "mlp", "recurrent"
ROUTER, BALANCE = "mlp.gate", "mlp.gate.e_score_correction_bias"
INWARD, OUTWARD = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
SHARED, SHARED_GATE = "mlp.shared_experts", "mlp.shared_expert_gate.weight"
LATENT_INWARD, LATENT_OUTWARD = "mlp.fc1_latent_proj", "mlp.fc2_latent_proj"


class Sublayer(NamedTuple):
    """Parts of a layer that read the same, and the names of the norms of what they read and of what they make,
    if any."""

    parts: tuple[Mixer | Channels, ...]
    norm: str | None
    output_norm: str | None = None


def sublayers(kind: LayerKind, execution: Execution) -> tuple[Sublayer, ...]:
    """What a layer adds to its hidden states, in order."""
    if kind.norms == 1:
        return (Sublayer(kind.parts, "input_layernorm"),)
    first, second = ("input_layernorm", "post_attention_layernorm") if not execution.norms_after else (None, None)
    has_outputs = execution.norms_after or kind.norms == 4
    outputs = ("attention_output_norm", "mlp_output_norm") if has_outputs else (None, None)
    return Sublayer(kind.mixers, first, outputs[0]), Sublayer(kind.channels, second, outputs[1])


def execution_of(model: ModelSpec) -> Execution:
    """What training needs of a model that `untrainable` has let pass."""
    execution = model_execution(model)
    assert execution is not None, "`untrainable` has refused it"
    return execution


def layer_kinds(model: ModelSpec) -> tuple[LayerKind, ...]:
    """The kind of each layer; where all are equal, with the window that the model states for them."""
    if model.layers:
        return model.layers
    (kind,) = model.kinds
    assert kind.attention is not None, "layers that are not stated attend"
    return (replace(kind, mixers=(replace(kind.attention, window=model.attention_window),)),) * model.num_layers


def layer_prefix(layer: int) -> str:
    """What the names of a layer's parameters begin with."""
    return f"model.layers.{layer}."


def layer_parts(model: ModelSpec, layer: int, shard: RankShard) -> Iterator[ParameterPart]:
    """The parts of a decoder layer that a rank holds."""
    at, execution = layer_prefix(layer), execution_of(model)
    if shard.hosts:
        experts = layer_kinds(model)[layer].experts
        if experts is not None:
            yield from _expert_parts(at, model, experts, shard)
        return
    norm_value = 0.0 if execution.unit_norms else 1.0
    for sublayer in sublayers(layer_kinds(model)[layer], execution):
        for norm in (sublayer.norm, sublayer.output_norm):
            if norm is not None:
                yield _whole(f"{at}{norm}.weight", model.hidden_size, norm_value)
        for part in sublayer.parts:
            match part:
                case Experts():
                    yield from _router_parts(at, model, part)
                    yield from _expert_parts(at, model, part, shard)
                    if part.latent:
                        yield from _projection_parts(at, model, part)
                    if part.shared:
                        yield from _shared_expert_parts(at, model, part, shard)
                case Attention() if part.kv_rank:
                    yield from _latent_parts(f"{at}{ATTENTION}.", model, part, shard)
                case Attention():
                    yield from _attention_parts(f"{at}{ATTENTION}.", model, part, shard, norm_value)
                case Recurrent():
                    yield from _recurrent_parts(f"{at}{RECURRENT}.", model, part, shard)
                case Dense():
                    yield from _dense_parts(f"{at}{MLP}.", model, part, shard)
                case _:
                    raise AssertionError("`untrainable` has refused it")


def _attention_parts(
    at: str, model: ModelSpec, part: Attention, shard: RankShard, norm_value: float
) -> Iterator[ParameterPart]:
    hidden, heads = model.hidden_size, shard.share(part.heads)
    kv_heads = shard.groups(part.heads, part.kv_heads)
    for name, span, count, dim in (
        ("q_proj", heads, part.heads, part.qk_dim * (1 + part.gated)),
        ("k_proj", kv_heads, part.kv_heads, part.qk_dim),
        ("v_proj", kv_heads, part.kv_heads, part.v_dim),
    ):
        yield from _rows(f"{at}{name}", (count * dim, hidden), (span[0] * dim, span[1] * dim), part.bias)
    for name, span, count in (("q_norm", heads, part.heads), ("k_norm", kv_heads, part.kv_heads)):
        if part.qk_norm == "head":
            yield _whole(f"{at}{name}.weight", part.qk_dim, norm_value)
        elif part.qk_norm == "whole":
            ends = span[0] * part.qk_dim, span[1] * part.qk_dim
            yield ParameterPart(f"{at}{name}.weight", (count * part.qk_dim,), 0, *ends, norm_value)
    yield from _attention_outputs(at, model, part, heads)


def _latent_parts(at: str, model: ModelSpec, part: Attention, shard: RankShard) -> Iterator[ParameterPart]:
    """Every rank holds what makes latent vectors."""
    hidden, heads = model.hidden_size, shard.share(part.heads)

    def up(name: str, rank: int, dim: int) -> Iterator[ParameterPart]:
        yield from _rows(f"{at}{name}", (part.heads * dim, rank), (heads[0] * dim, heads[1] * dim), False)

    def down(name: str, rank: int) -> Iterator[ParameterPart]:
        yield from _rows(f"{at}{name}", (rank, hidden), (0, rank), part.bias)

    if part.q_rank:
        yield from down("q_a_proj", part.q_rank)
        yield _whole(f"{at}q_a_layernorm.weight", part.q_rank)
        yield from up("q_b_proj", part.q_rank, part.qk_dim)
    else:
        yield from up("q_proj", hidden, part.qk_dim)
    yield from down("kv_a_proj_with_mqa", part.kv_rank + part.rope_dim)
    yield _whole(f"{at}kv_a_layernorm.weight", part.kv_rank)
    yield from up("kv_b_proj", part.kv_rank, part.qk_dim - part.rope_dim + part.v_dim)
    yield from _attention_outputs(at, model, part, heads)


def _attention_outputs(at: str, model: ModelSpec, part: Attention, heads: Range) -> Iterator[ParameterPart]:
    if part.sinks:
        yield ParameterPart(f"{at}sinks", (part.heads,), 0, *heads, initial=0.0)
    ends = heads[0] * part.v_dim, heads[1] * part.v_dim
    yield from _columns(f"{at}o_proj", (model.hidden_size, part.heads * part.v_dim), ends, part.output_bias)


class RecurrentRows(NamedTuple):
    """Rows of what is projected for a recurrence: so many for each of its heads, or of its groups; `is_mixed` says
    whether neighbouring tokens are convolved."""

    name: str
    per_item: int
    of_groups: bool = False
    is_mixed: bool = False


def recurrent_projections(part: Recurrent) -> tuple[RecurrentRows, ...]:
    """Gate, values, keys, queries and steps of time of a recurrence, and with the delta rule how much is written."""
    rows = (
        RecurrentRows("z", part.value_dim),
        RecurrentRows("v", part.value_dim, is_mixed=True),
        RecurrentRows("k", part.key_dim, of_groups=True, is_mixed=True),
        RecurrentRows("q", part.key_dim, of_groups=True, is_mixed=True),
        RecurrentRows("step", 1),
    )
    return (*rows, RecurrentRows("write", 1)) if part.delta else rows


def _recurrent_parts(at: str, model: ModelSpec, part: Recurrent, shard: RankShard) -> Iterator[ParameterPart]:
    hidden, heads = model.hidden_size, shard.share(part.heads)
    groups = shard.groups(part.heads, part.groups)
    for name, per_item, of_groups, is_mixed in recurrent_projections(part):
        count, (first, end) = (part.groups, groups) if of_groups else (part.heads, heads)
        size, rows = count * per_item, (first * per_item, end * per_item)
        yield from _rows(f"{at}{name}_in", (size, hidden), rows, part.bias)
        if is_mixed:
            yield ParameterPart(f"{at}{name}_conv.weight", (size, 1, part.conv), 0, *rows)
            if part.conv_bias:
                yield ParameterPart(f"{at}{name}_conv.bias", (size,), 0, *rows)
    of_heads: dict[str, Initial] = {"dt_bias": 1.0, "A_log": "log_of_number"}
    for name, initial in (of_heads if part.delta else of_heads | {"D": 1.0}).items():
        yield ParameterPart(f"{at}{name}", (part.heads,), 0, *heads, initial)
    width, ends = part.heads * part.value_dim, (heads[0] * part.value_dim, heads[1] * part.value_dim)
    if part.delta and part.norm:
        yield _whole(f"{at}norm.weight", part.value_dim, 1.0)
    elif part.norm:
        yield ParameterPart(f"{at}norm.weight", (width,), 0, *ends, 1.0)
    yield from _columns(f"{at}out_proj", (hidden, width), ends, part.bias)


def _dense_parts(at: str, model: ModelSpec, part: Dense, shard: RankShard) -> Iterator[ParameterPart]:
    share = shard.share(part.ffn_size)
    for name in ("gate_proj", "up_proj")[not part.gated :]:
        yield from _rows(f"{at}{name}", (part.ffn_size, model.hidden_size), share, part.bias)
    yield from _columns(f"{at}down_proj", (model.hidden_size, part.ffn_size), share, part.bias)


def _router_parts(at: str, model: ModelSpec, part: Experts) -> Iterator[ParameterPart]:
    yield ParameterPart(f"{at}{ROUTER}.weight", (part.count, model.hidden_size), 0, 0, part.count)
    if part.router_bias:
        yield _whole(f"{at}{ROUTER}.bias", part.count)
    router = execution_of(model).router
    if router is not None and router.has_bias:
        yield _whole(f"{at}{BALANCE}", part.count)


def _expert_parts(at: str, model: ModelSpec, part: Experts, shard: RankShard) -> Iterator[ParameterPart]:
    width, inner, held = part.width(model.hidden_size), part.ffn_size, shard.experts(part.count)
    for name, rows, columns in ((INWARD, (1 + part.gated) * inner, width), (OUTWARD, width, inner)):
        yield ParameterPart(f"{at}{name}", (part.count, rows, columns), 0, *held)
        if part.bias:
            yield ParameterPart(f"{at}{name}_bias", (part.count, rows), 0, *held)


def _projection_parts(at: str, model: ModelSpec, part: Experts) -> Iterator[ParameterPart]:
    """Every rank projects its tokens to the width of the experts, and back."""
    inward, outward = (part.latent, model.hidden_size), (model.hidden_size, part.latent)
    for name, shape in ((LATENT_INWARD, inward), (LATENT_OUTWARD, outward)):
        yield from _rows(f"{at}{name}", shape, (0, shape[0]), part.latent_bias)


def _shared_expert_parts(at: str, model: ModelSpec, part: Experts, shard: RankShard) -> Iterator[ParameterPart]:
    columns = Dense(ffn_size=part.shared, gated=part.gated, bias=part.shared_bias)
    yield from _dense_parts(f"{at}{SHARED}.", model, columns, shard)
    if part.shared_gate:
        yield ParameterPart(f"{at}{SHARED_GATE}", (1, model.hidden_size), 0, 0, 1)


def _rows(name: str, shape: tuple[int, int], rows: Range, has_bias: bool) -> Iterator[ParameterPart]:
    """A matrix whose output is cut, and its bias."""
    yield ParameterPart(f"{name}.weight", shape, 0, *rows)
    if has_bias:
        yield ParameterPart(f"{name}.bias", shape[:1], 0, *rows)


def _columns(name: str, shape: tuple[int, int], columns: Range, has_bias: bool) -> Iterator[ParameterPart]:
    """A matrix whose input is cut, and its bias, which every rank holds."""
    yield ParameterPart(f"{name}.weight", shape, 1, *columns)
    if has_bias:
        yield _whole(f"{name}.bias", shape[0])


def _whole(name: str, size: int, initial: float | None = None) -> ParameterPart:
    """A vector that every rank holds."""
    return ParameterPart(name, (size,), 0, 0, size, initial)


def head_name(model: ModelSpec) -> str:
    """The name of the LM head's matrix: tied, the embedding's."""
    return EMBEDDING if model.tied_embeddings else HEAD


def stage_parts(
    model: ModelSpec, layers: Sequence[Range], shard: RankShard, first: bool, last: bool
) -> Iterator[ParameterPart]:
    """The parts of a stage with ranges of layers; `first` holds the embedding, `last` final norm and LM head."""
    matrix, rows = (model.vocab_size, model.hidden_size), shard.even(model.vocab_size)
    first, last = first and not shard.hosts, last and not shard.hosts
    if first:
        yield ParameterPart(EMBEDDING, matrix, 0, *rows)
    for start, end in layers:
        for layer in range(start, end):
            yield from layer_parts(model, layer, shard)
    if last:
        yield _whole(FINAL_NORM, model.hidden_size, 0.0 if execution_of(model).unit_norms else 1.0)
        if not (first and model.tied_embeddings):
            yield ParameterPart(head_name(model), matrix, 0, *rows)


def whole_parts(model: ModelSpec) -> list[ParameterPart]:
    """Every parameter of the model as a whole, from the embedding to the LM head; a tied matrix once."""
    return list(stage_parts(model, [(0, model.num_layers)], RankShard(), first=True, last=True))
