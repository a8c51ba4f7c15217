"""The decoder computes what transformers computes: logits, loss and gradients, with weights read from its files."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hexiopt.files.huggingface import read_model
from hexiopt.problem.model import ModelSpec
from runtime.mapping.layout import Chunk
from runtime.mapping.model_parts import whole_parts
from runtime.mapping.parts import RankShard
from runtime.model.decoder import DecoderChunk, empty_weights
from runtime.model.part_calls import part_calls
from runtime.model.tensor_parallel import RankTpGroup
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
CASES: dict[str, dict[str, Any]] = {
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


def causal_lm(case: str) -> Any:
    """A random model of transformers in which every parameter matters: no norm is one, no bias zero."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(case.partition("-")[0], **SIZES | CASES[case])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(len(case))
    with torch.no_grad():
        for values in model.parameters():
            values.copy_(torch.randn(values.shape, generator=generator) * 0.3 + (values.ndim == 1))
    return model


def decoder(
    model: ModelSpec, path: Path, policies: tuple[str, ...] = ("none", "none")
) -> tuple[DecoderChunk, dict[str, nn.Parameter]]:
    """Our decoder as one process has it, and its parameters, with the weights at `path`."""
    parts, cpu = whole_parts(model), torch.device("cpu")
    weights = empty_weights(parts, torch.float32, cpu)
    stored = HuggingFaceWeights(path, model)
    for part in parts:
        weights[part.name].data.copy_(stored.read(part))
    chunk = Chunk(0, (0, model.num_layers), policies, first=True, last=True)
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
    assert weights.keys() == expected.keys()
    for name, values in weights.items():
        close = 1e-5 * float(expected[name].abs().max())
        torch.testing.assert_close(values.grad, expected[name], atol=close, rtol=0)


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
