"""What each `model_type` of Hugging Face fixes, and which key of `config.json` states the rest, as data.

Defaults are those of transformers' configuration classes, except that the sizes of a model must be stated.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hexiopt.files.models.facts import LAYER_NORM_EPS, ConfigFile, Mixers, ModelType, key, row, switch, usual
from hexiopt.files.models.hybrids import HYBRIDS
from hexiopt.files.models.mixtures import MIXTURES
from hexiopt.files.models.rows import (
    ALL_BIASED,
    BASE,
    BIASED,
    COHERE,
    DEFAULTS,
    GEMMA,
    GLM,
    GPT2,
    GPTJ,
    LEARNED,
    LLAMA_LIKE,
    MULTI_HEAD,
    OLMO2,
    PLAIN,
    UNROTATED,
    alternating,
    named_row,
    sliding,
)
from hexiopt.problem.architectures import DECODER
from hexiopt.problem.form import LLAMA

_SIDE_BY_SIDE = "attention and MLP of a layer stand side by side; they are priced one after the other"
_ALIBI = "its biases of the attention's scores (ALiBi) are not priced"
_CAPPED = "its soft cap on logits is not priced"
_UNROTATED_LAYERS = "its layers without rotary positions are priced as those with them"


def _falcon_kv_heads(config: ConfigFile, values: dict[str, Any]) -> int | None:
    num_kv_heads, several = config.size("num_kv_heads"), not config.flag("multi_query", True)
    return num_kv_heads if config.flag("new_decoder_architecture", False) or several else 1


def _falcon_norms(config: ConfigFile, values: dict[str, Any]) -> int:
    norms, parallel = config.size("num_ln_in_parallel_attn"), config.flag("parallel_attn", True)
    if norms is None and config.flag("new_decoder_architecture", False):
        norms = 2
    return 1 if parallel and norms != 2 else 2


def _mpt_ffn_size(config: ConfigFile, values: dict[str, Any]) -> None:
    """Transformers' own model has no biases, ALiBi and four times the width, whatever the file states."""
    if config.size("expansion_ratio", 4) != 4:
        config.refuse("expansion_ratio", "is not that of transformers' model, 4; use a model with that")
    if not config.flag("no_bias", True):
        config.refuse("no_bias", "states biases, which transformers' model lacks; use a model without")
    attention = config.inner("attn_config")
    usual = {"alibi": True, "qk_ln": False, "prefix_lm": False, "attn_type": "multihead_attention"}
    wrong = [f"{name} {attention[name]}" for name in usual if attention.get(name, usual[name]) != usual[name]]
    if wrong:
        config.refuse("attn_config", f"states {', '.join(wrong)}, which is not modelled; use a model without")


