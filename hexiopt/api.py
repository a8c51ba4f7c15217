"""The front door: read a cluster and a model, state a problem, solve, price, check, bound, compare, sweep and draw it.

All seconds are of one training step. Whatever a user states wrongly raises `InputError`, a `ValueError` whose text is
one line. In Jupyter every object shows itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hexiopt import plot
from hexiopt.bounds import compute_bound_s, lower_bound_s
from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError, quoted
from hexiopt.frame import Frame
from hexiopt.plan.check import Violation
from hexiopt.plan.check import check as broken_rules
from hexiopt.plan.plan import Plan
from hexiopt.plugins import current_name, declared_pricer
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.readers.cluster_file import cluster_from_section, read_cluster
from hexiopt.readers.huggingface import model_from_config, read_model
from hexiopt.readers.plan_file import read_plan
from hexiopt.readers.shipped import is_shipped, shipped
from hexiopt.readers.sweep_files import job_folders, jobs_frame
from hexiopt.reading import Section, number_in, whole_in
from hexiopt.solving import MAX_SEED, MAX_TIME_LIMIT_S, Budget, Pricer, Solver
from hexiopt.toolkit import html
from hexiopt.toolkit.catalogue import SolverCatalogue, SolverInfo, made_solver
from hexiopt.toolkit.comparing import Comparison, bound_above, each_result, labelled
from hexiopt.toolkit.running import Interrupt, listening
from hexiopt.toolkit.solution import PlacedPlan, PlanCost, Solution
from hexiopt.toolkit.sweeping import Sources, jobs_of, run_jobs

__all__ = [
    "Cluster",
    "Comparison",
    "Frame",
    "InputError",
    "ModelSpec",
    "PlacedPlan",
    "Plan",
    "PlanCost",
    "Problem",
    "Solution",
    "SolverCatalogue",
    "SolverInfo",
    "Space",
    "Workload",
    "check",
    "cluster",
    "compare",
    "load_plan",
    "lower_bound",
    "model",
    "plot",
    "price",
    "read_sweep",
    "solve",
    "solver",
    "solvers",
    "sweep",
]

html.register()


def cluster(source: str | Path | Mapping[str, Any]) -> Cluster:
    """A shipped cluster by its name, the cluster of a YAML or JSON file, or that of a mapping (docs/clusters.md).

    A string that is a shipped name is that cluster; "./NAME" or a Path is a file. The path of a `profile` starts at the
    folder of the file, or at the working directory for a mapping. Raises InputError, which names file and key.
    """
    if isinstance(source, Cluster):
        return source
    if isinstance(source, str) and is_shipped("cluster", source):
        return cluster_from_section(Section(shipped("cluster", source), f"{source}.yaml"))
    return read_cluster(source) if isinstance(source, str | Path) else cluster_from_section(Section(source, "cluster"))


def model(source: Any) -> ModelSpec:
    """A shipped model by its name, that of a Hugging Face `config.json` (or of its folder), of YAML with its keys, of a
    mapping, or of a configuration object of transformers.

    A string that is a shipped name is that model; "./NAME" or a Path is a file. Raises InputError, which names file and
    key.
    """
    if isinstance(source, ModelSpec):
        return source
    if isinstance(source, str) and is_shipped("model", source):
        return model_from_config(Section(shipped("model", source), f"{source}.yaml"))
    if isinstance(source, str | Path):
        path = Path(source)
        return read_model(path / "config.json" if path.is_dir() else path)
    if not isinstance(source, Mapping) and callable(getattr(source, "to_dict", None)):
        source = source.to_dict()  # as transformers' configurations have it
    return model_from_config(Section(source, "model"))


def load_plan(path: str | Path) -> PlacedPlan:
    """The plan of a `plan.json`, with its `problem` and the `solver` that found it. Raises InputError."""
    read = read_plan(path)
    return PlacedPlan.of(read.problem, read.plan, read.solver)


def price(problem: Problem, plan: Plan) -> PlanCost:
    """The price of one step of `plan`: seconds with their parts, tokens per second, bytes of every stage.

    A plan that does not fit in memory has a price too; see `PlanCost.fits`. Raises InputError for a plan that breaks
    another rule.
    """
    broken = broken_rules(problem, plan)
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise InputError(f"plan: breaks the rule {broken[0].rule}: {broken[0].text}{more}; mend it, or plan again")
    return PlanCost.of(problem, plan, PlanPricer(problem).price(plan))


def check(problem: Problem, plan: Plan) -> list[Violation]:
    """The rules that `plan` breaks; empty for a valid plan that fits.

    Memory is checked only if no other rule is broken.
    """
    return broken_rules(problem, plan) or violations(problem, plan, price(problem, plan))


def lower_bound(problem: Problem, time_limit_s: float = 10.0) -> float:
    """A step time in seconds that no plan can beat; more time makes it tighter, less time never makes it wrong.

    With a limit of 0, and after Ctrl-C, it is the compute bound, which takes no search. Raises InputError for a time
    limit below 0 or above 30 days.
    """
    limit_s = number_in(time_limit_s, "time_limit_s", at_least=0.0, at_most=MAX_TIME_LIMIT_S)
    pricer = PlanPricer(problem)
    try:
        return lower_bound_s(pricer, limit_s)
    except KeyboardInterrupt:
        return compute_bound_s(pricer)


def solvers() -> SolverCatalogue:
    """The solvers that installed packages declare: a mapping of `SolverInfo` by name, shown as a table.

    It gives what each can do, and its parameters with their defaults.
    """
    return SolverCatalogue()


def solver(name: str, **options: object) -> Solver:
    """The solver `name`, one of `solvers()`, with its own `options`, for `solve` and `compare`. Raises InputError."""
    return made_solver(current_name(name), options)


def solve(
    problem: Problem,
    solver: str | Solver | type = "portfolio",
    time_limit_s: float = 10.0,
    seed: int = 0,
    max_steps: int | None = None,
    *,
    constraints: Mapping[str, Any] | None = None,
    pricer: str | Pricer | Callable[[Problem], Pricer] | None = None,
    progress: bool | None = None,
    **options: object,
) -> Solution:
    """The best plan that `solver` finds within `time_limit_s` seconds, checked and priced again.

    `solver` is one of `solvers()` by name, or a class or an object of your own; `options` are its parameters. With
    `max_steps`, in the solver's own unit, the same `seed` gives the same plan, whatever the load of the machine.
    `constraints` bind the plan space of the problem for this call (fields of `Space`). `pricer` steers the search by
    another cost model: one that a package declares, by name, or what makes one for a problem. Progress is shown in a
    terminal and in a notebook unless `progress` says otherwise; Ctrl-C ends the search and returns the best so far.

    A result without a plan gives the reason in `reason`; `bound_s` is the bound that the solver proved, which
    `result.above(lower_bound(problem))` may raise.

    Raises InputError for unknown solvers and options, values out of range, and problems that the solver does not take;
    `hexiopt.referee.InvalidPlanError` for a plan that breaks a rule: a fault of the solver.
    """
    budget = Budget(time_limit_s, max_steps)
    seed = whole_in(seed, "seed", at_least=0, at_most=MAX_SEED)
    problem = _constrained(problem, constraints)
    made = made_solver(current_name(solver) if isinstance(solver, str) else solver, options)
    judge = _pricer(pricer, problem)
    with listening(Interrupt(), problem.workload.tokens, budget.time_limit_s, progress) as listen:
        result = made.solve(problem, budget, seed=seed, pricer=judge, on_progress=listen)
    return Solution.of(problem, result, judge)


def compare(
    problem: Problem,
    solvers: Sequence[str | Solver | type] | Mapping[str, str | Solver | type],
    seeds: int | Iterable[int] = 1,
    time_limit_s: float = 10.0,
    max_steps: int | None = None,
    *,
    bound_time_limit_s: float | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Solvers side by side on one problem, one after another with one budget each, for each of `seeds` (a number: so
    many, from 0).

    `solvers` are as in `solve`; a mapping gives them labels, so that one may stand twice with other options
    (`hexiopt.solver(NAME, ...)`). The lower bound gets `bound_time_limit_s` seconds, by default half a search's. A plan
    that breaks a rule is marked `invalid` and not ranked. Ctrl-C returns what there is. Raises InputError.
    """
    budget = Budget(time_limit_s, max_steps)
    own = range(whole_in(seeds, "seeds", at_least=1, at_most=10**6)) if not isinstance(seeds, Iterable) else seeds
    chosen = [whole_in(seed, "seeds", at_least=0, at_most=MAX_SEED) for seed in own]
    limit_s = 0.5 * budget.time_limit_s if bound_time_limit_s is None else bound_time_limit_s
    limit_s = number_in(limit_s, "bound_time_limit_s", at_least=0.0, at_most=MAX_TIME_LIMIT_S)
    made = [(label, made_solver(one, {})) for label, one in labelled(solvers).items()]
    interrupt = Interrupt()
    with listening(interrupt, problem.workload.tokens, budget.time_limit_s, progress) as listen:
        results = list(each_result(problem, made, budget, chosen, listen, interrupt))
    bound_s = 0.0 if interrupt.pressed else bound_above(problem, results, limit_s)
    return Comparison.among(problem, results, bound_s)


