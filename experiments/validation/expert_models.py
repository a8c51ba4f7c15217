"""Models with experts that measured runs name (`experiments/data/expert_models.yaml`)."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hexiopt
from hexiopt.problem.model import ModelSpec
from hexiopt.reading import read_mapping

_MODELS = Path(__file__).parent.parent / "data" / "expert_models.yaml"


@cache
def expert_model(name: str, num_layers: int | None = None, *, predicts_further: bool = True) -> ModelSpec | None:
    """The model `name`, in lower case; None where it is not known. With `num_layers` its first layers alone; without
    `predicts_further` without the layers that predict further tokens."""
    entry = _known().get(name)
    if entry is None:
        return None
    whole = hexiopt.model(entry if isinstance(entry, str) else {"name": name, **entry})
    layers = whole.layers[:num_layers]
    further = whole.extra_layers if predicts_further else ()
    return replace(whole, num_layers=len(layers), layers=layers, extra_layers=further)


@cache
def _known() -> dict[str, Any]:
    return dict(read_mapping(_MODELS)["models"])
