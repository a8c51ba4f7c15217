"""The catalogue's type for a product name as written by the driver or an administrator.

Users name types likewise, in cluster files and lists of cards: `3090`, `RTX 4090`, `A100 40`, `4060ti-16gb`.

Driver names follow NVIDIA's list of products (README of open-gpu-kernel-modules): `NVIDIA A100-SXM4-80GB`,
`NVIDIA H100 80GB HBM3` (SXM), `NVIDIA H100 PCIe`, `NVIDIA H200` (SXM; the PCIe card is named NVL).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from hexiopt.errors import InputError, closest_of_many
from hexiopt.numbers.gpus import Gpu, catalogue
from hexiopt.units import GIB

# Reported over nominal memory: K80 with ECC 11441 MiB of 12 GiB, T4 15360 of 16, H200 143771 of 141.
_LEAST_MEMORY, _MOST_MEMORY = 0.9, 1.02
# People write 192 GB for a B200 of 180 and a GB200 of 186; no two forms of a type are closer than an eighth.
_SAME_MEMORY = 0.07
_BRANDS = {"nvidia", "geforce", "tesla", "gpu", "generation", "amd", "instinct", "radeon", "oam", "ac", "mcm", "mba"}
_EDITIONS = {"blackwell", "workstation", "server", "edition", "vf"}  # of an RTX PRO; vf: passed through to a VM
_LINES = {"quadro", "ada", "pro"}  # which people leave out: an RTX 6000 is a Quadro, an Ada or a PRO
_SXM_UNSAID = {"h200", "h800"}  # the driver states the form only of their PCIe cards
# Exist only as modules.
_ONE_FORM = {"h20", "b200", "b100", "gh200", "gb200", "b300", "gb300"}
_ONE_FORM |= {"mi250", "mi250x", "mi300a", "mi300x", "mi325x", "mi350x", "mi355x"}
_SXM_MEMORY = {"h100": "hbm3"}  # the PCIe card has HBM2e
_SLICE = re.compile(r"(?:^|[^a-z0-9])([1-7])g\.?(\d{1,3})gb", re.IGNORECASE)
_BARE_MEMORY = re.compile(r"[ _-](\d{1,3})$")  # GB, without the unit
# Models of which the catalogue and these products are all that was sold, by NVIDIA's and AMD's lists of products.
_OTHER_PRODUCTS = {
    "a100": ("A100-SXM-64GB",),
    "a800": ("A800-SXM4-40GB",),
    "v100": ("V100-FHHL-16GB", "V100-DGXS-16GB", "V100-DGXS-32GB"),
    "p100": (),
    "h100": ("H100-SXM5-64GB", "H100-SXM5-94GB", "H100-PCIE-96GB"),
    "h200": (),
    "h800": ("H800-NVL-94GB",),
    "h20": ("H20-141GB",),
    "gh200": (),
    "2000": (),
    "4000": ("RTX 4000 SFF Ada Generation", "RTX PRO 4000 Blackwell SFF"),
    "4500": (),
    "5000": (),
    "6000": ("RTX PRO 6000 Blackwell Max-Q",),
    "8000": (),
    "a2000": (),
    "2060": (),
    "3050": ("GeForce RTX 3050 4GB",),
    "3060": (),
    "3080": (),
    "4060 ti": (),
    "5060 ti": (),
}
# Models that people also call by another one's name.
_ALSO_CALLED = {"v100": "v100s"}

_AMD = re.compile(r"mi\d+[ax]?|rx_\w+")  # types of the catalogue; the others are NVIDIA's


@dataclass(frozen=True)
class Match:
    """`gpu` is the catalogue's type for a name; None if the name is ambiguous, with `choices` as candidates.

    `others` are products of that name that the catalogue lacks; None if there may be unknown ones.
    """

    gpu: str | None
    choices: tuple[str, ...] = ()
    others: tuple[str, ...] | None = None


@dataclass(frozen=True)
class _NameParts:
    """The parts of a name: model words, product line (of `_LINES`), form (sxm, pcie, nvl), GB of memory; None marks
    what the name does not say. `by_driver`: whether the driver wrote the name."""

    model: frozenset[str]
    line: str | None
    form: str | None
    memory_gb: int | None
    by_driver: bool = False


def find_gpu(name: str, extra: Mapping[str, Gpu], where: str) -> Gpu:
    """The type `name` of `extra` (a cluster file's own types), else of the catalogue, by its name or a product's.

    Raises InputError naming `where` and the types that `name` may mean.
    """
    gpu = extra.get(name) or catalogue().get(name)
    if gpu is not None:
        return gpu
    named = match(name)
    if named.gpu is not None:
        return catalogue()[named.gpu]
    new = "a new type is described under 'gpus' of a cluster file"
    if named.choices:
        others = f", or {', '.join(named.others)}, which the catalogue lacks" if named.others else ""
        raise InputError(f"{where}: {name!r} may be {' or '.join(named.choices)}{others}; write one of them ({new})")
    hint = closest_of_many("_".join(re.findall(r"[a-z0-9]+", name.lower())), {*extra, *catalogue()})
    raise InputError(f"{where}: {name!r} is not a known GPU; {hint} ({new})")


def is_amd(gpu: Gpu) -> bool:
    """Whether a type of the catalogue is AMD's, whose software does not run on the cards of others."""
    return _AMD.fullmatch(gpu.name) is not None


@cache
def match(product: str, memory_bytes: float | None = None) -> Match:
    """The type for a name, never guessed (see `Match`); `memory_bytes` is what the driver reports."""
    name_parts = _product_parts(product)
    if not any(name_parts.model == parts.model for parts in _types().values()):  # `A100 40`
        name_parts = _product_parts(_BARE_MEMORY.sub(r" \1gb", product))
    fitting = [name for name, type_parts in _types().items() if _fits(name_parts, type_parts, name, memory_bytes)]
    others = _others(name_parts, memory_bytes)
    complete = others == ()
    if len(fitting) == 1 and (complete or _certain(name_parts, _types()[fitting[0]], memory_bytes)):
        return Match(fitting[0])
    also = _ALSO_CALLED.get(" ".join(sorted(name_parts.model)))
    if also is not None:
        called = replace(name_parts, model=frozenset({also}))
        fitting += [name for name, type_parts in _types().items() if _fits(called, type_parts, name, memory_bytes)]
    return Match(None, tuple(sorted(fitting)), others if fitting else None)


def fits_some_type(product: str, memory_bytes: float) -> bool:
    """Whether some type of that name has that memory."""
    candidates = match(product, memory_bytes)
    return candidates.gpu is not None or bool(candidates.choices)


def mig_profile(product: str) -> str | None:
    """The profile of the MIG slice in a name, such as `3g.20gb`; None for the name of a whole GPU."""
    profile = _SLICE.search(product)
    return None if profile is None else f"{profile[1]}g.{profile[2]}gb"


def _fits(name_parts: _NameParts, type_parts: _NameParts, name: str, memory_bytes: float | None) -> bool:
    """Whether the type `name` contradicts nothing that a name and a memory state."""
    gpu = catalogue()[name]
    if name_parts.model != type_parts.model or name_parts.line not in (None, type_parts.line):
        return False
    if name_parts.form is None:  # the driver always names NVL
        same_form = not (name_parts.by_driver and type_parts.form == "nvl")
    else:
        same_form = name_parts.form == (type_parts.form or "pcie")
    if not same_form:
        return False
    if memory_bytes is not None:
        return _LEAST_MEMORY <= memory_bytes / gpu.memory_bytes <= _MOST_MEMORY
    return name_parts.memory_gb is None or same_memory(gpu, name_parts.memory_gb)


def same_memory(gpu: Gpu, memory_gib: float) -> bool:
    """Whether people may mean the type's memory by `memory_gib`."""
    return abs(gpu.memory_bytes / GIB - memory_gib) <= _SAME_MEMORY * memory_gib


def _others(name_parts: _NameParts, memory_bytes: float | None) -> tuple[str, ...] | None:
    """The products outside the catalogue that fit a name and a memory; None if they are not known."""
    products = _OTHER_PRODUCTS.get(" ".join(sorted(name_parts.model)))
    if products is None:
        return None
    memory_gb = name_parts.memory_gb if memory_bytes is None else memory_bytes / GIB
    fitting = []
    for product in products:
        product_parts = _name_parts(product)
        same_form = name_parts.form is None or product_parts.form is None or name_parts.form == product_parts.form
        same_line = name_parts.line is None or product_parts.line is None or name_parts.line == product_parts.line
        near = (
            memory_gb is None
            or product_parts.memory_gb is None
            or abs(product_parts.memory_gb / memory_gb - 1) < _SAME_MEMORY
        )
        if same_form and same_line and near:
            fitting.append(product)
    return tuple(fitting)


def _certain(name_parts: _NameParts, type_parts: _NameParts, memory_bytes: float | None) -> bool:
    """Whether the name or the memory states everything that distinguishes the products of one model."""
    states_form = name_parts.form is not None or type_parts.form is None
    states_line = name_parts.line is not None or type_parts.line is None
    return (
        states_form
        and states_line
        and (type_parts.memory_gb is None or name_parts.memory_gb is not None or memory_bytes is not None)
    )


@cache
def _types() -> dict[str, _NameParts]:
    """The name parts of every type; a module has the form sxm even if its name does not say so."""
    types = {name: _name_parts(name) for name in catalogue()}
    modules = {name for name, gpu in catalogue().items() if gpu.is_module}
    return {name: replace(parts, form="sxm") if name in modules else parts for name, parts in types.items()}


def _product_parts(text: str) -> _NameParts:
    """The parts of a name written by the driver, which begins with the brand, or by an administrator."""
    parts = replace(_name_parts(text), by_driver=text.lower().startswith("nvidia"))
    for model in parts.model:
        by_memory = _SXM_MEMORY.get(model)
        if by_memory is not None and re.search(rf"\b{by_memory}\b", text.lower().replace("_", " ")):
            return replace(parts, form=parts.form or "sxm")
        if model in _ONE_FORM or (parts.by_driver and parts.model <= _SXM_UNSAID):
            # The name of a GH200 of 96 GB states its processor's memory.
            is_processors = model == "gh200" and (parts.memory_gb or 0) >= 480
            return replace(parts, form=parts.form or "sxm", memory_gb=None if is_processors else parts.memory_gb)
    return parts


def _name_parts(text: str) -> _NameParts:
    form, memory_gb, line, model = None, None, None, set()
    plain = re.sub(r"(rtx|gtx)(?=\d)|(?<=\d\d\d0)(?=(?:ti|super|xtx?)+\b)|(?<=ti)(?=super\b)", r"\1 ", text.lower())
    for word in re.findall(r"[a-z0-9]+", plain):
        if re.fullmatch(r"sxm\d?", word):
            form = "sxm"
        elif re.fullmatch(r"pcie?|active", word):  # an A800 40GB Active is a card
            form = "pcie"
        elif word == "nvl":
            form = "nvl"
        elif word in _LINES:
            line = word
        elif size := re.fullmatch(r"(\d{1,3})gb?", word):
            memory_gb = int(size[1])
        elif word not in _BRANDS | _EDITIONS and not re.fullmatch(r"hbm\d?e?", word):
            model.add(word)
    if len(model) > 1 and any(map(str.isdecimal, "".join(model))):
        model -= {"rtx", "gtx", "rx"}  # a 3090 is an RTX 3090
    return _NameParts(frozenset(model), line, form, memory_gb)
