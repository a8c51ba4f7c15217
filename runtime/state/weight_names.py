"""The names that Hugging Face gives to a model's parameters, by its type: ours are those of Llama."""

from collections.abc import Mapping
from types import MappingProxyType

from hexiopt.problem.model import ModelSpec
from runtime.mapping.model_parts import EMBEDDING, FINAL_NORM, execution_of
from runtime.mapping.parts import ParameterPart
from runtime.state.fused_tensors import FusedPiece

_AFTER = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
_AROUND = {**_AFTER, "post_attention_layernorm": "pre_feedforward_layernorm"}
_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gemma2": _AROUND,
        "gemma3_text": _AROUND,
        "olmo2": _AFTER,
        "olmo3": _AFTER,
        "bamba": {
            "recurrent": "mamba",
            "mlp": "feed_forward",
            "post_attention_layernorm": "pre_ff_layernorm",
            FINAL_NORM: "model.final_layernorm.weight",
        },
        "granitemoehybrid": {"recurrent": "mamba", "mlp": "shared_mlp", "down_proj": "output_linear"},
        "nemotron_h": {
            **dict.fromkeys(("self_attn", "mlp", "recurrent"), "mixer"),
            "model": "backbone",
            "input_layernorm": "norm",
            EMBEDDING: "backbone.embeddings.weight",
            FINAL_NORM: "backbone.norm_f.weight",
        },
        "qwen3_next": {"recurrent": "linear_attn"},
    }
)
"""By type, the words of our names that are others there, and whole names."""
CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "olmo2": "Olmo2ForCausalLM",
        "olmo3": "Olmo3ForCausalLM",
        "arcee": "ArceeForCausalLM",
        "seed_oss": "SeedOssForCausalLM",
        "granite": "GraniteForCausalLM",
        "granite_swa": "GraniteSwaForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "youtu": "YoutuForCausalLM",
        "bamba": "BambaForCausalLM",
        "granitemoehybrid": "GraniteMoeHybridForCausalLM",
        "nemotron_h": "NemotronHForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
    }
)
"""The class of transformers that loads a type."""


def stored_shape(part: ParameterPart, model: ModelSpec, fused: Mapping[str, FusedPiece]) -> tuple[str, tuple[int, ...]]:
    """The stored tensor that holds a parameter, perhaps with others: its name and shape."""
    piece = fused.get(part.name)
    name, shape = (part.name, part.shape) if piece is None else (piece.name, piece.shape)
    return stored_name(name, model), shape


def stored_name(name: str, model: ModelSpec) -> str:
    """The name under which a parameter, or a tensor that holds several, is stored."""
    words = _NAMES.get(execution_of(model).type, {})
    if name in words:
        return words[name]
    return ".".join(words.get(word, word) for word in name.split("."))
