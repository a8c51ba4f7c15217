"""Layer profiles in AMP's format: forward seconds of each pipeline module of GPT-2 at micro-batch 1, by GPU and TP.

AMP (NeurIPS 22) measured 30 modules of Megatron's GPT-2 (24 layers of 1,024, vocabulary padded to 52,256) in FP16 at
1,024 tokens: before the layers two of the embedding, after them four of the head. It takes the backward as twice
the forward, and so does this reader.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from hexiopt.errors import InputError, closest
from hexiopt.problem.profile import Entry, Measured, Profile, Shape, Times

_SHAPE = Shape(1024, 16, 4096, 52256, 1024, "fp16")
_MODULES, _BEFORE, _LAYERS = 30, 2, 24
_GPUS = {"G4": "t4", "P3": "v100_16gb_sxm"}
_BACKWARD = 2.0


def is_amp(data: Mapping[str, Any]) -> bool:
    """Whether a JSON object holds AMP's tables."""
    return isinstance(data.get("forward_s"), dict)


def amp_profile(data: Mapping[str, Any], where: str) -> Profile:
    """The profile in AMP's tables, `G4_tp1` and so on under `forward_s`. Raises InputError."""
    entries = []
    for name, seconds in data["forward_s"].items():
        gpu, _, tp = name.partition("_tp")
        if gpu not in _GPUS or not tp.isdigit():
            known = [f"{gpu}_tp{degree}" for gpu in _GPUS for degree in (1, 2, 4)]
            raise InputError(f"{where}: forward_s.{name}: is no table of AMP's; {closest(name, known)}")
        if not isinstance(seconds, list) or len(seconds) != _MODULES:
            raise InputError(f"{where}: forward_s.{name}: is not the seconds of {_MODULES} modules; mend the file")
        entries.append(Entry(_SHAPE, _GPUS[gpu], int(tp), 1, _measured(seconds)))
    return Profile(tuple(entries))


def _measured(seconds: Sequence[float]) -> Measured:
    end = _BEFORE + _LAYERS

    def both(forward_s: float) -> Times:
        return forward_s, _BACKWARD * forward_s

    return Measured(both(sum(seconds[:_BEFORE])), both(fmean(seconds[_BEFORE:end])), both(sum(seconds[end:])))
