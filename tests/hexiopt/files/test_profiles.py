"""Measured layers and links: our own format, Sailor's, AMP's and nccl-tests', and what the cost model makes of them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section, cluster_to_dict, read_cluster
from hexiopt.files.link_files import channel_of, read_nccl_tests, sailor_network
from hexiopt.files.profile_files import profile_from_section, profile_to_dict, read_profile
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.profile import Entry, Measured, Profile, Shape
from hexiopt.reading import Section
from tests.conftest import ROOT
from tests.hexiopt.numbers.test_frameworks import MODEL, PROBLEM

DATA = ROOT / "experiments" / "data"
SHAPE = Shape.of(MODEL, PROBLEM.workload)


def entry(size: int, seconds: float, tp: int = 2) -> Entry:
    times = Measured((0.1 * seconds, 0.2 * seconds), (seconds, 2 * seconds), (3 * seconds, 4 * seconds))
    return Entry(SHAPE, "a100_80gb_sxm", tp, size, times)


def with_profile(*entries: Entry) -> Problem:
    return replace(PROBLEM, cluster=replace(PROBLEM.cluster, profile=Profile(entries)))


def test_measured_layers_stand_instead_of_calculated_ones() -> None:
    problem = with_profile(entry(1, 0.01))
    plan = Plan((Pipeline((Stage.of((0, 1), 0, 8),), 16),))
    (stage,) = PlanPricer(problem).price(plan).pipelines[0].stages
    assert stage.forward_s == pytest.approx(0.001 + 8 * 0.01 + 0.03)
    assert stage.backward_s == pytest.approx(0.002 + 8 * 0.02 + 0.04)
    full = Plan((Pipeline((Stage.of((0, 1), 0, 8, "full"),), 16),))
    (again,) = PlanPricer(problem).price(full).pipelines[0].stages
    assert again.backward_s == pytest.approx(stage.backward_s + 8 * 0.01)
    for other in (Stage.of((0,), 0, 8), Stage.of((0, 1), 0, 8)):
        size = 2 if other.tp == 2 else 1
        elsewhere = Plan((Pipeline((other,), 16 // size, size),))
        assert PlanPricer(problem).price(elsewhere) == PlanPricer(PROBLEM).price(elsewhere)


def test_between_measured_sizes_times_are_linear_and_beyond_them_calculated() -> None:
    profile = Profile((entry(8, 0.08), entry(2, 0.02)))

    def layer(size: int) -> tuple[float, float] | None:
        times = profile.times(SHAPE, "a100_80gb_sxm", 2, size)
        return None if times is None else times.layer

    assert layer(2) == (0.02, 0.04)
    assert layer(4) == pytest.approx((0.04, 0.08))
    assert layer(1) is None
    assert layer(16) is None
    assert profile.times(SHAPE, "a100_80gb_sxm", 4, 2) is None
    assert profile.times(replace(SHAPE, precision="fp16"), "a100_80gb_sxm", 2, 2) is None


def test_a_profile_comes_back_and_stands_in_the_cluster_file(tmp_path: Path) -> None:
    profile = Profile((entry(1, 0.01), entry(2, 0.02, tp=1)))
    assert profile_from_section(Section(dict(profile_to_dict(profile)), "p")) == profile
    (tmp_path / "measured.json").write_text(json.dumps(profile_to_dict(profile)))
    data = cluster_to_dict(PROBLEM.cluster) | {"profile": "measured.json"}
    (tmp_path / "cluster.yaml").write_text(json.dumps(data))
    cluster = read_cluster(tmp_path / "cluster.yaml")
    assert cluster.profile == profile
    assert cluster_from_section(Section(cluster_to_dict(cluster), "again")) == cluster
    assert "profile" not in cluster_to_dict(PROBLEM.cluster)


def test_sailor_and_amp_profiles() -> None:
    sailor = read_profile(DATA / "sailor" / "layer_profiles.json")
    raw = json.loads((DATA / "sailor" / "layer_profiles.json").read_text())["OPT-350"]["GH-96"]["1"]["4"]
    sailor_times = sailor.times(Shape(1024, 16, 4096, 50272, 2048, "fp32"), "gh200_96gb", 4, 1)
    assert sailor_times is not None
    assert sailor_times.embedding == tuple(raw["0"][:2])
    assert sailor_times.head == tuple(raw["25"][:2])
    assert sailor_times.layer[0] == pytest.approx(sum(raw[str(k)][0] for k in range(1, 25)) / 24)
    amp = read_profile(DATA / "amp_layer_forward_seconds.json")
    table = json.loads((DATA / "amp_layer_forward_seconds.json").read_text())["forward_s"]["P3_tp2"]
    amp_times = amp.times(Shape(1024, 16, 4096, 52256, 1024, "fp16"), "v100_16gb_sxm", 2, 1)
    assert amp_times is not None
    assert amp_times.layer[0] == pytest.approx(sum(table[2:26]) / 24)
    assert amp_times.head[0] == pytest.approx(sum(table[26:]))
    assert amp_times.layer[1] == pytest.approx(2 * amp_times.layer[0])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "is not a known profile of layers"),
        ({"format": "hexiopt.plan"}, "format: 'hexiopt.plan'"),
        ({"format": "hexiopt.profile", "version": 1, "layers": [{}]}, r"layers\[0\]\.hidden_size: is missing"),
        ({"forward_s": {"G5_tp1": []}}, "G5_tp1: is not a table of AMP's; did you mean"),
        ({"forward_s": {"G4_tp1": [1.0]}}, "is not the seconds of 30 modules"),
        ({"OPT-350": {"H100": {}}}, "OPT-350.H100: is not a GPU of Sailor's"),
        ({"OPT-350": {"GH-96": {"1": {"1": {"0": [1, 2]}}}}}, "is not layers with"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=words):
        read_profile(path)


def test_sailors_network_fits() -> None:
    fits = sailor_network(DATA / "sailor" / "network.json")
    assert fits.between["rtx_3090"][8] == pytest.approx(0.115e9, rel=0.02)
    assert fits.between["gh200_96gb"][4] == pytest.approx(4 * fits.between["gh200_96gb"][1], rel=0.05)
    assert fits.inside["gh200_96gb"][4] == pytest.approx(251e9, rel=0.01)


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ({"A100": {}}, "OPT-350.A100: is not a GPU of Sailor's"),
        ({"A100-40": {"one": {"1": {}}}}, "A100-40: is not layers by micro-batch size and TP degree"),
        ({"A100-40": [1]}, "A100-40: is not layers by micro-batch size and TP degree"),
        ({"A100-40": {"1": {"1": {"0": [0.1, 0.2, 0]}}}}, "A100-40.1.1: has 1 layers"),
        ({"A100-40": {"1": {"1": {"0": [0.1, 0.2]}}}}, "A100-40.1.1: is not layers with"),
        ({"A100-40": {"1": {"1": 3}}}, "A100-40.1.1: is not layers with"),
    ],
)
def test_a_broken_file_of_sailors_is_refused_in_a_line(tmp_path: Path, gpus: Any, words: str) -> None:
    (tmp_path / "profiles.json").write_text(json.dumps({"OPT-350": gpus}))
    with pytest.raises(InputError, match=words):
        read_profile(tmp_path / "profiles.json")


def test_one_layer_measured_twice_is_refused() -> None:
    assert Profile((entry(1, 0.01), entry(1, 0.01))).times(SHAPE, "a100_80gb_sxm", 2, 1) is not None
    with pytest.raises(InputError, match="a100_80gb_sxm at TP 2 and micro-batches of 1 has two different measurements"):
        Profile((entry(1, 0.01), entry(2, 0.02), entry(1, 0.03)))


NCCL_TESTS = """\
# nThread 1 nGpus 8 minBytes 1048576 maxBytes 1073741824 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        131072      float    none      -1    {a}   10.0   {busa}      0    58.66   17.87   15.64      0
  1073741824     134217728      float    none      -1    {b}  200.0   {busb}      0   5133.4  209.17  183.02      0
