"""The public Python API: read clusters and models, state a problem, solve, price, check, bound, compare, sweep, draw.

All seconds are of one training step. Bad input raises `InputError`, a `ValueError` with a one-line message. All objects
are immutable and display themselves in Jupyter.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

from hexiopt import plot
from hexiopt.bounds import compute_bound_s, lower_bound_s
from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError, quoted
from hexiopt.exports.exporting import Exported, exported, imported, program_of, trainer_of
from hexiopt.exports.formats import LaunchOptions
from hexiopt.files.cluster_file import cluster_from_section, read_cluster
from hexiopt.files.huggingface import model_from_config, read_model
from hexiopt.files.plan_file import plan_file_to_dict, read_plan, write_text
from hexiopt.files.price_list import prices_for
from hexiopt.files.shipped import is_shipped, shipped
from hexiopt.files.sweep_files import counted, sweep_frame
from hexiopt.frame import Frame
from hexiopt.plan.check import Violation
from hexiopt.plan.check import check as broken_rules
from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section, number_in, whole_in
from hexiopt.solving import MAX_SEED, MAX_TIME_LIMIT_S, Budget, Pricer, PricerMaker, Solver
from hexiopt.solving.catalogue import SolverCatalogue, SolverInfo, default_of, made_solver
from hexiopt.solving.plugins import current_name, pricer_maker
from hexiopt.solving.result import Result
from hexiopt.study import html
from hexiopt.study.alternatives import Wishes, alternatives, priced
from hexiopt.study.comparing import Comparison, bound_above, each_result, labelled
from hexiopt.study.fitting import Fit, fitted
from hexiopt.study.replan.changes import Added, Slow, changed
from hexiopt.study.replan.moving import CHECKPOINT_GB_PER_S, RESTART_S
from hexiopt.study.replan.replanning import Replacement, Replanning, replacements
from hexiopt.study.running import Interrupt, listening
from hexiopt.study.solution import PlacedPlan, PlanCost, Solution
from hexiopt.study.sweeping import Sources, jobs_of, run_jobs
from hexiopt.study.trained import TrainedRun
from hexiopt.study.whatif import SearchSetup, WhatIf, planned, processes_for

__all__ = [
    "Cluster",
    "Comparison",
    "Exported",
    "Fit",
    "Frame",
    "InputError",
    "ModelSpec",
    "PlacedPlan",
    "Plan",
    "PlanCost",
    "Problem",
    "Replacement",
    "Replanning",
    "Solution",
    "SolverCatalogue",
    "SolverInfo",
    "Space",
    "TrainedRun",
    "WhatIf",
    "Workload",
    "check",
    "cluster",
    "compare",
    "export",
    "fit",
    "import_plan",
    "load_plan",
    "lower_bound",
    "model",
    "plot",
    "price",
    "read_sweep",
    "read_training",
    "replan",
    "solve",
    "solver",
    "solvers",
    "sweep",
    "what_if",
]

html.register()


def cluster(source: str | Path | Mapping[str, Any]) -> Cluster:
    """The cluster with a shipped name, from a YAML or JSON file, or from a mapping (docs/clusters.md).

    A shipped name takes precedence over a file; write "./NAME" or a Path for the file. The path of a `profile` is
    relative to the file, or to the working directory for a mapping. Raises InputError naming file and key.
    """
    if isinstance(source, Cluster):
        return source
    if isinstance(source, str) and is_shipped("cluster", source):
        return cluster_from_section(Section(shipped("cluster", source), f"{source}.yaml"))
    return read_cluster(source) if isinstance(source, str | Path) else cluster_from_section(Section(source, "cluster"))


def model(source: Any) -> ModelSpec:
    """The model with a shipped name, from a Hugging Face `config.json` or its folder, or a YAML file or a mapping with
    the same keys, from the Hub by its name ORG/NAME, or from a configuration object of transformers.

    A shipped name takes precedence over a file; write "./NAME" or a Path for the file. The Hub is asked where neither a
    file nor its local cache has the name. Raises InputError naming file and key.
    """
    if isinstance(source, ModelSpec):
        return source
    if isinstance(source, str) and is_shipped("model", source):
        return model_from_config(Section(shipped("model", source), f"{source}.yaml"))
    if isinstance(source, str | Path):
        return read_model(source)
    if not isinstance(source, Mapping) and callable(getattr(source, "to_dict", None)):
        source = source.to_dict()  # as transformers' configurations have it
    return model_from_config(Section(source, "model"))


def load_plan(path: str | Path) -> PlacedPlan:
    """The plan in a `plan.json`, with its `problem` and the record of its `solver`. Raises InputError."""
    read = read_plan(path)
    return PlacedPlan.of(read.problem, read.plan, read.solver)


def price(problem: Problem, plan: Plan) -> PlanCost:
    """The price of one step of `plan`: seconds with their parts, tokens per second, bytes of every stage.

    A plan that does not fit in memory has a price too; see `PlanCost.fits`. Raises InputError for a plan that breaks
    any other rule.
    """
    broken = broken_rules(problem, plan)
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise InputError(f"plan: breaks the rule {broken[0].rule}: {broken[0].text}{more}; correct it, or plan again")
    return PlanCost.of(problem, plan, PlanPricer(problem).price(plan))


def check(problem: Problem, plan: Plan) -> list[Violation]:
    """The rules that `plan` breaks; empty for a valid plan that fits in memory.

    Memory is checked only if no other rule is broken.
    """
    return broken_rules(problem, plan) or violations(problem, plan, price(problem, plan))


def lower_bound(problem: Problem, time_limit_s: float = 10.0) -> float:
    """A step time in seconds that no plan can beat. It holds for every time limit, and tightens with more time.

    With a limit of 0, and after Ctrl-C, it is the compute bound, which needs no search. Raises InputError for a time
    limit below 0 or above 30 days.
    """
    limit_s = number_in(time_limit_s, "time_limit_s", at_least=0.0, at_most=MAX_TIME_LIMIT_S)
    pricer = PlanPricer(problem)
    try:
        return lower_bound_s(pricer, limit_s)
    except KeyboardInterrupt:
        return compute_bound_s(pricer)


def solvers() -> SolverCatalogue:
    """The solvers that installed packages declare, as a mapping from name to `SolverInfo` that prints as a table.

    It lists the capabilities of each solver, and its parameters with their defaults.
    """
    return SolverCatalogue()


def solver(name: str, **options: object) -> Solver:
    """The solver `name`, one of `solvers()`, with parameters, for `solve` and `compare`. Raises InputError."""
    return made_solver(current_name(name), options)


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
    plan so far is returned.

    Without a plan, `reason` of the result says why. `bound_s` is the bound that the solver proved;
    `result.above(lower_bound(problem))` may raise it.

    Raises InputError for unknown solvers and options, for values out of range, and for problems that the solver does
    not accept; raises `hexiopt.solving.referee.InvalidPlanError` where the solver returns a plan that breaks a rule.
    """
    budget = Budget(time_limit_s, max_steps)
    seed = whole_in(seed, "seed", at_least=0, at_most=MAX_SEED)
    problem = _constrained(problem, constraints)
    made = made_solver(current_name(solver) if isinstance(solver, str) else solver, options)
    judge = None if pricer is None else pricer_maker(pricer)(problem)
    with listening(Interrupt(), problem.workload.tokens, budget.time_limit_s, progress) as listen:
        result = made.solve(problem, budget, seed=seed, pricer=judge, on_progress=listen, start=start)
    return Solution.of(problem, result, judge)


