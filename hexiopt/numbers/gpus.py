"""GPU types: the catalogue (`gpus.yaml`), and types that a cluster file states or overrides."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hexiopt.errors import InputError, closest_of_many
from hexiopt.numbers.coefficients import FP8_BYTES
from hexiopt.numbers.constants import constant, constant_values
from hexiopt.reading import Section, read_mapping
from hexiopt.units import GB, GIB, MICROSECOND, TFLOP, in_unit

# Of the matrix products of layers alone; everything else is then in BF16. Bytes of an element that a product reads and
# keeps for its backward, with its part of a scale: one a tensor, one byte for 32 elements (OCP MX specification 1.0),
# one for 16 (NVIDIA, arXiv 2509.25149, section 2).
QUANTIZED_BYTES = {"nvfp4": 0.5 + 1 / 16, "mxfp8": 1 + 1 / 32, "fp8": FP8_BYTES}
PRECISIONS = (*QUANTIZED_BYTES, "bf16", "fp16", "tf32", "fp32")
_NVLINKS = ("nvlink1", "nvlink2", "nvlink3", "nvlink4", "nvlink5", "nvlink_bridge")
LINKS = ("pcie3", "pcie4", "pcie5", *_NVLINKS, "infinity_fabric3", "infinity_fabric4", "memory")
GFLOP = 1e9
_CATALOGUE = Path(__file__).with_name("gpus.yaml")
_OPTIONAL = ("quantized_max", "fp32_max", "nvfp4_max")
_NAME = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")

# What a new type gets for values that its cluster file leaves out, beside the family `generic` of gpus.yaml.
_FP32_OVER_16BIT = 1 / 16  # data-centre parts: A100 19.5 / 312, H100 66.9 / 989.4
_USABLE_FRACTION = 0.9  # the least of the catalogue's cards with ECC, and room for the CUDA context
_LINK = "pcie4"


def outside_products(precision: str) -> str:
    """The precision of a run at `precision` outside the matrix products of its layers."""
    return "bf16" if precision in QUANTIZED_BYTES else precision


@dataclass(frozen=True)
class Efficiency:
    """How much of its peaks a GPU type reaches.

    A GEMM of F FLOP runs at `gemm_max` · F / (F + `gemm_half_flops`) of the peak; fused attention at
    `attention_max` of it; memory-bound work at `memory_max` of the HBM bandwidth; no operator takes less
    than `launch_s`. Products in FP8 and FP4 reach `quantized_max`, those in FP32 `fp32_max`,
    those in NVFP4 `nvfp4_max`, where these are stated.
    """

    gemm_max: float
    gemm_half_flops: float
    attention_max: float
    memory_max: float
    launch_s: float
    quantized_max: float | None = None
    fp32_max: float | None = None
    nvfp4_max: float | None = None

    def product_max(self, precision: str) -> float:
        """The share of the peak at `precision` that a large product reaches."""
        chosen = {"fp32": (self.fp32_max,), "nvfp4": (self.nvfp4_max, self.quantized_max)}
        chosen |= dict.fromkeys(("fp8", "mxfp8"), (self.quantized_max,))
        return next((share for share in chosen.get(precision, ()) if share is not None), self.gemm_max)


@dataclass(frozen=True)
class Gpu:
    """A GPU type. Rates are dense, with FP32 accumulation, in FLOP/s and bytes/s; None for arithmetic that it lacks.

    `flops_fp16` may use tensor cores; `process_memory_bytes` is what a process can allocate, and `memory_headroom` the
    share of it that plans must leave free. `full_speed` is the type at full speed, of a GPU that runs at a share of its
    speed (`at`), else None. `watts` is its power limit: what energy costs, and no price of a plan, depends on it.
    """

    name: str
    flops_bf16: float | None
    flops_fp16: float | None
    flops_tf32: float | None
    flops_fp32: float
    memory_bytes: float
    process_memory_bytes: float
    hbm_bytes_per_s: float
    link: str
    flash_attention: bool
    peer_to_peer: bool
    efficiency: Efficiency
    source: str
    flops_fp8: float | None = None
    flops_mxfp8: float | None = None
    flops_nvfp4: float | None = None
    memory_headroom: float = 0.0
    full_speed: "Gpu | None" = None
    watts: float | None = None

    def peak_flops(self, precision: str) -> float | None:
        """Dense peak in FLOP/s at one of `PRECISIONS`; None where the type has no such arithmetic."""
        value: float | None = getattr(self, f"flops_{precision}")
        return value

    @property
    def usable_memory_bytes(self) -> float:
        """Bytes that a plan may fill, the reserve of the memory model included; every memory limit comes from here."""
        return self.process_memory_bytes * (1.0 - self.memory_headroom)

    def leaving(self, memory_headroom: float) -> "Gpu":
        """The type with another `memory_headroom`."""
        full = None if self.full_speed is None else self.full_speed.leaving(memory_headroom)
        return replace(self, memory_headroom=memory_headroom, full_speed=full)

    @property
    def type_name(self) -> str:
        """The name of the type at full speed."""
        return (self.full_speed or self).name

    @property
    def speed(self) -> float:
        """The share of its type's full speed at which it runs."""
        return 1.0 if self.full_speed is None else self.flops_fp32 / self.full_speed.flops_fp32

    def at(self, speed: float) -> "Gpu":
        """The type at a share `speed` of its full speed: all its rates, and the launch of operators."""
        full = self.full_speed or self
        if speed == 1.0:
            return full
        rates: dict[str, Any] = {
            f"flops_{precision}": None if (rate := full.peak_flops(precision)) is None else rate * speed
            for precision in PRECISIONS
        }
        efficiency = replace(full.efficiency, launch_s=full.efficiency.launch_s / speed)
        hbm = full.hbm_bytes_per_s * speed
        name = f"{full.name}@{speed:g}"
        return replace(full, name=name, hbm_bytes_per_s=hbm, efficiency=efficiency, full_speed=full, **rates)

    @property
    def is_module(self) -> bool:
        """Whether the GPU is a module on a board with fast links between all GPUs, rather than a card."""
        return self.link.startswith(("nvlink", "infinity_fabric"))


