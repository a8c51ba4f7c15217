"""The load of the network: few transfers one by one and many at once say the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.executors.network_load import LinkLoads, load_of
from hexiopt.problem.cluster import Cluster
from tests.strategies import LAB, clusters

Transfers = list[tuple[int, int, float]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Cluster, Transfers]:
    """Transfers of some bytes between different devices, several between two perhaps."""
    cluster = draw((clusters() | st.just(LAB)).filter(lambda cluster: cluster.num_devices > 1))
    pairs = st.lists(st.integers(0, cluster.num_devices - 1), min_size=2, max_size=2, unique=True)
    sent = draw(st.lists(st.tuples(pairs, st.floats(1.0, 1e9)), min_size=1, max_size=12))
    return cluster, [(a, b, num_bytes) for (a, b), num_bytes in sent]


@given(case=cases())
def test_many_at_once_take_what_each_takes(case: tuple[Cluster, Transfers]) -> None:
    cluster, transfers = case
    load, crossings = load_of(cluster.network, transfers, receivers=True)
    each = [max(load[resource] for resource, _ in crossed) + latency_s for latency_s, crossed in crossings]
    senders, receivers = (np.array([transfer[k] for transfer in transfers]) for k in (0, 1))
    links, num_bytes = LinkLoads.of(cluster, senders, receivers), np.array([[transfer[2] for transfer in transfers]])
    assert links.seconds(num_bytes)[0] == pytest.approx(each, rel=1e-12)


@given(case=cases())
def test_a_port_is_charged_inside_a_machine_alone_and_its_receiver_where_asked(case: tuple[Cluster, Transfers]) -> None:
    cluster, transfers = case
    both, _ = load_of(cluster.network, transfers, receivers=True)
    senders, crossings = load_of(cluster.network, transfers, receivers=False)
    assert senders == {resource: seconds for resource, seconds in both.items() if resource >= 0 or resource % 2}
    for (a, b, _), (_, crossed) in zip(transfers, crossings, strict=True):
        inside = cluster.machine_of[a] == cluster.machine_of[b]
        assert [resource for resource, _ in crossed] == [-1 - 2 * a] if inside else len(crossed) >= 2
