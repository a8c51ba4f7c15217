"""Names of equal devices: bounds hold under all of them, and no plan is lost that is in time under some."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.configurations import named_model
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers.gpus import catalogue
from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.solving.naming import renumber
from solvers.proof.names import Names
from tests.solvers.brute_force import best_plan
from tests.solvers.proof.test_proof import SLOW, agrees, priced_plans

ROUNDING = 1 + 1e-9


@SLOW
@given(priced_plans(), st.randoms(use_true_random=False))
def test_bounds_hold_under_any_names(drawn: tuple[PlanPricer, Plan, float], rng: random.Random) -> None:
    pricer, plan, _ = drawn
    names, cost = Names(pricer), pricer.price(plan)
    to = dict[int, int]()
    for devices in pricer.problem.usable_by_machine.values():
        to |= dict(zip(devices, rng.sample(devices, len(devices)), strict=True))
    other_s = pricer.price(renumber(plan, to)).step_time_s
    assert names.least_s(plan, cost) <= other_s * ROUNDING
    every = names.every(plan, 200)
    if every is not None:  # also those that change names which do not matter
        priced = [pricer.price(named_plan).step_time_s for named_plan in every]
        assert cost.step_time_s in priced
        assert min(priced) <= other_s * ROUNDING


@pytest.mark.parametrize("zero", ["0", "1"])
def test_the_best_names_are_found(zero: str) -> None:
    """Three pipelines on machines of three and of one device, whose ports are slow: the one of two stages passes half
    as much over each port, if its devices come before the other's."""
    gpu, rate = catalogue()["a100_80gb_pcie"], 2e11
    machines = (
        Machine("m0", "m0", gpu, 3, 1e9, 3e-6, (), 1, rate, 2e-5),
        Machine("m1", "m1", gpu, 1, float("inf"), 3e-6, (), 1, rate, 2e-5),
    )
    workload = Workload(3, 256, schedule="1f1b", optimizer_sharding=zero)
    space = Space(max_micro_batch_size=1, replicas=False, num_pipelines=3)
    model = replace(named_model("gpt_3b"), num_layers=2)
    problem = Problem(Cluster("slow_ports", machines, rate, 2e-5), model, workload, space)
    assert agrees(problem)
    best, _ = best_plan(problem)
    assert best is not None
    in_order = renumber(best, {d: d for d in best.devices()} | {0: 1, 1: 0})
    pricer = PlanPricer(problem)
    assert pricer.price(in_order).step_time_s > 1.9 * pricer.price(best).step_time_s
