"""The types of Hugging Face whose layers have experts, and attend: rows of facts, as in `types.py`."""

from typing import Any

from hexiopt.files.models.facts import (
    ConfigFile,
    Fact,
    Mixers,
    ModelType,
    Placement,
    Row,
    key,
    product,
    row,
    switch,
    total,
    usual,
)
from hexiopt.files.models.rows import BASE, BIASED, GEMMA, GLM, LLAMA_LIKE, OLMO2, alternating, sliding

_UNROTATED_LAYERS = "its layers without rotary positions are priced as those with them"
_NORMED_VALUES = "its norm of values, which has no weights, is not priced"


def _global_width(config: ConfigFile, values: dict[str, Any]) -> int | None:
    """Of a head where all tokens are attended to; None where the file states it by layer, as transformers 5 does."""
    return None if config.inner("per_layer_config") else config.size("global_head_dim", 512)


def _global_kv_heads(config: ConfigFile, values: dict[str, Any]) -> int | None:
    heads = config.size("num_global_key_value_heads")
    return heads if config.flag("attention_k_eq_v", False) else None


def _value_width(config: ConfigFile, values: dict[str, Any]) -> int | None:
    return config.size("v_head_dim") or values.get("hidden_size", 0) // values.get("num_heads", 1)


_PER_TOKEN = key("num_experts_per_tok", "num_experts_per_token")
_WIDTH = key("moe_intermediate_size")
_COUNT = key("num_experts", "num_local_experts")
_LOCAL = key("num_local_experts", "num_experts")
_ROUTED = key("n_routed_experts", "num_local_experts", "num_experts")
_FIRST_DENSE = Placement(first="first_k_dense_replace")
_WORDS = Placement(words="mlp_layer_types", first_default=1)
_IN_STEPS = Placement(dense_layers="mlp_only_layers", step="decoder_sparse_step")
QWEN_PLACEMENT = _IN_STEPS


def experts(*bases: Row, **facts: Fact) -> Row:
    """The usual facts of experts: of `moe_intermediate_size` columns, under Qwen's names."""
    return row({"count": _COUNT, "top_k": _PER_TOKEN, "ffn_size": _WIDTH}, *bases, **facts)


ALL_EXPERTS: Row = {"ffn_size": key("intermediate_size")}
"""Where no layer is dense, `intermediate_size` is the experts' width."""

QWEN_SHARED: Row = {"shared": key("shared_expert_intermediate_size", default=512), "shared_gate": True}


def _shared_columns(name: str, default: int, width: str = "moe_intermediate_size") -> Row:
    return {"shared": product(key(name, default=default), key(width))}


def _latent(head: int = 128, rope: int = 64, value: int = 128, q_rank: int = 1536, kv_rank: int = 512) -> Row:
    """Facts of latent attention."""
    return {
        "qk_dim": total(key("qk_nope_head_dim", default=head), key("qk_rope_head_dim", default=rope)),
        "v_dim": key("v_head_dim", default=value),
        "q_rank": key("q_lora_rank", default=q_rank),
        "kv_rank": key("kv_lora_rank", default=kv_rank),
        "rope_dim": key("qk_rope_head_dim", default=rope),
    }


_LATENT_BASE = row(BIASED, {"num_kv_heads": None, "head_dim": 1}, usual(norm_eps=1e-6))
_UNREAD = ("num_key_value_heads", "head_dim", "qk_head_dim")  # by models with latent attention
_EVERY = {"moe_layer_freq": 1}

_DEEPSEEK_V3 = ModelType(
    row(_LATENT_BASE, usual(max_positions=4096)),
    attention=_latent(),
    experts=row(experts(count=_ROUTED), _shared_columns("n_shared_experts", 1)),
    placement=Placement(first="first_k_dense_replace", first_default=3),
    extra=key("num_nextn_predict_layers", "num_mtp_layers", default=1),
    only=_EVERY,
    ignores=_UNREAD,
    stored="fp8",
    own_code=("deepseekv3",),
)
_GRANITE = row(LLAMA_LIKE, usual(norm_eps=1e-6), mlp_bias=False)
_GRANITE_EXPERTS = experts(ALL_EXPERTS, count=_LOCAL)

