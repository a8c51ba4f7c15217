"""Generates the page of models, `docs/models.md`: `python -m tests.model_types`.

`tests/hexiopt/files/test_model_types.py` checks that it is current.
"""

import json
import logging
import warnings
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from hexiopt.files.huggingface import model_from_config
from hexiopt.files.models.features import feature_of_type, features
from hexiopt.files.models.types import TYPES
from hexiopt.problem.form import LLAMA, Form
from hexiopt.problem.model import ARCHITECTURES, DECODER
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

`model=Qwen/Qwen2.5-7B` reads `config.json` from the local cache of the Hub or, where it has none, from the Hub, and no
other file. Transformers is not needed. A model whose file states no name is called by the file, for a `config.json` by
its folder, from the Hub by its name there.

**Fields are read, not names.** A decoder whose layers are alike is priced whatever its `model_type` is called: for each
type below we know which keys state its sizes, how many norms a layer has, which projections have biases, and so on. The
parameters of each are counted against those of transformers' own model, to the last one. A note names the type, and
what the price leaves out. `hexiopt train` trains {trained}; the others are planned.

**What is not modelled is refused by name**: which experts, which windows, which layers. So are unknown keys, all of a
file in one line; an unknown switch that is off states nothing.

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

## The types of transformers

Of the {total} types of causal language models of transformers {version}, **{read} are read** as their default
configurations have them, and {alike} more where all of their layers are alike; {refused} are refused with the feature
named, {otherwise} otherwise. The second column has the form of a type that is read, or what is not modelled.

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
    """What becomes of a type (read, alike, refused or otherwise), and its line in the table."""
    config = default(kind)
    try:
        model = model_from_config(Section(config, kind))
    except InputError as error:
        why = "; ".join(text.partition(": not modelled")[0] for text in features(config).values())
        if kind in TYPES:
            return "alike", f"| {kind} | read where its layers are alike; by default {_windows(str(error))} |"
        why = why or feature_of_type(kind, config) or ""
        return ("refused" if why else "otherwise"), f"| {kind} | *not*: {why or error} |"
    form = model.form or ARCHITECTURES[model.architecture].form
    assert form is not None
    return "read", f"| {kind} | {form.in_words()} |"


def _windows(text: str) -> str:
    return text.partition(": ")[2].partition(": ")[2].partition(": not modelled")[0]


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
    counts = {what: sum(own == what for own, _ in rows) for what in ("read", "alike", "refused", "otherwise")}
    version = ".".join(transformers.__version__.split(".")[:2])
    head = _HEAD.format(
        trained="Llama, Mistral, Qwen2 and Qwen3",
        decoder=DECODER,
        form="\n".join(_field(name, value) for name, value in LLAMA.to_dict().items()),
        total=len(rows),
        version=version,
        **counts,
    )
    return head + "\n".join(line for _, line in rows) + "\n"


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