def replan(
    plan: PlacedPlan,
    problem: Problem | None = None,
    *,
    lost: Sequence[str] = (),
    slow: Slow | None = None,
    added: Added | None = None,
    horizon_steps: float = 1000.0,
    restart_s: float = RESTART_S,
    checkpoint_gb_per_s: float | None = CHECKPOINT_GB_PER_S,
    solver: str | Solver | type = "portfolio",
    time_limit_s: float = 10.0,
    seed: int = 0,
    max_steps: int | None = None,
    progress: bool | None = None,
) -> Replanning:
    """Plans that can replace `plan` on a changed cluster, each with the bytes and seconds that it moves.

    `problem` is the changed problem, of the same model; by default that of `plan`. Machines and devices in `lost` are
    excluded from it. Those in `slow` run at a share of their type's speed, `{"d:3": 0.7}`, or as a run of `plan`
    measured, of which it is the folder. `added` are more machines as a cluster file states them: the list, or a file or
    mapping with `machines` and their own `gpus`. Devices with the same name hold what they held.

    Three quarters of `time_limit_s`, and of `max_steps`, go to the fastest plan, the rest to one whose moving also pays
    back within `horizon_steps` steps. `restart_s` seconds are what a change takes beside moving; a machine reads a
    checkpoint at `checkpoint_gb_per_s`, at most as fast as its network interfaces receive (None: so fast). Both are
    assumptions until yours are stated. Raises InputError, also where there is no plan.
    """
    now = changed(plan, plan.problem if problem is None else problem, lost, slow, added)
    if now.model != plan.problem.model:
        raise InputError("replan: the changed problem has another model; plan again")
    steps = number_in(horizon_steps, "horizon_steps", above=0.0, at_most=1e12)
    rest_s = number_in(restart_s, "restart_s", at_least=0.0, at_most=1e9)
    if checkpoint_gb_per_s is not None:
        number_in(checkpoint_gb_per_s, "checkpoint_gb_per_s", above=0.0, at_most=1e6)

    budget = Budget(time_limit_s, max_steps)
    seed = whole_in(seed, "seed", at_least=0, at_most=MAX_SEED)
    made = made_solver(current_name(solver) if isinstance(solver, str) else solver, {})

    def search(start: Plan | None, pricer: Pricer | None, own: Budget) -> Result:
        with listening(Interrupt(), now.workload.tokens, own.time_limit_s, progress) as listen:
            return made.solve(now, own, seed=seed, pricer=pricer, on_progress=listen, start=start)

    return replacements(plan, now, search, budget, steps, rest_s, checkpoint_gb_per_s)


