"""Cluster files that are wrong: one line with file and key, whatever they hold; the lines are in `tests/golden`."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_to_dict
from tests.hexiopt.files.clusters import example, read, two


def with_links(*links: dict[str, Any]) -> dict[str, Any]:
    return {**two(), "links": [{"bandwidth_gb_per_s": 1, **link} for link in links]}


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
    all_places = []
    entries = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in entries:
        all_places += [(data, key), *places(value)]
    return all_places


def only_input_errors(data: Any) -> None:
    """`data` is a cluster that round-trips, or is refused in one line; anything else is an error here."""
    try:
        cluster = read(data)
    except InputError as error:
        assert str(error).startswith("my.yaml")  # noqa: PT017
    else:
        assert read(cluster_to_dict(cluster)) == cluster
        assert len(cluster.network.capacity) >= 2


@given(JSON_LIKE)
def test_arbitrary_data_is_refused_or_read(data: Any) -> None:
    only_input_errors(data)


@given(st.data())
def test_damaged_files_are_refused_or_read(source: st.DataObject) -> None:
    data = example()
    for _ in range(source.draw(st.integers(1, 3))):
        entries = places(data)
        container, key = entries[source.draw(st.integers(0, len(entries) - 1))]
        if source.draw(st.booleans()):
            container[key] = source.draw(JSON_LIKE)
        elif isinstance(container, dict):
            container[source.draw(KEYS)] = container.pop(key)
        else:
            container.append(container[key])
    only_input_errors(data)
