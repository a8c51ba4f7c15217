"""The keys of a `config.json` that change nothing that is priced, and the keys of features that are not modelled.

A feature is recognised by the fields of a file, not by the name of its type: by the first of its signs that is not
null, false, zero or empty. `OF_TYPES` has the features that no field shows.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hexiopt.checks import is_whole
from hexiopt.files.models.facts import ModelType
from hexiopt.ledger import OFF, Vocabulary

_WORDS = """
    architectures transformers_version torch_dtype dtype use_bfloat16 torchscript use_cache return_dict
    return_dict_in_generate output_attentions output_hidden_states output_scores use_return_dict gradient_checkpointing
    is_decoder tokenizer_class prefix task_specific_params problem_type finetuning_task num_labels id2label label2id
    unsloth_version unsloth_fixed pretraining_tp attn_implementation _attn_implementation
    _attn_implementation_autoset _attn_implementation_internal _experts_implementation _commit_hash bos_token_id
    eos_token_id pad_token_id sep_token_id unk_token_id eod_token_id cls_token_id mask_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids max_length min_length
    do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    exponential_decay_length_penalty remove_invalid_values initializer_range initializer_factor init_std init_device
    initial_scale init_fn attention_dropout attention_probs_dropout_prob hidden_dropout hidden_dropout_prob
    activation_dropout dropout classifier_dropout residual_dropout embedding_dropout resid_dropout embed_dropout
    resid_pdrop embd_pdrop emb_pdrop attn_pdrop ffn_dropout layerdrop summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj chunk_size_feed_forward tf_legacy_loss n_ctx n_special
    predict_special_tokens scale_attn_weights scale_attn_by_inverse_layer_idx scale_attention_softmax_in_fp32
    attention_softmax_in_fp32 reorder_and_upcast_attn rotary rotary_dim rotary_pct partial_rotary_factor
    use_parallel_residual max_sequence_length original_max_position_embeddings rope_interleaved is_llama_config
    transformers.js_config keys_to_ignore_at_inference cache_implementation ep_size max_window_layers
    no_rope_layers no_rope_layer_interval scale_embedding embedding_multiplier residual_multiplier attention_multiplier
    logits_scaling logit_scale query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping clip_qkv
    slow_but_exact apply_residual_connection_post_layernorm bias_dropout_fusion masked_softmax_fusion skip_bias_add
    skip_bias_add_qkv offset_alibi learned_pos_emb embedding_fraction norm_type tokenizer_name
    conv_bias conv_L_cache full_attn_idxs rope_local_base_freq sliding_window_size model_max_length loss_type
    rope_interleave
"""
HARMLESS = frozenset(_WORDS.split())
"""Keys that change no shape and no price, whatever their value."""


@dataclass(frozen=True)
class Feature:
    """A feature of models that is not modelled: `text` describes it as the file states it, with a `remedy`.

    `signs` are keys that state it, `others` keys with details, harmless without it.
    """

    signs: tuple[str, ...]
    text: str | Callable[[Mapping[str, Any]], str]
    remedy: str
    others: tuple[str, ...] = ()


def first_in_use(config: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of `names` whose value in the file says that the feature is used; None if there is none."""
    return next((name for name in names if name in config and not _is_off(config[name])), None)


def _is_off(value: Any) -> bool:
    return value in OFF


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    name = first_in_use(config, names)
    value = None if name is None else config[name]
    return value if is_whole(value) else None


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_layer")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "top_k_experts", "moe_topk")