def export(
    plan: PlacedPlan,
    format: str,
    folder: str | Path,
    trainer: str | None = None,
    *,
    master: str | None = None,
    job: str = "plan",
    image: str = "pytorch/pytorch:latest",
    minutes: int = 60,
    gpu_names: Mapping[str, str] = MappingProxyType({}),
) -> Exported:
    """Write a plan into `folder` in the files of another system, with `plan.json` and the rank table.

    `format` is a launcher (`torchrun`, `slurm`, `jobset`, `skypilot`), which starts the processes of `trainer` (by
    default our executor); a trainer alone (`megatron`, `flagscale`, `torchtitan`, ...); or `ranks`, the rank table. The
    other arguments are a launcher's: `master` is the host:port where ranks meet, `job` and `image` are names of the job
    and the container, `minutes` is the time limit, `gpu_names` has the scheduler's names of GPU types. The result has
    the files, the command to type, and what differs from the plan. Raises InputError where the format cannot express
    the plan; the message names the switch under which it can.
    """
    program = program_of(plan.problem, plan, trainer_of(format, trainer))
    where = Path(folder)
    options = LaunchOptions(str(where.absolute()), job, master, image, minutes, gpu_names)
    found = exported(plan.problem, plan, format, program, options)
    own = {"plan.json": json.dumps(plan_file_to_dict(plan.problem, plan, plan.cost, plan.solver), indent=1)}
    where.mkdir(parents=True, exist_ok=True)
    for name, text in (own | dict(found.files)).items():
        write_text(where / name, text)
    return found


def import_plan(
    format: str,
    file: str | Path,
    cluster: Cluster,
    model: ModelSpec | None = None,
    workload: Workload | None = None,
    *,
    ranks: str | Path | None = None,
) -> PlacedPlan:
    """The layout in the `file` of another trainer (`megatron`, `flagscale`, `torchtitan`, ...), as a plan on `cluster`.

    `model` is needed where the file does not state it; `workload` has what the file does not state, and its values
    other than the defaults go before the file's. `ranks` is a rank table, with the GPU of each rank; without it, ranks
    are the cluster's GPUs in order. `solver["notes"]` of the plan says what was read, left out or assumed. Raises
    InputError.
    """
    table = None if ranks is None else str(ranks)
    layout = imported(format, Path(file), cluster, model, workload or Workload(), Space(), table)
    made_by = {"name": f"{format} (imported)", "notes": list(layout.notes)}
    return PlacedPlan.of(layout.problem, layout.plan, made_by)


