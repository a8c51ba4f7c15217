"""The parameters of a model by its layers, and which part of each a tensor-parallel rank holds.

A layer is its sublayers in order, each of them norms and parts that stand side by side. Attention is cut at heads, an
MLP at columns, embedding and LM head at rows of the vocabulary. A key-value head that query heads of several ranks
meet is held by each of them; norms and output biases are held by all. Names are those of Hugging Face's Llama.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hexiopt.problem.kinds import Attention, Channels, Dense, LayerKind, Mixer
from hexiopt.problem.model import ModelSpec
from runtime.mapping.parts import ParameterPart, Range, RankShard

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ATTENTION, MLP = "self_attn", "mlp"


class Sublayer(NamedTuple):
    """Parts of a layer that read the same, and the name of the norm of what they read."""

    norm: str
    parts: tuple[Mixer | Channels, ...]


def sublayers(kind: LayerKind) -> tuple[Sublayer, ...]:
    """What a layer adds to its hidden states, in order."""
    return Sublayer("input_layernorm", kind.mixers), Sublayer("post_attention_layernorm", kind.channels)


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
    for sublayer in sublayers(layer_kinds(model)[layer]):
        at = layer_prefix(layer)
        yield _whole(f"{at}{sublayer.norm}.weight", model.hidden_size)
        for part in sublayer.parts:
            match part:
                case Attention():
                    yield from _attention_parts(f"{at}{ATTENTION}.", model, part, shard)
                case Dense():
                    yield from _dense_parts(f"{at}{MLP}.", model, part, shard)
                case _:
                    raise AssertionError("`untrainable` has refused it")


def _attention_parts(at: str, model: ModelSpec, part: Attention, shard: RankShard) -> Iterator[ParameterPart]:
    hidden, heads = model.hidden_size, shard.share(part.heads)
    kv_heads = shard.groups(part.heads, part.kv_heads)
    for name, own, count, dim in (
        ("q_proj", heads, part.heads, part.qk_dim),
        ("k_proj", kv_heads, part.kv_heads, part.qk_dim),
        ("v_proj", kv_heads, part.kv_heads, part.v_dim),
    ):
        yield from _rows(f"{at}{name}", (count * dim, hidden), (own[0] * dim, own[1] * dim), part.bias)
    if part.qk_norm != "none":
        for name in ("q_norm", "k_norm"):
            yield _whole(f"{at}{name}.weight", part.qk_dim)
    ends = heads[0] * part.v_dim, heads[1] * part.v_dim
    yield from _columns(f"{at}o_proj", (hidden, part.heads * part.v_dim), ends, part.output_bias)


def _dense_parts(at: str, model: ModelSpec, part: Dense, shard: RankShard) -> Iterator[ParameterPart]:
    own = shard.share(part.ffn_size)
    for name in ("gate_proj", "up_proj"):
        yield from _rows(f"{at}{name}", (part.ffn_size, model.hidden_size), own, part.bias)
    yield from _columns(f"{at}down_proj", (model.hidden_size, part.ffn_size), own, part.bias)


def _rows(name: str, shape: tuple[int, int], own: Range, has_bias: bool) -> Iterator[ParameterPart]:
    """A matrix whose output is cut, and its bias."""
    yield ParameterPart(f"{name}.weight", shape, 0, *own)
    if has_bias:
        yield ParameterPart(f"{name}.bias", shape[:1], 0, *own)


def _columns(name: str, shape: tuple[int, int], own: Range, has_bias: bool) -> Iterator[ParameterPart]:
    """A matrix whose input is cut, and its bias, which every rank holds."""
    yield ParameterPart(f"{name}.weight", shape, 1, *own)
    if has_bias:
        yield _whole(f"{name}.bias", shape[0])


def _whole(name: str, size: int) -> ParameterPart:
    """A vector that every rank holds."""
    return ParameterPart(name, (size,), 0, 0, size)


def head_name(model: ModelSpec) -> str:
    """The name of the LM head's matrix: tied, the embedding's."""
    return EMBEDDING if model.tied_embeddings else HEAD


def stage_parts(
    model: ModelSpec, layers: Sequence[Range], shard: RankShard, first: bool, last: bool
) -> Iterator[ParameterPart]:
    """The parts of a stage with ranges of layers; `first` holds the embedding, `last` final norm and LM head."""
    matrix, rows = (model.vocab_size, model.hidden_size), shard.even(model.vocab_size)
    if first:
        yield ParameterPart(EMBEDDING, matrix, 0, *rows)
    for start, end in layers:
        for layer in range(start, end):
            yield from layer_parts(model, layer, shard)
    if last:
        yield _whole(FINAL_NORM, model.hidden_size)
        if not (first and model.tied_embeddings):
            yield ParameterPart(head_name(model), matrix, 0, *rows)


def whole_parts(model: ModelSpec) -> list[ParameterPart]:
    """Every parameter of the model as a whole, from the embedding to the LM head; a tied matrix once."""
    return list(stage_parts(model, [(0, model.num_layers)], RankShard(), first=True, last=True))
