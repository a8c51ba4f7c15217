"""The spans of a priced plan."""

from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Plan
from hexiopt.simulation.engine import Span


def all_spans(model: PlanPricer, plan: Plan, cost: Cost) -> list[Span]:
    """Those of all pipelines, by end within a pipeline."""
    return [span for number in range(len(plan.pipelines)) for span in model.spans(plan, cost, number)]
