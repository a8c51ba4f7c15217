"""Reads a Hugging Face `config.json` into a `ModelSpec`, with the defaults of transformers but without importing it.

Keys that change the shape in a way that is not modelled are refused, and so are unknown keys.
"""

from pathlib import Path
from typing import Any

from hexiopt.errors import InputError, did_you_mean
from hexiopt.problem.model import ARCHITECTURES, MAX_NAME, MAX_NORM_EPS, MAX_ROPE_THETA, RANGES, ModelSpec
from hexiopt.reading import Section, read_mapping

CONFIG_FILE = "config.json"

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_positions": 2048, "activation": "silu", "norm_eps": 1e-6},
    "mistral": {
        "max_positions": 131_072,
        "activation": "silu",
        "norm_eps": 1e-6,
        "num_kv_heads": 8,
        "attention_window": 4096,
    },
    "qwen2": {
        "max_positions": 32_768,
        "activation": "silu",
        "norm_eps": 1e-6,
        "num_kv_heads": 32,
        "attention_window": 4096,
    },
    "qwen3": {
        "max_positions": 32_768,
        "activation": "silu",
        "norm_eps": 1e-6,
        "num_kv_heads": 32,
        "head_dim": 128,
        "attention_window": 4096,
    },
    "gpt2": {"max_positions": 1024, "activation": "gelu_new", "norm_eps": 1e-5},
    "gpt_neo": {"max_positions": 2048, "attention_window": 256, "activation": "gelu_new", "norm_eps": 1e-5},
    "gpt_neox": {"max_positions": 2048, "activation": "gelu", "norm_eps": 1e-5},
    "nemotron": {"max_positions": 4096, "activation": "relu2", "norm_eps": 1e-5, "num_kv_heads": None},
    "opt": {"max_positions": 2048, "activation": "relu"},
}
"""Defaults of transformers' configuration classes for keys that `config.json` lacks. Transformers has defaults for the
sizes of a model too (layers, widths, heads, vocabulary); here they must be stated."""

_IGNORED_WORDS = (
    "architectures transformers_version torch_dtype dtype use_bfloat16 torchscript use_cache "
    "return_dict return_dict_in_generate output_attentions output_hidden_states output_scores "
    "use_return_dict gradient_checkpointing is_decoder tokenizer_class prefix task_specific_params "
    "problem_type finetuning_task num_labels id2label label2id unsloth_version unsloth_fixed "
    "pretraining_tp attn_implementation _attn_implementation _attn_implementation_autoset "
    "_attn_implementation_internal _commit_hash bos_token_id eos_token_id pad_token_id sep_token_id "
    "decoder_start_token_id forced_bos_token_id forced_eos_token_id suppress_tokens "
    "begin_suppress_tokens bad_words_ids max_length min_length do_sample early_stopping num_beams "
    "num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty "
    "length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences "
    "exponential_decay_length_penalty remove_invalid_values initializer_range init_std "
    "attention_dropout hidden_dropout activation_dropout dropout classifier_dropout resid_dropout "
    "embed_dropout resid_pdrop embd_pdrop attn_pdrop layerdrop summary_activation "
    "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj "
    "chunk_size_feed_forward tf_legacy_loss n_ctx n_special predict_special_tokens scale_attn_weights "
    "scale_attn_by_inverse_layer_idx reorder_and_upcast_attn rotary_pct partial_rotary_factor "
    "use_parallel_residual max_sequence_length"
)
_IGNORED = frozenset(_IGNORED_WORDS.split())
"""Keys that do not change the shape, whatever their value."""