def _mixture(config: Mapping[str, Any]) -> str:
    count, per_token = _number(config, *_EXPERTS), _number(config, *_PER_TOKEN)
    text = "a mixture of experts" if count is None else f"a mixture of {count:,} expert{'s' * (count != 1)}"
    text += "" if per_token is None else f", {per_token} a token"
    layers, dense = _number(config, "num_hidden_layers", "n_layer"), config.get("mlp_only_layers")
    first = _number(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    step = _number(config, "decoder_sparse_step", "moe_layer_interval", "expert_layer_period")
    kinds = config.get("mlp_layer_types")
    if layers is None:
        return text
    if isinstance(kinds, list) and "dense" in kinds:
        return f"{text}, in {layers - kinds.count('dense')} of {layers} layers"
    if first is not None:
        return f"{text}, in layers {first} to {layers - 1}"
    if step is not None and step > 1:
        return f"{text}, in one layer of {step}"
    return f"{text}, in {layers - len(dense)} of {layers} layers" if isinstance(dense, list) and dense else text


_KINDS = ("layer_types", "layers_block_type", "block_types")
_ATTENDING = ("full_attention", "sliding_attention", "attention", "global", "local")


def _kinds(config: Mapping[str, Any]) -> tuple[str, Counter[str]]:
    """The key that names the kind of each layer, and the number of layers of each kind; both empty without one."""
    for name in _KINDS:
        kinds = config.get(name)
        if isinstance(kinds, list) and kinds and all(isinstance(kind, str) for kind in kinds):
            return name, Counter(kinds)
    return "", Counter()


def _modalities(config: Mapping[str, Any]) -> str:
    prefixes = {"vision": "vision", "image": "vision", "vq": "vision", "audio": "audio"}
    keys = [key for key, value in config.items() if not _is_off(value)]
    modalities = sorted({modality for word, modality in prefixes.items() if any(key.startswith(word) for key in keys)})
    return "a modality beside text" + (f" ({', '.join(modalities)})" if modalities else "")


def _several(kinds: Counter[str]) -> str:
    return f"layers of other kinds ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"


def _recurrent(config: Mapping[str, Any]) -> str:
    _, kinds = _kinds(config)
    return _several(kinds) if any(kind not in _ATTENDING for kind in kinds) else "recurrent layers"


def alternating(config: Mapping[str, Any]) -> str | None:
    """Windows that only some layers have, in words, as `layer_types` states them; None where all layers are equal."""
    _, kinds = _kinds(config)
    windows = kinds["sliding_attention"]
    if not 0 < windows < kinds.total():
        return None
    return f"alternating windows ({windows} of {kinds.total()} layers attend to a window, the others to all tokens)"


OTHER_TYPE = "use a type in which it is read (docs/models.md)"
FEATURES = (
    Feature(
        ("is_encoder_decoder", "encoder_layers", "encoder_attention_heads", "tie_encoder_decoder"),
        "an encoder beside the decoder",
        "use a decoder-only model",
        ("encoder_ffn_dim", "encoder_layerdrop", "decoder_layerdrop"),
    ),
    Feature(
        ("add_cross_attention", "cross_attention_hidden_size", "cross_attention_layers"),
        "cross attention to another model",
        "use a decoder-only model",
    ),
    Feature(
        (
            *("vision_config", "audio_config", "text_config", "audio_encoder_config", "vq_config", "audio_processor"),
            *("perception_config", "text_decoder_config"),
        ),
        _modalities,
        "use the config.json of the text model alone, such as its text_config",
    ),
    Feature(("patcher_config",), "bytes in patches, by several models", "use a model of tokens"),
    Feature(
        (*_EXPERTS, *_PER_TOKEN, "n_shared_experts", "num_shared_experts", "moe_intermediate_size", "ffn_config"),
        _mixture,
        OTHER_TYPE,
        (
            *(
                "decoder_sparse_step",
                "mlp_only_layers",
                "norm_topk_prob",
                "router_aux_loss_coef",
                "router_jitter_noise",
            ),
            *("output_router_logits", "first_k_dense_replace", "moe_layer_start_index", "moe_layer_end_index"),
            *("moe_layer_interval", "num_dense_layers", "routed_scaling_factor", "topk_method", "scoring_func"),
            *("n_group", "topk_group", "shared_expert_intermediate_size", "router_z_loss_coef", "aux_loss_alpha"),
            *("moe_norm_min", "seq_aux", "num_experts_per_group"),
        ),
    ),
    Feature(
        ("kv_lora_rank", "q_lora_rank"),
        "latent attention",
        OTHER_TYPE,
        ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    ),
    Feature(
        (
            *("mamba_d_state", "mamba_state_dim", "ssm_state_size", "ssm_cfg", "state_size", "mamba_num_heads"),
            *("lru_width", "linear_num_value_heads", "linear_key_head_dim", "short_conv_kernel_size"),
            *("attention_hidden_size", "mlstm_dim", "qk_dim_factor", "hybrid_override_pattern"),
        ),
        _recurrent,
        OTHER_TYPE,
        ("time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "mamba_expand", "mamba_d_conv"),
    ),
    Feature(
        ("index_topk", "index_n_heads", "indexer_types"), "sparse attention by an indexer", "use a model without it"
    ),
    Feature(
        ("num_kv_shared_layers", "hidden_size_per_layer_input", "altup_num_inputs"),
        "layers that share keys and values or have embeddings of their own",
        "use a model whose layers are alike",
    ),
    Feature(
        ("H_cycles", "L_cycles", "num_loops", "total_ut_steps"),
        "layers that a token passes several times",
        "use a model whose layers are passed once",
    ),
    Feature(
        ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "mtp_num_layers"),
        "multi-token prediction",
        OTHER_TYPE,
    ),
    Feature(
        ("use_bidirectional_attention", "prefix_lm"),
        "attention to later tokens",
        "use a model whose attention is causal",
    ),
    Feature(("use_mrope", "mrope_section"), "positions of images (M-RoPE)", "use a model of text"),
    Feature(("pruned_heads", "per_layer_config"), "layers that differ", "use a model whose layers are alike"),
    Feature(
        ("quantization_config", "compression_config"),
        "quantised or compressed weights, which are not trained",
        "use the original model's config.json",
    ),
    Feature(
        ("peft_type", "lora_alpha", "base_model_name_or_path"),
        "an adapter of another model",
        "use that model's config.json",
    ),
)


_ENCODER = "an encoder, which attends to later tokens, with an LM head of several layers"
_BERT = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("xlm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
OF_TYPES: Mapping[str, str] = {
    **dict.fromkeys(_BERT, _ENCODER),
    "cohere_compass_text": "layers that attend to later tokens or to none of them, by the file",
    "cpmant": "embeddings of segments and trained biases of positions",
    "diffllama": "differential attention",
    "gemma4_assistant": "a draft model that reads another model's keys and values",
    "gpt_neox_japanese": "a last layer that differs from the others (its bias)",
    "modernbert-decoder": "alternating windows",
    "reformer": "attention by hashing (LSH) and reversible layers",
    "trocr": "cross attention to another model",
    "xlnet": "attention in two streams with relative positions",
}
"""The features that are not modelled of types whose files need not show them in a field."""


def features(config: Mapping[str, Any], kind: ModelType | None = None) -> dict[str, str]:
    """The features that the file states and that are not modelled, with their remedies, by key.

    Those whose keys the type `kind` reads are not among them.
    """
    names, out = frozenset[str](), dict[str, str]()
    if kind is not None:
        names, config = kind.names, {**kind.assumed, **config}
    for feature in FEATURES:
        sign = None if names.intersection(feature.signs) else first_in_use(config, feature.signs)
        if sign is not None and not _is_stored(sign, config, kind):
            text = feature.text if isinstance(feature.text, str) else feature.text(config)
            out[sign] = f"{text}: not modelled; {feature.remedy}"
    name, kinds = _kinds(config)
    differ = any(word not in _ATTENDING for word in kinds) and (kind is None or kind.mixers is None)
    if differ and not any(_several(kinds) in text for text in out.values()):
        out[name] = f"{_several(kinds)}: not modelled in this type; {OTHER_TYPE}"
    return out


def _is_stored(sign: str, config: Mapping[str, Any], kind: ModelType | None) -> bool:
    """Whether the key states the format in which the makers of this type store weights."""
    value = config[sign]
    method = value.get("quant_method") if sign == "quantization_config" and isinstance(value, dict) else None
    return kind is not None and kind.stored is not None and method == kind.stored


def feature_of_type(kind: str, config: Mapping[str, Any]) -> str | None:
    """The feature that is not modelled of an unknown type whose file shows none of `FEATURES`; None if unknown."""
    return alternating(config) or OF_TYPES.get(kind)


def vocabulary(refused: Mapping[str, str], read: frozenset[str]) -> Vocabulary:
    """The keys of a file that are not read: harmless ones, and those of its `refused` features.

    Of a feature of which the type reads a key (in `read`), other keys that state it are no longer harmless.
    """
    silent = {name for feature in FEATURES for name in feature.others}
    silent |= {name for feature in FEATURES if not read.intersection(feature.signs) for name in feature.signs}
    return Vocabulary((HARMLESS | silent) - set(refused), dict(refused))
