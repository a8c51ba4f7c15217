"""Adapters as peft has them: a folder with `adapter_config.json` and `adapter_model.safetensors`. Nothing is
unpickled."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hexiopt.errors import InputError, quoted
from hexiopt.reading import Section, read_mapping
from runtime.mapping.adapters import MAX_ALPHA, MODULES, Adapters, adapter_name
from runtime.mapping.parts import ParameterPart
from runtime.state.checkpoint import TrainedModel
from runtime.state.file_layout import FileLayout
from runtime.state.weights import HuggingFaceWeights, read_slice, stored_tensors

FOLDER, CONFIG, WEIGHTS = "adapter", "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model.model."  # of names, in front of those in the model's decoder
# What changes nothing in what an adapter computes, or says how it was begun.
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version"),
    *("qalora_group_size", "revision", "runtime_config", "task_type", "velora_config"),
}
_PLAIN_STARTS = (None, True, False, "gaussian")  # others change the matrices beside the adapter


def write_adapter(folder: Path, trained: TrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write the adapters of a model as peft loads them into `folder`, in the width that they are trained in. `tensors`
    are the whole ones by name.

    Raises OSError where the folder cannot be written.
    """
    adapters = trained.adapters
    assert adapters is not None
    lora = adapters.lora
    dtype = torch.float32 if lora.adapter_bytes == 4 else torch.bfloat16
    folder.mkdir(parents=True, exist_ok=True)
    layout = FileLayout(trained.model)
    values = {_stored_name(layout, name): tensor.to("cpu", dtype).contiguous() for name, tensor in tensors}
    save_file(values, folder / WEIGHTS, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": trained.base.path or trained.model.name,
        "r": lora.rank,
        "lora_alpha": int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha,
        "target_modules": [MODULES[name] for name in lora.matrices],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class PeftAdapter:
    """An adapter folder that peft wrote, or this program, of a model that trains such adapters.

    Raises InputError where a file is missing or damaged, where rank, targets or alpha are others, where a matrix is
    missing, has another shape or would be dropped, and where the adapter computes more than its two matrices.
    """

    def __init__(self, folder: Path, trained: TrainedModel) -> None:
        adapters, model = trained.adapters, trained.model
        assert adapters is not None
        if not folder.is_dir():
            raise InputError(f"{folder}: is not a folder; give one with {CONFIG} and {WEIGHTS}")
        _check_config(Section(read_mapping(folder / CONFIG), str(folder / CONFIG)), adapters)
        self._path, self._layout = folder / WEIGHTS, FileLayout(model)
        stored = {name: tensor.shape for name, tensor in stored_tensors(self._path).items()}
        shapes = {_stored_name(self._layout, part.name): part.shape for part in trained.parts()}
        for name in sorted(shapes.keys() ^ stored.keys()):
            wrong = "lacks" if name in shapes else "has"
            raise InputError(
                f"{folder / WEIGHTS}: {wrong} {quoted(name)}, unlike adapters of the model {model.name}; check that "
                "both belong together"
            )
        for name, shape in shapes.items():
            if stored[name] != shape:
                raise InputError(
                    f"{folder / WEIGHTS}: {name} has the shape {list(stored[name])}, in the model "
                    f"{model.name} {list(shape)}; check that both belong together"
                )

    def read(self, part: ParameterPart) -> Tensor:
        """The values of a part of an adapter [part.local_shape]. Raises InputError where the file cannot be read."""
        return read_slice(self._path, _stored_name(self._layout, part.name), part.cut)


def _stored_name(layout: FileLayout, name: str) -> str:
    """The name of a matrix of an adapter: after that of the matrix beside it, which begins with the decoder."""
    module, matrix, ending = name.rsplit(".", 2)
    _, _, stored = layout.name_of(f"{module}.{ending}").partition(".")
    return f"{_PREFIX}{adapter_name(stored, matrix)}"


def weights_beside(checkpoint: Path, trained: TrainedModel, weights: Path | None, option: str) -> Path | None:
    """The weights beside which the adapters of a checkpoint were trained: at `weights`, which `option` states, or where
    the checkpoint says; None where its seed draws them. Raises InputError where they are others."""
    base = trained.base
    if weights is None and base.path is not None:
        weights = Path(base.path)
    if (HuggingFaceWeights(weights, trained.model).sha256 if weights else None) != base.sha256:
        remedy = f"give those that were at {base.path}" if base.path else "leave it out: its seed draws them"
        raise InputError(f"{option}: {weights} are not the weights beside which {checkpoint} was trained; {remedy}")
    return weights


def stated_alpha(folder: Path) -> float:
    """The alpha of an adapter folder. Raises InputError where it states none."""
    if not folder.is_dir():
        raise InputError(f"{folder}: is not a folder; give one with {CONFIG} and {WEIGHTS}")
    config = Section(read_mapping(folder / CONFIG), str(folder / CONFIG))
    return float(config.number("lora_alpha", above=0, at_most=MAX_ALPHA))


def _check_config(config: Section, adapters: Adapters) -> None:
    config.text("peft_type", choices=["LORA"])
    lora, modules = adapters.lora, {MODULES[name] for name in adapters.lora.matrices}
    targets = config.raw("target_modules")
    names = set(MODULES.values()) if targets == "all-linear" else set(targets) if isinstance(targets, list) else targets
    facts: list[tuple[str, Any, Any, str]] = [
        ("r", config.raw("r"), lora.rank, "workload.lora.rank"),
        ("lora_alpha", config.raw("lora_alpha"), adapters.alpha, "train.lora_alpha"),
        ("target_modules", names, modules, "workload.lora.targets"),
    ]
    for key, value, wanted, option in facts:
        if value != wanted:
            shown = ", ".join(sorted(wanted)) if isinstance(wanted, set) else f"{wanted:g}"
            config.fail(key, f"is not what {option} states ({shown}); state the same")
    if config.raw("init_lora_weights", None) not in _PLAIN_STARTS:
        config.fail("init_lora_weights", "changes the weights beside the adapter; convert it to a plain one with peft")
    if config.raw("bias", None) not in (None, "none"):
        config.fail("bias", "is not trained; take an adapter with none")
    read = {"peft_type", "r", "lora_alpha", "target_modules", "init_lora_weights", "bias"} | _HARMLESS
    for key in config.keys():  # noqa: SIM118
        if key not in read and config.raw(key, None):
            config.fail(key, "is not trained; take an adapter without it, or train one from the start")
