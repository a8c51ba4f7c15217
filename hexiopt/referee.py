"""The referee: no plan of a solver passes to anybody unchecked."""

from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.check import Violation, check
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.result import RestrictedBound, Result, Status
from hexiopt.solving import Budget, Capabilities, OnProgress, Pricer, Solver

_TOLERANCE = 1e-9  # of a step time, for prices that a solver states


class InvalidPlanError(Exception):
    """A solver's plan breaks a rule: a line that names both. `result` is that of the search, marked `invalid`, without
    the plan."""

    def __init__(self, text: str, result: Result) -> None:
        super().__init__(text, result)
        self.result = result

    def __str__(self) -> str:
        return str(self.args[0])


def referee(problem: Problem, result: Result, pricer: Pricer | None = None) -> Result:
    """`result`, whose plan obeys every rule of `problem`, fits, and takes as long as stated.

    Prices and memory are by `pricer`, our cost model where there is none. Raises InvalidPlanError.
    """
    plan, stated = result.plan, result.cost
    if plan is None or stated is None:
        return result
    broken = check(problem, plan)
    if not broken:
        cost = (pricer or PlanPricer(problem)).price(plan)
        broken = violations(problem, plan, cost)
        slack_s = _TOLERANCE * cost.step_time_s
        if abs(stated.step_time_s - cost.step_time_s) > slack_s:
            text = f"it states a step of {stated.step_time_s:.6g} s, which takes {cost.step_time_s:.6g} s"
            broken.append(Violation("price", text))
        elif result.bound_s > cost.step_time_s + slack_s:
            text = f"it states a lower bound of {result.bound_s:.6g} s, and its plan takes {cost.step_time_s:.6g} s"
            broken.append(Violation("bound", text))
    if not broken:
        return result
    more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
    text = f"solver: {result.solver}: its plan breaks the rule {broken[0].rule}: {broken[0].text}{more}"
    marked = Result(result.solver, Status.INVALID, result.seed, result.runtime_s, result.steps, reason=text)
    raise InvalidPlanError(text, marked)


def _or_start(problem: Problem, start: Plan, result: Result, pricer: Pricer | None) -> Result:
    """`result` of a search, or `start` if that is faster: it recomputes layers together, so that no search begins there
    and the bound does not speak of it. Raises InputError where it breaks a rule."""
    if broken := check(problem, start):
        raise InputError(f"start: breaks the rule {broken[0].rule}: {broken[0].text}; give a plan of this problem")
    cost = (pricer or PlanPricer(problem)).price(start)
    if cost.objective >= result.objective:
        return result
    bound = RestrictedBound(result.bound_s, "plans that recompute each layer by itself") if result.bound_s else None
    chosen = replace(result, status=Status.FEASIBLE, plan=start, cost=cost, reason="", bound_s=0.0)
    return replace(chosen, restricted_bound=bound)


@dataclass(frozen=True, slots=True)
class Refereed:
    """A solver whose plans are checked before anybody sees them: what the registry gives out."""

    solver: Solver

    @property
    def name(self) -> str:
        """Of the solver."""
        return self.solver.name

    @property
    def capabilities(self) -> Capabilities:
        """Of the solver."""
        return self.solver.capabilities

    @property
    def takes_start(self) -> bool:
        """Whether the solver can begin from a plan."""
        return "start" in signature(self.solver.solve).parameters

    def solve(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int = 0,
        pricer: Pricer | None = None,
        on_progress: OnProgress | None = None,
        start: Plan | None = None,
    ) -> Result:
        """As the solver's. Raises InvalidPlanError where its plan breaks a rule, InputError where `start` does or the
        solver takes none, and what the solver raises."""
        more: dict[str, Any] = {}
        if start is not None and start.joins_layers:
            result = self.solve(problem, budget, seed=seed, pricer=pricer, on_progress=on_progress)
            return _or_start(problem, start, result, pricer)
        if start is not None:
            if not self.takes_start:
                raise InputError(f"start: {self.name} begins from no plan; leave it out, or use solver=portfolio")
            if broken := check(problem, start):
                raise InputError(
                    f"start: breaks the rule {broken[0].rule}: {broken[0].text}; give a plan of this problem"
                )
            more["start"] = start
        result = self.solver.solve(problem, budget, seed=seed, pricer=pricer, on_progress=on_progress, **more)
        return referee(problem, result, pricer)
