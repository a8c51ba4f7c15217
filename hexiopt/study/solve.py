"""The best plan for a problem."""

from collections.abc import Mapping
from typing import Any

from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget, OnProgress, Pricer, PricerMaker, Solver, valid_seed
from hexiopt.solving.registry import make_solver
from hexiopt.study.inputs import constrain
from hexiopt.study.running import listener
from hexiopt.study.solution import Solution


def solve(
    problem: Problem,
    solver: str | Solver | type = "portfolio",
    time_limit_s: float = 10.0,
    seed: int = 0,
    max_steps: int | None = None,
    *,
    constraints: Mapping[str, Any] | None = None,
    pricer: str | Pricer | PricerMaker | None = None,
    start: Plan | None = None,
    progress: bool | None = None,
    on_progress: OnProgress | None = None,
    **options: object,
) -> Solution:
    """The best plan that `solver` finds within `time_limit_s` seconds, checked by the referee.

    `solver` is a name in `solvers()`, or a solver class or object; `options` are its parameters. `max_steps` limits the
    search in the solver's own unit; the same `seed` then gives the same plan, whatever the load of the machine.
    `constraints` are fields of `Space` that replace those of the problem for this call. `pricer` is the cost model that
    steers the search and prices its result instead of our own: a declared name, or a class or function that makes one
    for a problem. Bounds and proofs of ours do not hold for it, so `bound_s` is 0 unless it brings one. `start`
    is a plan for the problem to begin from, such as that of an earlier search: the result is never slower.
    Progress appears on a terminal and in a notebook, unless `progress` is False. Ctrl-C ends the search, and the best
    plan so far is returned; so it is where `on_progress`, which is called with each `Progress`, returns False.

    Without a plan, `reason` of the result says why. `bound_s` is the bound that the solver proved;
    `result.above(lower_bound(problem))` may raise it.

    Raises InputError for unknown solvers and options, for values out of range, and for problems that the solver does
    not accept; raises `hexiopt.solving.referee.InvalidPlanError` where the solver returns a plan that breaks a rule.
    """
    budget, seed = Budget(time_limit_s, max_steps), valid_seed(seed)
    problem = constrain(problem, constraints)
    refereed = make_solver(solver, options, pricer)
    judge = refereed.judge(problem)
    with listener(problem.workload.tokens, budget.time_limit_s, progress) as (listen, _):
        hear = listen if on_progress is None else lambda report: listen(report) and on_progress(report)
        result = refereed.solve(problem, budget, seed=seed, on_progress=hear, start=start, judge=judge)
    return Solution.of(problem, result, judge)