def compare(
    problem: Problem,
    solvers: Sequence[str | Solver | type] | Mapping[str, str | Solver | type],
    seeds: int | Iterable[int] = 1,
    time_limit_s: float = 10.0,
    max_steps: int | None = None,
    *,
    pricer: str | Pricer | PricerMaker | None = None,
    bound_time_limit_s: float | None = None,
    progress: bool | None = None,
) -> Comparison:
    """Run solvers one after the other on one problem, with the same budget, for each of `seeds` (or for that many
    seeds from 0).

    `solvers` are as in `solve`. The keys of a mapping are labels, under which one solver can appear twice with other
    parameters (`hexiopt.solver(NAME, ...)`). `pricer` is as in `solve`. The lower bound is computed within
    `bound_time_limit_s` seconds, by default half the time limit of a search; under another cost model than ours there
    is none, unless it brings one.

    A result whose plan breaks a rule is marked `invalid` and not ranked; so are solvers that do not take the problem
    (`refused`) and those that raise an exception (`crashed`). `overrun_s` says who took longer than the time limit
    allows. Ctrl-C ends the comparison, and the results so far are returned. Raises InputError.
    """
    budget = Budget(time_limit_s, max_steps)
    own = range(whole_in(seeds, "seeds", at_least=1, at_most=10**6)) if not isinstance(seeds, Iterable) else seeds
    chosen = [whole_in(seed, "seeds", at_least=0, at_most=MAX_SEED) for seed in own]
    limit_s = 0.5 * budget.time_limit_s if bound_time_limit_s is None else bound_time_limit_s
    limit_s = number_in(limit_s, "bound_time_limit_s", at_least=0.0, at_most=MAX_TIME_LIMIT_S)
    maker = None if pricer is None else pricer_maker(pricer)
    made = [(label, made_solver(one, {}, maker)) for label, one in labelled(solvers).items()]
    interrupt = Interrupt()
    with listening(interrupt, problem.workload.tokens, budget.time_limit_s, progress) as listen:
        results = list(each_result(problem, made, budget, chosen, listen, interrupt))
    judge = None if maker is None else maker(problem)
    bound_s = 0.0 if interrupt.pressed else bound_above(problem, results, limit_s, judge)
    return Comparison.among(problem, results, bound_s, judge)


def sweep(
    problem: Problem,
    over: Mapping[str, Iterable[Any]],
    folder: str | Path,
    *,
    solver: str = "portfolio",
    time_limit_s: float = 10.0,
    max_steps: int | None = None,
    pricer: str | None = None,
    processes: int | None = None,
    progress: bool | None = None,
) -> Frame:
    """Run one search for each combination of the values in `over`, on several `processes` (by default as many as the
    cores allow, of which some solvers keep several busy).

    Keys are those of the command line: `cluster`, `model`, `workload.KEY`, `space.KEY`, `constraints.KEY`, `solver`,
    `solver.KEY`, `pricer` and `seed`; `problem` and the other arguments supply the rest. `pricer` is the name of a
    declared cost model. Each job writes `plan.json` and
    `status.json` to a sub-folder of `folder` that is named by a hash of everything that determines its result. The same
    call resumes a sweep: it skips finished jobs, and repeats failed and interrupted ones. A failing job does not end
    the sweep. The frame has one row per job, with the columns of `hexiopt collect`.

    Raises InputError for wrong keys. Raises KeyboardInterrupt after Ctrl-C, once running jobs have saved their best
    plans.
    """
    budget, sources = Budget(time_limit_s, max_steps), Sources(cluster, model)
    jobs = jobs_of(problem, over, current_name(solver), budget, sources, pricer)
    return run_jobs(jobs, Path(folder), processes, progress)


def read_sweep(*folders: str | Path) -> Frame:
    """The jobs in `folders`, one row per job, whether `sweep` or `hexiopt plan -m` (a Hydra multirun) wrote them.

    Each overridden key is a column, with the value used where a job does not override it, followed by exit code,
    message and the prediction of the plan. A comparison has a row for each of its solvers. Jobs that were asked for and
    have not ended come last, without an exit code. Raises InputError for a folder without jobs.
    """
    frame = sweep_frame(map(Path, folders), default_of)
    return frame.replace(title=counted(frame))


