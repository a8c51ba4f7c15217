"""The types of Hugging Face some of whose layers are recurrences: rows of facts, as in `types.py`."""

from typing import Any

from hexiopt.files.models.facts import REQUIRED, ConfigFile, Mixers, ModelType, Row, key, row, usual
from hexiopt.files.models.mixtures import QWEN_PLACEMENT, QWEN_SHARED, experts
from hexiopt.files.models.rows import BASE, BIASED, LLAMA_LIKE, UNROTATED

_MULTIPLIED = "its multipliers of hidden states are not priced"


def _mamba_width(config: ConfigFile, values: dict[str, Any]) -> int | None:
    """The width of a head; `auto`: that of all, stated or so many times hidden_size, over the heads."""
    if config.word("mamba_d_head") not in (None, "auto"):
        return config.size("mamba_d_head")
    all_heads = config.size("mamba_d_ssm") or (config.size("mamba_expand", 2) or 0) * values["hidden_size"]
    heads = config.size("mamba_n_heads", 128)
    if not heads or all_heads % heads:
        config.refuse("mamba_n_heads", f"does not divide the {all_heads} values of all heads; change one")
    return all_heads // heads


def _mamba(**facts: Any) -> Row:
    """Facts of Mamba-2 under IBM's names."""
    return row(
        {
            "heads": key("mamba_n_heads", default=128),
            "groups": key("mamba_n_groups", default=1),
            "key_dim": key("mamba_d_state", default=256),
            "value_dim": _mamba_width,
            "conv": key("mamba_d_conv", default=4),
            "conv_bias": key("mamba_conv_bias", default=True),
            "chunk": key("mamba_chunk_size", default=256),
            "bias": key("mamba_proj_bias", default=False),
        },
        facts,
    )


def _delta(key_heads: Any = 16, value_heads: Any = 32, key_dim: Any = 128, value_dim: Any = 128) -> Row:
    """Facts of the gated delta rule under Qwen's names; transformers scans it in chunks of 64 tokens."""
    return {
        "heads": key("linear_num_value_heads", default=value_heads),
        "groups": key("linear_num_key_heads", default=key_heads),
        "key_dim": key("linear_key_head_dim", default=key_dim),
        "value_dim": key("linear_value_head_dim", default=value_dim),
        "conv": key("linear_conv_kernel_dim", default=4),
        "conv_bias": False,
        "chunk": 64,
        "delta": True,
    }


_QWEN = row(BIASED, usual(max_positions=32_768, head_dim=256, norm_eps=1e-6), qk_norm="head")
_QWEN_MIXERS = Mixers(others="recurrent", period=4, period_keys=("full_attention_interval",))
_FALCON_WEIGHTS = ("key", "attention_out", "attention_in", "ssm_in", "ssm_out", "lm_head")

