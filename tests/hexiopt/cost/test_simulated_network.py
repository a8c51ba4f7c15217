"""Prices without kernels are those of the compiled clock."""

import pytest
from hypothesis import given, settings

from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import FairShares
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from tests.strategies import problems_with_plans


@settings(max_examples=20, deadline=None)
@given(problems_with_plans())
def test_times_without_kernels_are_those_of_the_clock(drawn: tuple[Problem, Plan]) -> None:
    problem, plan = drawn
    clock, simulated = (PlanPricer(problem, network=FairShares(compiled)) for compiled in (True, False))
    ours, theirs = clock.price(plan), simulated.price(plan)
    assert theirs.step_time_s == pytest.approx(ours.step_time_s, rel=1e-9)
    for line, other in zip(ours.pipelines, theirs.pipelines, strict=True):
        assert other.message_s == pytest.approx(line.message_s, rel=1e-6, abs=1e-12)
        assert other.executor_end_s == pytest.approx(line.executor_end_s, rel=1e-9)
