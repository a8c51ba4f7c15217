"""Files of measured layers: hexiopt's own format, Sailor's and AMP's.

Our own is JSON: `{"format": "hexiopt.profile", "version": 1, "layers": [...]}`, each entry for one model shape,
sequence length, precision, GPU type, TP degree and micro-batch size, with forward and backward seconds of the
embedding, of a layer, and of the LM head with the loss, including TP collectives.

Sailor (SOSP 25) measured sequences of 2,048 tokens in FP32, including TP collectives. Its layers are numbered: 0 is
the embedding, the last one the LM head with the loss. Its files only name models and GPUs; their shapes are below.

AMP (NeurIPS 22) measured 30 modules of Megatron's GPT-2 (24 layers of 1,024, vocabulary padded to 52,256) in FP16 at
1,024 tokens: two of the embedding before the layers, four of the head after them. AMP takes the backward as twice the
forward, and so does this reader.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from hexiopt.checks import is_number
from hexiopt.errors import InputError, did_you_mean
from hexiopt.problem.profile import Entry, Measured, Profile, Shape, Times
from hexiopt.reading import Section, read_mapping

FORMAT, VERSION = "hexiopt.profile", 1
# (hidden size, heads, MLP size, vocabulary) of Sailor's models/*.json
_SAILOR_SHAPES = {
    "OPT-350": (1024, 16, 4096, 50272),
    "OPT-30": (7168, 56, 28672, 50272),
    "GPT-Neo-2.7": (2560, 32, 10240, 128256),
    "LLAMA-3-8": (4096, 32, 14336, 128256),
}
SAILOR_GPUS = {  # in the catalogue
    "A100-40": "a100_40gb_sxm",
    "A100-80": "a100_80gb_sxm",
    "V100-16": "v100_16gb_sxm",
    "GH-96": "gh200_96gb",
    "Titan-RTX": "titan_rtx",
    "RTX-2080": "rtx_2080",
    "RTX-3090": "rtx_3090",
}
_AMP_SHAPE = Shape(1024, 16, 4096, 52256, 1024, "fp16")
_MODULES, _BEFORE, _LAYERS = 30, 2, 24
_AMP_GPUS = {"G4": "t4", "P3": "v100_16gb_sxm"}
_BACKWARD = 2.0


def read_profile(path: Path) -> Profile:
    """The layers measured in a file: of hexiopt, of Sailor or of AMP. Raises InputError."""
    data = read_mapping(path)
    if "format" in data:
        return profile_from_section(Section(data, str(path)))
    if isinstance(data.get("forward_s"), dict):
        return _amp_profile(data, str(path))
    if set(data) <= set(_SAILOR_SHAPES) and data and all(isinstance(gpus, dict) for gpus in data.values()):
        return _sailor_profile(data, str(path))
    raise InputError(
        f"{path}: is not a known profile of layers; write format: hexiopt.profile, or give a file of Sailor's or AMP's"
    )


def profile_from_section(section: Section) -> Profile:
    """The profile in the format above. Raises InputError."""
    section.text("format", choices=(FORMAT,))
    section.integer("version", at_least=VERSION, at_most=VERSION)
    entries = tuple(_entry(entry) for entry in section.sections("layers"))
    section.finish()
    return Profile(entries)


def _entry(section: Section) -> Entry:
    shape = {field.name: section.raw(field.name) for field in fields(Shape)}
    gpu, tp, size = section.raw("gpu"), section.raw("tp"), section.raw("micro_batch_size")
    times = [
        tuple(float(value) if is_number(value) else value for value in section.items(key))
        for key in ("embedding_s", "layer_s", "head_s")
    ]
    section.finish()
    with section.building():
        return Entry(Shape(**shape), gpu, tp, size, Measured(*times))  # type: ignore[arg-type]


def profile_to_dict(profile: Profile) -> Mapping[str, Any]:
    """The profile in the format above."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "layers": [
            {
                **asdict(entry.shape),
                "gpu": entry.gpu,
                "tp": entry.tp,
                "micro_batch_size": entry.micro_batch_size,
                "embedding_s": list(entry.times.embedding),
                "layer_s": list(entry.times.layer),
                "head_s": list(entry.times.head),
            }
            for entry in profile.entries
        ],
    }


def _sailor_profile(data: Mapping[str, Any], where: str) -> Profile:
    """The profile in a file of Sailor's. Raises InputError that names the unknown or unreadable part."""
    entries = []
    for model, gpus in data.items():
        if model not in _SAILOR_SHAPES:
            raise InputError(f"{where}: {model!r} is not a model of Sailor's; {did_you_mean(model, _SAILOR_SHAPES)}")
        shape = Shape(*_SAILOR_SHAPES[model], 2048, "fp32")
        for gpu, sizes in gpus.items():
            if gpu not in SAILOR_GPUS:
                raise InputError(f"{where}: {model}.{gpu}: is not a GPU of Sailor's; {did_you_mean(gpu, SAILOR_GPUS)}")
            for size, tp, layers in _by_size_and_tp(sizes, f"{where}: {model}.{gpu}"):
                times = _sailor_times(layers, f"{where}: {model}.{gpu}.{size}.{tp}")
                entries.append(Entry(shape, SAILOR_GPUS[gpu], tp, size, times))
    return Profile(tuple(entries))


def _by_size_and_tp(sizes: Any, where: str) -> list[tuple[int, int, Any]]:
    """Micro-batch size, TP degree, and the value under them, for each pair."""
    try:
        return [(int(size), int(tp), layers) for size, degrees in sizes.items() for tp, layers in degrees.items()]
    except (AttributeError, ValueError):
        raise InputError(f"{where}: is not layers by micro-batch size and TP degree; correct the file") from None


def _sailor_times(layers: Mapping[str, Any], where: str) -> Measured:
    try:
        times = [(float(forward), float(backward)) for forward, backward, _ in layers.values()]
    except (AttributeError, TypeError, ValueError):
        raise InputError(f"{where}: is not layers with [forward, backward, update] in s; correct the file") from None
    if len(times) < 3:
        raise InputError(f"{where}: has {len(times)} layers; an embedding, layers and a head make at least three")
    inner = times[1:-1]
    layer: Times = fmean(forward for forward, _ in inner), fmean(backward for _, backward in inner)
    return Measured(times[0], layer, times[-1])


def _amp_profile(data: Mapping[str, Any], where: str) -> Profile:
    """The profile in AMP's tables, `G4_tp1` and so on under `forward_s`. Raises InputError."""
    entries = []
    for name, seconds in data["forward_s"].items():
        gpu, _, tp = name.partition("_tp")
        if gpu not in _AMP_GPUS or not tp.isdigit():
            names = [f"{gpu}_tp{degree}" for gpu in _AMP_GPUS for degree in (1, 2, 4)]
            raise InputError(f"{where}: forward_s.{name}: is not a table of AMP's; {did_you_mean(name, names)}")
        if not isinstance(seconds, list) or len(seconds) != _MODULES:
            raise InputError(f"{where}: forward_s.{name}: is not the seconds of {_MODULES} modules; correct the file")
        entries.append(Entry(_AMP_SHAPE, _AMP_GPUS[gpu], int(tp), 1, _amp_times(seconds)))
    return Profile(tuple(entries))


def _amp_times(seconds: Sequence[float]) -> Measured:
    end = _BEFORE + _LAYERS

    def both(forward_s: float) -> Times:
        return forward_s, _BACKWARD * forward_s

    return Measured(both(sum(seconds[:_BEFORE])), both(fmean(seconds[_BEFORE:end])), both(sum(seconds[end:])))
