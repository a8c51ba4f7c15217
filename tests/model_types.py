"""Generates the page of models, `docs/models.md`: `python -m tests.model_types`.

`tests/hexiopt/files/test_model_types.py` checks that it is current.
"""

import json
import logging
import warnings
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from hexiopt.files.huggingface import model_from_config
from hexiopt.files.models.features import feature_of_type, features
from hexiopt.files.models.kind_words import layers_in_words
from hexiopt.files.models.types import TYPES
from hexiopt.problem.architectures import ARCHITECTURES, DECODER
from hexiopt.problem.form import LLAMA, Form
from hexiopt.problem.kinds import PARTS, Part
from hexiopt.reading import Section

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
_HALF = ["linear_attention", "full_attention"]
UNBUILT: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "glm4_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": 16 * _HALF},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4},
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
}
"""Sizes without which transformers' default configuration makes no model, or none that is trained so."""

_HEAD = """# Models

`make reference` generates the lists of this page. A model is a `config.json` of Hugging Face, the folder with it, a
YAML file with the same keys, or a name on the Hub:

```bash
hexiopt plan cluster=small_mixed model=experiments/data/config.json workload.seq_len=2048
```

`model=Qwen/Qwen2.5-7B` is the shipped model of that name, where there is one, else the `config.json` in the local cache
of the Hub or, where it has none, on the Hub (not with `HF_HUB_OFFLINE=1`). Transformers is not needed. A model whose
file states no name is called by the file, for a `config.json` by its folder, from the Hub by its name there.

**Fields are read, not names.** A decoder is read whatever its `model_type` is called: for each type below we know which
keys state its sizes, how many norms a layer has, which projections have biases, where its experts stand, which layers
attend to a window, and so on. The parameters of each are counted against those of transformers' own model, to the last
one. A note names the type, and what the price leaves out. `hexiopt train` trains
[some of them](training.md#models).

**Layers may be of several kinds.** Attention (grouped, latent, gated, with windows, chunks or sinks), recurrences
(Mamba-2, the gated delta rule), MLPs and experts stand in layers as the file says: `layer_types`, `layers_block_type`,
`hybrid_override_pattern`, `mlp_layer_types`, `mlp_only_layers`, `decoder_sparse_step`, `first_k_dense_replace`,
`moe_layers`, `interleave_moe_layer_step`, or the rule of the type where it says nothing. A note counts them in one
line. Layers that predict further tokens (`num_nextn_predict_layers`) count in FLOPs, and beside the parameters, as in
published totals. Active parameters are those that a token is multiplied by: the experts that it goes to, and the head,
not the look-up in the embedding, as DeepSeek, OpenAI and NVIDIA count them. Such models are planned as others are
([mixtures of experts](planning.md), [which are trained](training.md#models)).

**What is not modelled is refused by name**: which recurrence, which attention, which layers. So are unknown keys, all
of a file in one line; an unknown switch that is off states nothing. Weights that their makers store in FP8 or MXFP4 are
read as those of the workload's precision, with a note; those that others have quantised are refused.

## A model of your own

A model with code of its own, or of a type that is not listed, is described by its fields, with `model_type: {decoder}`.
Keys that have a default may be left out:

```yaml
model_type: {decoder}
num_layers: 32
hidden_size: 4096
num_heads: 32
ffn_size: 14336
vocab_size: 128000
max_positions: 8192
activation: silu
# With their defaults:
num_kv_heads: null        # as many as heads
head_dim: null            # hidden_size / num_heads
tied_embeddings: false
attention_bias: false     # of queries, keys and values
mlp_bias: false
final_norm: true
{form}
```

Layers of several kinds are written as their parts, and the number of a kind for each layer; the sizes that follow from
them may be left out:

```yaml
model_type: {decoder}
hidden_size: 2048
vocab_size: 128000
max_positions: 8192
activation: silu
layer_kinds:
  - parts:                # mixers of tokens (attention, recurrent), then of channels (dense, experts); norms: 2
      - {{part: attention, heads: 16, kv_heads: 4, qk_dim: 128, v_dim: 128, window: 4096}}
      - {{part: dense, ffn_size: 8192}}
  - parts:
      - {{part: attention, heads: 16, kv_heads: 4, qk_dim: 128, v_dim: 128}}
      - {{part: experts, count: 64, top_k: 8, ffn_size: 1024, shared: 1024}}
layer_pattern: [0, 1, 0, 1]
extra_layer_kinds: []     # that predict further tokens
```

{parts}

## The types of transformers

Of {total} types of causal language models of transformers {version}, **{read} are read**; {refused} are refused with
the feature named, {otherwise} otherwise. The second column has the layers of a type's default configuration and their
form, or what is not modelled.

| type | form |
|---|---|
"""


