"""Which part of every parameter a tensor-parallel rank holds. Names are Hugging Face's.

Attention is cut at heads, the MLP at columns, embedding and LM head at rows of the vocabulary. A key-value head that
query heads of several ranks meet is held by each of them; norms and output biases are held by all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hexiopt.errors import InputError
from hexiopt.problem.model import ModelSpec

Range = tuple[int, int]  # [start, end)


@dataclass(frozen=True, slots=True)
class RankShard:
    """What one rank of a TP group holds of every layer, and of the vocabulary."""

    heads: Range
    kv_heads: Range
    ffn: Range
    vocab: Range


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """The part [start, end) along `dim` of the parameter `name`, which is `shape` as a whole; trained, or frozen."""

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    end: int
    trained: bool = True

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return (*self.shape[: self.dim], self.end - self.start, *self.shape[self.dim + 1 :])

    @property
    def decays(self) -> bool:
        """Whether an optimizer decays it: matrices, but neither norms nor biases."""
        return len(self.shape) > 1


def split(total: int, count: int) -> list[Range]:
    """Split `total` items over `count` ranks in order, as evenly as possible; the first ranks take one more."""
    low, extra = divmod(total, count)
    return list(pairwise([0, *accumulate(low + (k < extra) for k in range(count))]))


def shards(model: ModelSpec, tp: int, heads: Sequence[int] | None = None) -> tuple[RankShard, ...]:
    """The shard of each of `tp` ranks; with `heads` query heads each, if stated, and columns in proportion.

    Raises InputError where the heads are not those of the model.
    """
    if heads is not None and (len(heads) != tp or sum(heads) != model.num_heads or min(heads) < 0):
        raise InputError(
            f"heads: {list(heads)} over {tp} devices; give each its share of the model's {model.num_heads} heads"
        )
    if heads is None:
        of_heads, of_columns = split(model.num_heads, tp), split(model.ffn_size, tp)
    else:
        ends = [0, *accumulate(heads)]
        of_heads = list(pairwise(ends))
        of_columns = list(pairwise(round(end * model.ffn_size / model.num_heads) for end in ends))
    group = model.num_heads // model.num_kv_heads
    return tuple(
        RankShard(own, (own[0] // group, -(-own[1] // group)) if own[1] > own[0] else (0, 0), columns, rows)
        for own, columns, rows in zip(of_heads, of_columns, split(model.vocab_size, tp), strict=True)
    )


def layer_parts(model: ModelSpec, layer: int, shard: RankShard) -> Iterator[ParameterPart]:
    """The parts of a decoder layer."""
    at, dim, h = f"model.layers.{layer}.", model.head_dim, model.hidden_size
    queries, keys = (shard.heads, model.num_heads * dim), (shard.kv_heads, model.num_kv_heads * dim)

    yield ParameterPart(f"{at}input_layernorm.weight", (h,), 0, 0, h)
    for name, ((low, high), width) in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        yield ParameterPart(f"{at}self_attn.{name}.weight", (width, h), 0, low * dim, high * dim)
        if model.attention_bias:
            yield ParameterPart(f"{at}self_attn.{name}.bias", (width,), 0, low * dim, high * dim)
    if model.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield ParameterPart(f"{at}self_attn.{name}.weight", (dim,), 0, 0, dim)
    (low, high), width = queries
    yield ParameterPart(f"{at}self_attn.o_proj.weight", (h, width), 1, low * dim, high * dim)
    if model.output_bias:
        yield ParameterPart(f"{at}self_attn.o_proj.bias", (h,), 0, 0, h)
    yield ParameterPart(f"{at}post_attention_layernorm.weight", (h,), 0, 0, h)
    ffn, (low, high) = model.ffn_size, shard.ffn
    for name in ("gate_proj", "up_proj"):
        yield ParameterPart(f"{at}mlp.{name}.weight", (ffn, h), 0, low, high)
        if model.mlp_bias:
            yield ParameterPart(f"{at}mlp.{name}.bias", (ffn,), 0, low, high)
    yield ParameterPart(f"{at}mlp.down_proj.weight", (h, ffn), 1, low, high)
    if model.mlp_bias:
        yield ParameterPart(f"{at}mlp.down_proj.bias", (h,), 0, 0, h)


EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def head_name(model: ModelSpec) -> str:
    """The name of the LM head's matrix: tied, the embedding's."""
    return EMBEDDING if model.tied_embeddings else HEAD


def stage_parts(
    model: ModelSpec, layers: Sequence[Range], shard: RankShard, first: bool, last: bool
) -> Iterator[ParameterPart]:
    """The parts of a stage with ranges of layers; `first` holds the embedding, `last` final norm and LM head."""
    matrix = (model.vocab_size, model.hidden_size)
    if first:
        yield ParameterPart(EMBEDDING, matrix, 0, *shard.vocab)
    for start, end in layers:
        for layer in range(start, end):
            yield from layer_parts(model, layer, shard)
    if last:
        yield ParameterPart(FINAL_NORM, (model.hidden_size,), 0, 0, model.hidden_size)
        if not (first and model.tied_embeddings):
            yield ParameterPart(head_name(model), matrix, 0, *shard.vocab)


def whole_parts(model: ModelSpec) -> list[ParameterPart]:
    """Every parameter of the model as a whole, from the embedding to the LM head; a tied matrix once."""
    return list(stage_parts(model, [(0, model.num_layers)], shards(model, 1)[0], first=True, last=True))