# Avg bus bandwidth    : 95.3
"""


def test_nccl_tests_output(tmp_path: Path) -> None:
    """Times of 20 µs and 200 GB/s on the bus come back."""
    carried = [size * 7 / 8 for size in (1048576, 1073741824)]
    seconds = [20e-6 + moved / 200e9 for moved in carried]
    busbw = [moved / s / 1e9 for moved, s in zip(carried, seconds, strict=True)]
    text = NCCL_TESTS.format(
        a=f"{seconds[0] * 1e6:.4f}", b=f"{seconds[1] * 1e6:.4f}", busa=f"{busbw[0]:.6f}", busb=f"{busbw[1]:.6f}"
    )
    (tmp_path / "out.txt").write_text(text)
    fit = read_nccl_tests(tmp_path / "out.txt")
    assert fit.latency_s == pytest.approx(20e-6, rel=1e-3)
    assert fit.bytes_per_s == pytest.approx(200e9, rel=1e-3)
    (tmp_path / "none.txt").write_text("nothing here\n")
    with pytest.raises(InputError, match="has no two lines of sizes and times"):
        read_nccl_tests(tmp_path / "none.txt")


@given(
    latency=st.floats(0, 1e-2),
    bandwidth=st.floats(1e6, 1e12),
    sizes=st.lists(st.integers(1, 2**34), min_size=2, unique=True),
)
def test_a_channel_recovers_what_made_the_points(latency: float, bandwidth: float, sizes: list[int]) -> None:
    sizes.append(2 * max(*sizes, math.ceil(latency * bandwidth)))  # one message at least that shows the bandwidth
    moved = np.array(sizes, float)
    channel = channel_of(np.ones(len(sizes)), moved, latency + moved / bandwidth)
    assert channel.latency_s >= 0
    assert channel.latency_s + moved / channel.bytes_per_s == pytest.approx(latency + moved / bandwidth, rel=1e-3)


def test_a_bandwidth_that_no_message_shows_is_not_claimed() -> None:
    """Messages that take the latency alone: at most twice the rate of the fastest."""
    assert channel_of(np.ones(2), np.array([1.0, 1000.0]), np.array([0.01, 0.01])).bytes_per_s == pytest.approx(2e5)
