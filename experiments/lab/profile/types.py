"""GPU types of measured devices: those of the catalogue with measured efficiencies, others as measured altogether."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.lab.profile.fit import PeakRates, fit_efficiency, measured_rates
from experiments.lab.profile.points import PRECISIONS, Device, MeasuredPoint, Measurement
from hexiopt.numbers.frameworks import default_framework
from hexiopt.numbers.gpus import Efficiency, Gpu, catalogue
from hexiopt.numbers.products import match
from hexiopt.units import GB, GIB, MICROSECOND, TFLOP

CPU = "cpu"
_GFLOP = 1e9


@dataclass(frozen=True)
class Type:
    """A type, its devices by rank, the peaks that its efficiency is over, and the catalogue's entry, if any.

    A CPU's entry in the catalogue is nominal, so its peaks are measured.
    """

    name: str
    ranks: tuple[int, ...]
    precision: str
    rates: PeakRates
    efficiency: Efficiency
    listed: Gpu | None
    entry: dict[str, Any]


def types_of(measured: Measurement) -> list[Type]:
    """The types of all devices, in the order of ranks."""
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for rank, device in enumerate(measured.devices):
        gpu = match(device.product, device.total_bytes).gpu if device.is_gpu else None
        kind = (gpu,) if gpu is not None else (device.is_gpu, device.product, device.threads, device.precision)
        kinds.setdefault(kind, []).append(rank)
    used_names: set[str] = set()
    types = []
    for ranks in kinds.values():
        device = measured.devices[ranks[0]]
        name = _name(device, used_names)
        used_names.add(name)
        types.append(_type(name, tuple(ranks), measured))
    return types


def _name(device: Device, used_names: set[str]) -> str:
    if not device.is_gpu:
        name = CPU
    else:
        words = [word for word in re.findall(r"[a-z0-9]+", device.product.lower()) if word != "nvidia"]
        name = match(device.product, device.total_bytes).gpu or "_".join(words) or "gpu"
    return next(
        candidate
        for k in range(1, len(used_names) + 2)
        if (candidate := name if k == 1 else f"{name}_{k}") not in used_names
    )


def _type(name: str, ranks: tuple[int, ...], measured: Measurement) -> Type:
    devices = [measured.devices[rank] for rank in ranks]
    names = {device.name for device in devices}
    points = [point for point in measured.points if point.of[0] in names]
    precision = devices[0].precision
    listed = catalogue().get(name) if devices[0].is_gpu else None
    peak = None if listed is None else listed.peak_flops(precision)
    if listed is None or peak is None:
        reached = measured_rates(points)
        peaks = _peaks(points)
        peaks[precision] = max(reached.flops_per_s, peaks.get(precision, 0.0))
        rates = PeakRates(peaks[precision], reached.bytes_per_s)
    else:
        peaks, rates = {}, PeakRates(peak, listed.hbm_bytes_per_s)
    efficiency = fit_efficiency(points, rates)
    usable = min(device.free_bytes for device in devices) / GIB
    entry: dict[str, Any] = {}
    if listed is None:
        for dtype in PRECISIONS:
            entry[f"tflops_{dtype}"] = digits(peaks[dtype] / TFLOP) if dtype in peaks else None
        total = min(device.total_bytes for device in devices) / GIB
        entry |= {"memory_gib": round(total, 2), "hbm_gb_per_s": digits(rates.bytes_per_s / GB)}
        usable = min(usable, round(total, 2))
    entry["usable_memory_gib"] = math.floor(usable * 100) / 100
    entry["flash_attention"] = True  # torch fuses attention on all of them; that is what was measured
    entry["efficiency"] = {
        "gemm_max": digits(efficiency.gemm_max),
        "gemm_half_gflop": digits(efficiency.gemm_half_flops / _GFLOP),
        # That of FlashAttention-2, by which the executor's attention is priced.
        "attention_max": digits(efficiency.attention_max / default_framework().attention_speed),
        "memory_max": digits(efficiency.memory_max),
        "launch_us": digits(efficiency.launch_s / MICROSECOND),
    }
    hosts = ", ".join(dict.fromkeys(device.host for device in devices))
    of_peaks = "peaks too" if listed is None else "peaks of the catalogue"
    threads = "" if devices[0].is_gpu else f", {devices[0].threads} thread(s) a process"
    where = f"{devices[0].product} on {hosts[:200]}{threads}"
    entry["source"] = f"measured by hexiopt profile: {where}; {precision}, torch {measured.torch_version}; {of_peaks}"
    return Type(name, ranks, precision, rates, efficiency, listed, entry)


def _peaks(points: Sequence[MeasuredPoint]) -> dict[str, float]:
    """FLOP/s by precision: the fastest product measured."""
    peaks: dict[str, float] = {}
    for point in points:
        kind, _, precision = point.what.partition("_")
        if kind == "peak":
            peaks[precision] = max(peaks.get(precision, 0.0), point.size["flops"] / point.seconds)
    return peaks


def digits(value: float) -> float:
    """Four significant digits: more no measurement has."""
    return float(f"{value:.4g}")
