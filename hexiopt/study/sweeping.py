"""Sweeps over a grid of problems, solvers and seeds on several processes; finished jobs are not run again."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from hexiopt.cores import usable_cores
from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.files.sweep_files import Asked, counted, jobs_frame
from hexiopt.frame import Frame
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import whole_in, word
from hexiopt.solving import MAX_SEED, Budget
from hexiopt.solving.plugins import declared_pricer
from hexiopt.study.jobs import SweepJob
from hexiopt.study.running import StatusLine
from hexiopt.study.workers import JobProcesses

_GROUPS = ("workload", "space", "constraints")
_KEYS = ("cluster", "model", "solver", "pricer", "seed", *(f"{group}.KEY" for group in _GROUPS), "solver.KEY")
_FIELDS = {group: [field.name for field in fields(Workload if group == "workload" else Space)] for group in _GROUPS}
_BUDGET = ("time_limit_s", "max_steps")


@dataclass(frozen=True)
class Sources:
    """The functions that read the clusters and models of a grid."""

    cluster: Callable[[Any], Cluster]
    model: Callable[[Any], ModelSpec]


def jobs_of(
    problem: Problem,
    over: Mapping[str, Iterable[Any]],
    solver: str,
    budget: Budget,
    sources: Sources,
    pricer: str | None = None,
) -> list[SweepJob]:
    """One job for each combination of the values in `over`; the last key varies fastest.

    Raises InputError for unknown keys, for keys without values, and for cost models that are not declared. A
    combination that does not form a problem becomes a job with the reason.
    """
    axes: dict[str, list[Any]] = {}
    for key, values in over.items():
        group, dot, name = str(key).partition(".")
        if (dot and not (name and group in (*_GROUPS, "solver"))) or (not dot and key not in _KEYS):
            raise InputError(f"over: {quoted(key)}: unknown key; {did_you_mean(str(key), _KEYS)}")
        if group in _FIELDS and name not in _FIELDS[group]:
            raise InputError(f"over: {key}: unknown key; {did_you_mean(name, _FIELDS[group])}")
        if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
            raise InputError(f"over: {key}: {quoted(values)} is not a list; write [{values!r}]")
        axes[str(key)] = list(values)
        if not axes[str(key)]:
            raise InputError(f"over: {key}: is empty; give at least one value")
    for name in axes.get("pricer", [pricer]):
        if not isinstance(name, str | None):
            raise InputError(
                f"pricer: {quoted(name)} is not a name; the processes of a sweep know cost models that a package "
                "declares (docs/add_a_solver.md)"
            )
        if name is not None:
            declared_pricer(name)
    return [
        _job(problem, {"pricer": pricer} | dict(zip(axes, values, strict=True)), list(axes), solver, budget, sources)
        for values in product(*axes.values())
    ]


def run_jobs(
    jobs: Sequence[SweepJob], folder: Path, processes: int | None, progress: bool | None, caller: str = "sweep"
) -> Frame:
    """Run the unfinished jobs; returns all of them in order. Raises KeyboardInterrupt after Ctrl-C, with the way to
    resume, which is to repeat the call of `caller`."""
    count = _at_once(jobs) if processes is None else whole_in(processes, "processes", at_least=1, at_most=1024)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made ({error.strerror}); choose another folder") from None
    distinct = {job.key: job for job in jobs}
    Asked.of(folder).plus([job.overrides for job in distinct.values()], 0).write(folder)
    left = [job for job in distinct.values() if not job.is_done(folder)]
    with StatusLine(progress) as line:
        count_up = _Counter(len(distinct), len(distinct) - len(left), line)
        try:
            JobProcesses(left, folder, count, count_up).run()
        except KeyboardInterrupt:
            done = sum(job.is_done(folder) for job in distinct.values())
            said = f"{done} of {len(distinct)} jobs are done in {os.fspath(folder)}; call {caller} again to resume"
            raise KeyboardInterrupt(said) from None
    frame = jobs_frame([folder / job.key for job in jobs])
    return Frame(frame.columns, frame.rows, title=counted(frame))


def _at_once(jobs: Iterable[SweepJob]) -> int:
    """How many jobs run at once so that none waits for another's cores, whichever they are."""
    cores = usable_cores()
    return cores // max((job.cores(cores) for job in jobs), default=1)


class _Counter:
    """Counts finished jobs on a status line."""

    def __init__(self, total: int, done: int, line: StatusLine) -> None:
        self._total, self._ended, self._bad, self._line = total, done, 0, line
        self._tell()

    def __call__(self, job: SweepJob, code: int) -> None:
        self._ended += 1
        self._bad += code != 0
        self._tell()

    def _tell(self) -> None:
        bad = f", {self._bad} without a plan" if self._bad else ""
        self._line.tell(f"{self._ended} of {self._total} jobs{bad}")


def _job(
    problem: Problem, values: Mapping[str, Any], axes: Iterable[str], solver: str, budget: Budget, sources: Sources
) -> SweepJob:
    overrides = tuple(f"{key}={_word(values[key])}" for key in axes)
    groups: dict[str, dict[str, Any]] = {group: dict(_within(values, group)) for group in (*_GROUPS, "solver")}
    for name, value in groups["solver"].items():
        if not isinstance(value, str | int | float | None):
            raise InputError(
                f"over: solver.{name}: {quoted(value)} is not a plain value; give a number, a string or None"
            )
    stated = {name: groups["solver"].pop(name) for name in _BUDGET if name in groups["solver"]}
    seed = whole_in(values.get("seed", 0), "seed", at_least=0, at_most=MAX_SEED)
    changed, refused = None, ""
    try:
        parts = {name: getattr(sources, name)(values[name]) for name in ("cluster", "model") if name in values}
        changed = problem.replace(
            **parts,
            workload=problem.workload.replace(**groups["workload"]),
            space=problem.space.replace(**(groups["space"] | groups["constraints"])),
        )
        budget = Budget(**{name: getattr(budget, name) for name in _BUDGET} | stated)
    except InputError as error:
        refused = str(error)
    name, own = str(values.get("solver", solver)), groups["solver"]
    return SweepJob(overrides, changed, name, seed, budget, own, refused, pricer=values["pricer"])


def _within(values: Mapping[str, Any], group: str) -> Iterator[tuple[str, Any]]:
    return ((key.partition(".")[2], value) for key, value in values.items() if key.startswith(f"{group}."))


def _word(value: Any) -> str:
    return value.name if isinstance(value, Cluster | ModelSpec) else word(value)
