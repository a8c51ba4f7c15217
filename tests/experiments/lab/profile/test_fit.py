"""Fits find the constants that synthetic points were made of, through noise and outliers."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.lab.profile.fit import PeakRates, fit_channel, fit_efficiency, fit_ring, measured_rates, usual
from experiments.lab.profile.points import MeasuredPoint
from hexiopt.cost.executors.collectives import ring_collective_s
from hexiopt.cost.executors.compute import OperatorTimes
from hexiopt.files.link_files import Channel
from hexiopt.numbers.gpus import Efficiency, catalogue

SIZES = [4**k for k in range(5, 15)]


def noisy(rng: random.Random, seconds: float) -> float:
    """Within 3 %, and every twentieth point disturbed."""
    return seconds * rng.uniform(0.97, 1.03) * (rng.uniform(1.5, 4.0) if rng.random() < 0.05 else 1.0)


def operators(efficiency: Efficiency, rng: random.Random) -> list[MeasuredPoint]:
    """What an A100 of that efficiency takes by the cost model's own clock."""
    clock = OperatorTimes(replace(catalogue()["a100_80gb_sxm"], efficiency=efficiency), "bf16")
    points = [MeasuredPoint("launch", {}, efficiency.launch_s * rng.uniform(0.97, 1.03)) for _ in range(3)]
    for k in range(30):
        flops = 10 ** (7 + 5.5 * k / 29)
        points.append(MeasuredPoint("gemm", {"flops": flops}, noisy(rng, clock.gemm_s(flops))))
    for k in range(30):
        flops = 10 ** (8 + 5 * k / 29)
        points.append(MeasuredPoint("attention", {"flops": flops}, noisy(rng, clock.attention_s(flops))))
    for k in range(16, 31):
        points.append(MeasuredPoint("stream", {"bytes": 2.0**k}, noisy(rng, clock.memory_s(2.0**k))))
    for k in range(20):
        size = 2.0 ** (26 + k / 5)
        points.append(MeasuredPoint("adam", {"bytes": size}, noisy(rng, clock.memory_s(size))))
    return points


EFFICIENCIES = st.builds(
    Efficiency,
    gemm_max=st.floats(0.3, 0.95),
    gemm_half_flops=st.floats(1e8, 2e10),
    attention_max=st.floats(0.1, 0.8),
    memory_max=st.floats(0.3, 0.95),
    launch_s=st.floats(1e-6, 8e-6),
)


@given(EFFICIENCIES, st.integers(0, 2**32))
@settings(max_examples=25)
def test_an_efficiency_is_found_again(efficiency: Efficiency, seed: int) -> None:
    gpu = catalogue()["a100_80gb_sxm"]
    peak = gpu.peak_flops("bf16")
    assert peak is not None
    estimate = fit_efficiency(operators(efficiency, random.Random(seed)), PeakRates(peak, gpu.hbm_bytes_per_s))
    assert estimate.gemm_max == pytest.approx(efficiency.gemm_max, rel=0.08)
    true, fitted = (OperatorTimes(replace(gpu, efficiency=constants), "bf16") for constants in (efficiency, estimate))
    # What small ones take besides a launch is little, and so is what they say of it: one disturbed point may hide it.
    for flops in (1e9, 1e10, 1e11, 1e12):
        assert fitted.gemm_s(flops) == pytest.approx(true.gemm_s(flops), rel=0.12 if flops > 1e9 else 0.25)
    if efficiency.gemm_half_flops > 5e9:
        assert estimate.gemm_half_flops == pytest.approx(efficiency.gemm_half_flops, rel=0.2)
    assert estimate.attention_max == pytest.approx(efficiency.attention_max, rel=0.1)
    assert estimate.memory_max == pytest.approx(efficiency.memory_max, rel=0.1)
    assert estimate.launch_s == pytest.approx(efficiency.launch_s, rel=0.05)