_MIXTURE = "a mixture of experts is not modelled; use a dense model"
_ENCODER = "only decoders are modelled; use a decoder-only model"
_MODALITY = "only text is modelled; use the config.json of the text model alone"
_LATENT = "latent attention is not modelled; use a model with multi-head or grouped-query attention"
_REFUSED = {
    "num_local_experts": _MIXTURE,
    "num_experts": _MIXTURE,
    "n_routed_experts": _MIXTURE,
    "n_shared_experts": _MIXTURE,
    "num_experts_per_tok": _MIXTURE,
    "moe_intermediate_size": _MIXTURE,
    "is_encoder_decoder": _ENCODER,
    "add_cross_attention": _ENCODER,
    "cross_attention_hidden_size": _ENCODER,
    "tie_encoder_decoder": _ENCODER,
    "encoder_layers": _ENCODER,
    "encoder_attention_heads": _ENCODER,
    "vision_config": _MODALITY,
    "audio_config": _MODALITY,
    "text_config": _MODALITY,
    "kv_lora_rank": _LATENT,
    "q_lora_rank": _LATENT,
    "multi_query": "state num_key_value_heads instead",
    "multi_query_group_num": "state num_key_value_heads instead",
    "quantization_config": "quantised weights are not trained; use the original model's config.json",
    "compression_config": "compressed weights are not trained; use the original model's config.json",
    "pruned_heads": "layers with unequal heads are not modelled; use the model before pruning",
    "per_layer_config": "unequal layers are not modelled; use a model whose layers are alike",
    "num_nextn_predict_layers": "multi-token prediction is not modelled; use a model without it",
    "auto_map": "the model has its own code, of unknown shape; remove the key if it has the usual shape",
}
"""Keys for features that are not modelled; refused unless null, false, zero or empty."""


_EXTRA = {
    "llama": {"layer_types"},
    "mistral": {"layer_types"},
    "qwen2": {"layer_types", "use_sliding_window", "max_window_layers"},
    "qwen3": {"layer_types", "use_sliding_window", "max_window_layers"},
    "gpt_neo": {"attention_types", "attention_layers"},
    "opt": {"layer_norm_elementwise_affine", "_remove_final_layer_norm"},
}
"""Keys that are read in addition to those of `ARCHITECTURES`."""


def read_model(path: str | Path) -> ModelSpec:
    """The model of a `config.json`, of the folder with it, or of a YAML file with the same keys. Raises InputError.

    A model whose file states no name has the file's, or for a `config.json` its folder's.
    """
    file = config_file(path)
    return model_from_config(Section(read_mapping(file), str(file)), name_of_file(path))


def config_file(path: str | Path) -> Path:
    """The file of a model: `path`, or the `config.json` in the folder `path`."""
    path = Path(path)
    return path / CONFIG_FILE if path.is_dir() else path


def name_of_file(path: str | Path) -> str | None:
    """The name for a model whose file states none; None where the file's and its folder's have no usable name."""
    file = config_file(path)
    name = file.absolute().parent.resolve().name if file.name == CONFIG_FILE else file.stem
    return name if _usable(name) else None


def _usable(name: Any) -> bool:
    return isinstance(name, str) and bool(name.strip()) and name.isprintable() and len(name) <= MAX_NAME


def model_from_config(section: Section, name: str | None = None) -> ModelSpec:
    """The model that a `config.json` mapping describes. Raises InputError, one line naming the key.

    Its name is the additional key `name`, else `_name_or_path`, else the argument `name`, else `model_type`.
    """
    if section.raw("model_type", None) is None:
        section.refuse_missing("model_type", f"state one of {', '.join(ARCHITECTURES)}")
    architecture = section.text("model_type")
    if architecture not in ARCHITECTURES:
        section.fail("model_type", f"is not modelled; known: {', '.join(ARCHITECTURES)}")
    config = _Config(section, architecture)
    config.refuse()
    values = {**config.sizes(), **config.switches(), **config.numerics()}
    try:
        return ModelSpec(name=config.name(name or architecture), architecture=architecture, **values)
    except InputError as error:
        raise InputError(f"{section.where}: {error}") from None


