"""Where layers have experts, the default is not behind Megatron-LM's grids with every expert-parallel degree; and what
machines are called, or the order in which they are listed, changes no bound and no proof."""

import random
from dataclasses import replace
from typing import Any

import pytest

from hexiopt.bounds import compute_bound_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.solving import Budget
from hexiopt.solving.result import Status
from solvers.frame.infeasible import memory_infeasibility
from solvers.registry import make_solver
from tests.conftest import STRESS
from tests.hexiopt.shapes_of_kinds import MIXED, model_of
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.brute_force import best_plan
from tests.solvers.drawn import GPUS, drawn_problem
from tests.solvers.drawn_experts import drawn_with_experts

STEPS = 1200
BEHIND = 1.03
ATTENTION = Attention(heads=16, kv_heads=4, qk_dim=128, v_dim=128)
DENSE = LayerKind((ATTENTION,), (Dense(ffn_size=5632),))


def drawn_model(rng: random.Random, num_layers: int) -> ModelSpec:
    """2,048 wide, of equal layers with experts, or with one or two dense ones before."""
    experts = Experts(
        count=rng.choice((8, 32, 64)),
        top_k=rng.choice((1, 2, 4)),
        ffn_size=rng.choice((768, 1408, 4096)),
        shared=rng.choice((0, 1024)),
    )
    dense = rng.choice((0, 0, 1, 2))
    layers = [DENSE] * dense + [LayerKind((ATTENTION,), (experts,))] * (num_layers - dense)
    return model_of(*layers, hidden_size=2048, vocab_size=32_000)


def small_machines(number: int) -> Problem:
    """Up to 16 GPUs in small machines on a fast network, where experts over machines pay, and up to two slow ones."""
    rng = random.Random(number)
    size = rng.choice((1, 2, 4))
    links = {"num_gpus": size, "intra_bandwidth_gb_per_s": 100}
    machines: list[dict[str, Any]] = [
        {
            "name": "m",
            "gpu": rng.choice(("big", "mid")),
            "count": min(rng.choice((2, 4, 8)), 16 // size),
            "nic_bandwidth_gb_per_s": rng.choice((12.5, 50, 200)),
            **links,
        }
    ]
    if rng.random() < 0.5:
        slow = {"name": "s", "gpu": "small", "count": rng.randint(1, 2), "nic_bandwidth_gb_per_s": 12.5}
        machines.append({**slow, **links})
    gpus = {name: {**gpu, "memory_gib": 2 * gpu["memory_gib"]} for name, gpu in GPUS.items()}
    network = {"bandwidth_gb_per_s": 5, "latency_us": 20}
    data = {"name": "drawn", "inter_machine": network, "machines": machines, "gpus": gpus}
    model = drawn_model(rng, rng.choice((4, 8, 12)))
    workload = Workload(rng.choice((8, 16, 64)), rng.choice((512, 2048)))
    return Problem(cluster_from_section(Section(data, "drawn")), model, workload)


def mixed_machines(number: int) -> Problem:
    """A small problem of `drawn.py`, with experts."""
    problem = drawn_problem(number)
    return replace(problem, model=drawn_model(random.Random(number), problem.model.num_layers))


QUICK = [(small_machines, 8), (mixed_machines, 12)]
ALL = [*((small_machines, n) for n in range(32)), *((mixed_machines, n) for n in range(60) if n // 2 % 3 == 0)]
DRAWN = ALL if STRESS else [case for case in ALL if case in (*QUICK, *random.Random(0).sample(ALL, 18))]


@pytest.mark.parametrize(("make", "number"), slow_but(QUICK, DRAWN))
def test_never_behind_megatron(make: Any, number: int) -> None:
    problem = make(number)
    ours = make_solver("portfolio").solve(problem, Budget(3600.0, STEPS))
    grid = make_solver("megatron").solve(problem, Budget(60.0))
    if grid.plan is None:
        return
    assert ours.plan is not None
    assert ours.bound_s <= min(ours.objective, grid.objective)
    assert ours.objective <= BEHIND * grid.objective


@pytest.mark.parametrize("gib", slow_but((0.9,), (16.0, 0.9)))
def test_the_search_is_near_the_best_of_all_splits_of_two_kinds(gib: float) -> None:
    """Six layers, one dense and five with experts, on four GPUs of two types, memory plenty and scarce."""
    cluster = problems.cluster(("a", "fast", 2), ("b", "slow", 2), network_gb_per_s=2.0, fast_gib=gib, slow_gib=gib)
    workload = Workload(4, 2048, schedule="1f1b", optimizer_sharding="1")
    problem = Problem(cluster, MIXED, workload, Space(max_micro_batch_size=2, replicas=False))
    plan, best_s = best_plan(problem)
    result = make_solver("portfolio").solve(problem, Budget(60.0, 400))
    assert plan is not None
    assert result.bound_s <= best_s <= result.objective <= 1.01 * best_s


def shuffle_machines(problem: Problem, rng: random.Random) -> Problem:
    """The same machines in another order, under other names."""
    machines = list(problem.cluster.machines)
    rng.shuffle(machines)
    named = tuple(replace(machine, name=f"x{k}", spec_name=f"x{k}") for k, machine in enumerate(machines))
    return replace(problem, cluster=replace(problem.cluster, machines=named))


def test_the_order_of_machines_does_not_matter() -> None:
    proved = 0
    for number in range(24):
        problem = drawn_with_experts(number, num_layers=3, several=number % 2 > 0)
        other = shuffle_machines(problem, random.Random(number))
        bounds = [compute_bound_s(PlanPricer(each)) for each in (problem, other)]
        assert bounds[0] == pytest.approx(bounds[1], rel=0.2 if number % 2 else 1e-9)  # kinds weigh by one machine
        proofs = [memory_infeasibility(each, PlanPricer(each).stages) is None for each in (problem, other)]
        assert proofs[0] == proofs[1]
        if number % 8 == 0:
            exact = [make_solver("exact").solve(each, Budget(60.0, 600)) for each in (problem, other)]
            if exact[0].status is exact[1].status is Status.OPTIMAL:
                assert exact[0].objective == pytest.approx(exact[1].objective, rel=2e-4)
                proved += 1
            assert exact[0].status is not Status.INFEASIBLE or exact[1].plan is None
