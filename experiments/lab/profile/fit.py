"""Coefficients from measured points, by least squares of relative errors in which outliers count less."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from experiments.lab.profile.points import MeasuredPoint, of_kind
from hexiopt.cost.executors.collectives import ring_collective_s
from hexiopt.files.link_files import Channel, channel_of, nonnegative
from hexiopt.numbers.gpus import Efficiency
from hexiopt.problem.machine import MAX_LATENCY_US
from hexiopt.units import MICROSECOND

_FLOORED = 1.5  # times the floor, below which a point says more of the floor than of the rate
_AT_FLOOR = 1.1  # times the floor, up to which a point is taken to be at it
_CACHED_BYTES = 2**25  # of a stream that caches may hold: it says nothing of memory

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PeakRates:
    """The peaks that efficiencies are shares of: FLOP/s in the precision measured, and bytes/s of device memory."""

    flops_per_s: float
    bytes_per_s: float


def measured_rates(points: Sequence[MeasuredPoint]) -> PeakRates:
    """The largest rates among points: the peaks of a device that no catalogue knows."""
    gemm = max(point.size["flops"] / point.seconds for point in of_kind(points, "gemm"))
    streams = _beyond_caches(points)
    return PeakRates(gemm, max(point.size["bytes"] / point.seconds for point in streams))


def fit_efficiency(points: Sequence[MeasuredPoint], rates: PeakRates) -> Efficiency:
    """The efficiency of `hexiopt.cost.compute.Clock` that meets operators best; shares of more than 1 are cut to 1."""
    launch_s = median(point.seconds for point in of_kind(points, "launch"))
    gemm_max, half_flops = _fit_gemm(of_kind(points, "gemm"), rates.flops_per_s, launch_s)
    attention = _rate(_above(of_kind(points, "attention"), launch_s, "flops"), "flops")
    memory = _rate([*_beyond_caches(points), *_above(of_kind(points, "adam"), launch_s, "bytes")], "bytes")
    return Efficiency(
        gemm_max=gemm_max,
        gemm_half_flops=half_flops,
        attention_max=min(1.0, attention / rates.flops_per_s),
        memory_max=min(1.0, memory / rates.bytes_per_s),
        launch_s=launch_s,
    )


def fit_channel(points: Sequence[MeasuredPoint]) -> Channel:
    """Of exchanges: a message of so many bytes, and an empty one back."""
    num_bytes, seconds = _arrays(points, "bytes")
    # Two latencies, and the bytes one way.
    return _cap_latency(channel_of(np.full_like(seconds, 2.0), num_bytes, seconds))


def fit_ring(points: Sequence[MeasuredPoint]) -> Channel:
    """Of collectives of any number of ranks: the link on which `ring_collective_s` takes what was measured."""
    per_latency = np.array([ring_collective_s(0.0, int(p.size["ranks"]), 1.0, 1.0) for p in points])
    per_byte = np.array([ring_collective_s(p.size["bytes"], int(p.size["ranks"]), 1.0, 0.0) for p in points])
    seconds = np.array([point.seconds for point in points])
    return _cap_latency(channel_of(per_latency, per_byte, seconds))


def _cap_latency(channel: Channel) -> Channel:
    """With a latency that a cluster file may state."""
    return replace(channel, latency_s=min(channel.latency_s, MAX_LATENCY_US * MICROSECOND))


def usual(channels: Sequence[Channel]) -> Channel:
    """The median link."""
    return Channel(
        median(channel.latency_s for channel in channels), median(channel.bytes_per_s for channel in channels)
    )


def _fit_gemm(points: Sequence[MeasuredPoint], peak: float, launch_s: float) -> tuple[float, float]:
    """`gemm_max` and `gemm_half_flops` of (F + half) / (peak · gemm_max)."""
    flops, seconds = _arrays(_above(points, launch_s, "flops"), "flops")
    constant_s, s_per_flop = _fit_line(flops, seconds)
    slope = max(s_per_flop, 1.0 / peak)
    if slope > s_per_flop:  # faster than the peak: then all of it, and the constant that fits best
        left_s = np.maximum(seconds - slope * flops, 0.0)
        constant_s = float(np.median(left_s))
    # Those at the floor take no less than their work, which bounds the constant.
    at_floor_s = _AT_FLOOR * _floor_s(points, launch_s)
    floored = [p.seconds - slope * p.size["flops"] for p in points if p.seconds <= at_floor_s]
    constant_s = max(0.0, min([constant_s, *floored]))
    return min(1.0, 1.0 / (slope * peak)), constant_s / slope


def _floor_s(points: Sequence[MeasuredPoint], launch_s: float) -> float:
    """What work of one kind takes however small it is: to issue it, which takes longer than to launch one operator
    where it is several. In training a GPU's host does so while the GPU is busy with what came before."""
    return max(launch_s, min(point.seconds for point in points))


def _above(points: Sequence[MeasuredPoint], launch_s: float, unit: str) -> Sequence[MeasuredPoint]:
    """Those of one kind that take longer than their floor; all, where none does.

    Not those smaller than one at the floor: they are at it, too, and something else has held them up.
    """
    if not points:
        return points
    floor_s = _floor_s(points, launch_s)
    at_floor = max((p.size[unit] for p in points if p.seconds <= _AT_FLOOR * floor_s), default=0.0)
    return [p for p in points if p.seconds > _FLOORED * floor_s and p.size[unit] > at_floor] or points


def _beyond_caches(points: Sequence[MeasuredPoint]) -> Sequence[MeasuredPoint]:
    """Streams that no cache holds; the largest, where all are small."""
    streams = of_kind(points, "stream")
    largest = max(point.size["bytes"] for point in streams)
    return [point for point in streams if point.size["bytes"] >= min(largest, _CACHED_BYTES)]


def _rate(points: Sequence[MeasuredPoint], unit: str) -> float:
    """Units per second: the one rate that has the least relative errors."""
    sizes, seconds = _arrays(points, unit)
    (s_per_unit,) = nonnegative([sizes], seconds)
    return 1.0 / s_per_unit


def _arrays(points: Sequence[MeasuredPoint], unit: str) -> tuple[Floats, Floats]:
    return np.array([point.size[unit] for point in points]), np.array([point.seconds for point in points])


def _fit_line(sizes: Floats, seconds: Floats) -> tuple[float, float]:
    constant_s, slope = nonnegative([np.ones_like(sizes), sizes], seconds)
    return constant_s, slope
