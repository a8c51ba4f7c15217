"""The front door: read a cluster and a model, state a problem, solve, price, check and bound it.

All seconds are of one training step. Whatever a user states wrongly raises `InputError`, whose text is one line.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hexiopt.bounds import lower_bound_s
from hexiopt.cost.cost import Cost, violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError, did_you_mean
from hexiopt.plan.check import Violation
from hexiopt.plan.check import check as broken_rules
from hexiopt.plan.plan import Plan
from hexiopt.plugins import current_name, declared, imported, refereed
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.readers.cluster_file import cluster_from_section, read_cluster
from hexiopt.readers.huggingface import model_from_config, read_model
from hexiopt.readers.plan_file import PlanFile, read_plan, solver_to_dict, write_plan
from hexiopt.readers.shipped import is_shipped, shipped
from hexiopt.reading import Section, number_in, whole_in
from hexiopt.result import Result
from hexiopt.solving import MAX_SEED, MAX_TIME_LIMIT_S, Budget

__all__ = [
    "InputError",
    "Plan",
    "Problem",
    "Space",
    "Workload",
    "check",
    "cluster",
    "load_plan",
    "lower_bound",
    "model",
    "price",
    "save_plan",
    "solve",
    "solvers",
]


def cluster(source: str | Path | Mapping[str, Any]) -> Cluster:
    """A shipped cluster by its name, the cluster of a YAML or JSON file, or that of a mapping (docs/clusters.md).

    A string that is a shipped name is that cluster; "./NAME" or a Path is a file. The path of a `profile` starts at the
    folder of the file, or at the working directory for a mapping. Raises InputError, which names file and key.
    """
    if isinstance(source, str) and is_shipped("cluster", source):
        return cluster_from_section(Section(shipped("cluster", source), f"{source}.yaml"))
    return read_cluster(source) if isinstance(source, str | Path) else cluster_from_section(Section(source, "cluster"))


def model(source: str | Path | Mapping[str, Any]) -> ModelSpec:
    """A shipped model by its name, the model of a Hugging Face `config.json`, of YAML with its keys, or of a mapping.

    A string that is a shipped name is that model; "./NAME" or a Path is a file. Raises InputError, which names file and
    key.
    """
    if isinstance(source, str) and is_shipped("model", source):
        return model_from_config(Section(shipped("model", source), f"{source}.yaml"))
    return read_model(source) if isinstance(source, str | Path) else model_from_config(Section(source, "model"))


def load_plan(path: str | Path) -> PlanFile:
    """The content of a `plan.json`: `problem`, `plan`, and the `solver` that made it. Raises InputError.

    `check` and `price` take it in place of its plan.
    """
    return read_plan(path)


def save_plan(path: str | Path, problem: Problem, result: Result) -> None:
    """Write the plan of `result`, found for `problem`, as a `plan.json`, which `load_plan` reads. Raises InputError."""
    if result.plan is None or result.cost is None:
        raise InputError(f"plan: {result.solver} found none ({result.status}); there is nothing to save")
    write_plan(Path(path), problem, result.plan, result.cost, solver_to_dict(result))


def price(problem: Problem, plan: Plan | PlanFile) -> Cost:
    """The price of one step of `plan`: seconds with their parts, tokens per second, bytes of every stage.

    A plan that does not fit in memory has a price too; see `Cost.fits`. Raises InputError for a plan that breaks any
    other rule.
    """
    plan = _plan_of(plan)
    broken = broken_rules(problem, plan)
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise InputError(f"plan: breaks the rule {broken[0].rule}: {broken[0].text}{more}; correct it, or plan again")
    return PlanPricer(problem).price(plan)


def _plan_of(plan: Plan | PlanFile) -> Plan:
    return plan.plan if isinstance(plan, PlanFile) else plan


def check(problem: Problem, plan: Plan | PlanFile) -> list[Violation]:
    """The rules that `plan` breaks; empty for a valid plan that fits.

    Memory is checked only if no other rule is broken.
    """
    plan = _plan_of(plan)
    return broken_rules(problem, plan) or violations(problem, plan, price(problem, plan))


def lower_bound(problem: Problem, time_limit_s: float = 10.0) -> float:
    """A step time in seconds that no plan can beat; more time makes it tighter, less time never makes it wrong.

    With a limit of 0 it is the compute bound, which takes no search. Raises InputError for a time limit below 0 or
    above 30 days.
    """
    limit_s = number_in(time_limit_s, "time_limit_s", at_least=0.0, at_most=MAX_TIME_LIMIT_S)
    return lower_bound_s(PlanPricer(problem), limit_s)


def solvers() -> tuple[str, ...]:
    """The names of the solvers that installed packages declare, sorted."""
    return tuple(declared())


def solve(
    problem: Problem,
    solver: str = "portfolio",
    time_limit_s: float = 10.0,
    seed: int = 0,
    max_steps: int | None = None,
    **options: object,
) -> Result:
    """The best plan that `solver`, one of `solvers()`, finds within `time_limit_s` seconds, checked and priced again.

    With `max_steps`, in the solver's own unit, the same `seed` gives the same plan, whatever the load of the machine.
    `options` are the solver's own parameters. A result without a plan gives the reason in `reason`; `bound_s` is the
    bound that the solver proved, which `result.above(lower_bound(problem))` may raise.

    Raises InputError for unknown solvers and options, values out of range, and problems that the solver does not take;
    `hexiopt.referee.InvalidPlanError` for a plan that breaks a rule: a fault of the solver.
    """
    budget = Budget(time_limit_s, max_steps)
    seed = whole_in(seed, "seed", at_least=0, at_most=MAX_SEED)
    known = declared()
    if not known:
        raise InputError('solver: no installed package declares one; install this project, as by "pip install -e ."')
    solver = current_name(solver)
    if solver not in known:
        raise InputError(f"solver: {solver!r} is not known; {did_you_mean(str(solver), known)}")
    return refereed(imported(solver, known[solver]), **options).solve(problem, budget, seed=seed)