def test_what_a_host_takes_to_issue_says_nothing_of_rates() -> None:
    """Of an H100, whose host took 0.17 ms for attention and its backward, 70 µs for AdamW, however small they were."""
    points = [MeasuredPoint("launch", {}, 6.5e-6), MeasuredPoint("stream", {"bytes": 268e6}, 91e-6)]
    points += [MeasuredPoint("gemm", {"flops": 1.22e9 * 4**k}, max(12e-6, 4**k * 1.7e-6)) for k in range(6)]
    floored = [(3.7e6, 166e-6), (2.3e8, 166e-6), (1.9e9, 169e-6), (2.4e11, 1169e-6), (4.8e11, 1969e-6)]
    points += [MeasuredPoint("attention", {"flops": flops}, seconds) for flops, seconds in floored]
    steps = [(7.3e6, 69e-6), (29.4e6, 70e-6), (117e6, 91e-6), (470e6, 278e-6)]
    points += [MeasuredPoint("adam", {"bytes": num_bytes}, seconds) for num_bytes, seconds in steps]
    estimate = fit_efficiency(points, PeakRates(989e12, 3350e9))
    assert estimate.gemm_max * 989e12 == pytest.approx(1.22e9 / 1.7e-6, rel=0.02)
    assert estimate.gemm_half_flops < 1e8
    assert 205e12 < estimate.attention_max * 989e12 < 245e12
    assert 1690e9 < estimate.memory_max * 3350e9 < 2950e9


def test_a_rate_above_the_peak_is_all_of_it() -> None:
    points = [MeasuredPoint("launch", {}, 1e-6)]
    points += [MeasuredPoint("gemm", {"flops": f}, 1e-5 + f / 2e12) for f in (1e7, 1e8, 1e9, 1e10, 1e11)]
    points += [
        MeasuredPoint("attention", {"flops": 1e9}, 1e9 / 2e12),
        MeasuredPoint("stream", {"bytes": 1e9}, 1e9 / 2e11),
    ]
    estimate = fit_efficiency(points, PeakRates(1e12, 1e11))
    assert (estimate.gemm_max, estimate.attention_max, estimate.memory_max) == (1.0, 1.0, 1.0)
    assert estimate.gemm_half_flops >= 0.0
    rates = measured_rates(points)
    assert rates.bytes_per_s == pytest.approx(2e11)
    assert rates.flops_per_s == max(p.size["flops"] / p.seconds for p in points if p.what == "gemm")


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 3e11), st.integers(0, 2**32))
@settings(max_examples=40)
def test_a_link_is_found_again(latency_s: float, bandwidth: float, seed: int) -> None:
    rng = random.Random(seed)
    points = [
        MeasuredPoint("message", {"bytes": size}, noisy(rng, 2 * latency_s + size / bandwidth), ("a:0", "a:1"))
        for size in SIZES
        for _ in range(3)
    ]
    channel = fit_channel(points)
    # Where even 1 KiB takes longer than the latency, or 256 MiB no longer, one of the two cannot be seen.
    if SIZES[2] / bandwidth < latency_s:
        assert channel.latency_s == pytest.approx(latency_s, rel=0.15)
    if SIZES[-3] / bandwidth > latency_s:
        assert channel.bytes_per_s == pytest.approx(bandwidth, rel=0.15)


@given(st.integers(2, 16), st.integers(0, 2**32))
@settings(max_examples=30)
def test_a_ring_is_found_again(ranks: int, seed: int) -> None:
    rng = random.Random(seed)
    points = [
        MeasuredPoint("all_gather", {"bytes": n, "ranks": ranks}, noisy(rng, ring_collective_s(n, ranks, 2e10, 1e-5)))
        for n in SIZES
        for _ in range(2)
    ]
    ring = fit_ring(points)
    assert ring.bytes_per_s == pytest.approx(2e10, rel=0.15)
    assert ring.latency_s == pytest.approx(1e-5, rel=0.15)


def test_a_link_too_fast_to_see_stays_finite() -> None:
    channel = fit_channel([MeasuredPoint("message", {"bytes": size}, 1e-5, ("a:0", "a:1")) for size in SIZES])
    assert channel.bytes_per_s == pytest.approx(2 * SIZES[-1] / 1e-5)  # no more than twice what any message showed
    assert channel.latency_s == pytest.approx(5e-6, rel=1e-3)


def test_the_usual_link_is_the_median() -> None:
    channels = [Channel(1e-6, 1e9), Channel(3e-6, 2e9), Channel(2e-6, 9e9)]
    assert usual(channels) == Channel(2e-6, 2e9)
