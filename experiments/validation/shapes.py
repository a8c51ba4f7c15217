"""The model of a measured run, with the blanks of its row completed.

A model is a Llama (gated MLP, RMSNorm, RoPE) where its name says Llama, InternLM, Mistral or Qwen, a Nemotron (plain
MLP, LayerNorm, RoPE) where it says so or heads share keys and values, else a GPT-2 (plain MLP, LayerNorm, learned
positions, tied embeddings). A blank MLP size is four times the hidden size, a blank number of key-value heads is the
number of heads, a blank vocabulary is Megatron's padded GPT-2 one. Known shapes of named models are in
`experiments/data/model_shapes.yaml`, those of models with experts in `expert_models.py`.
"""

from functools import cache
from pathlib import Path
from typing import Any

from experiments.validation.expert_models import expert_model, functional_test_model
from experiments.validation.rows import Row
from hexiopt.problem.model import ModelSpec
from hexiopt.reading import read_mapping

_GATED = ("llama", "internlm", "mistral", "qwen")
_TIED = ("mpt", "gpt", "opt", "megatron", "mt-nlg", "bloom")
_PADDED_VOCABULARY = 51_200
_SHAPES = Path(__file__).parent.parent / "data" / "model_shapes.yaml"


class InexpressibleError(Exception):
    """The reason why a row cannot be predicted, in a few words, so that rows can be counted by it."""


@cache
def _known_shapes() -> dict[str, dict[str, Any]]:
    return dict(read_mapping(_SHAPES)["shapes"])


def seq_len_of(row: Row) -> int:
    """Tokens of a sequence. Raises InexpressibleError."""
    seq_len = row.seq_len or _known_shapes().get(row.model_name.lower(), {}).get("seq_len")
    if seq_len is None:
        raise InexpressibleError("no length of sequences")
    return int(seq_len)


def has_experts(row: Row) -> bool:
    """Whether the run's model is one with experts whose shape is known."""
    return (expert_model(row.model_name.lower()) or functional_test_model(row)) is not None


def model_of(row: Row) -> ModelSpec:
    """The decoder that the run trained. Raises InexpressibleError where its shape is not known."""
    name = row.model_name.lower()
    of_kinds = expert_model(name, row.layers, predicts_further=not row.says("no MTP", "w/o MTP"))
    of_kinds = of_kinds or functional_test_model(row)
    if of_kinds is not None:
        return of_kinds
    known = _known_shapes().get(name, {})

    def value(column: str) -> int | None:
        number = getattr(row, column)
        return int(known[column]) if number is None and column in known else number

    layers, hidden, heads = value("layers"), value("hidden"), value("heads")
    if layers is None or hidden is None or heads is None:
        raise InexpressibleError("the model's shape is not stated")
    if hidden % heads:
        raise InexpressibleError("heads do not divide the hidden size")
    gated = any(word in name for word in _GATED)
    tied = known.get("tied", not gated and any(word in name for word in _TIED))
    kv_heads = value("kv_heads") or heads
    grouped = not gated and (kv_heads != heads or "nemotron" in name)
    return ModelSpec(
        name=row.model_name,
        architecture="llama" if gated else "nemotron" if grouped else "gpt2",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn_size=value("ffn_hidden") or 4 * hidden,
        vocab_size=value("vocab") or _PADDED_VOCABULARY,
        max_positions=seq_len_of(row),
        tied_embeddings=bool(tied),
        attention_bias=not gated and not grouped,
        mlp_bias=not gated and not grouped,
    )
