"""Clusters: the file format, and naming."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_to_dict, read_cluster
from hexiopt.numbers.gpus import catalogue
from tests.hexiopt.files.clusters import EXAMPLE, example, read, two

# ------------------------------------------------------------------ file format


def test_example_of_the_format() -> None:
    cluster = read(example())
    assert [machine.name for machine in cluster.machines] == ["a", "d-0", "d-1", "d-2"]
    assert [machine.spec_name for machine in cluster.machines] == ["a", "d", "d", "d"]
    assert cluster.num_devices == 28
    assert cluster.first_device.tolist() == [0, 4, 12, 20]
    a, d = cluster.machines[:2]
    assert (a.intra_bandwidth_bytes_per_s, a.intra_latency_s) == (12e9, pytest.approx(10e-6))
    assert (a.nic_bandwidth_bytes_per_s, a.num_interfaces, a.price_per_hour) == (12.5e9, 1, None)
    assert (d.nic_bandwidth_bytes_per_s, d.num_interfaces, d.price_per_hour) == (25e9, 4, 20)
    assert a.pair_bandwidth(1, 0) == 50e9
    assert a.pair_bandwidth(1, 2) == 12e9
    assert a.pair_latency(1, 0) == a.pair_latency(1, 2) == a.intra_latency_s
    assert [gpu.name for gpu in cluster.types] == ["rtx_3090", "a800_80gb_sxm"]
    assert cluster.groups[0].uplink_bytes_per_s == 50e9
    assert cluster.links[0].latency_s == pytest.approx(2e-3)


def test_the_host_that_a_machine_is() -> None:
    """Says nothing about its kind, and there is one for each machine."""
    cluster = read(two(host="node1.lab"))
    assert [machine.host for machine in cluster.machines[:2]] == ["node1.lab", None]
    assert cluster.machines[0].kind == read(two()).machines[0].kind
    assert read(cluster_to_dict(cluster)) == cluster
    with pytest.raises(InputError, match="host: 'a b' is not a host name; write what `hostname` prints there"):
        read(two(host="a b"))
    with pytest.raises(InputError, match=r"host: .* is one host for 2 machines; write an entry for each"):
        read(two(host="node1", count=2))


def test_a_name_may_list_like_machines() -> None:
    cluster = read(two(name="gpu[08-10],login"))
    assert [machine.name for machine in cluster.machines[:4]] == ["gpu08", "gpu09", "gpu10", "login"]
    assert len({machine.kind for machine in cluster.machines[:4]}) == 1
    assert read(cluster_to_dict(cluster)) == cluster
    for broken, rule in (
        ({"name": "gpu[2-1]"}, r"has the range 2-1, which descends"),
        ({"name": "gpu[1-2],gpu1"}, r"lists 'gpu1', which appears twice"),
        ({"name": "gpu[1-2]", "count": 2}, r"count: 2 stands beside a name that lists 2 machines; remove it"),
        ({"name": "-[1-2]"}, r"'-1' is not a name"),
        ({"name": "gpu[1-2]", "host": "one"}, r"host: 'one' is one host for 2 machines; write an entry for each"),
    ):
        with pytest.raises(InputError, match=rule):
            read(two(**broken))


def test_defaults() -> None:
    cluster = read(two())
    machine = cluster.machines[0]
    assert cluster.inter_latency_s == machine.nic_latency_s == pytest.approx(20e-6)
    assert machine.intra_latency_s == pytest.approx(10e-6)
    assert machine.nic_bandwidth_bytes_per_s == 1.25e9


def test_one_machine_needs_no_network() -> None:
    data = two()
    del data["inter_machine"], data["machines"][1]
    cluster = read(data)
    assert read(cluster_to_dict(cluster)) == cluster
    json.dumps(cluster_to_dict(cluster), allow_nan=False)


def test_one_gpu_needs_no_internal_bandwidth() -> None:
    machine = read(two(num_gpus=1, intra_bandwidth_gb_per_s=...)).machines[0]
    assert math.isinf(machine.intra_bandwidth_bytes_per_s)
    assert read(two(num_gpus=1)).machines[0] == machine


def test_gpus_of_the_file_replace_and_extend_the_catalogue() -> None:
    data = two(gpu="my_gpu")
    data["gpus"] = {
        "my_gpu": {"tflops": 80, "memory_gib": 24, "hbm_gb_per_s": 900},
        "rtx_4090": {"tflops": 100},
        "l40s": {"tflops": 1},
    }
    cluster = read(data)
    assert cluster.gpu_of(0).flops_bf16 == 80e12
    assert cluster.gpu_of(4).flops_bf16 == 100e12
    assert set(cluster_to_dict(cluster)["gpus"]) == {"my_gpu", "rtx_4090"}
    assert cluster.total_peak_flops("bf16") == 4 * 80e12 + 8 * 100e12
    assert read(cluster_to_dict(cluster)) == cluster


def test_devices_without_a_precision_count_as_zero() -> None:
    data = two(gpu="t4")
    assert read(data).total_peak_flops("bf16") == 8 * (catalogue()["rtx_4090"].flops_bf16 or 0)


NAMES = st.sampled_from(["a", "b", "c", "d", "n-1", "x.y", "_z"])
RATES = st.floats(0, 1e5, exclude_min=True) | st.sampled_from([0.1, 1.25, 12.5, 50, 1e5])
MICROSECONDS = st.floats(0, 1e7) | st.sampled_from([0, 20, 0.7, 1e7])


@st.composite
def cluster_mappings(draw: st.DrawFn) -> dict[str, Any]:
    """Valid clusters: up to four specs, nested groups and links in both forms."""
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    machines = []
    single: list[str] = []
    for name in names:
        num_gpus = draw(st.integers(1, 6))
        machine: dict[str, Any] = {
            "name": name,
            "gpu": draw(st.sampled_from(["rtx_3090", "t4", "h100_80gb_sxm", "my_gpu"])),
            "num_gpus": num_gpus,
            "intra_bandwidth_gb_per_s": draw(RATES),
        }
        if draw(st.booleans()):
            machine |= {"intra_latency_us": draw(MICROSECONDS), "nic_bandwidth_gb_per_s": draw(RATES)}
        if draw(st.booleans()):
            machine |= {"network_interfaces": draw(st.integers(1, 8)), "price_per_hour": draw(RATES)}
        if draw(st.booleans()):
            machine["nic_latency_us"] = draw(MICROSECONDS)
        pairs = [[i, j] for i in range(num_gpus) for j in range(i)]
        if pairs:
            chosen = draw(st.lists(st.sampled_from(pairs), unique_by=tuple, max_size=4))
            machine["intra_links"] = [
                {"between": pair, "bandwidth_gb_per_s": draw(RATES), "latency_us": draw(MICROSECONDS)}
                for pair in chosen
            ]
        count = draw(st.integers(1, 3))
        if count > 1:
            machine["count"] = count
        single += [f"{name}-{i}" for i in range(count)] if count > 1 else [name]
        machines.append(machine)
    if len(set(single) | set(names)) < len(single) + sum("count" in machine for machine in machines):
        machines, single, names = machines[:1], [], names[:1]

    groups: list[dict[str, Any]] = []
    free = list(names)
    while free and draw(st.booleans()):
        members = draw(st.lists(st.sampled_from(free), min_size=1, unique=True))
        free = [name for name in free if name not in members]
        group: dict[str, Any] = {"name": f"rack{len(groups)}", "members": members}
        if draw(st.booleans()):
            group |= {"uplink_gb_per_s": draw(RATES), "latency_us": draw(MICROSECONDS)}
        groups.append(group)
        free.append(group["name"])

    links: list[dict[str, Any]] = []
    pairs_of_names = [(a, b) for a in names for b in names if a != b]
    for a, b in draw(st.lists(st.sampled_from(pairs_of_names), unique=True)) if pairs_of_names else []:
        link: dict[str, Any] = {"from": a, "to": b, "bandwidth_gb_per_s": draw(RATES)}
        if draw(st.booleans()):
            link["latency_us"] = draw(MICROSECONDS)
        links.append(link)
    return {
        "name": "random",
        "inter_machine": {"bandwidth_gb_per_s": draw(RATES), "latency_us": draw(MICROSECONDS)},
        "machines": machines,
        "groups": draw(st.permutations(groups)),
        "links": links,
        "gpus": {"my_gpu": {"tflops": 80, "memory_gib": 24, "hbm_gb_per_s": 900}},
    }


@given(cluster_mappings())
def test_round_trip(data: dict[str, Any]) -> None:
    cluster = read(data)
    written = cluster_to_dict(cluster)
    again = read(json.loads(json.dumps(written, allow_nan=False)))
    assert again == cluster
    assert hash(again) == hash(cluster)
    assert cluster_to_dict(again) == written


@given(cluster_mappings())
def test_device_names_and_interfaces(data: dict[str, Any]) -> None:
    cluster = read(data)
    seen = []
    for m, machine in enumerate(cluster.machines):
        used = [machine.interface(i) for i in range(machine.num_gpus)]
        assert used == [i * machine.num_interfaces // machine.num_gpus for i in range(machine.num_gpus)]
        for index in range(machine.num_gpus):
            device = cluster.device_index(f"{machine.name}:{index}")
            seen.append(device)
            assert cluster.device_name(device) == f"{machine.name}:{index}"
            assert (cluster.machine_of[device], cluster.index_in_machine[device]) == (m, index)
            assert cluster.gpu_of(device) == machine.gpu
    assert seen == list(range(cluster.num_devices))


@given(cluster_mappings())
def test_tables_pairs_and_routes_agree(data: dict[str, Any]) -> None:
    cluster = read(data)
    network = cluster.network
    machine_of = cluster.machine_of
    for a in range(0, cluster.num_devices, 3):
        for b in range(cluster.num_devices):
            first, second = machine_of[a], machine_of[b]
            if first == second:
                continue
            route = network.route(a, b)
            assert route[0] == network.transmit_interface(a)
            assert route[-1] == network.receive_interface(b)
            assert len(set(route)) == len(route)
            rate = network.pair_bandwidth(a, b)
            assert rate == network.capacity[list(route)].min() == network.bandwidth[first, second]
            assert network.pair_latency(a, b) == pytest.approx(network.latency_s[first, second], rel=1e-12)
    for m, machine in enumerate(cluster.machines):
        assert network.bandwidth[m, m] == machine.intra_bandwidth_bytes_per_s


def test_count_form_is_kept() -> None:
    data = two()
    data["machines"][1]["count"] = 1280
    written = cluster_to_dict(read(data))
    assert [machine["count"] for machine in written["machines"]] == [1, 1280]


def test_pickles_without_its_tables() -> None:
    cluster = read(example())
    assert cluster.network.bandwidth.shape == (4, 4)
    hash(cluster)
    again = pickle.loads(pickle.dumps(cluster))
    assert again == cluster
    assert "network" not in vars(again)
    assert "_hash" not in vars(again)


def test_kinds() -> None:
    data = two()
    data["machines"].append({**data["machines"][0], "name": "c"})
    data["machines"].append({**data["machines"][0], "name": "e", "nic_bandwidth_gb_per_s": 2})
    a, b0, b1, c, e = read(data).machines
    assert a.kind == c.kind
    assert b0.kind == b1.kind
    assert len({a.kind, b0.kind, e.kind}) == 3


def test_read_cluster_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(EXAMPLE.replace("num_gpus: 4", "num_gpus: 0"))
    with pytest.raises(InputError, match=r"my\.yaml: machines\[0\]\.num_gpus: 0 is out of range"):
        read_cluster(path)


# ------------------------------------------------------------------ device names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a", "'a' is not a device; write machine:index"),
        ("a:", "is not a device"),
        ("a:-1", "is not a device"),
        ("a:01", "is not a device"),
        ("a:²", "is not a device"),
        ("a:4", "out of range; a has 4 device"),
        ("a:99999999999999999999", "out of range"),
        ("d:0", "on no machine of the cluster; did you mean d-0"),
        ("d-9:0", "on no machine of the cluster; did you mean d-"),
        ("zzz:0", "known: a, d-0, d-1, d-2"),
    ],
)
def test_unknown_devices(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(example()).device_index(name, "plan.json: stages[0].devices")
    assert str(caught.value).startswith("plan.json: stages[0].devices: ")


def test_devices_named() -> None:
    cluster = read(example())
    assert cluster.devices_named("a") == range(4)
    assert cluster.devices_named("d") == range(4, 28)
    assert cluster.devices_named("d-1") == range(12, 20)
    assert cluster.devices_named("d-1:3") == range(15, 16)
    with pytest.raises(InputError, match=r"^constraints: 'e' is not a machine of the cluster"):
        cluster.devices_named("e", "constraints")


def test_hints_stay_short_in_large_clusters() -> None:
    data = two(count=5000)
    with pytest.raises(InputError) as caught:
        read(data).device_index("zzz:0")
    assert len(str(caught.value)) < 500


def box(*links: tuple[str, str], **more: Any) -> dict[str, Any]:
    machines = [{"name": name, "gpu": "t4", "num_gpus": 1} for name in "abc"]
    stated = [{"between": list(pair), "bandwidth_gb_per_s": 5 + k, "latency_us": 9} for k, pair in enumerate(links)]
    return {"name": "box", "machines": machines, "links": stated, **more}


def test_links_of_all_pairs_need_no_network() -> None:
    """Each pair has the rate of its link, also while all links are busy: an interface carries them together."""
    cluster = read(box(("a", "b"), ("a", "c"), ("b", "c")))
    assert [machine.nic_bandwidth_bytes_per_s for machine in cluster.machines] == [11e9, 12e9, 13e9]
    assert cluster.network.pair_bandwidth(0, 1) == 5e9
    assert cluster.is_linked
    assert read(cluster_to_dict(cluster)) == cluster


def test_a_pair_without_a_link_is_named() -> None:
    with pytest.raises(InputError, match=r"inter_machine\.bandwidth_gb_per_s: is missing; .*or the link from b to c"):
        read(box(("a", "b"), ("a", "c")))
    stated = box(("a", "b"), inter_machine={"bandwidth_gb_per_s": 1})
    assert not read(stated).is_linked