def sweep(
    problem: Problem,
    over: Mapping[str, Iterable[Any]],
    folder: str | Path,
    *,
    solver: str = "portfolio",
    time_limit_s: float = 10.0,
    max_steps: int | None = None,
    processes: int | None = None,
    progress: bool | None = None,
) -> Frame:
    """One search for each combination of the values of `over`, in several `processes` (by default one a core).

    Keys are those of the command line: `cluster`, `model`, `workload.KEY`, `space.KEY`, `constraints.KEY`, `solver`,
    `solver.KEY`, `seed`; what they do not state is that of `problem` and of the other arguments. Each job has a folder
    below `folder`, called by a hash of all that decides what it finds, with `plan.json` and `status.json`. Called
    again, a sweep goes on: jobs that are done are not run again, failed and interrupted ones are. A job that fails does
    not end the others. The frame has a row a job, as `hexiopt collect` writes them.

    Raises InputError for wrong keys; KeyboardInterrupt after Ctrl-C, which keeps the best plans of running jobs.
    """
    jobs = jobs_of(problem, over, current_name(solver), Budget(time_limit_s, max_steps), Sources(cluster, model))
    return run_jobs(jobs, Path(folder), processes, progress)


def read_sweep(*folders: str | Path) -> Frame:
    """The jobs of sweeps, a row a job: those that `sweep` left in `folders`, or `hexiopt plan -m` (Hydra).

    A column for each overridden key, then exit code, message and what the plan predicts. Raises InputError for a folder
    without jobs.
    """
    return jobs_frame([job for folder in folders for job in job_folders(Path(folder))])


def _constrained(problem: Problem, constraints: Mapping[str, Any] | None) -> Problem:
    if not isinstance(problem, Problem):
        raise InputError(f"problem: {quoted(problem)} is not a Problem; give hexiopt.Problem(cluster, model, ...)")
    return problem.replace(space=problem.space.replace(**constraints)) if constraints else problem


def _pricer(stated: Any, problem: Problem) -> Pricer | None:
    """The pricer that is stated by name, as itself or by what makes it. Raises InputError."""
    if stated is None:
        return None
    made: Any = declared_pricer(stated) if isinstance(stated, str) else stated
    pricer: Pricer = made if hasattr(made, "price") and not isinstance(made, type) else made(problem)
    return pricer
