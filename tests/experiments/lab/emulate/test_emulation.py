"""Emulated clusters: the stand-in keeps proportions, ranks keep their pace, links keep their rates."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.app.configurations import named_cluster, named_model
from experiments.lab.emulate import fabric
from experiments.lab.emulate.bench import EmulationBench
from experiments.lab.emulate.fabric import Fabric, network_hindrance
from experiments.lab.emulate.pace import pace_until, read_pace, write_paces
from experiments.lab.emulate.stand_in import divisors, narrow, paces
from hexiopt.cost.executors.compute import optimizer_compute_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.network import Group
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.operation import OperationKind
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.mapping.actions import backward_parts
from runtime.mapping.layout import layout_of
from tests.timing import TRIES

WORKLOAD = Workload(4, 128, precision="fp32", recompute="none", schedule="1f1b", optimizer_sharding="1")


def problem() -> Problem:
    """Two kinds of machines; a decoder of four layers, heads of 32."""
    return Problem(named_cluster("small_mixed"), named_model("tiny"), WORKLOAD)


def plan() -> Plan:
    """Two stages on two machines, the first one of two devices, beside a pipeline of one device."""
    long = Pipeline((Stage.of((0, 1), 0, 3), Stage.of((2,), 3, 4)), 3)
    return Plan((long, Pipeline((Stage.of((3,), 0, 4),), 1)), ONE_F_ONE_B, Sharding(1))


needs_root = pytest.mark.skipif(
    network_hindrance(problem().cluster) is not None, reason=str(network_hindrance(problem().cluster))
)


# ------------------------------------------------------------------ the stand-in


def test_messages_and_gradients_shrink_alike() -> None:
    task = replace(problem(), model=named_model("llama2_7b"), workload=replace(WORKLOAD, seq_len=4096))
    assert max(divisors(task)) == 64
    for divisor in divisors(task):
        small = narrow(task, divisor)
        messages = PlanPricer(task).stages.routes.message_bytes(2) / PlanPricer(small).stages.routes.message_bytes(2)
        assert messages == divisor**2
        assert task.model.num_params / small.model.num_params == pytest.approx(divisor**2, rel=0.02)
        for name in ("num_layers", "num_heads", "num_kv_heads"):
            assert getattr(small.model, name) == getattr(task.model, name)


@pytest.mark.parametrize("divisor", [3, 32])
def test_a_divisor_must_divide(divisor: int) -> None:
    with pytest.raises(
        InputError, match=rf"emulate.divisor: {divisor} does not divide .* choose one of 1, 2, 4, 8, 16$"
    ):
        narrow(problem(), divisor)


# ------------------------------------------------------------------ the pace


def test_paces_are_the_priced_times(tmp_path: Path) -> None:
    task = problem()
    cost = PlanPricer(task).price(plan())
    rank_paces, layout = paces(task, plan(), cost, 10.0), layout_of(plan(), task.model)
    stages = [(0, 0), (0, 0), (0, 1), (1, 0)]
    for rank, (p, s) in enumerate(stages):
        priced = cost.pipelines[p].stages[s]
        assert rank_paces[rank].chunks == ((10 * priced.forward_s, 10 * priced.backward_s),)
        assert rank_paces[rank].operation_s(OperationKind.BACKWARD, 0) == 10 * priced.backward_s
        executor = layout.executor_of[rank]
        count = backward_parts(executor.chunks[0])
        parts = [rank_paces[rank].operation_s(OperationKind.BACKWARD, 0, part) for part in range(count)]
        assert sum(parts) == pytest.approx(10 * priced.backward_s), "beside them gradients are summed"
        assert len(parts) == len(rank_paces[rank].last_parts[0]) == len(rank_paces[rank].first_parts[0])
        assert sum(rank_paces[rank].first_parts[0]) == pytest.approx(10 * priced.forward_s), "and weights gathered"
        gpu = task.cluster.machines[int(task.cluster.machine_of[rank])].gpu
        own_s = optimizer_compute_s(WORKLOAD, gpu, priced.memory.optimizer / WORKLOAD.states.moment)
        assert rank_paces[rank].optimizer_s == pytest.approx(10 * own_s)
    assert rank_paces[0].latency_s == pytest.approx((0.0, 1e-4, 5e-4, 5e-4))
    rank_paces[1] = replace(rank_paces[1], namespace="somewhere")
    write_paces(tmp_path / "paces.json", rank_paces)
    assert [read_pace(tmp_path / "paces.json", rank) for rank in range(4)] == rank_paces


def test_layers_recomputed_together_are_paced_as_one_part() -> None:
    together = replace(Stage.of((0,), 0, 4), recompute=("full", "joined", "joined", "none"))
    joined_plan = Plan((Pipeline((together,), 4),), ONE_F_ONE_B)
    cost = PlanPricer(problem()).price(joined_plan)
    (pace,) = paces(problem(), joined_plan, cost, 1.0)
    (chunk,) = layout_of(joined_plan, problem().model).executor_of[0].chunks
    for parts in (pace.first_parts[0], pace.last_parts[0][::-1]):
        assert len(parts) == backward_parts(chunk) == 4, "embedding, three layers, a layer, head"
        assert parts[1] > 2 * parts[2]


@pytest.mark.parametrize("zero", [2, 3])
def test_units_are_paced_without_what_they_gather_and_scatter(zero: int, tmp_path: Path) -> None:
    """Embedding, four layers and head of two pipelines of one device each, on machines of different speeds."""
    task = replace(problem(), workload=replace(WORKLOAD, optimizer_sharding=str(zero)))
    late = Plan(tuple(Pipeline((Stage.of((d,), 0, 4),), 2) for d in (0, 2)), ONE_F_ONE_B, Sharding(zero))
    alone = Plan((Pipeline((Stage.of((2,), 0, 4),), 4),), ONE_F_ONE_B, Sharding(zero))
    model = PlanPricer(task)
    rank_paces = paces(task, late, model.price(late), 10.0)
    whole = model.price(alone).pipelines[0].stages[0]
    for backward, seconds in enumerate((whole.forward_s, whole.backward_s)):
        kind = (OperationKind.FORWARD, OperationKind.BACKWARD)[backward]
        parts = [rank_paces[1].operation_s(kind, 0, part) for part in range(6)]
        assert sum(parts) == pytest.approx(rank_paces[1].operation_s(kind, 0)) == pytest.approx(10 * seconds)
        assert sum(parts) <= rank_paces[1].chunks[0][backward] * (1 + 1e-12)
        assert parts[2] == parts[3]
        assert parts[-1 if backward else 0] == rank_paces[1].units[0][backward]
    assert rank_paces[0].operation_s(OperationKind.BACKWARD, 0) < rank_paces[1].operation_s(OperationKind.BACKWARD, 0)
    write_paces(tmp_path / "paces.json", rank_paces)
    assert [read_pace(tmp_path / "paces.json", rank) for rank in range(2)] == rank_paces


@pytest.mark.slow
def test_a_step_of_zero_3_takes_as_long_as_its_units(tmp_path: Path) -> None:
    task = replace(problem(), workload=replace(WORKLOAD, optimizer_sharding="3"))
    late = Plan(tuple(Pipeline((Stage.of((d,), 0, 4),), 2) for d in (2, 3)), ONE_F_ONE_B, Sharding(3))
    cost = PlanPricer(task).price(late)
    dilation = 1.0 / cost.step_time_s
    steps = EmulationBench(tmp_path, task, 4, 0).paced_steps(late, cost, 2, dilation, shaped=False)
    units = paces(task, late, cost, 1.0)[0].units
    assert min(steps.seconds) > 2 * sum(forward_s + backward_s for forward_s, backward_s in units)


def test_pace_until_waits_only_for_what_is_left() -> None:
    began = time.time()
    pace_until(began - 5.0, 1.0)
    pace_until(began, 0.2)
    assert time.time() - began >= 0.2


@pytest.mark.slow
def test_a_step_takes_as_long_as_its_operations(tmp_path: Path) -> None:
    """On shaped links where this machine can have them. Never less than the stage that computes longest."""
    task = problem()
    cost, shaped = PlanPricer(task).price(plan()), network_hindrance(task.cluster) is None
    dilation = 1.0 / cost.step_time_s
    steps = EmulationBench(tmp_path, task, 4, 0).paced_steps(plan(), cost, 2, dilation, shaped=shaped)
    assert len(steps.seconds) == 2
    busy_s = max(
        pipeline.num_micro_batches * (stage.forward_s + stage.backward_s)
        for pipeline, priced in zip(plan().pipelines, cost.pipelines, strict=True)
        for stage in priced.stages
    )
    assert busy_s < min(steps.seconds)
    assert max(steps.seconds) < 20 * cost.step_time_s
    assert steps.late >= 0.0


# ------------------------------------------------------------------ the network

_SEND = """
import socket, sys
from experiments.lab.emulate.namespaces import enter
namespace, host, size = sys.argv[1:]
enter(namespace)
sender = socket.create_connection((host, 5000), timeout=120)
sender.sendall(bytes(int(size)))
sender.recv(1)
"""
_RECEIVE = """
import select, socket, sys, time
from experiments.lab.emulate.namespaces import enter
namespace, host, count, size = sys.argv[1:]
enter(namespace)
server = socket.create_server((host, 5000))
print("ready", flush=True)
peers = [server.accept()[0]]
began = time.perf_counter()
peers += [server.accept()[0] for _ in range(int(count) - 1)]
left = {peer: int(size) for peer in peers}
while left:
    for peer in select.select(list(left), [], [])[0]:
        left[peer] -= len(peer.recv(65536))
        if not left[peer]:
            del left[peer]
