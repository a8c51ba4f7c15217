"""Layers with experts compute what transformers' do: logits, loss and gradients, with weights read from its files, and
transformers loads what is written."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hexiopt.exports.trainable import untrainable
from hexiopt.files.huggingface import read_model
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload
from runtime.mapping.model_parts import BALANCE, whole_parts
from runtime.settings import ExpertTraining
from runtime.state.weights import HuggingFaceWeights, write_hugging_face
from tests.runtime.model import test_decoder
from tests.runtime.model.test_decoder import LLAMA3, MIXED, MULTIPLIERS, TOKENS, YARN, sequences
from tests.runtime.parallel.test_training import trainee, whole
from tests.runtime.stream_order import run_in_order

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERTS = 6
GROUPS = {"n_group": 3, "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
GRANITE = MULTIPLIERS | {"num_local_experts": EXPERTS, "intermediate_size": 12}
NEMOTRON = (
    test_decoder.CASES["nemotron_h"]
    | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_routed_experts": EXPERTS}
    | {"moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 10}
    | GROUPS
)
LLAMA4 = {"num_local_experts": EXPERTS, "head_dim": 8, "intermediate_size_mlp": 14, "no_rope_layer_interval": 2}
LLAMA4 |= {"attention_chunk_size": 4, "floor_scale": 4, "attn_scale": 0.8}
SPARSE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS, "sliding_window": None},
    "olmoe": {"num_experts": EXPERTS},
    "olmoe-normalised": {"num_experts": EXPERTS, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 10},
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": 12, "head_dim": 6, "norm_topk_prob": True},
    "glm4_moe": {"n_routed_experts": EXPERTS, "moe_intermediate_size": 12, "head_dim": 8, "first_k_dense_replace": 1}
    | {"num_nextn_predict_layers": 0}
    | GROUPS,
    "deepseek_v3": {"n_routed_experts": EXPERTS, "moe_intermediate_size": 12, "first_k_dense_replace": 1}
    | {"num_key_value_heads": 6, "num_nextn_predict_layers": 0}
    | GROUPS
    | LATENT,
    "qwen3_next": {"num_experts": EXPERTS, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 10}
    | {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "linear_num_value_heads": 4}
    | {"linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 6},
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE | {"shared_intermediate_size": 10},
    "granitemoe_swa": GRANITE | MIXED | {"shared_intermediate_size": 10, "attention_bias": True},
    "granitemoehybrid-experts": test_decoder.CASES["granitemoehybrid"] | GRANITE | {"shared_intermediate_size": 10},
    "nemotron_h-experts": NEMOTRON,
    "nemotron_h-latent": NEMOTRON | {"moe_latent_size": 8, "mlp_bias": True},
    "gpt_oss": {"num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 3, "swiglu_limit": 0.5},
    "flex_olmo": {"num_experts": EXPERTS, "pad_token_id": None},
    "mellum": {"num_experts": EXPERTS, "moe_intermediate_size": 12, "head_dim": 8, "sliding_window": 3}
    | {"layer_types": ["sliding_attention", "full_attention"], "norm_topk_prob": True},
    "dots1": {"n_routed_experts": EXPERTS, "moe_intermediate_size": 12, "head_dim": 4, "first_k_dense_replace": 1}
    | GROUPS,
    "solar_open": {"n_routed_experts": EXPERTS, "moe_intermediate_size": 12, "head_dim": 8} | GROUPS,
    "glm4_moe_lite": {"n_routed_experts": EXPERTS, "moe_intermediate_size": 12, "num_key_value_heads": 6}
    | {"mlp_layer_types": ["dense", "sparse"], "num_nextn_predict_layers": 0}
    | GROUPS
    | LATENT,
    "llama4_text": LLAMA4 | {"interleave_moe_layer_step": 2, "rope_parameters": LLAMA3},
    "llama4_text-even": LLAMA4 | {"attention_chunk_size": 3, "use_qk_norm": False, "attn_temperature_tuning": False},
    "llama4_text-yarn": LLAMA4 | {"moe_layers": [0], "rope_parameters": YARN},
}
CASES = {case: changes | {"num_experts_per_tok": 2} for case, changes in SPARSE.items()}


def causal_lm(case: str) -> Any:
    """As of `test_decoder`; biases that balance experts are not zero either."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    with patch.dict(test_decoder.CASES, {case: CASES[case]}):
        model = test_decoder.causal_lm(case)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model


def first_step(model: ModelSpec, path: Path) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits, the loss and gradients of a step of one process, and its parameters."""
    inputs, labels = sequences(model)
    batch = inputs.shape[1]
    tokens = torch.cat([inputs, labels[-1:]]).T

    def work(rank: int) -> Any:
        stored = HuggingFaceWeights(path, model)
        trained = trainee(
            whole(model, batch), model, batch, torch.float32, torch.float32, seq_len=TOKENS, initial=stored.read,
            experts=ExpertTraining(expert_bias_rate=0.0),
        )  # fmt: skip
        chunk = next(iter(trained.pipeline._chunks.values()))
        with torch.no_grad():
            logits = chunk.logits(chunk.hidden(inputs))
        loss = trained.gradients(lambda first, end: tokens[first:end])
        gradients = {
            name: view.clone() for bucket in trained.buckets for name, view, _ in bucket.pieces(bucket.gradient)
        }
        return logits, loss, gradients

    ((logits, loss, gradients),) = run_in_order(1, work)
    return logits, loss, gradients


@pytest.mark.parametrize("case", CASES)
def test_experts_compute_what_transformers_does(case: str, tmp_path: Path) -> None:
    theirs = causal_lm(case)
    theirs.save_pretrained(tmp_path)
    model = read_model(tmp_path / "config.json")
    assert untrainable(model, Workload(2, TOKENS, precision="fp32")) is None
    logits, loss, gradients = first_step(model, tmp_path)
    inputs, labels = sequences(model)
    expected = theirs(inputs.T, use_cache=False).logits.transpose(0, 1)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    assert expected.abs().max() > 1, "the model is too tame to tell"
    other = functional.cross_entropy(expected.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(torch.tensor(float(loss)), other.detach(), atol=0, rtol=1e-5)
    other.backward()  # type: ignore[no-untyped-call]
    for values in theirs.parameters():  # written as weights, they are read by our names
        assert values.grad is not None
        values.data.copy_(values.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    wanted = HuggingFaceWeights(tmp_path / "gradients", model)
    for part in whole_parts(model):
        if part.name.endswith(BALANCE):
            assert not gradients[part.name].any()
            continue
        want = wanted.read(part)
        close = 1e-4 * float(want.abs().max())
        torch.testing.assert_close(
            gradients[part.name], want, atol=close, rtol=0, msg=lambda text, part=part: part.name + text
        )


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_is_written(case: str, tmp_path: Path) -> None:
    theirs = causal_lm(case)
    theirs.save_pretrained(tmp_path / "theirs")
    model = read_model(tmp_path / "theirs" / "config.json")
    source = HuggingFaceWeights(tmp_path / "theirs", model)
    values = ((part.name, source.read(part).clone()) for part in whole_parts(model))
    write_hugging_face(tmp_path / "ours", model, values, torch.float32, shard_bytes=20_000)
    transformers = pytest.importorskip("transformers")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    state = again.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(state[name], tensor), name
    assert read_model(tmp_path / "ours" / "config.json").replace(name=model.name) == model
