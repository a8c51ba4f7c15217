"""Sweeps over a grid of problems, solvers and seeds on several processes; finished jobs are not run again."""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from hexiopt.cores import usable_cores
from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.files.sweep_files import SweepRequest, jobs_frame, sweep_frame
from hexiopt.frame import Frame
from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import whole_in, word
from hexiopt.solving import Budget, PricerMaker, valid_seed
from hexiopt.solving.registry import current_name, find_pricer
from hexiopt.study.inputs import cluster, model
from hexiopt.study.jobs import SweepJob
from hexiopt.study.running import status_line
from hexiopt.study.statistics import Mean, signed_rank_p
from hexiopt.study.workers import JobProcesses

Judge = Callable[[Problem, Plan], Mapping[str, float]]

_GROUPS = ("workload", "space", "constraints")
_KEYS = ("cluster", "model", "solver", "pricer", "seed", *(f"{group}.KEY" for group in _GROUPS), "solver.KEY")
_FIELDS = {group: [field.name for field in fields(Workload if group == "workload" else Space)] for group in _GROUPS}
_BUDGET = ("time_limit_s", "max_steps")


@dataclass(frozen=True, repr=False)
class Sweep(Frame):
    """The jobs of a sweep as a table, one row per job."""

    def summary(self, by: str = "solver") -> Frame:
        """One row per value of the column `by`, the best first, over jobs that agree in all other keys (cells).

        `over_best` is the geometric mean of step times over the shortest of each cell, `low` and `high` its 95 %
        interval. `pairs` are the cells in which both this value and that of the first row have a plan, `faster` those
        in which this one's is the faster, and `p` is by which chance they differ as much (Wilcoxon's signed-rank test).
        Raises InputError for an unknown column.
        """
        keys = [key for key in self.columns[1 : self.columns.index("exit_code")] if not key.startswith("judge.")]
        steps_s: dict[Any, dict[tuple[Any, ...], float]] = {value: {} for value in self[by]}
        best_s: dict[tuple[Any, ...], float] = {}
        for row in self:
            cell, step_s = tuple([row[key] for key in keys if key != by]), row["result.step_time_s"]
            if step_s is not None:
                steps_s[row[by]][cell] = step_s
                best_s[cell] = min(step_s, best_s.get(cell, step_s))
        over = {
            value: Mean.geometric([step_s / best_s[cell] for cell, step_s in cells.items()]) if cells else None
            for value, cells in steps_s.items()
        }
        order = sorted(steps_s, key=lambda value: (-len(steps_s[value]), mean.mean if (mean := over[value]) else 0.0))
        rows = []
        for value in order:
            row = {by: value, "jobs": self[by].count(value), "plans": len(steps_s[value])}
            if mean := over[value]:
                first = steps_s[order[0]]
                ratios = [step_s / first[cell] for cell, step_s in steps_s[value].items() if cell in first]
                row |= {"over_best": mean.mean, "low": mean.low, "high": mean.high, "pairs": len(ratios)}
                row |= {"faster": sum(ratio < 1.0 for ratio in ratios), "p": signed_rank_p(ratios)}
            rows.append(row)
        columns = (by, "jobs", "plans", "over_best", "low", "high", "pairs", "faster", "p")
        return Frame.of(rows, columns, title=self.title)


def sweep(
    problem: Problem,
    over: Mapping[str, Iterable[Any]],
    folder: str | Path,
    *,
    solver: str = "portfolio",
    time_limit_s: float = 10.0,
    max_steps: int | None = None,
    pricer: str | PricerMaker | None = None,
    judge: Judge | None = None,
    cpu_time: bool = False,
    processes: int | None = None,
    progress: bool | None = None,
) -> Sweep:
    """Run one search for each combination of the values in `over`, on several `processes` (by default as many as the
    cores allow, of which some solvers keep several busy).

    Keys are those of the command line: `cluster`, `model`, `workload.KEY`, `space.KEY`, `constraints.KEY`, `solver`,
    `solver.KEY`, `pricer` and `seed`; `problem` and the other arguments supply the rest. The solver `lower_bound` means
    the bound on every plan, found within the time limit. `pricer` is the name of a declared cost model, or a function
    or class of a module that makes one. The function `judge`, of a module too, says more of each plan, as numbers by
    name for problem and plan: columns `judge.NAME`. With `cpu_time` the time limit counts CPU seconds, of each process
    of a search, so that a busy machine changes nothing.

    Each job writes `plan.json` and `status.json` to a sub-folder of `folder` that is named by a hash of everything that
    determines its result. The same call resumes a sweep: it skips finished jobs, and repeats failed and interrupted
    ones. A failing job does not end the sweep. The frame has one row per job, with the columns of `hexiopt collect`.

    Raises InputError for wrong keys, and for functions that another process cannot import. Raises KeyboardInterrupt
    after Ctrl-C, once running jobs have saved their best plans.
    """
    budget, solver = Budget(time_limit_s, max_steps), current_name(solver)
    axes = {str(key): _axis(str(key), values) for key, values in over.items()}
    for name in axes.get("pricer", [pricer]):
        if isinstance(name, str):
            find_pricer(name)
        elif name is not None:
            import_path("pricer", name)
    combinations = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    jobs = [_job(problem, {"pricer": pricer} | values, list(axes), solver, budget) for values in combinations]
    judged_by = None if judge is None else import_path("judge", judge)
    jobs = [replace(job, judge=judged_by, cpu_time=cpu_time) for job in jobs]
    run_jobs(jobs, Path(folder), processes, progress)
    return _sweep(jobs_frame([Path(folder) / job.key for job in jobs]))


