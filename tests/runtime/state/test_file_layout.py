"""Experts are read from, and written as, the tensors that transformers has in its files."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hexiopt.files.huggingface import model_from_config
from hexiopt.files.models.execution import TRAINED
from hexiopt.reading import Section
from runtime.mapping.model_parts import INWARD, OUTWARD
from runtime.mapping.parts import ParameterPart
from runtime.state.file_layout import FileLayout, class_name

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT, WIDTH, HIDDEN = 4, 6, 10
SIZES = {
    "vocab_size": 17,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_experts_per_tok": 2,
}
# Of each type: what its file states.
TYPES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": WIDTH, "num_local_experts": COUNT},
    "qwen3_moe": {"moe_intermediate_size": WIDTH, "num_experts": COUNT},
    "gpt_oss": {"intermediate_size": WIDTH, "num_local_experts": COUNT},
    "llama4_text": {"intermediate_size": WIDTH, "num_local_experts": COUNT},
}


@pytest.mark.parametrize("model_type", TYPES)
def test_experts_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    transformers = pytest.importorskip("transformers")
    values = TYPES[model_type]
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **SIZES | values), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in theirs.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    theirs.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    parameters = dict(theirs.named_parameters())
    model = model_from_config(Section(theirs.config.to_dict(), model_type), model_type)
    layout = FileLayout(model)
    names = [name for name in parameters if ".experts." in name]
    assert len(names) == (4 if model_type == "gpt_oss" else 2)
    assert layout.shapes == {name: tuple(values.shape) for name, values in files.items()}
    for name in names:
        parameter = _as_here(parameters[name].detach(), name, model_type)
        here = next(ours for ours in (INWARD, OUTWARD) if name.removesuffix("_bias").endswith(ours.split(".")[-1]))
        here = f"model.layers.0.{here}{'_bias' if name.endswith('_bias') else ''}"
        for start, end in ((0, COUNT), (1, 3), (2, 2)):
            part = ParameterPart(here, tuple(parameter.shape), 0, start, end)
            read = layout.read(part, lambda name, cut: files[name][cut])
            assert torch.equal(read, parameter[start:end])
        for stored, written in layout.stored_tensors([(here, parameter)]):
            assert torch.equal(files[stored], written)


@pytest.mark.parametrize("model_type", TRAINED)
def test_transformers_has_the_classes(model_type: str) -> None:
    auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    assert auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == class_name(model_type)


def _as_here(parameter: Tensor, name: str, model_type: str) -> Tensor:
    """Transformers holds gpt-oss and Llama 4 as their files do."""
    if model_type == "llama4_text":
        return parameter.mT
    if model_type != "gpt_oss":
        return parameter
    if name.endswith("gate_up_proj"):
        return torch.cat([parameter[..., ::2], parameter[..., 1::2]], -1).mT
    if name.endswith("gate_up_proj_bias"):
        return torch.cat([parameter[..., ::2], parameter[..., 1::2]], -1)
    return parameter.mT if name.endswith("down_proj") else parameter
