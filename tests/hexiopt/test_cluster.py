"""Clusters: the file format and its errors, and naming."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hexiopt.cluster import Cluster
from hexiopt.cluster_file import cluster_from_section, cluster_to_dict, read_cluster
from hexiopt.errors import InputError
from hexiopt.gpus import catalogue
from hexiopt.reading import Section, parse

EXAMPLE = """
name: example
inter_machine: {bandwidth_gb_per_s: 12.5, latency_us: 20}
machines:
  - {name: a, gpu: rtx_3090, num_gpus: 4, intra_bandwidth_gb_per_s: 12, intra_latency_us: 10,
     intra_links: [{between: [0, 1], bandwidth_gb_per_s: 50}]}
  - {name: d, gpu: a800_80gb_sxm, num_gpus: 8, intra_bandwidth_gb_per_s: 200, count: 3,
     network_interfaces: 4, nic_bandwidth_gb_per_s: 25, price_per_hour: 20}
groups:
  - {name: rack1, members: [d], uplink_gb_per_s: 50, latency_us: 50}
links:
  - {between: [a, d], bandwidth_gb_per_s: 0.1, latency_us: 2000}
gpus:
  my_gpu: {tflops_bf16: 80, tflops_fp16: 80, tflops_fp32: 20, memory_gib: 24, usable_memory_gib: 22.5,
           hbm_gb_per_s: 900, flash_attention: true}
