"""The network: rates and routes by hand, and the cost of large clusters (test_cluster.py has random ones)."""

from typing import Any

import numpy as np
import pytest

from hexiopt.cost.executors.network_load import load_of
from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section, cluster_to_dict
from hexiopt.problem.cluster import Cluster
from hexiopt.reading import Section
from tests.timing import within


def read(data: Any) -> Cluster:
    return cluster_from_section(Section(data, "my.yaml"))


def racks() -> Cluster:
    """Two racks in zone z (each machine two GPUs), a machine outside, and a slow link from e to c-1.

    z (uplink 4 GB/s, 100 µs): rack r (uplink 6, 10 µs) of c-0, c-1 and rack s (uplink 5) of d. Outside: e.
    """
    machine = {"gpu": "rtx_3090", "num_gpus": 2, "intra_bandwidth_gb_per_s": 12}
    return read(
        {
            "name": "racks",
            "inter_machine": {"bandwidth_gb_per_s": 10, "latency_us": 20},
            "machines": [
                {"name": "c", "count": 2, "network_interfaces": 2, **machine},
                {"name": "d", "nic_bandwidth_gb_per_s": 5.5, **machine},
                {"name": "e", "nic_latency_us": 30, **machine},
            ],
            "groups": [
                {"name": "z", "members": ["r", "s"], "uplink_gb_per_s": 4, "latency_us": 100},
                {"name": "r", "members": ["c"], "uplink_gb_per_s": 6, "latency_us": 10},
                {"name": "s", "members": ["d"], "uplink_gb_per_s": 5},
            ],
            "links": [
                {"from": "e", "to": "c-1", "bandwidth_gb_per_s": 1, "latency_us": 1000},
                {"between": ["c-0", "c-1"], "bandwidth_gb_per_s": 40},
            ],
        }
    )


def test_rates_and_latencies_by_hand() -> None:
    network = racks().network
    gb = [
        [
            12,
            10,
            5,
            4,
        ],  # c-0: to c-1 a link wider than the interfaces; to d both racks' uplinks; to e the zone's
        [10, 12, 5, 4],
        [5, 5, 12, 4],
        [4, 1, 4, 12],  # e to c-1 by the slow link
    ]
    us = [
        [10, 20, 30, 140],  # racks r and s cost 10 + 0, the zone 100, machine e 30
        [20, 10, 30, 140],
        [30, 30, 10, 130],
        [140, 1110, 130, 10],
    ]
    np.testing.assert_allclose(network.bandwidth, np.array(gb) * 1e9)
    np.testing.assert_allclose(network.latency_s, np.array(us) * 1e-6)


def test_routes_and_capacities_by_hand() -> None:
    cluster = racks()
    network = cluster.network
    names = [network.resource_name(r) for r in range(network.num_resources)]
    assert names == [
        *("c-0 interface 0 transmit", "c-0 interface 1 transmit", "c-1 interface 0 transmit"),
        *("c-1 interface 1 transmit", "d interface 0 transmit", "e interface 0 transmit"),
        *("c-0 interface 0 receive", "c-0 interface 1 receive", "c-1 interface 0 receive"),
        *("c-1 interface 1 receive", "d interface 0 receive", "e interface 0 receive"),
        *("z uplink out", "z uplink in", "r uplink out", "r uplink in", "s uplink out", "s uplink in"),
        *("link e to c-1", "link c-0 to c-1", "link c-1 to c-0"),
    ]
    interfaces = [10, 10, 10, 10, 5.5, 10]
    capacities = [*interfaces, *interfaces, 4, 4, 6, 6, 5, 5, 1, 40, 40]
    np.testing.assert_allclose(network.capacity, np.array(capacities) * 1e9)

    def route(a: str, b: str) -> list[str]:
        return [names[r] for r in network.route(cluster.device_index(a), cluster.device_index(b))]

    assert route("c-0:1", "c-1:0") == [
        "c-0 interface 1 transmit",
        "link c-0 to c-1",
        "c-1 interface 0 receive",
    ]
    assert route("c-1:1", "d:0") == [
        *("c-1 interface 1 transmit", "r uplink out", "s uplink in", "d interface 0 receive")
    ]
    assert route("d:1", "e:0") == [
        "d interface 0 transmit",
        "s uplink out",
        "z uplink out",
        "e interface 0 receive",
    ]
    assert route("e:1", "c-1:0") == [
        *("e interface 0 transmit", "link e to c-1", "z uplink in", "r uplink in", "c-1 interface 0 receive")
    ]
    assert route("c-1:0", "e:0") == [
        *("c-1 interface 0 transmit", "r uplink out", "z uplink out", "e interface 0 receive")
    ]
    with pytest.raises(IndexError):
        network.resource_name(network.num_resources)


