"""FSDP: its whole space is tried, hybrid sharding pays where the network is slow, and what it cannot express."""

from dataclasses import replace
from itertools import product

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import Replica
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import RECOMPUTE_POLICIES
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.baselines.fsdp import STRATEGIES, Fsdp, device_sets
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.baselines import problems as mixed
from tests.solvers.baselines.published_spaces import SPACES


def line(devices: tuple[int, ...], count: int, size: int = 1, policy: str = "none") -> Pipeline:
    return Pipeline((Stage.of(devices, 0, 6, policy),), count, size)


def plain(devices: tuple[int, ...], sharding: Sharding, size: int, policy: str, batch: int = 16) -> Plan:
    return Plan(tuple(line((d,), batch // len(devices) // size, size, policy) for d in devices), ONE_F_ONE_B, sharding)


def test_sets_of_machines() -> None:
    """Machines a (0, 1) and b (2, 3) are alike, c (4 to 7) has four GPUs, of which two may run."""
    assert set(device_sets(problems.easy())) == {
        *((0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3, 4, 5), (0, 1, 4, 5, 6, 7), (0, 1, 4, 5)),
        *((0, 1, 2, 3), (0, 1), (4, 5, 6, 7), (4, 5)),
    }


@pytest.mark.parametrize(("network_gb_per_s", "fast_gib"), slow_but([(0.1, 0.9)], product((0.1, 10.0), (0.9, 16.0))))
def test_the_best_of_everything(network_gb_per_s: float, fast_gib: float) -> None:
    """Every strategy, micro-batch size and policy over every set of machines, priced."""
    problem = problems.easy(network_gb_per_s=network_gb_per_s, fast_gib=fast_gib)
    model = PlanPricer(problem)
    best_s = float("inf")
    for devices, sharding, size, policy in product(device_sets(problem), STRATEGIES, (1, 2, 4, 8), RECOMPUTE_POLICIES):
        if 16 % (len(devices) * size) == 0:
            plan = plain(devices, sharding, size, policy)
            assert check(problem, plan) == []
            assert SPACES["fsdp"].first_violation(problem, plan) is None
            best_s = min(best_s, model.price(plan).objective)
    assert best_s < float("inf")
    assert Fsdp().solve(problem, Budget(3600.0)).objective == pytest.approx(best_s, rel=1e-12)


def test_hybrid_sharding_where_machines_hardly_talk() -> None:
    """Two machines of four A100 on 10 Gbit/s: shards stay inside, and gradients cross the network once a step."""
    base = mixed.one_kind()
    large, small = (replace(base, workload=replace(base.workload, global_batch=batch)) for batch in (512, 32))
    large_plan, small_plan = Fsdp().solve(large, Budget(3600.0)).plan, Fsdp().solve(small, Budget(3600.0)).plan
    assert large_plan is not None
    assert small_plan is not None
    assert (len(large_plan.pipelines), large_plan.sharding.groups) == (8, "machine")
    assert len(small_plan.pipelines) == 4  # for a few sequences the other machine is not worth the way


REFUSED = {
    "tensor": Plan((line((0, 1), 16),)),
    "pipeline": Plan((Pipeline((Stage.of((0,), 0, 3), Stage.of((1,), 3, 6)), 16),)),
    "replicated": Plan((Pipeline((Stage.of_replicas((Replica((0,), 1), Replica((1,), 1)), ((0, 6),)),), 8, 2),)),
    "unequal batches": Plan((line((0,), 10), line((1,), 6))),
    "different recompute": Plan((line((0,), 8), line((1,), 8, policy="full"))),
    "ZeRO-1": Plan((line((0,), 8), line((1,), 8)), ONE_F_ONE_B, Sharding(1)),
    "the ranks": Plan((line((0,), 8), line((2,), 8))),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_express(words: str) -> None:
    problem: Problem = problems.easy()
    assert check(problem, REFUSED[words]) == []
    assert words in (SPACES["fsdp"].first_violation(problem, REFUSED[words]) or "")


def test_a_batch_that_no_number_of_gpus_shares() -> None:
    """37 sequences over 1, 2, 4, 6 or 8 GPUs: one GPU, or none where every machine has two at least."""
    problem = problems.easy()
    problem = replace(problem, workload=replace(problem.workload, global_batch=37))
    result = Fsdp().solve(problem, Budget(5.0))
    assert result.plan is None
    assert "portfolio" in result.reason