def fit(
    problem: Problem,
    solver: str | Solver | type = "portfolio",
    time_limit_s: float = 3.0,
    seed: int = 0,
    max_steps: int | None = None,
    *,
    pricer: str | Pricer | PricerMaker | None = None,
    precision: float = 0.03,
    progress: bool | None = None,
    **options: object,
) -> Fit:
    """What fits in memory, on the whole cluster and on the devices of each GPU type alone.

    The rows of the table say whether the problem fits as asked, the longest `seq_len` and the largest `num_layers`
    that do, each with everything else as asked, and the largest micro-batch in sequences that fits in a plan found. The
    global batch is bounded by time alone: micro-batches follow each other. `fittings` has the plans that prove it.
    Above, a request is `impossible` where the solver proves it, and `without_plan` where it found none.

    `solver` answers each question within `time_limit_s` seconds and `max_steps` steps; `precision` is the relative
    distance to the least refused request at which bisection ends; `pricer` is as in `solve`. After Ctrl-C the answers
    so far are returned. Raises InputError as `solve` does.
    """
    budget = Budget(time_limit_s, max_steps)
    seed = whole_in(seed, "seed", at_least=0, at_most=MAX_SEED)
    precision = number_in(precision, "precision", at_least=0.0, at_most=1.0)
    maker = None if pricer is None else pricer_maker(pricer)
    made = made_solver(current_name(solver) if isinstance(solver, str) else solver, options, maker)
    return fitted(_constrained(problem, None), made, budget, seed, precision, Interrupt(), progress)


def what_if(
    problem: Problem,
    solver: str = "portfolio",
    time_limit_s: float = 10.0,
    seed: int = 0,
    max_steps: int | None = None,
    *,
    prices: str | Path | Mapping[str, Any] | None = None,
    factor: float = 2.0,
    take: Sequence[str] | Sequence[Sequence[str]] = (),
    add: Mapping[str, int] | Sequence[Mapping[str, int]] = (),
    pricer: str | None = None,
    folder: str | Path | None = None,
    bound_time_limit_s: float | None = None,
    processes: int | None = None,
    progress: bool | None = None,
    **options: Any,
) -> WhatIf:
    """What the cluster would gain from other machines and links: one row per alternative, with its plan in `options`.

    Alternatives are the cluster with one machine of a kind more or less, without all of a kind, with the rates of a
    kind of links multiplied by `factor`, and with what the price list `prices` offers, a file or a mapping
    (docs/questions.md); and what you state: without the machines in `take`, or with those in `add`, a number by the
    name of a machine of the cluster or on offer. Several such sets are an alternative each. Each is searched
    with the same solver and budget, from the plan of the cluster as it is where the solver can begin from one. A plan
    found for one counts for every other that it is valid for, so a machine more never makes the plan worse. `gain` is
    in tokens per second, `bound_share` the dual value of a machine in the lower bound as a share of its throughput,
    `worth_per_hour` the price at which a token costs as much as now. `pricer` is the name of a declared cost model that
    prices plans instead of ours.

    With a `folder` the same call resumes: it keeps the plans there. `processes` run at once (by default as many as the
    solver's cores allow). Raises InputError, and KeyboardInterrupt after Ctrl-C.
    """
    budget = Budget(time_limit_s, max_steps)
    seed = whole_in(seed, "seed", at_least=0, at_most=MAX_SEED)
    factor = number_in(factor, "factor", above=1.0, at_most=1000.0)
    limit_s = 0.5 * budget.time_limit_s if bound_time_limit_s is None else bound_time_limit_s
    limit_s = number_in(limit_s, "bound_time_limit_s", at_least=0.0, at_most=MAX_TIME_LIMIT_S)
    name = current_name(solver)
    made = made_solver(name, options)
    offered = prices_for(_constrained(problem, None), prices)
    found = alternatives(priced(problem, offered), offered, factor, Wishes(take, add))
    count = processes_for(made.capabilities, processes)
    setup = SearchSetup(name, options, budget, seed, pricer)
    setup.judge(problem)  # refused before anything is searched
    with nullcontext(folder) if folder is not None else TemporaryDirectory() as kept:
        return planned(found, setup, Path(kept), count, limit_s, progress)


def read_training(folder: str | Path) -> TrainedRun:
    """The training run in the folder of `hexiopt train`: its steps, and a measured step beside the predicted one.

    Raises InputError for a folder without the files of a run.
    """
    return TrainedRun.of(folder)


def _constrained(problem: Problem, constraints: Mapping[str, Any] | None) -> Problem:
    if not isinstance(problem, Problem):
        raise InputError(f"problem: {quoted(problem)} is not a Problem; give hexiopt.Problem(cluster, model, ...)")
    return problem.replace(space=problem.space.replace(**constraints)) if constraints else problem
