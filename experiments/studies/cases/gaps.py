"""Where the step of a plan goes."""

from hexiopt.cost.breakdown import breakdown
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem


def parts_of_step(problem: Problem, plan: Plan) -> dict[str, float]:
    """The seconds of a plan's step by part, where a search has found it."""
    pricer = PlanPricer(problem)
    return dict(breakdown(pricer, plan, pricer.price(plan)).parts)