def read_sweep(*folders: str | Path) -> Sweep:
    """The jobs in `folders`, one row per job, whether `sweep` or `hexiopt plan -m` (a Hydra multirun) wrote them.

    Each overridden key is a column, with the default where a job does not override it, followed by exit code, message
    and the prediction of the plan. A comparison has a row for each of its solvers. Requested jobs that have not ended
    come last, without an exit code. Raises InputError for a folder without jobs.
    """
    return _sweep(sweep_frame(map(Path, folders)))


def _sweep(frame: Frame) -> Sweep:
    return Sweep(frame.columns, frame.rows, title=frame.title)


def _axis(key: str, values: Any) -> list[Any]:
    """The values of `key`. Raises InputError for an unknown key, and for a key without values."""
    group, dot, name = key.partition(".")
    if (dot and not (name and group in (*_GROUPS, "solver"))) or (not dot and key not in _KEYS):
        raise InputError(f"over: {quoted(key)}: unknown key; {did_you_mean(key, _KEYS)}")
    if group in _FIELDS and name not in _FIELDS[group]:
        raise InputError(f"over: {key}: unknown key; {did_you_mean(name, _FIELDS[group])}")
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise InputError(f"over: {key}: {quoted(values)} is not a list; write [{values!r}]")
    if not (items := list(values)):
        raise InputError(f"over: {key}: is empty; give at least one value")
    return items


def run_jobs(
    jobs: Sequence[SweepJob],
    folder: Path,
    processes: int | None,
    progress: bool | None,
    caller: str = "sweep",
    *,
    code: str | None = None,
    isolated: bool = False,
) -> None:
    """Run the unfinished jobs.

    Those that keep most cores busy run first, by default as many at a time as the cores allow. With `code`, jobs that
    other code finished are run again; `isolated` jobs each have a process of their own. Raises KeyboardInterrupt after
    Ctrl-C; its message says to call `caller` again to resume.
    """
    if processes is not None:
        whole_in(processes, "processes", at_least=1, at_most=1024)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror}); choose another folder") from None
    distinct = {job.key: job for job in jobs}
    pending = [job for job in distinct.values() if not job.is_done(folder, code)]
    SweepRequest.of(folder).plus([job.overrides for job in pending], 0).write(folder)
    cores, groups, codes = usable_cores(), defaultdict[int, list[SweepJob]](list), list[int]()
    for job in pending:
        groups[job.cores(cores) if processes is None else 1].append(job)
    with status_line(progress) as show:

        def tell(*more: int) -> None:
            codes.extend(more)
            bad, ended = sum(code != 0 for code in codes), len(distinct) - len(pending) + len(codes)
            show(f"{ended} of {len(distinct)} jobs" + (f", {bad} without a plan" if bad else ""))

        tell()
        try:
            for busy, group in sorted(groups.items(), reverse=True):
                JobProcesses(group, folder, processes or cores // busy, tell, isolated=isolated).run()
        except KeyboardInterrupt:
            done = sum(job.is_done(folder, code) for job in distinct.values())
            message = f"{done} of {len(distinct)} jobs are done in {os.fspath(folder)}; call {caller} again to resume"
            raise KeyboardInterrupt(message) from None


def _job(problem: Problem, values: Mapping[str, Any], axes: Iterable[str], solver: str, budget: Budget) -> SweepJob:
    overrides = tuple(f"{key}={_word(values[key])}" for key in axes)
    groups: dict[str, dict[str, Any]] = {group: dict(_within(values, group)) for group in (*_GROUPS, "solver")}
    for name, value in groups["solver"].items():
        if not isinstance(value, str | int | float | None):
            raise InputError(
                f"over: solver.{name}: {quoted(value)} is not a plain value; give a number, a string or None"
            )
    limits = {name: groups["solver"].pop(name) for name in _BUDGET if name in groups["solver"]}
    seed = valid_seed(values.get("seed", 0))
    changed, refused = None, ""
    try:
        parts = {name: read(values[name]) for name, read in (("cluster", cluster), ("model", model)) if name in values}
        changed = problem.replace(
            **parts,
            workload=problem.workload.replace(**groups["workload"]),
            space=problem.space.replace(**(groups["space"] | groups["constraints"])),
        )
        budget = Budget(**{name: getattr(budget, name) for name in _BUDGET} | limits)
    except InputError as error:
        refused = str(error)
    name, options = str(values.get("solver", solver)), groups["solver"]
    maker = values["pricer"]
    pricer = maker if isinstance(maker, str | None) else import_path("pricer", maker)
    return SweepJob(overrides, changed, name, seed, budget, options, refused, pricer=pricer)


def import_path(what: str, function: Callable[..., Any]) -> str:
    """`module:name` of a function or class, by which another process imports it.

    Raises InputError for what it cannot import.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if module in (None, "__main__") or "<" in name:
        raise InputError(
            f"{what}: {quoted(function)} is no function or class of a module, which the processes of a sweep can "
            "import; put it into a file of its own, and import it from there"
        )
    return f"{module}:{name}"


def _within(values: Mapping[str, Any], group: str) -> Iterator[tuple[str, Any]]:
    return ((key.partition(".")[2], value) for key, value in values.items() if key.startswith(f"{group}."))


def _word(value: Any) -> str:
    if callable(value):
        return str(value.__qualname__)
    return value.name if isinstance(value, Cluster | ModelSpec) else word(value)