def test_pairs_inside_a_machine() -> None:
    network = racks().network
    assert network.pair_bandwidth(0, 1) == 12e9
    assert network.pair_latency(0, 1) == pytest.approx(10e-6)
    assert network.pair_bandwidth(0, 0) == np.inf
    assert network.pair_latency(0, 0) == 0


def test_links_between_all_machines_of_a_spec() -> None:
    machine = {"gpu": "rtx_3090", "num_gpus": 2, "intra_bandwidth_gb_per_s": 12, "count": 3}
    cluster = read(
        {
            "name": "x",
            "inter_machine": {"bandwidth_gb_per_s": 10},
            "machines": [{"name": "d", **machine}, {"name": "e", **machine}],
            "links": [
                {"between": ["d", "d"], "bandwidth_gb_per_s": 2},
                {"from": "e", "to": "d", "bandwidth_gb_per_s": 1},
            ],
        }
    )
    expected = np.full((6, 6), 10.0)
    expected[:3, :3] = 2
    expected[3:, :3] = 1
    np.fill_diagonal(expected, 12)
    np.testing.assert_allclose(cluster.network.bandwidth, expected * 1e9)
    routes = {cluster.network.route(a, b)[1:-1] for a in range(0, 12, 2) for b in range(0, 12, 2) if a != b}
    assert len(routes) == 6 + 9 + 1  # each ordered pair with a link has its own resource; others cross none


def large(num_racks: int) -> Cluster:
    machine = {
        "gpu": "a100_80gb_sxm",
        "num_gpus": 8,
        "intra_bandwidth_gb_per_s": 300,
        "network_interfaces": 8,
    }
    per_rack = 1280 // num_racks
    return read(
        {
            "name": "large",
            "inter_machine": {"bandwidth_gb_per_s": 25},
            "machines": [{"name": f"m{r}", "count": per_rack, **machine} for r in range(num_racks)],
            "groups": [{"name": f"rack{r}", "members": [f"m{r}"], "uplink_gb_per_s": 100} for r in range(num_racks)],
            "links": [{"between": ["m0", "m1"], "bandwidth_gb_per_s": 1}],
        }
    )


def test_ten_thousand_gpus() -> None:
    network = within(2.0, lambda: large(40).network)
    assert network.bandwidth.shape == network.latency_s.shape == (1280, 1280)
    assert network.bandwidth.nbytes + network.latency_s.nbytes < 100e6
    assert network.bandwidth[0, 32] == 1e9
    assert network.bandwidth[0, 1279] == 25e9


def test_too_many_machines_for_tables() -> None:
    machine = {"name": "m", "gpu": "t4", "num_gpus": 1, "count": 20_000}
    cluster = read({"name": "x", "inter_machine": {"bandwidth_gb_per_s": 1}, "machines": [machine]})
    assert cluster.network.pair_bandwidth(0, 19_999) == 1e9
    with pytest.raises(InputError, match="more than the 16384"):
        _ = cluster.network.bandwidth


def test_arrays_are_read_only() -> None:
    cluster = racks()
    for array in (cluster.network.capacity, cluster.network.bandwidth, cluster.machine_of):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_members_of_a_group_share_what_lies_between_them_in_both_directions() -> None:
    parts = [{"name": name, "gpu": "rtx_3090", "num_gpus": 1, "host": "pc"} for name in "abc"]
    outside = {"name": "d", "gpu": "rtx_3090", "num_gpus": 1}
    pc = {"name": "pc", "members": ["a", "b", "c"], "uplink_gb_per_s": 1, "shared_gb_per_s": 8}
    text = {"name": "x", "inter_machine": {"bandwidth_gb_per_s": 12}, "machines": [*parts, outside], "groups": [pc]}
    cluster = read(text)
    network = cluster.network
    names = [network.resource_name(r) for r in range(network.num_resources)]
    assert [names[r] for r in network.route(0, 1)] == ["a interface 0 transmit", "pc inside", "b interface 0 receive"]
    assert [names[r] for r in network.route(0, 3)] == [
        "a interface 0 transmit",
        "pc uplink out",
        "d interface 0 receive",
    ]
    assert network.pair_bandwidth(0, 1) == network.bandwidth[0, 1] == 8e9
    assert network.pair_bandwidth(0, 3) == network.bandwidth[0, 3] == 1e9
    assert network.capacity[names.index("pc inside")] == 8e9
    assert read(cluster_to_dict(cluster)) == cluster
    # Two transfers at once, one each way: each needs an eighth of a second of the same thing, for half of the time.
    load, _ = load_of(network, [(0, 1, 1e9), (1, 0, 1e9)], receivers=True)
    assert max(load.values()) == load[names.index("pc inside")] == pytest.approx(2 / 8)