"""


def read(data: Any, where: str = "my.yaml") -> Cluster:
    return cluster_from_section(Section(data, where))


def example() -> Any:
    return parse(EXAMPLE, "example", as_json=False)


def two(**first: Any) -> dict[str, Any]:
    """Two machines of four GPUs; `first` changes the first one (a value of `...` removes its key)."""
    machine = {"name": "a", "gpu": "rtx_3090", "num_gpus": 4, "intra_bandwidth_gb_per_s": 12, **first}
    return {
        "name": "two",
        "inter_machine": {"bandwidth_gb_per_s": 1.25},
        "machines": [
            {key: value for key, value in machine.items() if value is not ...},
            {"name": "b", "gpu": "rtx_4090", "num_gpus": 4, "intra_bandwidth_gb_per_s": 12, "count": 2},
        ],
    }


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
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_round_trip(data: dict[str, Any]) -> None:
    cluster = read(data)
    written = cluster_to_dict(cluster)
    again = read(json.loads(json.dumps(written, allow_nan=False)))
    assert again == cluster
    assert hash(again) == hash(cluster)
    assert cluster_to_dict(again) == written


@given(cluster_mappings())
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


# ------------------------------------------------------------------ errors


def with_groups(*groups: dict[str, Any]) -> dict[str, Any]:
    return {**two(), "groups": list(groups)}


def with_links(*links: dict[str, Any]) -> dict[str, Any]:
    return {**two(), "links": [{"bandwidth_gb_per_s": 1, **link} for link in links]}


def intra(*pairs: Any) -> dict[str, Any]:
    return two(intra_links=[{"between": pair, "bandwidth_gb_per_s": 50} for pair in pairs])


ERRORS = [
    ([], r"my\.yaml: \[\] is not a mapping"),
    ({}, r"my\.yaml: name: is missing"),
    ({**two(), "name": "x\ny"}, r"my\.yaml: name: .*printable"),
    ({**two(), "machines": []}, r"my\.yaml: machines: .*empty"),
    ({**two(), "machines": {}}, r"my\.yaml: machines: .*not a list"),
    ({**two(), "machine": []}, r"my\.yaml: machine: unknown key; did you mean machines"),
    ({**two(), "profile": "measured.json"}, r"my\.yaml: profile: .*not read yet"),
    ({**two(), "profile": None}, r"my\.yaml: profile: .*not read yet"),
    ({**two(), "inter_machine": {}}, r"my\.yaml: inter_machine\.bandwidth_gb_per_s: is missing"),
    ({**two(), "inter_machine": {"bandwidth_gb_per_s": None}}, r"inter_machine\.bandwidth_gb_per_s: .*null"),
    ({**two(), "inter_machine": {"bandwidth_gb_per_s": 0}}, r"inter_machine\.bandwidth_gb_per_s: 0 is out"),
    ({**two(), "inter_machine": {"bandwidth_gb_per_s": 1e6}}, r"inter_machine\.bandwidth_gb_per_s: 1000000"),
    (
        {**two(), "inter_machine": {"bandwidth_gb_per_s": 1, "latency_us": -1}},
        r"my\.yaml: inter_machine\.latency_us: -1 is out of range",
    ),
    (two(name="a:b"), r"my\.yaml: machines\[0\]\.name: 'a:b' is not a name"),
    (two(name="b"), r"my\.yaml: machines\[1\]\.name: 'b' stands twice"),
    (two(name="b-1"), r"my\.yaml: machines\[1\]\.name: 'b' with its count makes a second machine 'b-1'"),
    (two(gpu="rtx_309"), r"my\.yaml: machines\[0\]\.gpu: 'rtx_309' .*rtx_3090"),
    (two(gpu=3090), r"my\.yaml: machines\[0\]\.gpu: 3090 is not text"),
    (two(num_gpus=True), r"my\.yaml: machines\[0\]\.num_gpus: True is not a number"),
    (two(num_gpus=2.5), r"my\.yaml: machines\[0\]\.num_gpus: 2\.5 is not a whole number"),
    (two(num_gpus=1025), r"my\.yaml: machines\[0\]\.num_gpus: 1025 is out of range"),
    (two(num_gpus=...), r"my\.yaml: machines\[0\]\.num_gpus: is missing"),
    (two(intra_bandwidth_gb_per_s=...), r"my\.yaml: machines\[0\]\.intra_bandwidth_gb_per_s: is missing"),
    (two(intra_bandwidth_gb_per_s=None), r"machines\[0\]\.intra_bandwidth_gb_per_s: is unknown \(null\)"),
    (two(intra_bandwidth_gb_per_s=math.nan), r"machines\[0\]\.intra_bandwidth_gb_per_s: nan is not finite"),
    (two(intra_latency_us=1e8), r"machines\[0\]\.intra_latency_us: .*out of range"),
    (two(network_interfaces=65), r"machines\[0\]\.network_interfaces: 65 is out of range"),
    (two(nic_bandwidth_gb_per_s=None), r"machines\[0\]\.nic_bandwidth_gb_per_s: is unknown"),
    (two(price_per_hour=None), r"machines\[0\]\.price_per_hour: is unknown"),
    (two(price_per_hour=0), r"machines\[0\]\.price_per_hour: 0 is out of range"),
    (two(count=0), r"machines\[0\]\.count: 0 is out of range"),
    (two(count=100_000), r"machines\[1\]\.count: makes more than 100000 machines"),
    (two(num_gpus=1024, count=1000), r"machines\[0\]\.count: makes more than .* 1000000 devices"),
    (two(gpus=4), r"machines\[0\]\.gpus: unknown key; did you mean"),
    (intra([0, 4]), r"machines\[0\]\.intra_links\[0\]\.between: \[0, 4\] .*0 to 3"),
    (intra([0, True]), r"machines\[0\]\.intra_links\[0\]\.between: \[0, True\] is not a pair"),
    (intra([0]), r"machines\[0\]\.intra_links\[0\]\.between: \[0\] is not a pair"),
    (intra([1, 1]), r"machines\[0\]\.intra_links\[0\]\.between: \[1, 1\] links a device with itself"),
    (intra([0, 1], [1, 0]), r"machines\[0\]\.intra_links\[1\]\.between: \[1, 0\] stands twice"),
    (with_groups({"name": "a", "members": ["b"]}), r"groups\[0\]\.name: 'a' stands twice"),
    (with_groups({"name": "g", "members": []}), r"groups\[0\]\.members: \[\] is empty"),
    (
        with_groups({"name": "g", "members": ["bb"]}),
        r"groups\[0\]\.members: .*no machine or group; did you m",
    ),
    (with_groups({"name": "g", "members": [1]}), r"groups\[0\]\.members: .*has 1, which is no machine"),
    (with_groups({"name": "g", "members": ["g"]}), r"groups\[0\]\.members: .*'g' contain itself"),
    (
        with_groups({"name": "g", "members": ["h"]}, {"name": "h", "members": ["g"]}),
        r"my\.yaml: groups\[0\]\.members: .*'g' contain itself",
    ),
    (
        with_groups({"name": "g", "members": ["b"]}, {"name": "h", "members": ["b-1", "a"]}),
        r"my\.yaml: groups\[1\]\.members: .*'b-1', which is in 'g' too",
    ),
    (
        with_groups({"name": "g", "members": ["h"]}, {"name": "i", "members": ["h"]}, {"name": "h", "members": ["a"]}),
        r"my\.yaml: groups\[1\]\.members: .*'h', which is in 'g' too",
    ),
    (
        with_groups(
            {"name": "g0", "members": ["a"]},
            *({"name": f"g{i}", "members": [f"g{i - 1}"]} for i in range(1, 20)),
        ),
        r"my\.yaml: groups\[0\]\.members: .*more than 16 nested groups",
    ),
    (
        with_groups({"name": "g", "members": ["a"], "uplink_gb_per_s": 0}),
        r"groups\[0\]\.uplink_gb_per_s: 0 is",
    ),
    (with_links({"between": ["a", "c"]}), r"links\[0\]\.between: .*names 'c', which is no machine"),
    (with_links({"between": ["a", "g"]}), r"links\[0\]\.between: .*names 'g', which is no machine"),
    (with_links({"between": ["a"]}), r"links\[0\]\.between: \['a'\] is not a pair"),
    (with_links({"between": "ab"}), r"links\[0\]\.between: 'ab' is not a list"),
    (with_links({"between": ["a", "a"]}), r"links\[0\]\.between: .*a machine with itself"),
    (with_links({"from": "b-0", "to": "b-0"}), r"links\[0\]\.to: 'b-0' links a machine with itself"),
    (with_links({"from": "a"}), r"links\[0\]\.to: is missing"),
    (with_links({"from": "a", "to": 3}), r"links\[0\]\.to: 3 names 3, which is no machine"),
    (with_links({"between": ["a", "b"], "from": "a"}), r"links\[0\]\.from: unknown key"),
    (
        with_links({"between": ["a", "b"]}, {"from": "b-1", "to": "a"}),
        r"links\[1\]\.from: .*has a link already",
    ),
    ({**two(), "links": [{"between": ["a", "b"]}]}, r"links\[0\]\.bandwidth_gb_per_s: is missing"),
    ({**two(), "gpus": {"my_gpu": {"tflops": 80}}}, r"my\.yaml: gpus\.my_gpu\.memory_gib: is missing"),
    ({**two(), "gpus": {"My GPU": {}}}, r"my\.yaml: gpus\.My GPU: "),
]


@pytest.mark.parametrize(("data", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors_are_one_line_with_file_and_key(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read(data)
    text = str(caught.value)
    assert text.startswith("my.yaml: ")
    assert "\n" not in text
    assert len(text) < 700


def test_too_many_linked_pairs() -> None:
    data = with_links({"between": ["a", "b"]})
    data["machines"][0]["count"] = data["machines"][1]["count"] = 2000
    with pytest.raises(InputError, match=r"links\[0\]\.between: .*linked machine pairs"):
        read(data)


LINK_ENDS = st.tuples(*[st.sampled_from(["a", "a-0", "a-1", "b", "b-0", "c"])] * 2)


@given(st.lists(LINK_ENDS, max_size=5), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_machine_pair_has_one_link_at_most(ends: list[tuple[str, str]], both: bool) -> None:
    """The check on names agrees with listing all the machine pairs."""
    data = two(count=2)
    data["machines"].append({"name": "c", "gpu": "t4", "num_gpus": 1})
    data["links"] = [
        {"bandwidth_gb_per_s": 1, **({"between": [x, y]} if both else {"from": x, "to": y})} for x, y in ends
    ]
    of = {"a": ("a-0", "a-1"), "b": ("b-0", "b-1")}
    listed = []
    for x, y in ends:
        pairs = {(i, j) for i in of.get(x, (x,)) for j in of.get(y, (y,)) if i != j}
        listed += sorted(pairs | {(j, i) for i, j in pairs} if both else pairs)
    with_itself = any(x == y and x not in of for x, y in ends)
    if len(set(listed)) < len(listed) or with_itself:
        with pytest.raises(InputError):
            read(data)
    else:
        read(data)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.floats()
    | st.sampled_from(["a", "b", "b-0", "rtx_3090", "t4", "x:y", "", "\ud800", "é"])
)
KEYS = st.sampled_from(
    [
        *("name", "inter_machine", "machines", "groups", "links", "gpus", "profile", "synthetic"),
        *("bandwidth_gb_per_s", "gpu", "num_gpus", "intra_bandwidth_gb_per_s", "intra_links", "count", "to"),
        *("network_interfaces", "members", "between", "from", "uplink_gb_per_s", "nic_bandwidth_gb_per_s"),
        *("latency_us", "num_machines", "mix", "seed", "t4", "tflops", "memory_gib"),
    ]
)
JSON_LIKE = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | SCALARS, inner, max_size=4),
    max_leaves=12,
)


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every container and key of nested data."""
    found = []
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        found += [(data, key), *places(value)]
    return found