@cache
def catalogue() -> Mapping[str, Gpu]:
    """All types of `gpus.yaml` by name, read once; immutable."""
    return calibrated_catalogue(constant_values())


def calibrated_catalogue(values: Mapping[str, float]) -> Mapping[str, Gpu]:
    """The catalogue with `values` of the fitted constants."""
    types = _table().section("types")
    families = _table().section("families")
    gpus = {}
    for name in types.keys():  # noqa: SIM118
        section = types.section(name)
        family = families.section(section.text("family", choices=families.keys()))
        gpus[name] = _read(section, name, None, family, values)
    return MappingProxyType(gpus)


def fitted_efficiency(name: str) -> dict[str, str]:
    """The fields of a catalogue type's efficiency that are fitted constants, with the names of the constants."""
    section = _table().section("types").section(name)
    family = _table().section("families").section(section.text("family")).section("efficiency")
    entry = section.section("efficiency", optional=True)
    content = {key: (entry if key in entry else family).raw(key) for key in {*family.keys(), *entry.keys()}}
    return {key: value for key, value in content.items() if isinstance(value, str)}


def gpu_from_section(section: Section, name: str, base: Gpu | None) -> Gpu:
    """The type that a cluster file's `gpus: {name: ...}` states, in file units.

    With a `base` (the catalogue's type of that name) the entry overrides only what it states, except that
    usable memory follows memory in proportion when only memory is stated. `tflops` stands for BF16 and FP16;
    on a base without BF16 for FP16 alone, so that an override never invents arithmetic. A rate of its own
    (`tflops_bf16`, ...) goes before `tflops`; null means that the type has no such arithmetic.

    Without a base, one of `tflops`, `tflops_bf16` and `tflops_fp16`, `memory_gib` and `hbm_gb_per_s` are
    required; FP32 defaults to a sixteenth of the 16-bit rate, other rates to none, usable memory to nine
    tenths, the link to PCIe 4, and the rest to the family `generic` of `gpus.yaml`.

    Raises InputError for missing, unknown and out-of-range values and for names outside lower_snake_case.
    """
    if not _NAME.fullmatch(name):
        rule = "a GPU's name is lower-case letters, digits and single underscores"
        raise InputError(f"{section.where}: {name!r} is not a name; {rule}; {closest_of_many(name, catalogue())}")
    return _read(section, name, base, _table().section("families").section("generic"))


