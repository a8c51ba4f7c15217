"""Cluster files that are wrong: one line with file and key, whatever they hold."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_to_dict
from tests.hexiopt.files.clusters import example, read, two


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
    ({**two(), "profile": "measured.json"}, r"my\.yaml: profile: measured\.json: the file does not exist"),
    ({**two(), "profile": {"format": "other"}}, r"my\.yaml: profile\.format: 'other'"),
    ({**two(), "profile": 3}, r"my\.yaml: profile: 3 is not a mapping"),
    ({**two(), "inter_machine": {}}, r"my\.yaml: inter_machine\.bandwidth_gb_per_s: is missing"),
    ({**two(), "inter_machine": {"bandwidth_gb_per_s": None}}, r"inter_machine\.bandwidth_gb_per_s: .*null"),
    ({**two(), "inter_machine": {"bandwidth_gb_per_s": 0}}, r"inter_machine\.bandwidth_gb_per_s: 0 is out"),
    ({**two(), "inter_machine": {"bandwidth_gb_per_s": 1e6}}, r"inter_machine\.bandwidth_gb_per_s: 1000000"),
    (
        {**two(), "inter_machine": {"bandwidth_gb_per_s": 1, "latency_us": -1}},
        r"my\.yaml: inter_machine\.latency_us: -1 is out of range",
    ),
    (two(name="a:b"), r"my\.yaml: machines\[0\]\.name: 'a:b' is not a name"),
    (two(name="b"), r"my\.yaml: machines\[1\]\.name: 'b' appears twice"),
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
    (two(network_interfaces=1025), r"machines\[0\]\.network_interfaces: 1025 is out of range"),
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
    (intra([0, 1], [1, 0]), r"machines\[0\]\.intra_links\[1\]\.between: \[1, 0\] appears twice"),
    (with_groups({"name": "a", "members": ["b"]}), r"groups\[0\]\.name: 'a' appears twice"),
    (with_groups({"name": "g", "members": []}), r"groups\[0\]\.members: \[\] is empty"),
    (
        with_groups({"name": "g", "members": ["bb"]}),
        r"groups\[0\]\.members: .*not a machine or group; did you m",
    ),
    (with_groups({"name": "g", "members": [1]}), r"groups\[0\]\.members: .*has 1, which is not a machine"),
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
    (with_links({"between": ["a", "c"]}), r"links\[0\]\.between: .*names 'c', which is not a machine"),
    (with_links({"between": ["a", "g"]}), r"links\[0\]\.between: .*names 'g', which is not a machine"),
    (with_links({"between": ["a"]}), r"links\[0\]\.between: \['a'\] is not a pair"),
    (with_links({"between": "ab"}), r"links\[0\]\.between: 'ab' is not a list"),
    (with_links({"between": ["a", "a"]}), r"links\[0\]\.between: .*a machine with itself"),
    (with_links({"from": "b-0", "to": "b-0"}), r"links\[0\]\.to: 'b-0' links a machine with itself"),
    (with_links({"from": "a"}), r"links\[0\]\.to: is missing"),
    (with_links({"from": "a", "to": 3}), r"links\[0\]\.to: 3 names 3, which is not a machine"),
    (with_links({"between": ["a", "b"], "from": "a"}), r"links\[0\]\.from: unknown key"),
    (
        with_links({"between": ["a", "b"]}, {"from": "b-1", "to": "a"}),
        r"links\[1\]\.from: .*already has a link",
    ),
    ({**two(), "links": [{"between": ["a", "b"]}]}, r"links\[0\]\.bandwidth_gb_per_s: is missing"),
    ({**two(), "gpus": {"my_gpu": {"tflops": 80}}}, r"my\.yaml: gpus\.my_gpu\.memory_gib: is missing"),
    ({**two(), "gpus": 8}, r"my\.yaml: gpus: 8 is not a mapping of GPU types .* num_gpus and count of each machine"),
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
def test_arbitrary_data_is_refused_or_read(data: Any) -> None:
    only_input_errors(data)


@given(st.data())
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
