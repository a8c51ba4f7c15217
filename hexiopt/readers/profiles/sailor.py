"""Layer profiles in Sailor's format: model, GPU, micro-batch, TP degree, layer, and [forward, backward, update] in s.

Layers are numbered: 0 is the embedding, the last one the LM head with the loss. Sailor (SOSP 25) measured at sequences
of 2,048 tokens in FP32, with the collectives of TP. The file names models and GPUs only; what they are stands here.
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from hexiopt.errors import InputError, closest
from hexiopt.problem.profile import Entry, Measured, Profile, Shape, Times

_SEQ_LEN, _PRECISION = 2048, "fp32"
# (hidden size, heads, MLP columns, vocabulary) of its models/*.json
_SHAPES = {
    "OPT-350": (1024, 16, 4096, 50272),
    "OPT-30": (7168, 56, 28672, 50272),
    "GPT-Neo-2.7": (2560, 32, 10240, 128256),
    "LLAMA-3-8": (4096, 32, 14336, 128256),
}
GPUS = {  # in the catalogue
    "A100-40": "a100_40gb_sxm",
    "A100-80": "a100_80gb_sxm",
    "V100-16": "v100_16gb_sxm",
    "GH-96": "gh200_96gb",
    "Titan-RTX": "titan_rtx",
    "RTX-2080": "rtx_2080",
    "RTX-3090": "rtx_3090",
}


def is_sailor(data: Mapping[str, Any]) -> bool:
    """Whether a JSON object is nested as Sailor nests its profiles."""
    return bool(data) and all(isinstance(gpus, dict) for gpus in data.values()) and set(data) <= set(_SHAPES)


def sailor_profile(data: Mapping[str, Any], where: str) -> Profile:
    """The profile in a file of Sailor's. Raises InputError naming what it does not know or cannot read."""
    entries = []
    for model, gpus in data.items():
        if model not in _SHAPES:
            raise InputError(f"{where}: {model!r} is no model of Sailor's; {closest(model, _SHAPES)}")
        shape = Shape(*_SHAPES[model], _SEQ_LEN, _PRECISION)
        for gpu, sizes in gpus.items():
            if gpu not in GPUS:
                raise InputError(f"{where}: {model}.{gpu}: is no GPU of Sailor's; {closest(gpu, GPUS)}")
            for size, tp, layers in _counted(sizes, f"{where}: {model}.{gpu}"):
                times = _measured(layers, f"{where}: {model}.{gpu}.{size}.{tp}")
                entries.append(Entry(shape, GPUS[gpu], tp, size, times))
    return Profile(tuple(entries))


def _counted(sizes: Any, where: str) -> list[tuple[int, int, Any]]:
    """Micro-batch size, TP degree, and what stands under them."""
    try:
        return [(int(size), int(tp), layers) for size, degrees in sizes.items() for tp, layers in degrees.items()]
    except (AttributeError, ValueError):
        raise InputError(f"{where}: is not layers by micro-batch size and TP degree; mend the file") from None


def _measured(layers: Mapping[str, Any], where: str) -> Measured:
    try:
        each = [(float(forward), float(backward)) for forward, backward, _ in layers.values()]
    except (AttributeError, TypeError, ValueError):
        raise InputError(f"{where}: is not layers with [forward, backward, update] in seconds; mend the file") from None
    if len(each) < 3:
        raise InputError(f"{where}: has {len(each)} layers; an embedding, layers and a head are three at least")
    inner = each[1:-1]
    layer: Times = fmean(forward for forward, _ in inner), fmean(backward for _, backward in inner)
    return Measured(each[0], layer, each[-1])