class _Config:
    """A `config.json` mapping of a known architecture, from which the fields of `ModelSpec` are read."""

    def __init__(self, section: Section, architecture: str) -> None:
        self._section = section
        self._architecture = architecture
        self._facts = ARCHITECTURES[architecture]
        self._keys = self._facts.keys
        self._defaults = _DEFAULTS[architecture]

    def refuse(self) -> None:
        """Refuse keys for shapes that are not modelled, and unknown keys."""
        known = {"name", "_name_or_path", "model_type", *self._keys.values()}
        known |= _EXTRA.get(self._architecture, set())
        if "rope_theta" in self._keys:
            known |= {"rope_scaling", "rope_parameters"}
        keys = self._section.keys()
        for key in keys:
            value = self._section.raw(key, None)
            if key in _REFUSED and value not in (None, False, 0, {}, []):
                raise InputError(f"{self._section.at(key)}: {_REFUSED[key]}")
            if key not in known and key not in _IGNORED and key not in _REFUSED:
                near = did_you_mean(key, known)
                hint = f", {near}" if near.startswith("did you mean") else ""
                rule = f"unknown key{hint}; remove it if it does not change the model's shape"
                raise InputError(f"{self._section.at(key)}: {rule}")

    def name(self, default: str) -> Any:
        """The name of the model, `default` where none is stated; `ModelSpec` checks it."""
        if "name" in self._section:
            return self._section.raw("name", None)
        path = self._section.raw("_name_or_path", None)
        return path if _usable(path) else default

    def sizes(self) -> dict[str, Any]:
        """The sizes of the shape, which are whole numbers."""
        needed = ("num_layers", "hidden_size", "num_heads", "vocab_size")
        out = {name: self._required(name) for name in needed}
        hidden_size, num_heads = out["hidden_size"], out["num_heads"]
        out["ffn_size"] = self._ffn_size(hidden_size)
        out["num_kv_heads"] = self._size("num_kv_heads") or num_heads
        out["head_dim"] = self._head_dim(hidden_size, num_heads)
        out["max_positions"] = self._size("max_positions") or self._defaults["max_positions"]
        projected = self._size("projected_embedding")
        window = self._attention_window(out["num_layers"])
        return {
            **out,
            "projected_embedding": None if projected == hidden_size else projected,
            "attention_window": window,
        }

    def switches(self) -> dict[str, bool]:
        """Whether embeddings are tied, which projections have biases, and which norms exist."""
        facts = self._facts
        attention_bias = self._flag("attention_bias", facts.attention_bias)
        mlp_bias = attention_bias if facts.mlp_bias is None else self._flag("mlp_bias", facts.mlp_bias)
        final_norm = self._flag("final_norm", True)
        if self._architecture == "opt":
            if not self._flag_key("layer_norm_elementwise_affine", True):
                self._section.fail(
                    "layer_norm_elementwise_affine", "is not modelled; use a model whose norms have weights"
                )
            final_norm = final_norm and not self._flag_key("_remove_final_layer_norm", False)
        return {
            "tied_embeddings": self._flag("tied_embeddings", facts.tied_embeddings),
            "attention_bias": attention_bias,
            "mlp_bias": mlp_bias,
            "final_norm": final_norm,
        }

    def numerics(self) -> dict[str, Any]:
        """The values that training needs in addition to the shape."""
        out: dict[str, Any] = {
            "activation": self._section.text(self._keys["activation"], default=None) or self._defaults["activation"]
        }
        if "norm_eps" in self._keys:
            out["norm_eps"] = self._number(
                self._section, self._keys["norm_eps"], MAX_NORM_EPS, self._defaults["norm_eps"]
            )
        if "rope_theta" in self._keys:
            out |= self._rope()
        return out

    def _size(self, name: str) -> int | None:
        """The size `name`, or its default where the key is absent; None where it is null or has neither."""
        key = self._keys.get(name)
        if key is None:
            return None
        low, high = RANGES[name]
        default: int | None = None if key in self._section else self._defaults.get(name)
        value: int | None = self._section.integer(key, at_least=low, at_most=high, default=None)
        return default if value is None else value

    def _required(self, name: str) -> int:
        value = self._size(name)
        if value is None:
            self._section.refuse_missing(self._keys[name])
        return value

    def _flag(self, name: str, default: bool) -> bool:
        key = self._keys.get(name)
        return default if key is None else self._flag_key(key, default)

    def _flag_key(self, key: str, default: bool) -> bool:
        if key in self._section and self._section.raw(key, None) is None:
            self._section.fail(key, "is not true or false; write one of them")
        value: bool = self._section.flag(key, default)
        return value

    @staticmethod
    def _number(section: Section, key: str, at_most: float, default: float) -> float:
        """The number above 0 under `key`; `default` where it is absent or null."""
        value: float | None = section.number(key, above=0, at_most=at_most, default=None)
        return default if value is None else value

    def _ffn_size(self, hidden_size: int) -> int:
        if self._architecture in ("gpt2", "gpt_neo"):
            return self._size("ffn_size") or 4 * hidden_size
        return self._required("ffn_size")

    def _head_dim(self, hidden_size: int, num_heads: int) -> int:
        if "head_dim" in self._defaults:
            return self._required("head_dim")
        stated = self._size("head_dim")
        if stated is not None:
            return stated
        if hidden_size % num_heads:
            raise InputError(
                f"{self._section.at(self._keys['hidden_size'])}: {hidden_size} is not a multiple of "
                f"{num_heads} heads; change one" + (", or state head_dim" if "head_dim" in self._keys else "")
            )
        return hidden_size // num_heads

    def _attention_window(self, num_layers: int) -> int | None:
        """The attention window of all layers, in GPT-Neo of every second one; None for full attention."""
        if self._architecture == "gpt_neo":
            local = self._alternates(num_layers)
            return self._size("attention_window") if local else None
        kind = self._layer_type(num_layers)
        if "attention_window" not in self._keys:
            if kind == "sliding_attention":
                self._section.fail("layer_types", f"is not modelled; {self._architecture} has full attention")
            return None
        if self._architecture in ("qwen2", "qwen3"):
            if not self._flag_key("use_sliding_window", False):
                return None
            kind = kind or self._qwen_layer_type(num_layers)
        return None if kind == "full_attention" else self._size("attention_window")

    def _qwen_layer_type(self, num_layers: int) -> str:
        """Qwen's older notation: layers from `max_window_layers` (28) on have the window."""
        first = self._section.integer("max_window_layers", at_least=0, at_most=RANGES["num_layers"][1], default=None)
        first = 28 if first is None else first
        if 0 < first < num_layers:
            raise InputError(
                f"{self._section.at('max_window_layers')}: {first} of {num_layers} layers attend fully; a mixture is "
                "not modelled, use one kind for all layers"
            )
        return "sliding_attention" if first == 0 else "full_attention"

    def _layer_type(self, num_layers: int) -> str | None:
        """The single kind in `layer_types`; None where the key is absent or null."""
        if "layer_types" not in _EXTRA.get(self._architecture, ()) or (self._section.raw("layer_types", None) is None):
            return None
        kinds = self._section.each(
            "layer_types",
            lambda kind: kind in ("full_attention", "sliding_attention"),
            "is not modelled; known: full_attention, sliding_attention",
        )
        if len(kinds) != num_layers:
            raise InputError(
                f"{self._section.at('layer_types')}: {len(kinds)} entries for {num_layers} layers; state each"
            )
        if len(set(kinds)) > 1:
            where = self._section.at("layer_types")
            raise InputError(f"{where}: a mixture of kinds is not modelled; use one kind for all layers")
        return str(kinds[0])

    def _alternates(self, num_layers: int) -> bool:
        """Whether GPT-Neo's layers are global, local, global, ... (True) or all global (False)."""
        kinds = ["global", "local"] * 12
        key = "attention_layers"
        if self._section.raw(key, None) is not None:
            kinds = self._section.items(key)
        elif self._section.raw("attention_types", None) is not None:
            key = "attention_types"
            kinds = []
            for item in self._section.items(key):
                if not _is_repeat(item):
                    self._section.fail(key, 'is not a list of [["global", "local"], repeats]; write it so')
                kinds += list(item[0]) * item[1]
                if len(kinds) > num_layers:
                    break
        if kinds == (["global", "local"] * num_layers)[:num_layers]:
            return num_layers > 1
        if kinds == ["global"] * num_layers:
            return False
        raise InputError(
            f"{self._section.at(key)}: must give {num_layers} layers, all global or alternately global and local; no "
            "other order is modelled"
        )

    def _rope(self) -> dict[str, Any]:
        """`rope_theta` and `rope_type`, from the keys of transformers before version 5 or since."""
        theta = self._number(self._section, self._keys["rope_theta"], MAX_ROPE_THETA, 10_000.0)
        for holder in ("rope_scaling", "rope_parameters"):
            if self._section.raw(holder, None) in (None, {}):
                continue
            rope = self._section.section(holder)
            inner = rope.keys()
            if any(isinstance(rope.raw(key, None), dict) for key in inner):
                self._section.fail(holder, "differs by layer, which is not modelled; state one for all")
            kind = rope.text("rope_type", default=None) or rope.text("type", default=None) or "default"
            theta = self._number(rope, "rope_theta", MAX_ROPE_THETA, theta)
            return {"rope_theta": theta, "rope_type": kind}
        return {"rope_theta": theta, "rope_type": "default"}


def _is_repeat(item: Any) -> bool:
    """Whether `item` is GPT-Neo's [[kinds], repeats] and has no more layers than a model may have."""
    if not isinstance(item, list | tuple) or len(item) != 2:
        return False
    kinds, repeats = item
    if not isinstance(kinds, list | tuple) or not isinstance(repeats, int) or isinstance(repeats, bool):
        return False
    return bool(kinds) and repeats > 0 and len(kinds) * repeats <= RANGES["num_layers"][1]