MIXTURES: dict[str, ModelType] = {
    "afmoe": ModelType(
        row(BASE, usual(head_dim=128, max_positions=16_384), norms=4, qk_norm="head"),
        alternating(4, "global_attn_every_n_layers", window=1024),
        attention={"gated": True},
        experts=row(experts(), _shared_columns("num_shared_experts", 2), router_bias=True),
        placement=Placement(first="num_dense_layers", first_default=1),
        only={"attention_bias": False},
        ignores=("route_scale", "route_norm", "score_func", "load_balance_coeff", "mup_enabled"),
    ),
    "deepseek_v2": ModelType(
        row(_LATENT_BASE, usual(mlp_bias=False)),
        attention=_latent(),
        experts=row(
            experts(count=_ROUTED), _shared_columns("n_shared_experts", 2), shared_bias=key("mlp_bias", default=False)
        ),
        placement=_FIRST_DENSE,
        only=_EVERY,
        ignores=_UNREAD,
        own_code=("deepseekv2",),
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
    "dots1": ModelType(
        row(BIASED, usual(norm_eps=1e-6), qk_norm="head"),
        Mixers(key("sliding_window", default=4096), from_layer="max_window_layers", from_default=62),
        experts=row(experts(count=_ROUTED), _shared_columns("n_shared_experts", 0)),
        placement=_FIRST_DENSE,
        only=_EVERY,
    ),
    "ernie4_5_moe": ModelType(
        row(
            BASE,
            usual(num_kv_heads=4, max_positions=131_072, rope_theta=5e5, tied_embeddings=True),
            attention_bias=key("use_bias", default=False),
            mlp_bias=key("use_bias", default=False),
            head_bias=key("use_bias", default=False),
        ),
        experts=row(
            experts(count=key("moe_num_experts", "num_experts"), top_k=key("moe_k", "num_experts_per_tok")),
            _shared_columns("moe_num_shared_experts", 2),
            shared_bias=key("use_bias", default=False),
            router_bias=True,  # its correction of scores is a parameter
        ),
        placement=Placement(
            first="moe_layer_start_index", first_default=1, last="moe_layer_end_index", step="moe_layer_interval"
        ),
    ),
    "exaone_moe": ModelType(
        row(BASE, usual(num_kv_heads=32), qk_norm="head"),
        alternating(4),
        experts=row(experts(), _shared_columns("num_shared_experts", 1)),
        placement=Placement(words="mlp_layer_types", first="first_k_dense_replace", first_default=1),
    ),
    "flex_olmo": ModelType(
        row(OLMO2, usual(max_positions=4096, norm_eps=1e-6, rope_theta=5e5)), experts=experts(ALL_EXPERTS)
    ),
    "gemma4_text": ModelType(  # but for those with embeddings or keys and values of layers
        row(
            GEMMA,
            usual(max_positions=131_072, rope_theta=1e6),
            norms=switch("enable_moe_block", False, 7, 4),
            qk_norm="head",
            rope_type="proportional",
        ),
        Mixers(
            key("sliding_window", default=512),
            period=6,
            period_keys=("sliding_window_pattern", "_sliding_window_pattern"),
            last_is_full=True,
        ),
        full={
            "qk_dim": _global_width,
            "v_dim": _global_width,
            "kv_heads": _global_kv_heads,
            "keys_are_values": key("attention_k_eq_v", default=False),
        },
        experts=experts(
            count=key("num_experts", default=0),
            top_k=key("top_k_experts", default=0),
            ffn_size=key("moe_intermediate_size", default=0),
            router_vectors=1,
            expert_scales=True,
        ),
        placement=Placement(switch="enable_moe_block"),
        beside_experts=True,
        assumed={"hidden_size_per_layer_input": 256},
        per_layer="per_layer_config",
        ignores=("use_double_wide_mlp", "vocab_size_per_layer_input"),
        notes=(_NORMED_VALUES,),
    ),
    "glm4_moe": ModelType(
        row(
            GLM,
            usual(num_kv_heads=8, attention_bias=False, norm_eps=1e-5, head_dim=None),
            qk_norm=switch("use_qk_norm", False, "head", "none"),
        ),
        experts=row(experts(count=_ROUTED), _shared_columns("n_shared_experts", 1)),
        placement=Placement(first="first_k_dense_replace", first_default=1),
        extra=key("num_nextn_predict_layers", "num_mtp_layers", default=1),
    ),
    "glm4_moe_lite": ModelType(
        row(_LATENT_BASE, usual(max_positions=202_752, norm_eps=1e-5)),
        attention=_latent(192, 64, 256, 768),
        experts=row(experts(count=_ROUTED), _shared_columns("n_shared_experts", 1)),
        placement=_WORDS,
        ignores=_UNREAD,
    ),
    "gpt_oss": ModelType(
        row(
            BASE,
            usual(
                num_kv_heads=8, head_dim=64, max_positions=131_072, attention_bias=True, norm_eps=1e-5, rope_theta=1.5e5
            ),
            rope_type="yarn",
        ),
        alternating(2, window=128),
        attention={"sinks": True},
        experts=experts(ALL_EXPERTS, bias=True, router_bias=True),
        ignores=("experts_per_token", "initial_context_length", "swiglu_alpha", "swiglu_limit"),
        stored="mxfp4",
    ),
    "granite_swa": ModelType(
        row(LLAMA_LIKE, usual(max_positions=8192, num_kv_heads=4, tied_embeddings=True)),
        Mixers(key("sliding_window", default=128), period=4, first_is_full=True),
        attention={"sinks": True},
        ignores=("layer_rope_theta",),
    ),
    "granitemoe": ModelType(_GRANITE, experts=_GRANITE_EXPERTS),
    "granitemoe_swa": ModelType(
        _GRANITE,
        Mixers(key("sliding_window", default=128), period=4, first_is_full=True),
        attention={"sinks": True},
        experts=row(_GRANITE_EXPERTS, shared=key("shared_intermediate_size", default=0)),
        ignores=("layer_rope_theta",),
    ),
    "granitemoeshared": ModelType(
        _GRANITE, experts=row(_GRANITE_EXPERTS, shared=key("shared_intermediate_size", default=0))
    ),
    "hunyuan_v1_moe": ModelType(
        row(BIASED, qk_norm="head"),
        experts=experts(
            count=key("num_experts", "num_local_experts"),
            top_k=key("moe_topk", "num_experts_per_tok"),
            ffn_size=key("intermediate_size"),
            shared=key("intermediate_size"),
        ),
    ),
    "hy_v3": ModelType(
        row(
            LLAMA_LIKE,
            usual(num_kv_heads=8, head_dim=128, max_positions=131_072, rope_theta=11_158_840.0),
            qk_norm="head",
        ),
        experts=row(experts(), _shared_columns("num_shared_experts", 1), shared_bias=key("mlp_bias", default=False)),
        placement=_WORDS,
        ignores=("router_scaling_factor", "enable_moe_fp32_combine"),
    ),
    "llama4_text": ModelType(
        row(
            BIASED,
            usual(num_kv_heads=8, head_dim=128, max_positions=131_072, rope_theta=5e5),
            ffn_size=key("intermediate_size_mlp", default=16_384),
            qk_norm=switch("use_qk_norm", True, "plain", "none"),
        ),
        Mixers(
            key("attention_chunk_size", default=8192),
            period=4,
            period_keys=("no_rope_layer_interval",),
            flags="no_rope_layers",
            chunked=True,
        ),
        full={"qk_norm": "none"},
        experts=experts(ALL_EXPERTS, count=_LOCAL, shared=key("intermediate_size"), scales_input=True),
        placement=Placement(sparse_layers="moe_layers", step="interleave_moe_layer_step"),
        ignores=("attn_temperature_tuning", "floor_scale", "attn_scale", "for_llm_compressor"),
        notes=(_UNROTATED_LAYERS,),
    ),
    "mellum": ModelType(
        row(
            BIASED,
            usual(num_kv_heads=4, head_dim=128, max_positions=131_072, norm_eps=1e-6, rope_theta=5e5),
            qk_norm="head",
        ),
        Mixers(key("sliding_window", default=1024), period=1),
        experts=experts(),
        placement=Placement(words="mlp_layer_types"),
        ignores=("mtp_layer_types", "mtp_mlp_layer_types"),
    ),
    "minicpm3": ModelType(
        row(_LATENT_BASE, usual(max_positions=32_768, norm_eps=1e-5, tied_embeddings=True, mlp_bias=False)),
        attention=row(_latent(64, 32, 64, 768, 256), v_dim=_value_width),
        ignores=(*_UNREAD, "scale_emb", "scale_depth", "dim_model_base"),
    ),
    "minimax_m2": ModelType(
        row(
            BASE,
            usual(num_kv_heads=8, head_dim=128, max_positions=196_608, norm_eps=1e-6, rope_theta=5e6),
            qk_norm="whole",
        ),
        experts=experts(ALL_EXPERTS),
        extra=key("num_mtp_modules", default=0),
        only={"attn_type_list": 1, "shared_intermediate_size": 0, "use_qk_norm": True, "mtp_transformer_layers": 1},
        ignores=(
            *("use_mtp", "use_routing_bias", "qk_norm_type", "mlp_intermediate_size", "shared_moe_mode"),
            *("max_model_len", *(f"layernorm_{part}_beta" for part in ("full_attention", "linear_attention", "mlp"))),
        ),
        stored="fp8",
    ),
    "mixtral": ModelType(
        row(BASE, usual(num_kv_heads=8, max_positions=131_072, rope_theta=1e6)), sliding(), experts=experts(ALL_EXPERTS)
    ),
    "olmoe": ModelType(
        row(BIASED, usual(max_positions=4096), head_dim=None, qk_norm="whole"), experts=experts(ALL_EXPERTS)
    ),
    "phimoe": ModelType(
        row(
            BIASED,
            usual(num_kv_heads=8, max_positions=131_072, rope_theta=1e6),
            norm="layer",
            norm_vectors=2,
            head_bias=key("lm_head_bias", default=False),
        ),
        sliding(),
        experts=experts(ALL_EXPERTS, count=_LOCAL),
        ignores=("input_jitter_noise",),
    ),
    "qwen2_moe": ModelType(
        row(
            BASE,
            usual(num_kv_heads=16, max_positions=32_768, norm_eps=1e-6),
            attention_bias=key("qkv_bias", default=True),
            output_bias=False,
        ),
        Mixers(
            key("sliding_window", default=4096), switch="use_sliding_window", until_layer="max_window_layers", period=2
        ),
        experts=row(experts(), QWEN_SHARED, shared=key("shared_expert_intermediate_size", default=5632)),
        placement=_IN_STEPS,
    ),
    "qwen3_moe": ModelType(
        row(BIASED, usual(num_kv_heads=4, max_positions=32_768, norm_eps=1e-6), qk_norm="head"),
        Mixers(key("sliding_window", default=4096), switch="use_sliding_window"),
        experts=experts(),
        placement=_IN_STEPS,
    ),
    "solar_open": ModelType(
        row(
            BIASED,
            usual(num_kv_heads=8, head_dim=128, max_positions=131_072, rope_theta=1e6),
            ffn_size=None,
            output_bias=False,
        ),
        experts=row(experts(count=_ROUTED), _shared_columns("n_shared_experts", 1)),
        ignores=("intermediate_size", "first_k_dense_replace"),
    ),
    "youtu": ModelType(
        row(_LATENT_BASE, usual(max_positions=131_072, tied_embeddings=True)),
        attention=_latent(),
        ignores=(*_UNREAD, "embedding_initializer_range"),
    ),
}
"""Types with experts, latent attention, sinks, and other attention than that of `Form`."""
