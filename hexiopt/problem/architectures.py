"""The architectures of models: what each fixes, the keys of its `config.json`, and the values that models may have."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from hexiopt.problem.form import GPT, LLAMA, Form

RANGES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "num_layers": (1, 10_000),
        "hidden_size": (1, 2**20),
        "num_heads": (1, 2**16),
        "num_kv_heads": (1, 2**16),
        "head_dim": (1, 2**16),
        "ffn_size": (1, 2**22),
        "vocab_size": (1, 2**24),
        "max_positions": (1, 2**27),
        "projected_embedding": (1, 2**20),
        "attention_window": (1, 2**27),
    }
)
MAY_BE_NONE = ("projected_embedding", "attention_window")
DEFAULTS: Mapping[str, float] = MappingProxyType({"norm_eps": 1e-5, "rope_theta": 10_000.0})
MAX_NORM_EPS = 1.0
MAX_ROPE_THETA = 1e12
MAX_NAME = 200

ROUTER_KEYS: Mapping[str, type] = MappingProxyType(
    {
        "scoring_func": str,
        "topk_method": str,
        "norm_topk_prob": bool,
        "n_group": int,
        "topk_group": int,
        "routed_scaling_factor": float,
    }
)
"""The keys of `config.json` that say how a router scores experts, and the kinds of their values."""


@dataclass(frozen=True)
class Architecture:
    """The facts that a `model_type` of Hugging Face fixes, and the keys of its `config.json` for everything else.

    `keys` maps fields of `ModelSpec` to keys of `config.json`. Fields without a key are fixed: biases to the values
    given here (None: as `attention_bias`), the number of key-value heads to that of query heads, `head_dim` to
    hidden_size / num_heads. `form` is None if each model states its own.
    """

    keys: Mapping[str, str]
    form: Form | None = LLAMA
    attention_bias: bool = False
    mlp_bias: bool | None = False
    tied_embeddings: bool = False


_PLAIN = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_positions": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}
_GROUPED = _PLAIN | {
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "attention_window": "sliding_window",
}
_LLAMA = {name: key for name, key in _GROUPED.items() if name != "attention_window"}
_BIAS = {"attention_bias": "attention_bias"}
_GPT2 = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "ffn_size": "n_inner",
    "vocab_size": "vocab_size",
    "max_positions": "n_positions",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "activation_function",
    "norm_eps": "layer_norm_epsilon",
}
_GPT_NEO = _PLAIN | {
    "num_layers": "num_layers",
    "num_heads": "num_heads",
    "activation": "activation_function",
    "norm_eps": "layer_norm_epsilon",
    "attention_window": "window_size",
}
_GPT_NEOX = _PLAIN | {"norm_eps": "layer_norm_eps", "rope_theta": "rotary_emb_base"} | _BIAS
_NEMOTRON = _PLAIN | {
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "mlp_bias": "mlp_bias",
}
_OPT = _PLAIN | {
    "ffn_size": "ffn_dim",
    "activation": "activation_function",
    "attention_bias": "enable_bias",
    "final_norm": "do_layer_norm_before",
    "projected_embedding": "word_embed_proj_dim",
}

_BY_NAME = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size", "max_positions"),
    *("tied_embeddings", "attention_bias", "mlp_bias", "final_norm", "attention_window"),
    *("activation", "norm_eps", "rope_theta"),
)
_LEARNED = replace(GPT, positions="learned")

LLAMA_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
"""The architectures that have Llama's form but for biases and norms of queries and keys."""

DECODER = "decoder"
"""The architecture of all models that are described by their form, whatever Hugging Face calls their type."""

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(_LLAMA | _BIAS | {"mlp_bias": "mlp_bias"}),
        "mistral": Architecture(_GROUPED, replace(LLAMA, output_bias=False)),
        "qwen2": Architecture(_GROUPED, replace(LLAMA, output_bias=False), attention_bias=True),
        "qwen3": Architecture(_GROUPED | _BIAS, replace(LLAMA, qk_norm="head")),
        "gpt2": Architecture(
            _GPT2, replace(_LEARNED, output_bias=True), attention_bias=True, mlp_bias=True, tied_embeddings=True
        ),
        "gpt_neo": Architecture(_GPT_NEO, replace(_LEARNED, output_bias=True), mlp_bias=True, tied_embeddings=True),
        "gpt_neox": Architecture(_GPT_NEOX, GPT, attention_bias=True, mlp_bias=True),
        "nemotron": Architecture(_NEMOTRON | _BIAS, GPT),
        "opt": Architecture(
            _OPT, replace(_LEARNED, extra_positions=2), attention_bias=True, mlp_bias=None, tied_embeddings=True
        ),
        DECODER: Architecture({name: name for name in _BY_NAME}, None),
    }
)