def only_input_errors(data: Any) -> None:
    """`data` is a cluster that round-trips, or is refused in one line; anything else is an error here."""
    message = None
    try:
        cluster = read(data)
    except InputError as error:
        message = str(error)
    if message is None:
        assert read(cluster_to_dict(cluster)) == cluster
        assert len(cluster.network.capacity) >= 2
    else:
        assert message.startswith("my.yaml")
        assert "\n" not in message


@given(JSON_LIKE)
@settings(max_examples=150, deadline=None)
def test_arbitrary_data_is_refused_or_read(data: Any) -> None:
    only_input_errors(data)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_files_are_refused_or_read(source: st.DataObject) -> None:
    data = example()
    for _ in range(source.draw(st.integers(1, 3))):
        found = places(data)
        container, key = found[source.draw(st.integers(0, len(found) - 1))]
        if source.draw(st.booleans()):
            container[key] = source.draw(JSON_LIKE)
        elif isinstance(container, dict):
            container[source.draw(KEYS)] = container.pop(key)
        else:
            container.append(container[key])
    only_input_errors(data)


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
    with pytest.raises(InputError, match=r"^constraints: 'e' is no machine of the cluster"):
        cluster.devices_named("e", "constraints")


def test_hints_stay_short_in_large_clusters() -> None:
    data = two(count=5000)
    with pytest.raises(InputError) as caught:
        read(data).device_index("zzz:0")
    assert len(str(caught.value)) < 500
