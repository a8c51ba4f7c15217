"""Split backwards and free depths: searches use them where they are on, and only there."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget
from solvers.completion.pricing import price_plan
from solvers.core.search import Search
from solvers.portfolio import Portfolio
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.drawn import drawn_problem


def with_freedoms(problem: Problem, **freedoms: Any) -> Problem:
    """The problem with freedoms, and an open schedule."""
    return replace(
        problem, space=replace(problem.space, **freedoms), workload=replace(problem.workload, schedule="auto")
    )


def plan_of(problem: Problem) -> tuple[Plan, float]:
    """The default's plan in 60 steps, which breaks no rule, and its step time in seconds."""
    run = Search("loop", problem, Budget(3600.0, 60), 0)
    Portfolio().find(run)
    assert run.plan is not None
    assert not check(problem, run.plan)
    assert PlanPricer(problem).price(run.plan).fits
    return run.plan, run.best_s


@pytest.mark.parametrize("problem", [problems.fast_network(), problems.three_gpus()])
def test_split_backwards_are_searched_where_they_are_allowed(problem: Problem) -> None:
    usual, usual_s = plan_of(with_freedoms(problem))
    plan, step_s = plan_of(with_freedoms(problem, split_backward=True))
    assert plan.schedule.splits
    assert not usual.schedule.splits
    assert step_s < usual_s
    assert step_s < PlanPricer(problem).price(replace(plan, schedule=plan.schedule.whole())).step_time_s


@pytest.mark.parametrize("number", slow_but((2,), (2, 12, 14)))
def test_depths_are_searched_where_they_are_free(number: int) -> None:
    usual, usual_s = plan_of(with_freedoms(drawn_problem(number)))
    plan, step_s = plan_of(with_freedoms(drawn_problem(number), depth=True))
    assert any(plan.other_depths())
    assert not any(usual.other_depths())
    assert step_s < usual_s


@pytest.mark.parametrize(("number", "split"), slow_but([(4, False), (13, True)], product((2, 4, 6, 13), (False, True))))
def test_stages_hold_more_only_where_that_is_better_and_fits(number: int, split: bool) -> None:
    """Of the plan that a search without depths makes."""
    problem = with_freedoms(drawn_problem(number), split_backward=split)
    plan, _ = plan_of(problem)
    before = price_plan(PlanPricer(problem), plan)
    after = price_plan(PlanPricer(with_freedoms(problem, depth=True)), plan)
    assert before is not None
    assert after is not None
    assert after.cost.fits
    assert after.cost.objective <= before.cost.objective
    assert (after.plan == before.plan) == (after.cost.objective == before.cost.objective)
