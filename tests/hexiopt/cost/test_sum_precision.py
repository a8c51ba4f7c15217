"""Gradients in 8 bits: the price of their sums by hand, their memory, and that no bound exceeds it."""

from dataclasses import replace

import pytest

import hexiopt as hx
from hexiopt.cost.executors.compute import OperatorTimes
from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.rings import gradient_rings
from hexiopt.numbers.frameworks import default_framework
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from tests.slow import slow_but
from tests.solvers.drawn import drawn_problem
from tests.solvers.problems import cluster

MODEL = hx.model("tiny")
SENT = 1 + 4 / 128  # bytes of a value


def problem(*counts: int, precision: str = "fp8") -> Problem:
    """Machines of so many devices, at 0.1 GB/s."""
    machines = [(f"m{k}", "fast", count) for k, count in enumerate(counts)]
    return Problem(cluster(*machines, network_gb_per_s=0.1), MODEL, Workload(8, 128, gradient_precision=precision))


def data_parallel(count: int, zero: int) -> Plan:
    lines = tuple(Pipeline((Stage.of((d,), 0, MODEL.num_layers),), 8 // count) for d in range(count))
    return Plan(lines, sharding=Sharding(zero))


@pytest.mark.parametrize("zero", [0, 1])
def test_two_machines_by_hand(zero: int) -> None:
    """Each device sends half of all gradients; under ZeRO-0 the sums of its half, too; and it converts them."""
    after = replace(default_framework(), gradient_sums="after", weight_gathers="after")
    task, plan = problem(1, 1), data_parallel(2, zero)
    eight, sixteen = (PlanPricer(variant, after).price(plan) for variant in (task, problem(1, 1, precision="training")))
    params, passes = MODEL.num_params, 1 if zero else 2
    half_s = params / 2 / 0.1e9
    moved = (2 + SENT + SENT + 8) + (0 if zero else SENT + 2)
    gpu = task.cluster.machines[0].gpu
    converted_s = OperatorTimes(gpu, "bf16").memory_s(params * moved)
    latency_s = sixteen.gradient_sync_s - passes * half_s * 2
    assert eight.gradient_sync_s == pytest.approx(converted_s + passes * half_s * SENT + latency_s, rel=1e-9)
    assert eight.optimizer_s == pytest.approx(sixteen.optimizer_s)


@pytest.mark.parametrize("counts", [(1, 1), (1, 1, 1), (2, 2), (1, 3), (4,)])
def test_an_all_to_all_sends_no_less_than_a_ring(counts: tuple[int, ...]) -> None:
    """As much where every machine has a device or there is one machine; more where machines have several."""
    task, count = problem(*counts), sum(counts)
    rings = gradient_rings(data_parallel(count, 1), None, task.parameters.trained_groups, task.cluster, exchange=True)
    ring_s, exchange_s = (float(times.ring_pass_s(2)[0][0]) for times in (rings.within_group, rings.scatter))
    if max(counts) == 1 or len(counts) == 1:
        assert exchange_s == pytest.approx(ring_s)
        return
    # Of n devices, k in the machine: each sends 1/n to every other one outside.
    most = max(k * (count - k) for k in counts)
    latency_s = float(rings.scatter.ring_pass_s(0)[0][0])
    assert exchange_s - latency_s == pytest.approx(most / count * 2 * MODEL.num_params / 0.1e9)
    assert exchange_s >= ring_s


def test_who_shares_nothing_converts_nothing() -> None:
    alone = data_parallel(1, 0)
    costs = [PlanPricer(problem(1, precision=precision)).price(alone) for precision in ("fp8", "training")]
    assert costs[0].step_time_s == costs[1].step_time_s


def test_what_is_sent_and_what_comes_is_counted() -> None:
    costs = [PlanPricer(problem(1, 1, precision=p)).price(data_parallel(2, 0)) for p in ("fp8", "training")]
    memory, plain = (cost.pipelines[0].stages[0].fullest.memory for cost in costs)
    assert memory.gradients - plain.gradients == pytest.approx(2 * SENT * MODEL.num_params)
    assert memory.total - plain.total == pytest.approx(memory.gradients - plain.gradients)


def test_no_plan_of_zero_2_or_3() -> None:
    with pytest.raises(hx.InputError, match=r"optimizer_sharding: 2 does not go with gradient_precision=fp8; choose"):
        Workload(8, 128, optimizer_sharding="2", gradient_precision="fp8")
    assert [fault.rule for fault in hx.check(problem(1, 1), data_parallel(2, 2))] == ["sharding"]


@pytest.mark.parametrize("number", slow_but((1,), range(4)))
def test_bounds_hold(number: int) -> None:
    task = drawn_problem(number)
    task = replace(task, workload=replace(task.workload, gradient_precision="fp8"))
    result = hx.solve(task, max_steps=20, time_limit_s=60)
    assert result.cost is None or hx.lower_bound(task, time_limit_s=5) <= result.cost.step_time_s
