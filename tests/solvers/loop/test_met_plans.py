"""Split backwards take hardly ever longer than whole ones on the plans that searches meet, and estimates rank these.

`python -m tests.solvers.loop.test_met_plans` prints a table, in five minutes.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median
from unittest.mock import patch

import pytest
from scipy.stats import spearmanr

from experiments.studies.cases.split_and_depth import problems, usual_depths
from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.schedules.registry import SPLIT_SCHEDULES
from hexiopt.solving import Budget
from solvers.core.zero import LOCKSTEP
from solvers.portfolio import Portfolio
from tests.estimate import Estimate
from tests.slow import slow_but

STEPS, MOST_PLANS, NEAR = 3000, 60, 1.5  # of a search; of a problem; times the best of them
PROBLEMS = {", ".join(name): problem for name, problem in problems().items()}
SAME, LEAST_CORRELATION = 1e-9, 0.4  # least seen: 0.45, of 60 plans that lie close together
QUICK = [name for name in PROBLEMS if name.startswith("small_mixed")]


@dataclass(frozen=True)
class Met:
    """A plan with whole backwards and the same with split ones: seconds by the clock, and by the estimate."""

    whole_s: float
    split_s: float
    estimate_s: float

    @property
    def ratio(self) -> float:
        """Of the step with split backwards to that with whole ones."""
        return self.split_s / self.whole_s


def met_plans(problem: Problem, max_steps: int = STEPS) -> list[Plan]:
    """The plans that the default prices in so many steps, as they are with whole backwards; at most `MOST_PLANS` drawn
    of those that fit and take no more than `NEAR` times the best of them."""
    steps_s: dict[Plan, float] = {}
    price = PlanPricer.price

    def listen(self: PlanPricer, plan: Plan, *rest: object) -> Cost:
        cost = price(self, plan, *rest)  # type: ignore[arg-type]
        steps_s.setdefault(usual_depths(replace(plan, schedule=plan.schedule.whole())), 0.0)
        return cost

    with patch.object(PlanPricer, "price", listen):
        Portfolio().solve(problem, Budget(3600.0, max_steps), seed=0)
    pricer = PlanPricer(problem)
    for plan in steps_s:
        cost = pricer.price(plan)
        steps_s[plan] = cost.step_time_s if cost.fits else float("inf")
    near_s = NEAR * min(steps_s.values())
    near = [plan for plan, step_s in steps_s.items() if step_s <= near_s and any(split_forms(plan))]
    return random.Random(0).sample(near, min(MOST_PLANS, len(near)))


def split_forms(plan: Plan) -> Iterator[Plan]:
    """The plan with split backwards, where its schedule has such and it does not gather weights micro-batch by
    micro-batch."""
    late = [schedule for schedule in SPLIT_SCHEDULES if schedule.whole() == plan.schedule]
    yield from (replace(plan, schedule=schedule) for schedule in late if plan.sharding.stage < LOCKSTEP)


def price_met_plans(problem: Problem, max_steps: int = STEPS) -> list[Met]:
    """What split backwards take on the plans that the default meets where it may split."""
    problem = replace(problem, space=replace(problem.space, split_backward=True))
    pricer = PlanPricer(problem)
    prices = []
    for plan in met_plans(problem, max_steps):
        (split,) = split_forms(plan)
        cost = pricer.price(split)
        assert cost.fits
        estimate = pricer.with_network(Estimate()).price(split)
        prices.append(Met(pricer.price(plan).step_time_s, cost.step_time_s, estimate.step_time_s))
    return prices


def correlation(plans: list[Met]) -> float:
    """The rank correlation of estimates and clock."""
    return float(spearmanr([plan.estimate_s for plan in plans], [plan.split_s for plan in plans]).statistic)


@pytest.mark.parametrize("name", slow_but(QUICK, PROBLEMS))
def test_split_backwards_are_hardly_ever_behind_and_estimates_rank_them(name: str) -> None:
    plans = price_met_plans(PROBLEMS[name])
    assert len(plans) > MOST_PLANS / 3
    assert all(plan.ratio < 1.02 for plan in plans)
    assert sum(plan.ratio > 1 + SAME for plan in plans) <= len(plans) / 20
    assert correlation(plans) > LEAST_CORRELATION


if __name__ == "__main__":
    every: list[Met] = []
    for label, problem in PROBLEMS.items():
        rows = price_met_plans(problem)
        ratios = sorted(plan.ratio for plan in rows)
        longer = sum(ratio > 1 + SAME for ratio in ratios)
        cells = f"{ratios[0]:.3f} | {median(ratios):.3f} | {ratios[-1]:.3f} | {longer} | {correlation(rows):.2f}"
        print(f"| {label} | {len(rows)} | {cells} |", flush=True)
        every += rows
    print(f"{len(every)} plans, median {median(plan.ratio for plan in every):.3f}")
