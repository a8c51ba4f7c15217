"""Synthetic clusters: determinism, shares, errors, and ten thousand GPUs."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section, cluster_to_dict, resolve_synthetic
from hexiopt.numbers.gpus import catalogue
from hexiopt.numbers.links import intra_bandwidth_gb_per_s
from hexiopt.problem.cluster import Cluster
from hexiopt.reading import Section
from tests.timing import within


def mapping(**changes: Any) -> dict[str, Any]:
    return {"name": "made_up", "synthetic": {"num_machines": 128, **changes}}


def build(**changes: Any) -> Cluster:
    return cluster_from_section(Section(mapping(**changes), "my.yaml"))


def counts(cluster: Cluster) -> dict[str, int]:
    out: dict[str, int] = {}
    for machine in cluster.machines:
        out[machine.spec_name] = out.get(machine.spec_name, 0) + 1
    return out


def test_defaults() -> None:
    cluster = build()
    assert counts(cluster) == dict.fromkeys(["h100_80gb_sxm", "a100_80gb_sxm", "rtx_4090", "rtx_3090"], 32)
    assert cluster.num_devices == 1024
    by_type = {machine.gpu.name: machine.intra_bandwidth_bytes_per_s / 1e9 for machine in cluster.machines}
    assert by_type == {"h100_80gb_sxm": 450, "a100_80gb_sxm": 300, "rtx_4090": 12, "rtx_3090": 12}
    assert cluster.machines[0].nic_bandwidth_bytes_per_s == 12.5e9


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("gpus", 1024, "gpus: 1024 is not how .* machines of 8 GPUs; state cluster.synthetic.num_machines=128$"),
        ("num_gpus", 1025, "num_gpus: 1025 is not how .*; state cluster.synthetic.num_machines=129$"),
        ("machines", 16, "machines: 16 is not how .*; state cluster.synthetic.num_machines=16$"),
        ("seed", 3, "seed: 3 belongs in synthetic; state cluster.synthetic.seed=3$"),
        ("mix", {"t4": 1}, "mix: {'t4': 1} belongs in synthetic; state cluster.synthetic.mix$"),
        (
            "links",
            [],
            r"links: \[\] is nothing that a synthetic cluster has; cluster.synthetic has num_machines",
        ),
        ("gpus", ["t4"], r"gpus: \['t4'\] is not a mapping of keys to values; write {key: value}$"),
    ],
)
def test_keys_beside_synthetic_are_refused_with_the_one_that_is_meant(key: str, value: Any, remedy: str) -> None:
    with pytest.raises(InputError, match=f"^my.yaml: {remedy}"):
        cluster_from_section(Section({**mapping(), key: value}, "my.yaml"))


def test_a_number_of_gpus_follows_how_many_a_machine_has() -> None:
    with pytest.raises(InputError, match=r"machines of 4 GPUs; state cluster\.synthetic\.num_machines=3$"):
        cluster_from_section(Section({**mapping(gpus_per_machine=4), "gpus": 12}, "my.yaml"))


def test_gpu_types_may_stand_beside_synthetic() -> None:
    types = {"gpus": {"rtx_3090": {"memory_gib": 48}}}
    cluster = cluster_from_section(Section({**mapping(), **types}, "my.yaml"))
    assert {m.gpu.memory_bytes for m in cluster.machines if m.gpu.name == "rtx_3090"} == {48 * 2**30}


def test_same_seed_same_cluster() -> None:
    assert build(seed=3) == build(seed=3)
    orders = {tuple(counts(build(seed=seed))) for seed in range(20)}
    assert len(orders) > 5
    assert build(mix={"t4": 1, "l4": 2}) == build(mix={"l4": 2, "t4": 1})


def test_resolved_mapping_is_ordinary_and_small() -> None:
    section = resolve_synthetic(Section(mapping(num_machines=1280), "my.yaml"))
    assert "synthetic" not in section
    assert len(section.items("machines")) == 4
    cluster = cluster_from_section(section)
    assert cluster == build(num_machines=1280)
    assert cluster_from_section(Section(cluster_to_dict(cluster), "again")) == cluster


@given(st.integers(1, 3000), st.lists(st.floats(0, 100), min_size=1, max_size=4), st.integers(0, 9))
def test_counts_are_rounded_shares(num_machines: int, weights: list[float], seed: int) -> None:
    mix = dict(zip(["h100_80gb_sxm", "a100_80gb_sxm", "rtx_4090", "t4"], weights, strict=False))
    if sum(weights) == 0:
        return
    machine_counts = counts(build(num_machines=num_machines, gpus_per_machine=1, mix=mix, seed=seed))
    assert sum(machine_counts.values()) == num_machines
    for name, weight in mix.items():
        share = num_machines * weight / sum(weights)
        assert abs(machine_counts.get(name, 0) - share) < 1 + 1e-6


def test_measured_types_are_passed_on() -> None:
    data = {**mapping(mix={"rtx_3090": 1}), "gpus": {"rtx_3090": {"tflops": 60}}}
    assert cluster_from_section(Section(data, "my.yaml")).gpu_of(0).flops_bf16 == 60e12


def test_every_type_of_the_catalogue_has_a_usual_link() -> None:
    for gpu in catalogue().values():
        assert intra_bandwidth_gb_per_s(gpu) > 0
    assert intra_bandwidth_gb_per_s(catalogue()["a800_80gb_sxm"]) == 200


def test_ten_thousand_gpus_in_two_seconds() -> None:
    catalogue()

    def build_cluster() -> Cluster:
        cluster = build(num_machines=1280)
        assert cluster.network.bandwidth.shape == (1280, 1280)
        return cluster

    assert within(2.0, build_cluster).machine_of.shape == (10_240,)
