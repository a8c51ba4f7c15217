"""Rows that several types of Hugging Face share, with the defaults of transformers' configuration classes."""

from collections.abc import Mapping
from typing import Any

from hexiopt.files.models.facts import LAYER_NORM_EPS, REQUIRED, Key, Mixers, Row, key, row, usual
from hexiopt.problem.architectures import ARCHITECTURES, DECODER
from hexiopt.problem.form import GPT, LLAMA

# Defaults of the architectures that `ModelSpec` knows by name; their keys are in `ARCHITECTURES`.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_positions": 2048, "activation": "silu", "norm_eps": 1e-6},
    "mistral": {"max_positions": 131_072, "activation": "silu", "norm_eps": 1e-6, "num_kv_heads": 8},
    "qwen2": {"max_positions": 32_768, "activation": "silu", "norm_eps": 1e-6, "num_kv_heads": 32},
    "qwen3": {"max_positions": 32_768, "activation": "silu", "norm_eps": 1e-6, "num_kv_heads": 32, "head_dim": 128},
    "gpt2": {"max_positions": 1024, "activation": "gelu_new", "ffn_size": None},
    "gpt_neo": {"max_positions": 2048, "activation": "gelu_new", "ffn_size": None, "attention_window": 256},
    "gpt_neox": {"max_positions": 2048, "activation": "gelu"},
    "nemotron": {"max_positions": 4096, "activation": "relu2"},
    "opt": {"max_positions": 2048, "activation": "relu"},
    DECODER: {"attention_window": None},
}
_OTHER_NAMES = {
    "n_layer": "num_hidden_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
"""Of transformers' attribute maps."""


def named_row(architecture: str) -> Row:
    """The row of an architecture that `ModelSpec` knows by name."""
    facts = ARCHITECTURES[architecture]
    fixed = {"attention_bias": facts.attention_bias, "mlp_bias": facts.mlp_bias}
    usual: dict[str, Any] = {
        **dict.fromkeys(("num_kv_heads", "head_dim", "projected_embedding")),
        "final_norm": True,
        "norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tied_embeddings": facts.tied_embeddings,
        **fixed,
        **DEFAULTS[architecture],
    }
    keys = {
        name: Key((k, _OTHER_NAMES[k]) if k in _OTHER_NAMES else (k,), usual.get(name, REQUIRED))
        for name, k in facts.keys.items()
        if name != "attention_window" or name in usual
    }
    return row(dict.fromkeys(("num_kv_heads", "head_dim")), fixed, keys)


# Rows from which the types that are read by their fields are made.
BASE = row(
    row(
        num_layers=key("num_hidden_layers"),
        hidden_size=key("hidden_size"),
        num_heads=key("num_attention_heads"),
        ffn_size=key("intermediate_size"),
        vocab_size=key("vocab_size"),
    ),
    usual(num_kv_heads=None, head_dim=None, max_positions=2048, tied_embeddings=False, activation="silu"),
    {"attention_bias": False, "mlp_bias": False},
    usual(norm_eps=1e-5, rope_theta=10_000.0),
    LLAMA.to_dict(),
)
BIASED = row(BASE, usual(attention_bias=False))
ALL_BIASED = {"attention_bias": True, "mlp_bias": True}
LLAMA_LIKE = row(BIASED, usual(mlp_bias=False))
PLAIN = row(BASE, GPT.to_dict(), norm_eps=LAYER_NORM_EPS)
MULTI_HEAD = {"num_kv_heads": None, "head_dim": None}
LEARNED = {"positions": "learned", "rope_theta": 10_000.0}
UNROTATED = {"positions": "none", "rope_theta": 10_000.0}
GPT2 = row(
    PLAIN,
    MULTI_HEAD,
    num_layers=key("n_layer", "num_hidden_layers"),
    hidden_size=key("n_embd", "hidden_size"),
    num_heads=key("n_head", "num_attention_heads"),
    ffn_size=key("n_inner", default=None),
    max_positions=key("n_positions", "max_position_embeddings", default=1024),
    activation=key("activation_function", default="gelu_new"),
    norm_eps=key("layer_norm_epsilon", default=1e-5),
)
GPTJ = row(
    GPT2,
    max_positions=key("n_positions", "max_position_embeddings", default=2048),
    mlp_bias=True,
    output_bias=False,
    norms=1,
    head_bias=True,
)
GEMMA = row(
    BIASED,
    usual(num_kv_heads=4, head_dim=256, tied_embeddings=True, max_positions=8192, norm_eps=1e-6),
    activation=key("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
)
COHERE = row(BIASED, usual(tied_embeddings=True, max_positions=8192), norm="layer", norms=1, norm_eps=LAYER_NORM_EPS)
GLM = row(
    BASE,
    usual(attention_bias=True, num_kv_heads=2, head_dim=128, max_positions=131_072, norm_eps=1.5625e-7),
    output_bias=False,
)
OLMO2 = row(BIASED, qk_norm="whole")


def sliding(default: int | None = None) -> Mixers:
    """Windows of all layers."""
    return Mixers(key("sliding_window", default=default))


def alternating(period: int, *period_keys: str, window: int = 4096, first_is_full: bool = False) -> Mixers:
    """Windows of all but every `period`-th layer."""
    keys = period_keys or ("sliding_window_pattern", "_sliding_window_pattern")
    return Mixers(key("sliding_window", default=window), period=period, period_keys=keys, first_is_full=first_is_full)