def gpu_to_dict(gpu: Gpu) -> dict[str, Any]:
    """`gpu` in file units with all its values, as `gpu_from_section` reads them.

    Reading it back gives an equal Gpu, bit for bit, for every Gpu that was itself read from file units.
    """
    efficiency = gpu.efficiency
    out: dict[str, Any] = {}
    known = catalogue().get(gpu.name, gpu)
    for precision in PRECISIONS:
        rate = gpu.peak_flops(precision)
        # Written only where known, so that problems without them keep their text and hash.
        if precision not in ("mxfp8", "nvfp4") or rate is not None or known.peak_flops(precision) is not None:
            out[f"tflops_{precision}"] = None if rate is None else in_unit(rate, TFLOP, 15)
    return out | {
        "memory_gib": in_unit(gpu.memory_bytes, GIB, 15),
        "usable_memory_gib": in_unit(gpu.process_memory_bytes, GIB, 15),
        "hbm_gb_per_s": in_unit(gpu.hbm_bytes_per_s, GB, 15),
        "link": gpu.link,
        "flash_attention": gpu.flash_attention,
        "peer_to_peer": gpu.peer_to_peer,
        "efficiency": {
            "gemm_max": efficiency.gemm_max,
            "gemm_half_gflop": in_unit(efficiency.gemm_half_flops, GFLOP, 15),
            "attention_max": efficiency.attention_max,
            "memory_max": efficiency.memory_max,
            "launch_us": in_unit(efficiency.launch_s, MICROSECOND, 15),
            **{key: value for key in _OPTIONAL if (value := getattr(efficiency, key)) is not None},
        },
        "source": gpu.source,
        # Written only where the catalogue has another, so that problems keep their text and hash.
        **({} if gpu.watts == _watts(gpu.name) else {"watts": gpu.watts}),
    }


def _watts(name: str) -> float | None:
    known = catalogue().get(name)
    return None if known is None else known.watts


@cache
def _table() -> Section:
    return Section(read_mapping(_CATALOGUE), _CATALOGUE.name)


def _read(
    section: Section, name: str, base: Gpu | None, family: Section, values: Mapping[str, float] | None = None
) -> Gpu:
    """The type of `section` over `base`, or over `family` without one. Raises InputError."""
    rates = _rates(section, base)
    memory = _si_number(section, "memory_gib", GIB, base.memory_bytes if base else None, 4096)
    usable = memory * (base.process_memory_bytes / base.memory_bytes if base else _USABLE_FRACTION)
    if base and memory == base.memory_bytes:
        usable = base.process_memory_bytes
    source = section.text("source", default=None)
    if source is None and base is None:
        source = "stated by the cluster file"
    elif source is None and base:
        source = f"{base.source}; changed by the cluster file" if section.keys() else base.source
    if base:
        efficiency, link, flash, peer = base.efficiency, base.link, base.flash_attention, base.peer_to_peer
    else:
        peak = max(rates["bf16"] or 0, rates["fp16"] or 0) or rates["fp32"] or 0
        efficiency, link = _family_efficiency(family, peak, values), _LINK
        flash, peer = family.flag("flash_attention"), family.flag("peer_to_peer")
    gpu = Gpu(
        name=name,
        flops_bf16=rates["bf16"],
        flops_fp16=rates["fp16"],
        flops_tf32=rates["tf32"],
        flops_fp32=rates["fp32"] or 0,
        memory_bytes=memory,
        process_memory_bytes=_si_number(section, "usable_memory_gib", GIB, min(usable, memory), memory / GIB),
        hbm_bytes_per_s=_si_number(section, "hbm_gb_per_s", GB, base.hbm_bytes_per_s if base else None, 1e5),
        link=section.text("link", choices=LINKS, default=link),
        flash_attention=section.flag("flash_attention", flash),
        peer_to_peer=section.flag("peer_to_peer", peer),
        efficiency=_efficiency(section.section("efficiency", optional=True), efficiency, values),
        source=source,
        flops_fp8=rates["fp8"],
        flops_mxfp8=rates["mxfp8"],
        flops_nvfp4=rates["nvfp4"],
        watts=section.number("watts", above=0, at_most=1e5, default=_watts(name) if values is None else None),
    )
    section.finish()
    return gpu


