"""A cost model in which gradient sync takes no time, because the last backwards hide it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.cost.pricer import PlanPricer, PricerFeatures
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem


class HiddenSync:
    """Hexiopt's own model, except for the price of a whole plan."""

    name = "hidden_sync"

    def __init__(self, problem: Problem) -> None:
        self._own = PlanPricer(problem)
        self.features = PricerFeatures(stages=self._own.stages, replicas=True)  # single stages are hexiopt's own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def price(self, plan: Plan, pipelines: Sequence[PipelineCost] | None = None) -> Cost:
        cost = self._own.price(plan, pipelines)
        step_s = cost.step_time_s - cost.gradient_sync_s
        faster = cost.step_time_s / step_s
        rates = {"tokens_per_s": cost.tokens_per_s * faster, "mfu": cost.mfu * faster}
        return replace(cost, step_time_s=step_s, gradient_sync_s=0.0, **rates)
