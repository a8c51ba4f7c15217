"""The referee: no plan of a solver passes to anybody unchecked."""

import math
import time
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

from hexiopt.cost.cost import Cost, memory_violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.check import Violation, check
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.solving.result import RestrictedBound, Result, Status
from hexiopt.solving.solver import Budget, Capabilities, OnProgress, Pricer, PricerMaker, Solver, foreign_name

_TOLERANCE = 1e-9  # of a step time, for prices that a solver states
_OVERRUN, _OVERRUN_S = 0.1, 0.5  # tolerated beyond a time limit: a share of it, or seconds, whichever is more


class InvalidPlanError(Exception):
    """A solver's plan breaks a rule, or its cost model contradicts itself; the message names the one at fault.

    `result` is the result of the search, marked `invalid`, without the plan.
    """

    def __init__(self, text: str, result: Result) -> None:
        super().__init__(text, result)
        self.result = result

    def __str__(self) -> str:
        return str(self.args[0])


def referee(problem: Problem, result: Result, judge: Pricer) -> Result:
    """Check that the plan of `result` obeys every rule of `problem`, fits, and takes as long as its cost states.

    Returns the result with the price by `judge`. Raises InvalidPlanError.
    """
    plan, claim = result.plan, result.cost
    if plan is None or claim is None:
        return result
    broken = check(problem, plan)
    if not broken:
        cost = judge.price(plan)
        foreign = foreign_name(judge, problem)
        if foreign and (fault := _contradiction(judge, plan, cost)):
            raise _invalid(result, f"pricer: {foreign}: {fault}")
        broken = memory_violations(problem, plan, cost)
        slack_s = _TOLERANCE * cost.step_time_s
        if abs(claim.step_time_s - cost.step_time_s) > slack_s:
            text = f"it states a step of {claim.step_time_s:.6g} s, which takes {cost.step_time_s:.6g} s"
            broken.append(Violation("price", text))
        elif result.bound_s > cost.step_time_s + slack_s:
            text = f"it states a lower bound of {result.bound_s:.6g} s, and its plan takes {cost.step_time_s:.6g} s"
            broken.append(Violation("bound", text))
        if not broken:
            return replace(result, cost=cost)
    more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
    raise _invalid(
        result, f"solver: {result.solver}: its plan breaks the rule {broken[0].rule}: {broken[0].text}{more}"
    )


def _contradiction(pricer: Pricer, plan: Plan, cost: Cost) -> str:
    """The contradiction in what another cost model says of `plan`, whose price is `cost`; empty without one."""
    step_s, bound_s = cost.step_time_s, pricer.features.bound_s
    if not 0.0 < step_s < math.inf:
        return f"it prices a plan at {step_s:g} s a step; a step takes seconds above 0"
    again_s = pricer.price(plan).step_time_s
    if not abs(again_s - step_s) <= _TOLERANCE * step_s:
        return f"it prices one plan at {step_s:.6g} s and at {again_s:.6g} s; equal plans must have equal prices"
    if bound_s > step_s * (1 + _TOLERANCE):
        return f"it states a lower bound of {bound_s:.6g} s, and prices a plan at {step_s:.6g} s"
    return ""


def _invalid(result: Result, text: str) -> InvalidPlanError:
    marked = Result(result.solver, Status.INVALID, result.seed, result.runtime_s, result.steps, reason=text)
    return InvalidPlanError(text, marked)


def _check_start(problem: Problem, start: Plan) -> None:
    if broken := check(problem, start):
        raise InputError(f"start: breaks the rule {broken[0].rule}: {broken[0].text}; give a plan of this problem")


def _or_start(problem: Problem, start: Plan, result: Result, judge: Pricer) -> Result:
    """The faster of `result` and `start`, a plan that recomputes layers together.

    No search begins from such a plan, and the bound does not hold for it. Raises InputError where it breaks a rule.
    """
    _check_start(problem, start)
    cost = judge.price(start)
    if cost.objective >= result.objective:
        return result
    bound = RestrictedBound(result.bound_s, "plans that recompute each layer by itself") if result.bound_s else None
    chosen = replace(result, status=Status.FEASIBLE, plan=start, cost=cost, reason="", bound_s=0.0)
    return replace(chosen, restricted_bound=bound)


@dataclass(frozen=True, slots=True)
class Refereed:
    """A solver whose plans are checked before anybody sees them: what the registry gives out.

    `pricer_of` makes the cost model that steers a search without a pricer of its own; None stands for ours.
    """

    solver: Solver
    pricer_of: PricerMaker | None = None

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

    def judge(self, problem: Problem) -> Pricer:
        """The cost model that prices its plans for `problem`."""
        return (self.pricer_of or PlanPricer)(problem)

    def solve(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int = 0,
        pricer: Pricer | None = None,
        on_progress: OnProgress | None = None,
        start: Plan | None = None,
        judge: Pricer | None = None,
    ) -> Result:
        """The solver's result, its plan priced by `judge` (default: `pricer`, or else `self.judge(problem)`).

        Raises InvalidPlanError where the plan breaks a rule, InputError where `start` does or the solver takes no
        start, and what the solver raises.
        """
        more: dict[str, Any] = {}
        judge = pricer or judge or self.judge(problem)
        if pricer is None and self.pricer_of is not None:
            pricer = self.pricer_of(problem)  # a new one, so that compared searches share nothing
        if start is not None and start.joins_layers:
            result = self.solve(problem, budget, seed=seed, pricer=pricer, on_progress=on_progress, judge=judge)
            return _or_start(problem, start, result, judge)
        if start is not None:
            if not self.takes_start:
                raise InputError(f"start: {self.name} begins from no plan; leave it out, or use solver=portfolio")
            _check_start(problem, start)
            more["start"] = start
        began_s = time.perf_counter()
        result = self.solver.solve(problem, budget, seed=seed, pricer=pricer, on_progress=on_progress, **more)
        overrun_s = time.perf_counter() - began_s - budget.time_limit_s
        if overrun_s > max(_OVERRUN * budget.time_limit_s, _OVERRUN_S):
            result = replace(result, overrun_s=overrun_s)
        return referee(problem, result, judge)