print(time.perf_counter() - began)
for peer in peers:
    peer.sendall(b"k")
"""


def transfer_s(net: Fabric, senders: tuple[int, ...], receiver: int, size: int) -> float:
    """Seconds that several devices take to send `size` bytes each to another one at once."""
    to = [net.namespaces[receiver], net.addresses[receiver]]
    python = [sys.executable, "-c"]
    receiving = subprocess.Popen(
        [*python, _RECEIVE, *to, str(len(senders)), str(size)], stdout=subprocess.PIPE, text=True
    )
    assert receiving.stdout is not None
    assert receiving.stdout.readline() == "ready\n"
    sending = [subprocess.Popen([*python, _SEND, net.namespaces[sender], to[1], str(size)]) for sender in senders]
    processes: tuple[subprocess.Popen[bytes] | subprocess.Popen[str], ...] = (*sending, receiving)
    seconds = float(receiving.stdout.readline())
    assert [process.wait(120) for process in processes] == [0] * len(processes)
    return seconds


@needs_root
def test_links_have_their_rates() -> None:
    """Never faster than the rate of what they share; once all is sent, the network is gone."""
    cluster, slowdown = named_cluster("small_mixed"), 1e4
    inside, outside = 12e9 / slowdown, 1.25e9 / slowdown  # bytes/s
    with Fabric(cluster, range(6), slowdown) as net:
        assert transfer_s(net, (2,), 4, 600_000) >= 0.9 * 600_000 / inside
        assert transfer_s(net, (0,), 2, 60_000) >= 0.9 * 60_000 / outside
        assert transfer_s(net, (0, 1), 2, 40_000) >= 0.9 * 80_000 / outside  # one interface
        # Inside the machine; a busy one may take as long now and then.
        assert any(transfer_s(net, (0,), 1, 60_000) < 0.5 * 60_000 / outside for _ in range(TRIES))
    assert not set(fabric._ours()) & {*net.namespaces.values()}


@needs_root
def test_what_is_small_does_not_wait() -> None:
    """What acknowledges or announces a message passes one that is on the same way."""
    with Fabric(named_cluster("small_mixed"), range(4), 1e5) as net, ThreadPoolExecutor() as pool:
        long = pool.submit(transfer_s, net, (0,), 2, 40_000)
        assert any(transfer_s(net, (1,), 3, 60) < 0.3 for _ in range(TRIES))
        assert not long.done()
        assert long.result() >= 0.9 * 40_000 / 1.25e4


@needs_root
def test_an_uplink_is_shared() -> None:
    base = named_cluster("small_mixed")
    groups = (Group("rack", ("new",), 0.125e9, 0.0),)
    racks = Cluster(base.name, base.machines, base.inter_bandwidth_bytes_per_s, base.inter_latency_s, groups)
    with Fabric(racks, (0, 2), 1e4) as net:
        for sender, receiver in ((0, 2), (2, 0)):
            assert transfer_s(net, (sender,), receiver, 10_000) >= 0.9 * 10_000 / 0.125e5


@needs_root
def test_what_was_left_behind_is_removed() -> None:
    """By a process that was killed: its number belongs to nobody any more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    left = f"hexiopt-{process.pid}-0"
    subprocess.run(["ip", "netns", "add", left], check=True)
    with Fabric(named_cluster("small_mixed"), (0,), 1.0):
        assert left not in fabric._ours()


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert network_hindrance(problem().cluster) == "network namespaces need root"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert network_hindrance(problem().cluster) == "ip and tc (iproute2) not found"


def test_addresses_are_those_for_tests_of_networks() -> None:
    addresses = Fabric(named_cluster("small_mixed"), range(6), 1.0).addresses
    assert list(addresses.values()) == [f"198.18.{m}.{k}" for m, k in ((0, 1), (0, 2), (1, 1), (1, 2), (1, 3), (1, 4))]