def _lfm2_ffn_size(config: ConfigFile, values: dict[str, Any]) -> int | None:
    """Two thirds of the stated width, rounded up to a multiple, unless the file says that it is the width."""
    width = config.size("block_ff_dim") or config.size("intermediate_size")
    multiple, factor = config.size("block_multiple_of") or 256, config.number("block_ffn_dim_multiplier", 1.0)
    if width is None:
        config.refuse("intermediate_size", "is not a size; state it")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return width
    return -(-int(factor * int(2 * width / 3)) // multiple) * multiple


def _opt_final_norm(config: ConfigFile, values: dict[str, Any]) -> bool:
    if not config.flag("layer_norm_elementwise_affine", True):
        config.refuse("layer_norm_elementwise_affine", "is not modelled; use a model whose norms have weights")
    removed = config.flag("_remove_final_layer_norm", False)
    return config.flag("do_layer_norm_before", True) and not removed


def _bigcode_kv_heads(config: ConfigFile, values: dict[str, Any]) -> int | None:
    config.size("num_key_value_heads")  # which transformers writes, and does not read
    return 1 if config.flag("multi_query", True) else None


def _xielu_params(config: ConfigFile, values: dict[str, Any]) -> int:
    return 2 if values.get("activation") == "xielu" else 0


_QWEN_WINDOWS = Mixers(key("sliding_window", default=4096), switch="use_sliding_window", from_layer="max_window_layers")
_NAMED_WINDOWS = {"mistral": sliding(4096), "qwen2": _QWEN_WINDOWS, "qwen3": _QWEN_WINDOWS}

_BY_FIELDS: dict[str, ModelType] = {
    "apertus": ModelType(
        row(
            BIASED,
            usual(activation="xielu", max_positions=65_536, rope_theta=12e6),
            gated_mlp=False,
            qk_norm="head",
            activation_params=_xielu_params,
            rope_type="llama3",
        )
    ),
    "arcee": ModelType(row(LLAMA_LIKE, usual(activation="relu2", max_positions=4096), gated_mlp=False)),
    "biogpt": ModelType(
        row(
            PLAIN,
            ALL_BIASED,
            MULTI_HEAD,
            LEARNED,
            usual(activation="gelu", max_positions=1024, tied_embeddings=True),
            extra_positions=2,
            norm_eps=key("layer_norm_eps", default=1e-12),
        )
    ),
    "bitnet": ModelType(row(BIASED, usual(activation="relu2", rope_theta=5e5), inner_norms=True)),
    "bloom": ModelType(
        row(
            GPT2,
            ALL_BIASED,
            UNROTATED,
            usual(tied_embeddings=True),
            hidden_size=key("n_embed", "hidden_size"),
            ffn_size=None,
            max_positions=key("seq_length", default=2048),
            activation="gelu",
            embedding_norm=True,
        ),
        notes=(_ALIBI,),
    ),
    "codegen": ModelType(GPTJ, notes=(_SIDE_BY_SIDE,)),
    "cohere": ModelType(
        row(COHERE, usual(rope_theta=5e5), qk_norm=switch("use_qk_norm", False, "heads", "none")),
        notes=(_SIDE_BY_SIDE,),
    ),
    "cohere2": ModelType(COHERE, alternating(4), notes=(_SIDE_BY_SIDE, _UNROTATED_LAYERS)),
    "ctrl": ModelType(
        row(
            GPT2,
            ALL_BIASED,
            UNROTATED,
            usual(tied_embeddings=True),
            ffn_size=key("dff"),
            max_positions=key("n_positions", "max_position_embeddings", default=256),
            activation="relu",
            norm_eps=key("layer_norm_epsilon", default=1e-6),
            head_bias=True,
        )
    ),
    "cwm": ModelType(
        row(
            BASE,
            usual(mlp_bias=False, num_kv_heads=8, head_dim=128, max_positions=131_072, rope_theta=1e6),
            rope_type="llama3",
        ),
        alternating(4, "window_pattern", window=8192, first_is_full=True),
    ),
    "ernie4_5": ModelType(
        row(
            BASE,
            usual(num_kv_heads=2, head_dim=128, max_positions=131_072, rope_theta=5e5, tied_embeddings=True),
            attention_bias=key("use_bias", default=False),
            mlp_bias=key("use_bias", default=False),
        )
    ),
    "exaone4": ModelType(row(BASE, usual(num_kv_heads=32), qk_norm="head"), alternating(4)),
    "falcon": ModelType(
        row(
            PLAIN,
            MULTI_HEAD,
            usual(tied_embeddings=True),
            num_layers=key("num_hidden_layers", "n_layer"),
            num_heads=key("num_attention_heads", "n_head"),
            num_kv_heads=_falcon_kv_heads,
            ffn_size=key("ffn_hidden_size", default=None),
            attention_bias=key("bias", default=False),
            mlp_bias=key("bias", default=False),
            norms=_falcon_norms,
            positions=switch("alibi", False, "none", "rope"),
            activation=key("activation", default="gelu"),
            norm_eps=key("layer_norm_epsilon", default=1e-5),
        ),
        notes=(_SIDE_BY_SIDE,),
    ),
    "gemma": ModelType(row(GEMMA, usual(num_kv_heads=16))),
    "gemma2": ModelType(row(GEMMA, norms=4), alternating(2), notes=(_CAPPED,)),
    "gemma3_text": ModelType(
        row(GEMMA, usual(max_positions=131_072, rope_theta=1e6), norms=4, qk_norm="head"), alternating(6)
    ),
    "glm": ModelType(GLM),
    "glm4": ModelType(row(GLM, norms=4)),
    "gpt_bigcode": ModelType(
        row(
            GPT2,
            ALL_BIASED,
            LEARNED,
            usual(tied_embeddings=True),
            num_kv_heads=_bigcode_kv_heads,
            activation=key("activation_function", default="gelu_pytorch_tanh"),
        )
    ),
    "gptj": ModelType(GPTJ, notes=(_SIDE_BY_SIDE,)),
    "granite": ModelType(row(LLAMA_LIKE, usual(norm_eps=1e-6))),
    "helium": ModelType(
        row(
            LLAMA_LIKE,
            usual(num_kv_heads=20, head_dim=128, max_positions=4096, norm_eps=1e-8, rope_theta=1e5),
            output_bias=False,
        )
    ),
    "hunyuan_v1_dense": ModelType(row(BIASED, qk_norm="head")),
    "hyperclovax": ModelType(row(LLAMA_LIKE, usual(norm_eps=1e-6), norms=switch("use_post_norm", True, 4, 2))),
    "internlm3": ModelType(
        row(
            BASE,
            usual(num_kv_heads=2, head_dim=128, max_positions=32_768),
            attention_bias=key("attention_bias", "qkv_bias", default=False),
            mlp_bias=key("mlp_bias", "bias", default=False),
            output_bias=key("mlp_bias", "bias", default=False),
        )
    ),
    "iquestcoder": ModelType(row(LLAMA_LIKE, usual(num_kv_heads=8, head_dim=128, max_positions=131_072))),
    "jais2": ModelType(row(PLAIN, usual(attention_bias=True, mlp_bias=True, activation="relu2", max_positions=8192))),
    "lfm2": ModelType(
        row(
            BASE,
            usual(num_kv_heads=8, max_positions=128_000, rope_theta=1e6),
            ffn_size=_lfm2_ffn_size,
            qk_norm="head",
            activation="silu",
            norm_eps=key("norm_eps", default=1e-5),
            tied_embeddings=key("tie_embedding", "tie_word_embeddings", default=True),
        )
    ),
    "ministral": ModelType(row(BASE, usual(num_kv_heads=8, max_positions=131_072, norm_eps=1e-6)), sliding(4096)),
    "ministral3": ModelType(
        row(BASE, usual(num_kv_heads=8, head_dim=128, max_positions=262_144, rope_theta=1e6), rope_type="yarn"),
        sliding(),
    ),
    "mpt": ModelType(
        row(
            GPT2,
            UNROTATED,
            usual(tied_embeddings=True),
            num_layers=key("n_layers", "num_hidden_layers"),
            hidden_size=key("d_model", "hidden_size"),
            num_heads=key("n_heads", "num_attention_heads"),
            ffn_size=_mpt_ffn_size,
            max_positions=key("max_seq_len", default=2048),
            activation="gelu",
            norm_vectors=1,
        ),
        notes=(_ALIBI,),
    ),
    "nanochat": ModelType(
        row(BIASED, usual(activation="relu2", norm_eps=1e-6), gated_mlp=False, norm_vectors=0, qk_norm="plain"),
        notes=(_CAPPED,),
    ),
    "olmo": ModelType(row(BIASED, norm="layer", norm_vectors=0, norm_eps=1e-5)),
    "olmo2": ModelType(OLMO2),
    "olmo3": ModelType(row(OLMO2, usual(rope_theta=5e5)), alternating(4)),
    "openai-gpt": ModelType(
        row(
            GPT2,
            ALL_BIASED,
            LEARNED,
            usual(tied_embeddings=True),
            final_norm=False,
            ffn_size=None,
            max_positions=key("n_positions", "max_position_embeddings", default=512),
            activation=key("afn", default="gelu"),
        )
    ),
    "persimmon": ModelType(
        row(
            PLAIN,
            ALL_BIASED,
            MULTI_HEAD,
            usual(activation="relu2", max_positions=16_384),
            qk_norm=switch("qk_layernorm", True, "head", "none"),
            qk_norm_vectors=2,
        )
    ),
    "phi": ModelType(
        row(
            PLAIN,
            ALL_BIASED,
            usual(activation="gelu_new"),
            norms=1,
            head_dim=None,
            head_bias=True,
            qk_norm=switch("qk_layernorm", False, "head", "none"),
            qk_norm_vectors=2,
        ),
        notes=(_SIDE_BY_SIDE,),
    ),
    "phi3": ModelType(row(BASE, usual(max_positions=4096)), sliding()),
    "seed_oss": ModelType(
        row(
            LLAMA_LIKE,
            usual(attention_bias=True, num_kv_heads=8, head_dim=128, max_positions=524_288, norm_eps=1e-6),
            output_bias=key("attention_out_bias", default=False),
        )
    ),
    "smollm3": ModelType(
        row(
            LLAMA_LIKE, usual(num_kv_heads=4, max_positions=32_768, norm_eps=1e-6, rope_theta=2e6, tied_embeddings=True)
        ),
        Mixers(
            key("sliding_window", default=None),
            switch="use_sliding_window",
            period=4,
            period_keys=("no_rope_layer_interval",),
            flags="no_rope_layers",
            inverse=True,
        ),
        notes=(_UNROTATED_LAYERS,),
    ),
    "stablelm": ModelType(
        row(
            BASE,
            usual(max_positions=4096),
            norm="layer",
            norm_vectors=2,
            output_bias=False,
            attention_bias=key("use_qkv_bias", default=False),
            qk_norm=switch("qk_layernorm", False, "heads", "none"),
            norms=switch("use_parallel_residual", False, 1, 2),
            norm_eps=LAYER_NORM_EPS,
        )
    ),
    "starcoder2": ModelType(
        row(
            PLAIN,
            usual(num_kv_heads=2, activation="gelu_pytorch_tanh", max_positions=4096, tied_embeddings=True),
            attention_bias=key("use_bias", default=True),
            mlp_bias=key("use_bias", default=True),
            norm_eps=key("norm_epsilon", default=1e-5),
        ),
        sliding(),
    ),
    "vaultgemma": ModelType(GEMMA, alternating(2), notes=(_CAPPED,)),
    "xglm": ModelType(
        row(
            PLAIN,
            ALL_BIASED,
            MULTI_HEAD,
            UNROTATED,
            usual(tied_embeddings=True),
            num_layers=key("num_layers", "num_hidden_layers"),
            hidden_size=key("d_model", "hidden_size"),
            num_heads=key("attention_heads", "num_attention_heads"),
            ffn_size=key("ffn_dim"),
            norm_eps=1e-5,
            activation=key("activation_function", default="gelu"),
        )
    ),
}

TYPES: Mapping[str, ModelType] = MappingProxyType(
    {
        **{name: ModelType(named_row(name), _NAMED_WINDOWS.get(name), name) for name in DEFAULTS if name != DECODER},
        "opt": ModelType(row(named_row("opt"), final_norm=_opt_final_norm), architecture="opt"),
        "gpt-sw3": ModelType(named_row("gpt2"), architecture="gpt2"),
        **_BY_FIELDS,
        **MIXTURES,
        **HYBRIDS,
        DECODER: ModelType(
            row({name: key(name, default=value) for name, value in LLAMA.to_dict().items()}, named_row(DECODER))
        ),
    }
)
"""All types that are read."""
