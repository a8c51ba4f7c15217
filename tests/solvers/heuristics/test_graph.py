"""The device graph and METIS's partition of it."""

import os
import random
from typing import Any

import numpy as np
import pytest

from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.reading import Section
from solvers.heuristics.graph import DeviceGraph, device_graph, partition_graph, scaled
from tests.solvers import problems


def bridged_cluster() -> Cluster:
    """A machine with one NVLink bridge, and another without."""
    machine: dict[str, Any] = {"gpu": "rtx_3090", "num_gpus": 4, "intra_bandwidth_gb_per_s": 12}
    bridge = {"between": [1, 2], "bandwidth_gb_per_s": 50}
    data = {
        "name": "bridged",
        "inter_machine": {"bandwidth_gb_per_s": 3, "latency_us": 20},
        "machines": [{"name": "a", **machine, "intra_links": [bridge]}, {"name": "b", **machine}],
    }
    return cluster_from_section(Section(data, "bridged.yaml"))


def test_scaled_keeps_ratios() -> None:
    """25 and 600 GB/s must not look alike, whatever the unit; nothing becomes zero."""
    for unit in (1e-9, 1.0, 1e9):
        slow, fast = scaled(np.array([25.0, 600.0]) * unit)
        assert slow / fast == pytest.approx(25 / 600, rel=2e-3)
    reciprocal = scaled(1 / np.array([25e9, 600e9]))
    assert reciprocal[0] / reciprocal[1] == pytest.approx(600 / 25, rel=2e-3)
    assert scaled(np.array([1.0, 1e9])).min() == 1
    assert scaled(np.zeros(3)).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    "problem",
    [
        Problem(bridged_cluster(), problems.TINY),
        Problem(bridged_cluster(), problems.TINY, space=Space(exclude=("a:1", "b:0"))),
        problems.easy(),
        problems.slow_network(),
    ],
    ids=["bridged", "excluded", "easy", "slow_network"],
)
def test_graph_says_what_the_network_says(problem: Problem) -> None:
    graph = device_graph(problem)
    assert graph.devices == problem.usable_devices
    for i, a in enumerate(graph.devices):
        gpu = problem.cluster.gpu_of(a)
        assert graph.speed[i] == gpu.peak_flops(problem.workload.precision)
        for j, b in enumerate(graph.devices):
            expected = problem.cluster.network.pair_bandwidth(a, b) if a != b else 0.0
            assert graph.bandwidth[i, j] == expected, (a, b)


def test_subset() -> None:
    graph = device_graph(problems.easy())
    part = graph.subset([5, 0])
    assert part.devices == (graph.devices[5], graph.devices[0])
    assert part.speed.tolist() == [graph.speed[5], graph.speed[0]]
    assert part.bandwidth[0, 1] == graph.bandwidth[5, 0]


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8, 9, 16, 31, 32, 40])
def test_partition_covers_all_devices_once(parts: int) -> None:
    graph = device_graph(problems.thirty_two_gpus())
    for seed in range(3):
        groups = partition_graph(graph, parts, graph.bandwidth, seed)
        assert sorted(position for members in groups for position in members) == list(range(32))
        assert all(groups)
        assert len(groups) <= parts
        assert partition_graph(graph, parts, graph.bandwidth, seed) == groups


def test_partition_finds_the_machines() -> None:
    """Four machines of equal speed, thin links between: cutting little bandwidth keeps machines whole."""
    bandwidth = np.ones((16, 16))
    for machine in range(4):
        bandwidth[4 * machine : 4 * machine + 4, 4 * machine : 4 * machine + 4] = 50.0
    np.fill_diagonal(bandwidth, 0.0)
    graph = DeviceGraph(tuple(range(16)), np.full(16, 1e14), bandwidth)
    groups = partition_graph(graph, 4, bandwidth, 0)
    assert sorted(groups) == [[4 * m, 4 * m + 1, 4 * m + 2, 4 * m + 3] for m in range(4)]


def test_partition_balances_speed() -> None:
    """One GPU as fast as four others: in two parts it stands alone, or nearly so."""
    graph = DeviceGraph(tuple(range(5)), np.array([4e14, 1e14, 1e14, 1e14, 1e14]), np.ones((5, 5)))
    groups = partition_graph(graph, 2, graph.bandwidth, 0)
    speeds = sorted(sum(graph.speed[i] for i in members) for members in groups)
    assert len(groups) == 2
    assert speeds[0] >= 3e14


def test_no_partition_is_empty_or_makes_metis_complain(capfd: pytest.CaptureFixture[str]) -> None:
    """METIS prints to the terminal where it has too few vertices, and where a few weigh most: it is not asked then, or
    not heard."""
    rng = random.Random(0)
    graph = device_graph(problems.easy())
    for _ in range(400):
        count = rng.randint(1, len(graph.devices))
        part = graph.subset(sorted(rng.sample(range(len(graph.devices)), count)))
        parts = rng.randint(1, count)
        drawn = [rng.uniform(0.4, 1.6) for _ in range(parts)]
        shares = [share / sum(drawn) for share in drawn] if rng.random() < 0.5 else None
        groups = partition_graph(
            part, parts, part.bandwidth, rng.randrange(99), shares=shares, exponent=rng.choice((0, 1))
        )
        assert sorted(i for members in groups for i in members) == list(range(count))
        assert all(groups)
        assert 2 * parts <= count or len(groups) == parts
    heavy = DeviceGraph(tuple(range(7)), np.array([1e12, 1e12, 1e12, 1e13, 1e14, 1e13, 1e12]), np.ones((7, 7)))
    assert partition_graph(heavy, 3, heavy.bandwidth, 242, shares=[0.5783, 0.2536, 0.1681], exponent=1.0)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_a_partition_needs_no_standard_output() -> None:
    """As of a process that closed it."""
    graph = device_graph(problems.easy())
    stdout_copy = os.dup(1)
    os.close(1)
    try:
        groups = partition_graph(graph, 2, graph.bandwidth, 0)
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)
    assert sorted(i for members in groups for i in members) == list(range(len(graph.devices)))
