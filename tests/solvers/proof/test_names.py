"""Names of equal devices: bounds hold under all of them, and no plan is lost that is in time under some."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Plan
from solvers.proof.names import Names
from tests.solvers.proof.test_proof import SLOW, priced_plans

ROUNDING = 1 + 1e-9


def renamed_at_random(plan: Plan, pricer: PlanPricer, rng: random.Random) -> Plan:
    """The plan with the devices of each machine exchanged at random."""
    to = dict[int, int]()
    for devices in pricer.problem.usable_by_machine.values():
        to |= dict(zip(devices, rng.sample(devices, len(devices)), strict=True))
    pipelines = [
        replace(
            pipeline,
            stages=tuple(
                replace(stage, parallelism=TensorParallel(tuple(to[device] for device in stage.devices)))
                for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    ]
    return replace(plan, pipelines=tuple(pipelines))


@SLOW
@given(priced_plans(), st.randoms(use_true_random=False))
def test_bounds_hold_under_any_names(drawn: tuple[PlanPricer, Plan, float], rng: random.Random) -> None:
    pricer, plan, _ = drawn
    names, cost = Names(pricer), pricer.price(plan)
    other_s = pricer.price(renamed_at_random(plan, pricer, rng)).step_time_s
    assert names.least_s(plan, cost) <= other_s * ROUNDING
    every = names.every(plan, 200)
    if every is not None:  # also those that change names which do not matter
        priced = [pricer.price(one).step_time_s for one in every]
        assert cost.step_time_s in priced
        assert min(priced) <= other_s * ROUNDING
