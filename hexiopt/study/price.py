"""The price of a plan, the rules that it breaks, and the step time that no plan can beat."""

from pathlib import Path

from hexiopt.bounds import bound_under_s, compute_bound_s, our_model
from hexiopt.cost.cost import memory_violations
from hexiopt.errors import InputError
from hexiopt.files.plan_file import read_plan
from hexiopt.plan.check import Violation
from hexiopt.plan.check import check as broken_rules
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.reading import number_in
from hexiopt.solving import MAX_TIME_LIMIT_S, Pricer, PricerMaker
from hexiopt.solving.registry import make_pricer
from hexiopt.study.solution import PlacedPlan, PlanCost


def load_plan(path: str | Path) -> PlacedPlan:
    """The plan in a `plan.json`, with its `problem` and the record of its `solver`. Raises InputError."""
    file = read_plan(path)
    return PlacedPlan.of(file.problem, file.plan, file.solver)


def price(problem: Problem, plan: Plan, where: str = "plan") -> PlanCost:
    """The price of one step of `plan`: seconds with their parts, tokens per second, bytes of every stage.

    A plan that does not fit in memory has a price too; see `PlanCost.fits`. Raises InputError for a plan that breaks
    any other rule; the message calls the plan `where`.
    """
    broken = broken_rules(problem, plan)
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise InputError(
            f"{where}: breaks the rule {broken[0].rule}: {broken[0].text}{more}; correct it, or plan again"
        )
    return _place(problem, plan).cost


def check(problem: Problem, plan: Plan) -> list[Violation]:
    """The rules that `plan` breaks; empty for a valid plan that fits in memory.

    Memory is checked only if no other rule is broken.
    """
    broken = broken_rules(problem, plan)
    return broken or memory_violations(problem, plan, _place(problem, plan).cost)


def certify(problem: Problem, plan: Plan, pricer: Pricer) -> PlacedPlan | None:
    """`plan` placed on `problem`, if it obeys every rule there and fits by `pricer`; else None."""
    try:
        if broken_rules(problem, plan):
            return None
        placed = PlacedPlan.of(problem, plan, pricer=pricer)
        return None if memory_violations(problem, plan, placed.cost) else placed
    except InputError:
        return None


def _place(problem: Problem, plan: Plan) -> PlacedPlan:
    """Place `plan` on `problem` by our cost model; a plan placed so keeps the price that it has cached."""
    if isinstance(plan, PlacedPlan) and plan.problem == problem and our_model(plan.pricer, problem) is not None:
        return plan
    return PlacedPlan.of(problem, plan)


def lower_bound(
    problem: Problem, time_limit_s: float = 10.0, *, pricer: str | Pricer | PricerMaker | None = None
) -> float:
    """A step time in seconds that no plan can beat. It holds for every time limit, and tightens with more time.

    With a limit of 0, and after Ctrl-C, it is the compute bound, which needs no search. `pricer` is as in `solve`;
    another cost model than ours has the bound that it brings, or 0. Raises InputError for a time limit below 0 or above
    30 days.
    """
    limit_s = number_in(time_limit_s, "time_limit_s", at_least=0.0, at_most=MAX_TIME_LIMIT_S)
    judge = make_pricer(pricer, problem)
    try:
        return bound_under_s(judge, problem, limit_s)
    except KeyboardInterrupt:
        ours = our_model(judge, problem)
        return 0.0 if ours is None else compute_bound_s(ours)
