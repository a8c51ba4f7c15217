"""What a measured run trained: its model, with the blanks of its row completed, and its adapters.

A model is a Llama (gated MLP, RMSNorm, RoPE) where its name says Llama, InternLM, Mistral or Qwen, a Nemotron (plain
MLP, LayerNorm, RoPE) where it says so or heads share keys and values, else a GPT-2 (plain MLP, LayerNorm, learned
positions, tied embeddings). A blank MLP size is four times the hidden size, a blank number of key-value heads is the
number of heads, a blank vocabulary is Megatron's padded GPT-2 one. Known shapes of named models are in
`experiments/data/model_shapes.yaml`, those of models with experts in `expert_models.yaml`; Megatron-LM's functional
tests, `ci-moe`, state theirs. Notes state adapters: `LoRA` or `QLoRA`, `rank=16`, `targets=q,v`, `quant=bnb-nf4`,
`adapter_bytes=2`.
"""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hexiopt
from experiments.validation.rows import Row
from hexiopt.problem.architectures import DECODER
from hexiopt.problem.form import GPT
from hexiopt.problem.kinds import Attention, Experts, LayerKind
from hexiopt.problem.lora import TARGETS, Lora
from hexiopt.problem.model import ModelSpec
from hexiopt.reading import read_mapping

_GATED = ("llama", "internlm", "mistral", "qwen")
_TIED = ("mpt", "gpt", "opt", "megatron", "mt-nlg", "bloom")
_PADDED_VOCABULARY = 51_200
_SHAPES = Path(__file__).parent.parent / "data" / "model_shapes.yaml"
_GPT2_VOCABULARY = 50_304  # 50,257 padded to a multiple of 128
_MODELS = Path(__file__).parent.parent / "data" / "expert_models.yaml"
_STORAGES = {"none": "16bit", "bnb-nf4": "nf4", "bnb-4bit": "nf4", "bnb-nf4-dq": "nf4_double", "bnb-int8": "int8"}
_MLP = ("gate", "up", "down")


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


@cache
def expert_model(name: str, num_layers: int | None = None, *, predicts_further: bool = True) -> ModelSpec | None:
    """The model `name`, in lower case; None where it is not known. With `num_layers` its first layers alone; without
    `predicts_further` without the layers that predict further tokens."""
    entry = _known_models().get(name)
    if entry is None:
        return None
    whole = hexiopt.model(entry if isinstance(entry, str) else {"name": name, **entry})
    layers = whole.layers[:num_layers]
    further = whole.extra_layers if predicts_further else ()
    return replace(whole, num_layers=len(layers), layers=layers, extra_layers=further)


def functional_test_model(row: Row) -> ModelSpec | None:
    """The model of a functional test, in Megatron-LM's form of GPT: LayerNorm, biases, learned positions, a tied
    matrix of GPT-2's vocabulary; experts four times as wide as hidden states where none is stated. None for other
    rows."""
    experts = re.search(r"\bexperts=(\d+) top(\d+)", row.notes)
    layers, hidden, heads = row.layers, row.hidden, row.heads
    if row.model_name != "ci-moe" or experts is None or layers is None or hidden is None or heads is None:
        return None
    width, kv_heads = hidden // heads, row.kv_heads or heads
    attention = Attention(heads=heads, kv_heads=kv_heads, qk_dim=width, v_dim=width, bias=True, output_bias=True)
    part = Experts(
        count=int(experts[1]),
        top_k=int(experts[2]),
        ffn_size=int(row.note("moe_ffn") or 4 * hidden),
        shared=int(row.note("shared") or 0),
        gated=False,
        bias=True,
    )
    return ModelSpec(
        name=row.model_name,
        architecture=DECODER,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        ffn_size=part.ffn_size,
        vocab_size=_GPT2_VOCABULARY,
        max_positions=row.seq_len or 1,
        tied_embeddings=True,
        form=replace(GPT, positions="learned"),
        layers=(LayerKind((attention,), (part,)),) * layers,
    )


@cache
def _known_models() -> dict[str, Any]:
    return dict(read_mapping(_MODELS)["models"])


def adapters_of(row: Row) -> Lora | None:
    """The adapters that a row states; None where it states none, or not enough of them.

    Raises InexpressibleError where they are not modelled, or where sequences of mixed lengths were trained, whose mean
    no row states.
    """
    rank, targets = row.note("rank"), row.note("targets")
    if not row.says("lora") or rank is None or targets is None:
        return None
    if row.says("mixed lengths", "mean length below"):
        raise InexpressibleError("adapters with sequences of mixed lengths")
    quant = row.note("quant") or "none"
    if quant not in _STORAGES:
        raise InexpressibleError(f"adapters beside weights quantised by {quant}")
    if "zero2" in row.zero_stage_or_fsdp or "zero3" in row.zero_stage_or_fsdp or "fsdp" in row.zero_stage_or_fsdp:
        raise InexpressibleError("adapters with states sharded by ZeRO-2 or ZeRO-3")
    names = [part for name in targets.split(",") for part in (_MLP if name == "mlp" else (name,))]
    several = any(name in TARGETS for name in names)
    return Lora(
        rank=int(rank),
        targets=tuple(names) if several else targets,
        storage=_STORAGES[quant],
        adapter_bytes=int(row.note("adapter_bytes") or 4),
    )
