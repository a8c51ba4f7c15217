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
from hexiopt.plugins import declared, imported, refereed
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.readers.cluster_file import cluster_from_section, read_cluster
from hexiopt.readers.huggingface import model_from_config, read_model
from hexiopt.readers.plan_file import PlanFile, read_plan
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
    "solve",
    "solvers",
]


def cluster(source: str | Path | Mapping[str, Any]) -> Cluster:
    """The cluster of a YAML or JSON file, or of a mapping with the same keys (docs/clusters.md).

    A `profile` that it names is a path from the file's folder, of a mapping from the working directory. Raises
    InputError that names file and key.
    """
    return read_cluster(source) if isinstance(source, str | Path) else cluster_from_section(Section(source, "cluster"))


def model(source: str | Path | Mapping[str, Any]) -> ModelSpec:
    """The model of a Hugging Face `config.json`, of a YAML file with the same keys, or of such a mapping.

    Raises InputError that names file and key.
    """
    return read_model(source) if isinstance(source, str | Path) else model_from_config(Section(source, "model"))


def load_plan(path: str | Path) -> PlanFile:
    """What a `plan.json` says: `problem`, `plan`, and the `solver` that made it. Raises InputError.

    `check` says whether the plan is valid, `price` what it costs today.
    """
    return read_plan(path)


def price(problem: Problem, plan: Plan) -> Cost:
    """What a step of `plan` takes: seconds with their parts, tokens per second, bytes of every stage.

    A plan beyond memory has a price too; see `Cost.fits`. Raises InputError for a plan that breaks any other rule.
    """
    broken = broken_rules(problem, plan)
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise InputError(f"plan: breaks the rule {broken[0].rule}: {broken[0].text}{more}; mend it, or plan again")
    return PlanPricer(problem).price(plan)


def check(problem: Problem, plan: Plan) -> list[Violation]:
    """The rules that `plan` breaks; empty for a valid plan that fits. Memory is looked at where no other rule is
    broken."""
    return broken_rules(problem, plan) or violations(problem, plan, price(problem, plan))


def lower_bound(problem: Problem, time_limit_s: float = 10.0) -> float:
    """Seconds that a step of every plan takes at least; better with more time, never wrong with less.

    At 0 seconds it is the compute bound, at once. Raises InputError for a time limit below 0 or above 30 days.
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
    """The best plan that `solver`, one of `solvers()`, finds within `time_limit_s` seconds, checked and priced anew.

    `max_steps`, in the solver's own unit, makes the plan the same for the same `seed`, whatever else the machine does.
    `options` are the solver's own parameters. A result without a plan says why in `reason`; `bound_s` is what the
    solver proved, which `result.above(lower_bound(problem))` may raise.

    Raises InputError for unknown solvers and options, values out of range, and problems that the solver does not take;
    `hexiopt.referee.InvalidPlanError` for a plan that breaks a rule: a fault of the solver.
    """
    budget = Budget(time_limit_s, max_steps)
    seed = whole_in(seed, "seed", at_least=0, at_most=MAX_SEED)
    known = declared()
    if not known:
        raise InputError('solver: no installed package declares one; install this project, as by "pip install -e ."')
    if solver not in known:
        raise InputError(f"solver: {solver!r} is not known; {did_you_mean(str(solver), known)}")
    return refereed(imported(solver, known[solver]), **options).solve(problem, budget, seed=seed)