HYBRIDS: dict[str, ModelType] = {
    "bamba": ModelType(
        row(LLAMA_LIKE, usual(num_kv_heads=8, max_positions=262_144)),
        Mixers(others="recurrent", lists=("layers_block_type", "layer_types"), full_layers="attn_layer_indices"),
        recurrent=_mamba(),
        ignores=("z_loss_coefficient", "num_logits_to_keep"),
    ),
    "falcon_h1": ModelType(
        row(LLAMA_LIKE, usual(num_kv_heads=8, max_positions=8192)),
        Mixers(others="both", lists=("layers_block_type", "layer_types")),
        recurrent=_mamba(norm=key("mamba_rms_norm", default=False), bias=False),
        only={"projectors_bias": False, "mamba_proj_bias": False},
        ignores=(
            *("mamba_norm_before_gate", "num_logits_to_keep", "mlp_multipliers", "ssm_multipliers", "mamba_use_mlp"),
            *(f"{name}_multiplier" for name in _FALCON_WEIGHTS),
        ),
        notes=(_MULTIPLIED,),
    ),
    "granitemoehybrid": ModelType(
        row(BIASED, usual(norm_eps=1e-6), ffn_size=key("shared_intermediate_size", default=1024)),
        Mixers(others="recurrent", lists=("layer_types", "layers_block_type")),
        recurrent=_mamba(),
        experts=experts(
            count=key("num_local_experts", "num_experts", default=8),
            top_k=key("num_experts_per_tok", default=2),
            ffn_size=key("intermediate_size"),
            shared=key("shared_intermediate_size", default=1024),
        ),
        ignores=("position_embedding_type", "normalization_function", "init_method"),
    ),
    "nemotron_h": ModelType(
        row(
            BASE,
            UNROTATED,
            usual(num_kv_heads=8, head_dim=128, max_positions=4096, mlp_bias=False),
            num_layers=key("num_hidden_layers", default=None),
            activation=key("mlp_hidden_act", default="relu2"),
            norm_eps=key("layer_norm_epsilon", "norm_eps", "rms_norm_eps", default=1e-5),
            gated_mlp=False,
            tied_embeddings=False,
        ),
        Mixers(others="recurrent", lists=("layers_block_type", "layer_types", "hybrid_override_pattern"), blocks=True),
        recurrent={
            "heads": key("mamba_num_heads", default=128),
            "groups": key("n_groups", "mamba_n_groups", default=8),
            "key_dim": key("ssm_state_size", default=128),
            "value_dim": key("mamba_head_dim", default=64),
            "conv": key("conv_kernel", "mamba_d_conv", default=4),
            "conv_bias": key("use_conv_bias", "mamba_conv_bias", default=True),
            "chunk": key("chunk_size", "mamba_chunk_size", default=128),
            "bias": key("use_bias", default=False),
        },
        experts=experts(
            count=key("n_routed_experts", "num_local_experts", default=8),
            top_k=key("num_experts_per_tok", default=2),
            ffn_size=key("moe_intermediate_size", default=7688),
            shared=key("moe_shared_expert_intermediate_size", default=7688),
            gated=False,
            shared_bias=key("mlp_bias", default=False),
            latent=key("moe_latent_size", default=0),
            latent_bias=key("mlp_bias", default=False),
        ),
        extra=key("num_nextn_predict_layers", default=0),
        only={"tie_word_embeddings": False},
        extra_blocks=("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
        ignores=(
            *(
                "n_shared_experts",
                "attention_bias",
                "expand",
                "mamba_hidden_act",
                "mamba_proj_bias",
                "mamba_ssm_cache_dtype",
            ),
            *("moe_shared_expert_overlap", "num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32"),
            *("use_mamba_kernels", "sliding_window", "rope_theta", "partial_rotary_factor", "attention_head_dim"),
            *("mamba_dt_min", "mamba_dt_max", "mamba_dt_limit", "mamba_dt_init_floor", "time_step_rank"),
        ),
    ),
    "olmo_hybrid": ModelType(
        row(BIASED, usual(max_positions=65_536, norm_eps=1e-6), qk_norm="whole"),
        Mixers(others="recurrent", period=4),
        recurrent=_delta(REQUIRED, REQUIRED, REQUIRED, REQUIRED),
        ignores=tuple(
            f"linear_{name}"
            for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor", "allow_neg_eigval")
        ),
    ),
    "qwen3_5_moe_text": ModelType(
        row(_QWEN, usual(num_kv_heads=2), ffn_size=None),
        _QWEN_MIXERS,
        attention={"gated": True},
        recurrent=_delta(),
        experts=row(experts(), QWEN_SHARED),
        extra=key("mtp_num_hidden_layers", default=0),
        ignores=("mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "attn_output_gate", "intermediate_size"),
    ),
    "qwen3_5_text": ModelType(
        row(_QWEN, usual(num_kv_heads=4)),
        _QWEN_MIXERS,
        attention={"gated": True},
        recurrent=_delta(),
        extra=key("mtp_num_hidden_layers", default=0),
        ignores=("mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "attn_output_gate"),
    ),
    "qwen3_next": ModelType(
        row(_QWEN, usual(num_kv_heads=2)),
        _QWEN_MIXERS,
        attention={"gated": True},
        recurrent=_delta(),
        experts=row(experts(), QWEN_SHARED),
        placement=QWEN_PLACEMENT,
    ),
}
"""Types with recurrences beside attention."""
