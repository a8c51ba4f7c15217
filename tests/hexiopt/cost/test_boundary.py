"""Messages between stages: who sends what, what crosses, and what is shared."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.executors.network_load import PlacedMessage, Route, executor_loads
from hexiopt.cost.executors.routes import overlaps, route
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.plan.messages import Message
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from tests.strategies import clusters


def cluster_of(*sizes: int, **common: Any) -> Cluster:
    """Machines a, b, ... of `sizes` GPUs; 10 GB/s inside, 1 GB/s and no latency outside."""
    machine = {"gpu": "rtx_3090", "intra_bandwidth_gb_per_s": 10, "intra_latency_us": 3, **common}
    return cluster_from_section(
        Section(
            {
                "name": "c",
                "inter_machine": {"bandwidth_gb_per_s": 1, "latency_us": 0},
                "machines": [{"name": "abcdef"[k], "num_gpus": n, **machine} for k, n in enumerate(sizes)],
            },
            "test",
        )
    )


MODEL = ModelSpec(
    name="m",
    architecture="llama",
    num_layers=6,
    hidden_size=500,
    num_heads=4,
    num_kv_heads=4,
    head_dim=4,
    ffn_size=8,
    vocab_size=10,
    max_positions=1000,
)


def model_of(cluster: Cluster, global_batch: int) -> PlanPricer:
    """A message is 1 MB: 1,000 tokens of 500 numbers of two bytes."""
    return PlanPricer(Problem(cluster, MODEL, Workload(global_batch=global_batch, seq_len=1000)))


@given(st.integers(1, 40), st.integers(1, 40))
def test_overlaps_cut_the_message_into_exactly_what_both_sides_hold(senders: int, receivers: int) -> None:
    parts = list(overlaps(senders, receivers))
    share_by_pair = {(i, j): share for i, j, share in parts}
    assert len(share_by_pair) == len(parts)
    for i in range(senders):
        for j in range(receivers):
            start = max(Fraction(i, senders), Fraction(j, receivers))
            end = min(Fraction(i + 1, senders), Fraction(j + 1, receivers))
            if end > start:
                assert share_by_pair.pop((i, j)) == float(end - start)
    assert not share_by_pair
    assert sum(share for *_, share in parts) == pytest.approx(1.0, rel=1e-12)


@given(cluster=clusters(), data=st.data())
def test_one_message_crosses_between_two_machines(cluster: Cluster, data: st.DataObject) -> None:
    """Whatever the TP degrees, the interfaces of both machines and every link and uplink carry it once."""
    if len(cluster.machines) < 2:
        return
    a, b = data.draw(st.permutations(range(len(cluster.machines))))[:2]
    ends = []
    for m in (a, b):
        first, count = int(cluster.first_device[m]), cluster.machines[m].num_gpus
        devices = data.draw(st.permutations(range(first, first + count)))
        ends.append(tuple(devices[: data.draw(st.integers(1, count))]))
    way = route(cluster, *ends)
    network = cluster.network
    crossing = {r: s * float(network.capacity[r]) for r, s in way.shared}
    sides = [
        {network.transmit_interface(d) for d in ends[0]},
        {network.receive_interface(d) for d in ends[1]},
    ]
    for interfaces in sides:
        assert sum(crossing.pop(r) for r in interfaces) == pytest.approx(1.0)
    assert list(crossing.values()) == pytest.approx([1.0] * len(crossing))
    assert way.port_s_per_byte == 0.0


def test_a_message_inside_a_machine_uses_the_ports_of_its_senders() -> None:
    cluster = cluster_of(4)
    # Ranks 0 and 1 hold halves; the receiver takes both at once.
    assert route(cluster, (0, 1), (2,)).alone_s(1e9) == pytest.approx(0.05 + 3e-6)
    # One sender gives two halves one after another.
    assert route(cluster, (0,), (2, 3)).alone_s(1e9) == pytest.approx(0.1 + 3e-6)


def test_uneven_degrees_by_hand() -> None:
    """3 ranks to 2: thirds to halves, so rank 1 sends a sixth to each. Machine a has an interface per GPU."""
    cluster = cluster_of(3, 2, network_interfaces=1)
    (transmit, alone), *others = route(cluster, (0, 1, 2), (3, 4)).shared
    assert (transmit, alone) == (0, pytest.approx(1e-9))
    assert [s for _, s in others] == pytest.approx([1e-9])


def test_two_pipelines_over_one_interface_take_twice_as_long() -> None:
    cluster = cluster_of(2, 2)
    lone = Plan((Pipeline((Stage.of((0,), 0, 3), Stage.of((2,), 3, 6)), 2),))
    both = Plan(
        (
            Pipeline((Stage.of((0,), 0, 3), Stage.of((2,), 3, 6)), 2),
            Pipeline((Stage.of((1,), 0, 3), Stage.of((3,), 3, 6)), 2),
        )
    )
    (alone,) = model_of(cluster, 2).price(lone).pipelines
    shared = model_of(cluster, 4).price(both).pipelines
    assert alone.send_forward_s == alone.send_backward_s == pytest.approx((1e-3,))
    for pipeline in shared:
        assert pipeline.send_forward_s == pytest.approx((2e-3,))
        assert pipeline.send_backward_s == pytest.approx((2e-3,))


def test_pipelines_that_share_nothing_do_not_slow_each_other() -> None:
    cluster = cluster_of(1, 1, 1, 1)
    plan = Plan(
        (
            Pipeline((Stage.of((0,), 0, 3), Stage.of((1,), 3, 6)), 2),
            Pipeline((Stage.of((2,), 0, 3), Stage.of((3,), 3, 6)), 2),
        )
    )
    for pipeline in model_of(cluster, 4).price(plan).pipelines:
        assert pipeline.send_forward_s == pytest.approx((1e-3,))


def test_own_interfaces_separate_pipelines_of_one_machine() -> None:
    cluster = cluster_of(2, 2, network_interfaces=2)
    plan = Plan(
        (
            Pipeline((Stage.of((0,), 0, 3), Stage.of((2,), 3, 6)), 2),
            Pipeline((Stage.of((1,), 0, 3), Stage.of((3,), 3, 6)), 2),
        )
    )
    for pipeline in model_of(cluster, 4).price(plan).pipelines:
        assert pipeline.send_forward_s == pytest.approx((1e-3,))


def test_messages_of_one_stage_share_its_interface_when_they_meet() -> None:
    """The middle machine sends to c and to a by turns, and receives from both now and then at once: then each takes
    longer, alone 1 ms."""
    cluster = cluster_of(1, 1, 1)
    plan = Plan((Pipeline((Stage.of((0,), 0, 2), Stage.of((1,), 2, 4), Stage.of((2,), 4, 6)), 3),))
    (priced,) = model_of(cluster, 3).price(plan).pipelines
    assert priced.send_forward_s == pytest.approx((1e-3, 4e-3 / 3))
    assert priced.send_backward_s == pytest.approx((4e-3 / 3, 1e-3))


def test_a_pipeline_that_returns_to_a_machine_shares_its_interface_with_itself() -> None:
    """Stages a, b, a, b: machine a transmits for stages 0 and 2, machine b for stages 1 and 3, now and then at once."""
    cluster = cluster_of(2, 2)
    stages = tuple(Stage.of((d,), k, k + 1) for k, d in enumerate((0, 2, 1)))
    plan = Plan((Pipeline((*stages, Stage.of((3,), 3, 6)), 3),))
    (priced,) = model_of(cluster, 3).price(plan).pipelines
    assert all(1e-3 <= seconds < 2e-3 for seconds in priced.send_forward_s)
    assert max(priced.send_forward_s) > 1.1e-3


def test_a_senders_load_takes_the_larger_direction() -> None:
    cluster = cluster_of(1, 1, 1)
    ahead, back = route(cluster, (1,), (2,)), route(cluster, (1,), (0,))
    transmit = cluster.network.transmit_interface(1)
    sent = (Message(False, 1, 0, 0, 1), ahead, 1e9), (Message(True, 1, 0, 0, 1), back, 3e9)
    load = dict(executor_loads([PlacedMessage(*message) for message in sent]))
    assert load[transmit] == pytest.approx(3.0)
    assert load[cluster.network.receive_interface(2)] == pytest.approx(1.0)
    assert load[cluster.network.receive_interface(0)] == pytest.approx(3.0)


def test_the_slowest_resource_and_the_longest_latency_count() -> None:
    cluster = cluster_from_section(
        Section(
            {
                "name": "c",
                "inter_machine": {"bandwidth_gb_per_s": 1, "latency_us": 20},
                "machines": [
                    {"name": "a", "gpu": "t4", "num_gpus": 1},
                    {"name": "b", "gpu": "t4", "num_gpus": 1, "nic_bandwidth_gb_per_s": 0.5},
                ],
                "groups": [{"name": "g", "members": ["a"], "uplink_gb_per_s": 0.25, "latency_us": 100}],
            },
            "test",
        )
    )
    assert route(cluster, (0,), (1,)).alone_s(1e9) == pytest.approx(4.0 + 120e-6)


def test_an_unlimited_interface_takes_no_time() -> None:
    """Machines of a cluster that states no network: messages cost their latency only."""
    free_route = Route(shared=((3, 0.0),), port_s_per_byte=0.0, latency_s=1e-5)
    sent = PlacedMessage(Message(False, 0, 0, 0, 1), free_route, 1e6)
    load = dict(executor_loads([sent]))
    assert load == {3: 0.0}
    assert sent.seconds(load) == 1e-5