def _rates(section: Section, base: Gpu | None) -> dict[str, float | None]:
    """FLOP/s by precision, as `gpu_from_section` describes."""
    rates = {precision: base.peak_flops(precision) if base else None for precision in PRECISIONS}
    stated_16bit = "tflops_bf16" in section or "tflops_fp16" in section
    both = _si_number(section, "tflops", TFLOP, 0.0 if base or stated_16bit else None, 1e5)
    if both:
        rates["fp16"] = both
        if base is None or base.flops_bf16 is not None:
            rates["bf16"] = both
    for precision in (*QUANTIZED_BYTES, "bf16", "fp16", "tf32"):
        key = f"tflops_{precision}"
        value = section.number(key, above=0, at_most=1e5, default=None)
        if key in section:
            rates[precision] = None if value is None else value * TFLOP
    fastest = max(rates["bf16"] or 0, rates["fp16"] or 0)
    fp32 = rates["fp32"] or (fastest / TFLOP * _FP32_OVER_16BIT * TFLOP) or None
    rates["fp32"] = _si_number(section, "tflops_fp32", TFLOP, fp32, 1e5)
    return rates


def _efficiency(section: Section, base: Efficiency, values: Mapping[str, float] | None) -> Efficiency:
    """`base` with what `section` states; `power` is a factor of everything that the power limit holds back.

    With `values`, as in the catalogue, names of constants may stand for numbers.
    """

    def number(key: str, at_most: float, default: float | None) -> float | None:
        if values is not None and isinstance(section.raw(key, None), str):
            return constant(section, key, values)
        value: float | None = section.number(key, above=0, at_most=at_most, default=default)
        return value

    power = number("power", 2, 1.0) or 1.0

    def share(key: str) -> float | None:
        overrides, usual = key in section, getattr(base, key)
        # A share that a type states is what it reaches; only that of NVFP4 is stated for several types together.
        held_back = key == "nvfp4_max" if overrides else usual is not None and key != "memory_max"
        value = number(key, 1, usual)
        return min(1.0, value * power) if held_back and value is not None else value

    def fraction(key: str) -> float:
        value = share(key)
        assert value is not None, "only fields with a default may be left out"
        return value

    out = Efficiency(
        gemm_max=fraction("gemm_max"),
        gemm_half_flops=_si_number(section, "gemm_half_gflop", GFLOP, base.gemm_half_flops, 1e6, zero=True),
        attention_max=fraction("attention_max"),
        memory_max=fraction("memory_max"),
        launch_s=_si_number(section, "launch_us", MICROSECOND, base.launch_s, 1e5, zero=True),
        **{key: share(key) for key in _OPTIONAL},
    )
    section.finish()
    return out


def _family_efficiency(family: Section, peak_flops: float, values: Mapping[str, float] | None) -> Efficiency:
    """A family's efficiency at a peak: the GEMM of half rate has the FLOP of `gemm_fill_us` at the peak."""
    section = family.section("efficiency")
    fill_us = section.number("gemm_fill_us", at_least=0, at_most=1e5)
    half_gflop = float(f"{fill_us * MICROSECOND * peak_flops / GFLOP:.4g}")
    out = Efficiency(
        gemm_max=constant(section, "gemm_max", values),
        gemm_half_flops=min(half_gflop, 1e6) * GFLOP,
        attention_max=constant(section, "attention_max", values),
        memory_max=section.number("memory_max", above=0, at_most=1),
        launch_s=section.number("launch_us", at_least=0, at_most=1e5) * MICROSECOND,
        **{key: constant(section, key, values) for key in _OPTIONAL if key in section},
    )
    section.finish()
    return out


def _si_number(
    section: Section, key: str, unit: float, default: float | None, most: float, zero: bool = False
) -> float:
    """The number under `key` in SI units; where absent, `default`, in SI units, or InputError without one."""
    limits: dict[str, Any] = {"at_least" if zero else "above": 0, "at_most": most}
    if default is not None:
        limits["default"] = default
    value: float = section.number(key, **limits)
    return value * unit if key in section else value
