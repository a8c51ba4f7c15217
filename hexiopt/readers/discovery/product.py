"""The catalogue's type for a product name as written by the driver or an administrator.

Driver names follow NVIDIA's list of products (README of open-gpu-kernel-modules): `NVIDIA A100-SXM4-80GB`,
`NVIDIA H100 80GB HBM3` (SXM), `NVIDIA H100 PCIe`, `NVIDIA H200` (SXM; the PCIe card is named NVL).
"""

import re
from dataclasses import dataclass, replace
from functools import cache

from hexiopt.calibration.gpus import Gpu, catalogue
from hexiopt.units import GIB

# Reported over nominal memory: K80 with ECC 11441 MiB of 12 GiB, T4 15360 of 16, H200 143771 of 141.
_LEAST_MEMORY, _MOST_MEMORY = 0.9, 1.02
# People write 192 GB for a B200 of 180 and a GB200 of 186; no two forms of a type are closer than an eighth.
_SAME_MEMORY = 0.07
_BRANDS = {"nvidia", "geforce", "tesla", "gpu", "generation", "amd", "instinct", "oam", "ac"}
_EDITIONS = {"blackwell", "workstation", "server", "edition"}  # of an RTX PRO
_SXM_UNSAID = {"h200", "h800"}  # the driver states the form only of their PCIe cards
# Exist only as modules.
_ONE_FORM = {"h20", "b200", "b100", "gh200", "gb200", "b300", "gb300", "mi300x", "mi325x", "mi350x", "mi355x"}
_SXM_MEMORY = {"h100": "hbm3"}  # the PCIe card has HBM2e


@dataclass(frozen=True)
class Match:
    """`gpu` is the catalogue's type for a name; None if the name is ambiguous, with `choices` as candidates."""

    gpu: str | None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Named:
    """The parts of a name: model words, form (sxm, pcie or None), GB of memory (or None)."""

    model: frozenset[str]
    form: str | None
    memory_gb: int | None


def match(product: str, memory_bytes: float | None = None) -> Match:
    """The type for a name, never guessed (see `Match`); `memory_bytes` is what the driver reports."""
    said = _product(product)
    fitting = [name for name, own in _types().items() if _fits(said, own, catalogue()[name], memory_bytes)]
    if len(fitting) == 1 and _certain(said, _types()[fitting[0]], memory_bytes):
        return Match(fitting[0])
    return Match(None, tuple(sorted(fitting)))


def _fits(said: _Named, own: _Named, gpu: Gpu, memory_bytes: float | None) -> bool:
    """Whether a type contradicts nothing that is stated."""
    if said.model != own.model or said.form not in (None, own.form or "pcie"):
        return False
    if memory_bytes is not None:
        return _LEAST_MEMORY <= memory_bytes / gpu.memory_bytes <= _MOST_MEMORY
    return said.memory_gb is None or same_memory(gpu, said.memory_gb)


def same_memory(gpu: Gpu, memory_gib: float) -> bool:
    """Whether people may mean the type's memory by `memory_gib`."""
    return abs(gpu.memory_bytes / GIB - memory_gib) <= _SAME_MEMORY * memory_gib


def _certain(said: _Named, own: _Named, memory_bytes: float | None) -> bool:
    """Whether everything is stated that distinguishes the products of one model."""
    formed = said.form is not None or own.form is None
    return formed and (own.memory_gb is None or said.memory_gb is not None or memory_bytes is not None)


@cache
def _types() -> dict[str, _Named]:
    """The name parts of every type; a module is one even if its name does not say so."""
    types = {name: _named(name) for name in catalogue()}
    modules = {name for name, gpu in catalogue().items() if gpu.is_module}
    return {name: replace(own, form="sxm") if name in modules else own for name, own in types.items()}


def _product(text: str) -> _Named:
    """The parts of a name written by the driver, which begins with the brand, or by an administrator."""
    named = _named(text)
    by_driver = text.lower().startswith("nvidia")
    for model in named.model:
        by_memory = _SXM_MEMORY.get(model)
        if by_memory is not None and re.search(rf"\b{by_memory}\b", text.lower().replace("_", " ")):
            return _Named(named.model, named.form or "sxm", named.memory_gb)
        if model in _ONE_FORM or (by_driver and named.model <= _SXM_UNSAID):
            # The name of a GH200 states its processor's memory.
            memory_gb = None if model == "gh200" and by_driver else named.memory_gb
            return _Named(named.model, named.form or "sxm", memory_gb)
    return named


def _named(text: str) -> _Named:
    form, memory_gb, model = None, None, set()
    for word in re.findall(r"[a-z0-9]+", re.sub(r"(rtx)(?=\d)|(?<=\d\d\d0)(?=ti\b)", r"\1 ", text.lower())):
        if re.fullmatch(r"sxm\d?", word):
            form = "sxm"
        elif re.fullmatch(r"pcie?", word):
            form = "pcie"
        elif size := re.fullmatch(r"(\d{1,3})gb?", word):
            memory_gb = int(size[1])
        elif word not in _BRANDS | _EDITIONS and not re.fullmatch(r"hbm\d?e?", word):
            model.add(word)
    if len(model) > 1 and any(map(str.isdecimal, "".join(model))):
        model.discard("rtx")  # a 3090 is an RTX 3090
    return _Named(frozenset(model), form, memory_gb)
