"""The searches of a study, which are jobs of a sweep: run once, known by their hash, and read as rows."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.studies.frame.settings import quick
from hexiopt.cores import usable_cores
from hexiopt.files.plan_file import read_plan
from hexiopt.files.sweep_files import PLAN_FILE, read_status
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget, Pricer
from hexiopt.study.jobs import LOWER_BOUND, SweepJob, code_sha256
from hexiopt.study.solution import PlacedPlan
from hexiopt.study.sweep import import_path, run_jobs

BOUND = LOWER_BOUND
CPU_LIMITS = "Time limits are CPU seconds, of each process of the search and of each core of the bound."
"""What a page says of searches with `cpu_time`."""
FOLDER, ANY_CODE = "STUDIES_FOLDER", "STUDIES_ANY_CODE"  # environment: where searches are kept, and of which code
_QUICK_STEPS, _QUICK_S, _QUICK_BOUND_S = 20, 60.0, 0.2
_measured: list[tuple["SearchSpec", dict[str, Any]]] = []  # by the study that runs: `take_measured`
_FIGURES = (
    *("step_time_s", "tokens_per_s", "mfu", "bound_s", "runtime_s", "first_plan_s", "peak_gib", "steps", "cpu_s"),
    *("unfit_step_s", "lacks_gib"),
)


@dataclass(frozen=True)
class SearchSpec:
    """A problem, a solver with its options, and its budget; `labels` are the columns that identify its row. With
    `max_steps` the steps bind, so that the plan is the same on any machine, and the time limit is generous.

    `pricer`, `judge`, `cpu_time` and `before` are as in `hexiopt.study.jobs.SweepJob`; functions are of a module. Where
    QUICK=1 a search takes a few steps.
    """

    problem: Problem
    solver: str
    time_limit_s: float
    labels: Mapping[str, Any]
    seed: int = 0
    options: Mapping[str, str | bool | float] = field(default_factory=dict)
    pricer: Callable[[Problem], Pricer] | None = None
    judge: Callable[[Problem, Plan], Mapping[str, float]] | None = None
    max_steps: int | None = None
    cpu_time: bool = False
    before: PlacedPlan | None = None

    @cached_property
    def job(self) -> SweepJob:
        """The search as a job of a sweep."""
        budget = Budget(self.time_limit_s, self.max_steps)
        if quick():
            budget = Budget(_QUICK_BOUND_S) if self.solver == BOUND else Budget(_QUICK_S, _QUICK_STEPS)
        return SweepJob(
            tuple(f"{key}={value}" for key, value in self.labels.items()),
            self.problem,
            self.solver,
            self.seed,
            budget,
            self.options,
            pricer=self.pricer and import_path("pricer", self.pricer),
            judge=self.judge and import_path("judge", self.judge),
            cpu_time=self.cpu_time,
            before=self.before,
        )


def folder() -> Path:
    """Where searches are kept: all studies share them."""
    return Path(os.environ.get(FOLDER, "results/searches"))


def measured(specs: Sequence[SearchSpec]) -> pd.DataFrame:
    """One row per search, run now or before by this version of the code: its labels, specification and measurements;
    NaN where it has no plan, `status` as of a result, or `bound`, `refused`, `overran` and `failed`."""
    code = None if os.environ.get(ANY_CODE) else code_sha256()
    jobs = {spec.job.key: spec.job for spec in specs}
    waiting = [job for job in jobs.values() if not job.is_done(folder(), code)]
    cores = usable_cores()
    longest_s = sum(job.budget.time_limit_s * job.cores(cores) for job in waiting) / cores
    known = f"{len(waiting)} of {len(jobs)} searches to run, at most about {longest_s / 60:.1f} min"
    print(f"hexiopt: {known}", file=sys.stderr)
    run_jobs(list(jobs.values()), folder(), None, None, "make results", code=code, isolated=True)
    rows = [_row(spec) for spec in specs]
    _measured.extend(zip(specs, rows, strict=True))
    return _table(rows)


def take_measured() -> tuple[list[SearchSpec], pd.DataFrame]:
    """The distinct searches measured since the last call, and their rows as of `measured`."""
    known = {row["key"]: (spec, row) for spec, row in _measured}
    _measured.clear()
    return [spec for spec, _ in known.values()], _table([row for _, row in known.values()])


def _table(searches: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    rows = pd.DataFrame(searches)
    rows = rows.reindex(columns=[*rows.columns, *(name for name in _FIGURES if name not in rows)])
    return rows.astype(dict.fromkeys(_FIGURES, float))


def plan_of(spec: SearchSpec) -> PlacedPlan | None:
    """The plan that a search has found."""
    path = folder() / spec.job.key / PLAN_FILE
    if not path.is_file():
        return None
    file = read_plan(path)
    return PlacedPlan.of(file.problem, file.plan, file.solver)


def _row(spec: SearchSpec) -> dict[str, Any]:
    status = read_status(folder() / spec.job.key)
    more = dict(status.get("measured", {}))
    return {
        **spec.labels,
        "solver": spec.solver,
        "seed": spec.seed,
        "time_limit_s": spec.time_limit_s,
        "reason": "" if more.get("status") in (None, "bound") else status.get("message", ""),
        "step_time_s": status.get("step_time_s"),
        "runtime_s": more.pop("search_s", status.get("runtime_s")),
        "bound_s": 0.0,
        "trajectory": [],
        **more.pop("judged", {}),
        **more,
        "key": spec.job.key,
    }
