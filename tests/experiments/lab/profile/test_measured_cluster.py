"""From measured devices and points to a cluster file: types, usual and unusual links, and the nulls of a given file."""

import copy
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import pytest

from experiments.lab.profile.points import Device, MeasuredPoint, Measurement
from experiments.lab.profile.result import check_base, result_of
from hexiopt.cost.executors.compute import OperatorTimes
from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.files.cluster_yaml import cluster_text, unknowns
from hexiopt.numbers.frameworks import default_framework
from hexiopt.numbers.gpus import Gpu, catalogue
from hexiopt.reading import Section, parse

GIB = 2**30
A100, T4, NVL = "NVIDIA A100-SXM4-80GB", "Tesla T4", "NVIDIA H900 NVL"
SIZES = [4**k for k in range(5, 15)]


def device(machine: str, index: int, product: str) -> Device:
    memory = {A100: 80 * GIB, T4: 15 * GIB, NVL: 94 * GIB}.get(product, 8 * GIB)
    is_gpu = product in (A100, T4, NVL)
    known = ("bf16", "fp16", "fp32") if product != T4 else ("fp16", "fp32")
    free = memory - GIB
    return Device(
        machine, index, f"host-{machine}", product, is_gpu, 1, memory, free, known, "fp16" if is_gpu else "fp32"
    )


def points_of(measured_device: Device) -> list[MeasuredPoint]:
    """As fast as the catalogue says of an A100, or of a T4."""
    gpu: Gpu = catalogue()["t4" if measured_device.product == T4 else "a100_80gb_sxm"]
    clock, of = OperatorTimes(gpu, measured_device.precision), (measured_device.name,)
    points = [MeasuredPoint("launch", {}, gpu.efficiency.launch_s, of)]
    points += [MeasuredPoint("gemm", {"flops": f}, clock.gemm_s(f), of) for f in (1e8, 1e9, 1e10, 1e11, 1e12)]
    points += [MeasuredPoint("attention", {"flops": f}, clock.attention_s(f), of) for f in (1e9, 1e10, 1e11)]
    points += [MeasuredPoint("stream", {"bytes": b}, clock.memory_s(b), of) for b in (2.0**20, 2.0**28, 2.0**30)]
    points += [MeasuredPoint("adam", {"bytes": b}, clock.memory_s(b), of) for b in (2.0**28, 2.0**30)]
    points += [MeasuredPoint(f"peak_{p}", {"flops": 1e12}, 1e12 / 9e13, of) for p in measured_device.precisions]
    return points


Rate = Callable[[Device, Device], float]


def measurement(devices: Sequence[Device], rate: Rate = lambda a, b: 10e9) -> Measurement:
    """Links of `rate` bytes/s and 10 µs: all pairs inside machines, both ways for the first devices of two."""
    points = [point for measured_device in devices for point in points_of(measured_device)]
    pairs = []
    for a, b in combinations(devices, 2):
        if a.machine == b.machine:
            pairs.append((a, b))
        elif a.index == b.index == 0:
            pairs += [(a, b), (b, a)]
    for a, b in pairs:
        points += [MeasuredPoint("message", {"bytes": n}, 2e-5 + n / rate(a, b), (a.name, b.name)) for n in SIZES]
    return Measurement(tuple(devices), tuple(points), "2.13")


def read_back(cluster: dict[str, Any]) -> Any:
    """As a file that a reader takes."""
    data = parse(cluster_text(cluster, ["x"], {}), "cluster.yaml", as_json=False)
    assert data == cluster
    return cluster_from_section(Section(data, "cluster.yaml"))


def test_a_type_of_the_catalogue_keeps_its_peaks() -> None:
    result = result_of(measurement([device("a", i, A100) for i in range(2)]), "mine", None)
    (gpu,) = read_back(result.cluster).types
    listed = catalogue()["a100_80gb_sxm"]
    assert (gpu.flops_bf16, gpu.hbm_bytes_per_s) == (listed.flops_bf16, listed.hbm_bytes_per_s)
    assert gpu.usable_memory_bytes == pytest.approx(79 * GIB)
    for key in ("gemm_max", "gemm_half_flops", "memory_max", "launch_s"):
        assert getattr(gpu.efficiency, key) == pytest.approx(getattr(listed.efficiency, key), rel=0.01)
    priced = gpu.efficiency.attention_max * default_framework().attention_speed
    assert priced == pytest.approx(listed.efficiency.attention_max, rel=0.01), "the rate that was measured"
    assert gpu.source.startswith("measured by hexiopt profile: NVIDIA A100-SXM4-80GB on host-a; fp16, torch 2.13")


def test_a_type_that_no_catalogue_knows_has_the_peaks_measured() -> None:
    result = result_of(measurement([device("a", 0, NVL), device("b", 0, "AMD EPYC")]), "mine", None)
    nvl, cpu = read_back(result.cluster).types
    assert (nvl.name, cpu.name) == ("h900_nvl", "cpu")
    assert nvl.flops_bf16 == pytest.approx(9e13)
    assert nvl.flops_fp16 >= nvl.flops_bf16  # the fastest of its products
    assert nvl.memory_bytes == pytest.approx(94 * GIB, rel=1e-3)
    assert cpu.link == "memory"