def default(kind: str) -> dict[str, Any]:
    """The file of a type's default configuration; its type alone where transformers cannot make one."""
    from transformers import CONFIG_MAPPING

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = CONFIG_MAPPING[kind](**UNBUILT.get(kind, {})).to_dict()
        except Exception:  # of whatever kind that model's check has
            config = {}
    plain: dict[str, Any] = json.loads(json.dumps(config, default=str))
    return plain | {"model_type": kind}


def row(kind: str) -> tuple[str, str]:
    """What becomes of a type (read, refused or otherwise), and its line in the table."""
    config = default(kind)
    try:
        model = model_from_config(Section(config, kind))
    except InputError as error:
        stated = features(config, TYPES.get(kind))
        why = "; ".join(text.partition(": not modelled")[0] for text in stated.values())
        why = why or feature_of_type(kind, config) or ""
        return ("refused" if why else "otherwise"), f"| {kind} | *not*: {why or error} |"
    form = model.form or ARCHITECTURES[model.architecture].form
    assert form is not None
    layers = layers_in_words(model.layers, model.extra_layers)
    return "read", f"| {kind} | {'; '.join(filter(None, (layers, form.in_words())))} |"


def kinds() -> list[str]:
    """The types of causal language models of transformers."""
    from transformers.models.auto import modeling_auto

    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def page() -> str:
    """The page."""
    import transformers

    logging.disable(logging.WARNING)
    rows = [row(kind) for kind in kinds()]
    logging.disable(logging.NOTSET)
    counts = {what: sum(outcome == what for outcome, _ in rows) for what in ("read", "refused", "otherwise")}
    version = ".".join(transformers.__version__.split(".")[:2])
    head = _HEAD.format(
        decoder=DECODER,
        form="\n".join(_field(name, value) for name, value in LLAMA.to_dict().items()),
        parts="\n".join(map(_part, PARTS.values())),
        total=len(rows),
        version=version,
        **counts,
    )
    return head + "\n".join(line for _, line in rows) + "\n"


def _part(kind: type[Part]) -> str:
    """The fields of a part, those with defaults behind the others."""
    stated = [field.name for field in fields(kind) if field.default is MISSING]
    others = [f"{field.name} {json.dumps(field.default)}" for field in fields(kind) if field.default is not MISSING]
    return f"- `{kind.name}`: {', '.join(stated)}; with their defaults {', '.join(others)}."


def _field(name: str, value: Any) -> str:
    text = f"{name}: {json.dumps(value) if not isinstance(value, str) else value}"
    return f"{text:<25} # {_MEANING[name]}"


_MEANING = {
    "gated_mlp": "three matrices instead of two",
    "norm": "or layer",
    "norm_vectors": "0 without weights, 2 with bias",
    "norms": "in a layer, of hidden_size values",
    "qk_norm": "or plain, head, heads, whole",
    "qk_norm_vectors": "2 with bias",
    "inner_norms": "of what the output projection and the last of the MLP read",
    "output_bias": "of attention; null: as attention_bias",
    "activation_params": "trained scalars of a layer's activation",
    "positions": "or learned, none",
    "extra_positions": "rows of learned positions beyond max_positions",
    "embedding_norm": "behind the token embedding",
    "head_bias": "of the LM head",
}
assert set(_MEANING) == set(Form.__dataclass_fields__)

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
