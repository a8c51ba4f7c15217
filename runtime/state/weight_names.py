"""The names that Hugging Face gives to a model's parameters, by its type: ours are those of Llama."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from torch import Tensor

from hexiopt.problem.model import ModelSpec
from runtime.mapping.model_parts import EMBEDDING, FINAL_NORM, execution_of
from runtime.mapping.parts import ParameterPart
from runtime.state.expert_tensors import ExpertTensor, expert_tensors, stored_experts
from runtime.state.fused_tensors import FusedPiece

_AFTER = {"attention_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"}
_AROUND = {**_AFTER, "post_attention_layernorm": "pre_feedforward_layernorm"}
_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gemma2": _AROUND,
        "gemma3_text": _AROUND,
        "olmo2": _AFTER,
        "olmo3": _AFTER,
        "mixtral": {"mlp": "block_sparse_moe"},
        "qwen2_moe": {"shared_experts": "shared_expert"},
        "gpt_oss": {"gate": "router"},
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
        "qwen3_next": {"recurrent": "linear_attn", "shared_experts": "shared_expert"},
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
        "mixtral": "MixtralForCausalLM",
        "olmoe": "OlmoeForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "glm4_moe": "Glm4MoeForCausalLM",
        "gpt_oss": "GptOssForCausalLM",
        "bamba": "BambaForCausalLM",
        "granitemoehybrid": "GraniteMoeHybridForCausalLM",
        "nemotron_h": "NemotronHForCausalLM",
        "qwen3_next": "Qwen3NextForCausalLM",
    }
)
"""The class of transformers that loads a type."""


def stored_name(name: str, model: ModelSpec) -> str:
    """The name under which a parameter, or a tensor that holds several, is stored."""
    words = _NAMES.get(execution_of(model).type, {})
    if name in words:
        return words[name]
    return ".".join(words.get(word, word) for word in name.split("."))


def tensors_of_experts(part: ParameterPart, model: ModelSpec) -> list[ExpertTensor]:
    """The stored tensors that hold a parameter of experts; none of others."""
    return expert_tensors(part, execution_of(model).type, stored_name(part.name, model))


def stored_shapes(part: ParameterPart, model: ModelSpec, fused: Mapping[str, FusedPiece]) -> dict[str, tuple[int, ...]]:
    """The stored tensors that hold a parameter, one perhaps with others, by name."""
    if piece := fused.get(part.name):
        return {stored_name(piece.name, model): piece.shape}
    tensors = tensors_of_experts(part, model)
    return {tensor.name: tensor.shape for tensor in tensors} or {stored_name(part.name, model): part.shape}


def tensors_to_store(
    parts: Mapping[str, ParameterPart], model: ModelSpec, name: str, values: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of a whole parameter of that name among `parts`, or of one that holds several, by name."""
    tensors = tensors_of_experts(parts[name], model) if name in parts else []
    if tensors:
        yield from stored_experts(values, tensors)
    else:
        yield stored_name(name, model), values
