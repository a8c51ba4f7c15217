"""The decoder computes what transformers computes: logits, loss and gradients, with weights read from its files."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hexiopt.files.huggingface import model_from_config, read_model
from hexiopt.problem.model import ModelSpec
from hexiopt.reading import Section
from runtime.mapping.layout import Chunk
from runtime.mapping.model_parts import whole_parts
from runtime.mapping.parts import RankShard
from runtime.model.decoder import DecoderChunk, empty_weights
from runtime.model.part_calls import part_calls
from runtime.model.tensor_parallel import RankTpGroup
from runtime.state.file_layout import FileLayout
from runtime.state.weights import HuggingFaceWeights

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS, SAMPLES = 9, 2
SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WINDOW = {"sliding_window": 3}
QWEN_WINDOW = WINDOW | {"use_sliding_window": True, "max_window_layers": 0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 300.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 300.0,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
GEMMA = MIXED | {"head_dim": 6, "query_pre_attn_scalar": 9, "hidden_activation": "gelu_pytorch_tanh"}
MULTIPLIERS = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.5,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.5,
}
MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_chunk_size": 4,
    "mamba_expand": 2,
}
LATENT = {
    "q_lora_rank": 7,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "num_key_value_heads": 6,
}
CHUNKS = {"num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [], "intermediate_size_mlp": 20}
CHUNKS |= {"head_dim": 8, "no_rope_layer_interval": 2}
CHUNKS |= {"attention_chunk_size": 4, "floor_scale": 4, "attn_scale": 0.8}
CASES: dict[str, dict[str, Any]] = {
    "llama-linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}},
    "llama-llama3": {"rope_parameters": LLAMA3},
    "llama-yarn": {"rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5}, "head_dim": 12},
    "qwen3-yarn": {"rope_parameters": YARN | {"attention_factor": 1.5}, "head_dim": 8},
    "qwen3-mixed": MIXED | {"use_sliding_window": True, "max_window_layers": 1, "head_dim": 8},
    "gemma2": GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma2-plain": GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3_text": GEMMA | {"final_logit_softcapping": 5.0},
    "gemma3_text-scaled": GEMMA
    | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        }
    },
    "arcee": {"mlp_bias": True},
    "seed_oss": {"head_dim": 6, "attention_out_bias": True},
    "granite": MULTIPLIERS,
    "granite_swa": MULTIPLIERS | MIXED | {"tie_word_embeddings": True},
    "youtu": LATENT,
    "youtu-yarn": LATENT
    | {
        "q_lora_rank": None,
        "rope_interleave": False,
        "rope_parameters": YARN | {"mscale": 1.5, "mscale_all_dim": 0.7},
        "v_head_dim": 6,
    },
    "deepseek_v3": LATENT
    | {
        "first_k_dense_replace": 2,
        "attention_bias": True,
        "num_nextn_predict_layers": 0,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
    },
    "bamba": MAMBA | {"attn_layer_indices": [1], "mamba_proj_bias": True, "head_dim": 8},
    "bamba-limits": MAMBA | {"attn_layer_indices": [0], "time_step_limit": [0.5, 1.0], "mamba_n_groups": 1},
    "granitemoehybrid": MAMBA
    | MULTIPLIERS
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 20,
        "tie_word_embeddings": True,
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
        "num_hidden_layers": 4,
        "head_dim": 6,
        "mamba_num_heads": 6,
        "mamba_head_dim": 8,
        "n_groups": 3,
        "ssm_state_size": 5,
        "chunk_size": 4,
        "n_routed_experts": 4,
        "num_nextn_predict_layers": 0,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_only_layers": [0, 1],
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 4,
        "head_dim": 8,
        "linear_num_value_heads": 6,
        "linear_num_key_heads": 3,
        "linear_key_head_dim": 5,
        "linear_value_head_dim": 4,
    },
    "llama4_text": CHUNKS | {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "llama4_text-plain": CHUNKS | {"use_qk_norm": False, "attn_temperature_tuning": False, "attention_chunk_size": 3},
    "iquestcoder": {"head_dim": 8},
    "hyperclovax": MULTIPLIERS | {"head_dim": 8},
    "hyperclovax-before": {"use_post_norm": False},
    "cwm": MIXED | {"head_dim": 8, "rope_parameters": LLAMA3},
    "ministral": MIXED | {"head_dim": 8},
    "gemma": {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"},
    "vaultgemma": GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "helium": {"head_dim": 4},  # transformers makes no other
    "ernie4_5": {"head_dim": 8, "use_bias": True},
    "exaone4": MIXED,
    "exaone4-whole": {"layer_types": ["full_attention"] * 2, "sliding_window": None},
    "olmo2": {"rope_theta": 300.0},
    "olmo3": MIXED | {"tie_word_embeddings": True},
    "llama": {"rope_theta": 300.0},
    "llama-tied": {"tie_word_embeddings": True, "head_dim": 6, "rms_norm_eps": 1e-2},
    "llama-biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 10},
    "llama-one-key-head": {"num_key_value_heads": 1},
    "llama-no-groups": {"num_key_value_heads": 6},
    "mistral": {"sliding_window": None, "head_dim": 8},
    "mistral-window": WINDOW | {"tie_word_embeddings": True},
    "mistral-wide-window": {"sliding_window": TOKENS - 1},
    "qwen2": {"rope_theta": 1e6},
    "qwen2-tied": QWEN_WINDOW | {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 8},
    "qwen3-tied": QWEN_WINDOW | {"head_dim": 2, "tie_word_embeddings": True, "attention_bias": True},
}


STD = {"qwen3_next": 0.1}  # of random weights; larger ones make float32 too coarse to compare
CLOSE = {"qwen3_next": 3e-5}


def tiny(case: str, **changes: Any) -> ModelSpec:
    """The model of a case as its config.json describes it."""
    config = {"model_type": case.partition("-")[0], **SIZES, **CASES[case], **changes}
    return model_from_config(Section(config, case), case)


def causal_lm(case: str) -> Any:
    """A random model of transformers in which every parameter matters: no norm is one, no bias zero."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(case.partition("-")[0], **SIZES | CASES[case])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(len(case))
    model.eval()  # some types drop values at random by default, as no run does here
    with torch.no_grad():
        for values in model.parameters():
            values.copy_(torch.randn(values.shape, generator=generator) * STD.get(case, 0.3) + (values.ndim == 1))
    return model