def test_usual_and_unusual_links() -> None:
    def rate(a: Device, b: Device) -> float:
        if a.machine == b.machine:
            return 56e9 if {a.index, b.index} == {0, 1} else 11e9 if {a.index, b.index} == {0, 2} else 10e9
        slow = {"c"} & {a.machine, b.machine}
        one_way = (a.machine, b.machine) == ("a", "b")
        return 0.5e9 if slow else 1.0e9 if one_way else 1.5e9

    devices = [device(m, i, A100) for m in "abde" for i in range(4)] + [device("c", 0, T4)]
    cluster = result_of(measurement(devices, rate), "mine", None).cluster
    machine = cluster["machines"][0]
    assert machine["intra_bandwidth_gb_per_s"] == pytest.approx(10, rel=0.01)
    assert machine["intra_latency_us"] == pytest.approx(10, rel=0.01)
    assert [link["between"] for link in machine["intra_links"]] == [[0, 1]]  # 11 GB/s are within 15 %
    assert "intra_bandwidth_gb_per_s" not in cluster["machines"][-1]
    assert cluster["inter_machine"]["bandwidth_gb_per_s"] == pytest.approx(1.5, rel=0.01)
    stated = {tuple(link.get("between") or (link["from"], link["to"])): link for link in cluster["links"]}
    assert set(stated) == {("a", "b"), ("a", "c"), ("b", "c"), ("c", "d"), ("c", "e")}
    assert "from" in stated["a", "b"]  # the way back is as usual
    assert stated["a", "c"]["bandwidth_gb_per_s"] == pytest.approx(0.5, rel=0.01)
    network = read_back(cluster).network
    assert network is not None


def test_a_machine_of_two_types_has_two_parts_and_a_link() -> None:
    devices = [device("a", 0, A100), device("a", 1, A100), device("a", 2, T4)]
    cluster = result_of(measurement(devices, lambda a, b: 5e9), "mine", None).cluster
    assert [entry["name"] for entry in cluster["machines"]] == ["a.a100_80gb_sxm", "a.t4"]
    (link,) = cluster["links"]
    assert link["between"] == ["a.a100_80gb_sxm", "a.t4"]
    assert link["bandwidth_gb_per_s"] == pytest.approx(5, rel=0.01)
    read_back(cluster)


BASE: dict[str, Any] = {
    "name": "ours",
    "inter_machine": {"bandwidth_gb_per_s": None, "latency_us": 7},
    "machines": [
        {
            "name": "d",
            "gpu": None,
            "num_gpus": 4,
            "count": 2,
            "intra_bandwidth_gb_per_s": None,
            "intra_latency_us": 3,
            "intra_links": [{"between": [0, 1], "bandwidth_gb_per_s": None}],
        },
        {"name": "x", "gpu": "t4", "num_gpus": None, "intra_bandwidth_gb_per_s": None, "intra_latency_us": None},
    ],
    "gpus": {"t4": {"usable_memory_gib": 11}},
}


def test_nulls_of_a_base_are_filled_and_what_it_states_stays() -> None:
    before = copy.deepcopy(BASE)

    def rate(a: Device, b: Device) -> float:
        return 2e9 if a.machine != b.machine else 90e9 if {a.index, b.index} in ({0, 1}, {2, 3}) else 30e9

    devices = [device("d-1", i, A100) for i in range(4)] + [device("x", 0, T4)]
    check_base(BASE, devices)
    cluster = result_of(measurement(devices, rate), "other", BASE).cluster
    assert before == BASE
    assert not list(unknowns(cluster))
    assert cluster["name"] == "ours"
    d, x = cluster["machines"]
    assert (d["gpu"], d["count"], d["intra_latency_us"]) == ("a100_80gb_sxm", 2, 3)
    assert d["intra_bandwidth_gb_per_s"] == pytest.approx(30, rel=0.01)
    rates = {tuple(link["between"]): link["bandwidth_gb_per_s"] for link in d["intra_links"]}
    assert rates == pytest.approx({(0, 1): 90, (2, 3): 90}, rel=0.01)
    assert x == {"name": "x", "gpu": "t4", "num_gpus": 1}
    assert cluster["inter_machine"] == {"bandwidth_gb_per_s": pytest.approx(2, rel=0.01), "latency_us": 7}
    assert cluster["gpus"]["t4"]["usable_memory_gib"] == 11
    assert cluster["gpus"]["t4"]["efficiency"]["gemm_max"] == pytest.approx(
        catalogue()["t4"].efficiency.gemm_max, rel=0.01
    )
    read_back(cluster)


def test_what_was_not_measured_stays_null() -> None:
    cluster = result_of(measurement([device("d-0", i, A100) for i in range(4)]), "other", BASE).cluster
    open_keys = dict(unknowns(cluster))
    assert set(open_keys) == {"between machines", "x"}


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([device("y", 0, A100)], "profile.base: has no machine 'y'; .*profile.machine=NAME"),
        ([device("d-2", 0, A100)], "has no machine 'd-2'"),
        ([device("d-0", 0, A100)], "d-0 has num_gpus 4, measured 1"),
        ([device("x", 0, A100)], "x has gpu t4, measured a100_80gb_sxm"),
        ([device("x", 0, "AMD EPYC")], "x has gpu t4, measured cpu"),
    ],
)
def test_a_base_that_does_not_fit_is_refused(devices: list[Device], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_base(BASE, devices)
    with pytest.raises(InputError, match=message):
        result_of(measurement(devices), "other", BASE)
