"""Models with experts of measured runs: those that rows name (`experiments/data/expert_models.yaml`), and those of
Megatron-LM's functional tests, `ci-moe`, whose rows and notes state their shape."""

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
from hexiopt.problem.model import ModelSpec
from hexiopt.reading import read_mapping

_GPT2_VOCABULARY = 50_304  # 50,257 padded to a multiple of 128
_MODELS = Path(__file__).parent.parent / "data" / "expert_models.yaml"


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