def decoder(
    model: ModelSpec, path: Path, policies: tuple[str, ...] | None = None
) -> tuple[DecoderChunk, dict[str, nn.Parameter]]:
    """Our decoder as one process has it, and its parameters, with the weights at `path`."""
    parts, cpu = whole_parts(model), torch.device("cpu")
    weights = empty_weights(parts, torch.float32, cpu)
    stored = HuggingFaceWeights(path, model)
    for part in parts:
        weights[part.name].data.copy_(stored.read(part))
    chunk = Chunk(0, (0, model.num_layers), policies or ("none",) * model.num_layers, first=True, last=True)
    shard, tp = RankShard(), RankTpGroup(0, ((0, TOKENS),))
    calls = part_calls(model, shard, tp, tp.tokens, torch.empty(0))
    return DecoderChunk(model, chunk, shard, tp, calls, weights), weights


def sequences(model: ModelSpec) -> tuple[Tensor, Tensor]:
    """Inputs and labels [T, B]."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(model.vocab_size, (TOKENS + 1, SAMPLES), generator=generator)
    return drawn[:-1], drawn[1:]


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = causal_lm(case)
    theirs.save_pretrained(tmp_path)
    model = read_model(tmp_path / "config.json")
    ours, weights = decoder(model, tmp_path)
    inputs, labels = sequences(model)

    hidden = ours.hidden(inputs)
    logits = theirs(inputs.T, use_cache=False).logits.transpose(0, 1)
    torch.testing.assert_close(ours.logits(hidden), logits, atol=1e-5, rtol=1e-5)
    assert logits.abs().max() > 1, "the model is too tame to tell"

    loss = ours.loss(hidden, labels)
    other = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, other, atol=0, rtol=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    other.backward()  # type: ignore[no-untyped-call]
    expected = {name: values.grad for name, values in theirs.named_parameters()}
    if case.startswith("nemotron_h"):  # whose parameters transformers renames as it loads them
        expected = {name.replace("model.", "backbone."): gradient for name, gradient in expected.items()}
    grads = [(name, values.grad) for name, values in weights.items() if values.grad is not None]
    stored_gradients = dict(FileLayout(model).stored_tensors(grads))
    assert stored_gradients.keys() == expected.keys()
    for name, gradient in stored_gradients.items():
        close = CLOSE.get(case, 1e-5) * float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], atol=close, rtol=0)


@pytest.mark.parametrize("case", ["llama-biases", "mistral-window", "qwen3"])
def test_recomputing_changes_no_gradient(case: str, tmp_path: Path) -> None:
    causal_lm(case).save_pretrained(tmp_path)
    model = read_model(tmp_path / "config.json")
    inputs, labels = sequences(model)

    def gradients(*policies: str) -> dict[str, Tensor | None]:
        ours, weights = decoder(model, tmp_path, policies)
        ours.loss(ours.hidden(inputs), labels).backward()  # type: ignore[no-untyped-call]
        return {name: values.grad for name, values in weights.items()}

    expected = gradients("none", "none")
    for policies in (("selective", "selective"), ("full", "full"), ("selective", "full")):
        torch.testing.assert_close(gradients(*policies), expected, atol=0, rtol=0)
