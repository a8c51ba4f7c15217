"""The jobs of a sweep: a job is one problem, one solver, one budget and one seed, identified by its hash."""

import hashlib
import json
import math
import platform
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import hexiopt
from hexiopt.bounds import lower_bound_s
from hexiopt.cores import usable_cores
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.plan_file import (
    plan_file_from_section,
    plan_from_section,
    plan_to_dict,
    solver_to_dict,
    write_plan,
    write_text,
)
from hexiopt.files.problem_file import problem_from_section, problem_to_dict
from hexiopt.files.sweep_files import FINAL, PLAN_FILE, STATUS_FILE, read_status, status_to_dict
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section, sha256_of
from hexiopt.solving import Budget, OnProgress, Pricer, PricerMaker, Progress, foreign_name
from hexiopt.solving.clock import cpu_time, search_clock_s
from hexiopt.solving.referee import InvalidPlanError, Refereed
from hexiopt.solving.registry import make_solver
from hexiopt.solving.result import Result
from hexiopt.study.replan.replan import Replanning, weigh
from hexiopt.study.solution import PlacedPlan
from hexiopt.units import GIB

INTERRUPTED = 130
LOWER_BOUND = "lower_bound"
"""Stands for a solver: the bound on every plan, computed within the time limit on all cores."""
_GRACE, _CPU_GRACE, _GRACE_S = 2.0, 40.0, 60.0  # CPU time may pass slowly on a busy machine
_KIB = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
_CODE = ("hexiopt", "solvers")


@dataclass(frozen=True)
class SweepJob:
    """One job of a sweep.

    `overrides` are the KEY=VALUE pairs that distinguish it from the other jobs. The search begins from the plan `start`
    if there is one, and prices by the cost model `pricer` (None: ours), a declared name or the `module:function` that
    makes one. The `judge`, a `module:function` of problem and plan, says more of the plan found, in numbers by name.
    With `cpu_time` the time limit counts CPU seconds: of each process of the search, of all cores for a bound. With
    `before`, the plan of this problem before a change, the job replaces that plan by the fastest one, as
    `hexiopt.replan` does. If the overrides do not form a problem, `problem` is None and `refused` says why, in one
    line.
    """

    overrides: tuple[str, ...]
    problem: Problem | None
    solver: str
    seed: int
    budget: Budget
    options: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    start: Plan | None = None
    pricer: str | None = None
    judge: str | None = None
    cpu_time: bool = False
    before: PlacedPlan | None = None

    @cached_property
    def key(self) -> str:
        """The name of the job's folder: 16 hexadecimal digits of a hash of everything that determines its result."""
        data = self.to_dict()
        return sha256_of(data if self.problem is None else data | {"overrides": []})[:16]

    def to_dict(self) -> dict[str, Any]:
        """The job as plain data that `job_from_dict` reads."""
        more: dict[str, Any] = {name: value for name in _OPTIONAL if (value := getattr(self, name))}
        if self.before is not None:
            more["before"] = self.before.to_dict()
        if self.problem is not None and self.start is not None:
            more["start"] = plan_to_dict(self.start, self.problem.cluster)
        return more | {
            "overrides": list(self.overrides),
            "problem": None if self.problem is None else problem_to_dict(self.problem),
            "solver": self.solver,
            "seed": self.seed,
            "budget": asdict(self.budget),
            "options": dict(self.options),
            "refused": self.refused,
        }

    def cores(self, usable: int) -> int:
        """The number of `usable` cores that the solver keeps busy; 1 for an unknown solver."""
        if self.solver == LOWER_BOUND:
            return usable
        try:
            return make_solver(self.solver, self.options).capabilities.busy(usable)
        except InputError:
            return 1

    @property
    def longest_s(self) -> float:
        """Wall seconds after which a process of its own is ended, which allow for loading and slow pricing."""
        return (_CPU_GRACE if self.cpu_time else _GRACE) * self.budget.time_limit_s + _GRACE_S

    def is_done(self, folder: Path, code: str | None = None) -> bool:
        """Whether an earlier run, of this `code` if that is given, finished the job in `folder`."""
        status = read_status(folder / self.key)
        same = code is None or status.get("measured", {}).get("code") == code
        return same and status.get("exit_code") in FINAL

    def finish(
        self,
        folder: Path,
        exit_code: int,
        message: str,
        step_time_s: float = math.inf,
        runtime_s: float | None = None,
        **measured: Any,
    ) -> int:
        """Write the job's `status.json`; returns the exit code."""
        line = " ".join(message.split())
        status = status_to_dict(
            exit_code, line, self.overrides, step_time_s, runtime_s, self.key, provenance() | measured
        )
        (folder / self.key).mkdir(parents=True, exist_ok=True)
        write_text(folder / self.key / STATUS_FILE, json.dumps(status, indent=1, allow_nan=False) + "\n")
        return exit_code

    def run(self, folder: Path, listen: OnProgress) -> int:
        """Search, and write `plan.json` and `status.json` into the job's folder; returns the command line's exit code.

        Every exception but an interrupt becomes an exit code. 130 says that `listen` stopped the search; the plan is
        then the best so far.
        """
        stopped, began_s, used_s = False, time.perf_counter(), cpu_used_s()

        def report(progress: Progress) -> bool:
            nonlocal stopped
            stopped = not listen(progress)
            return not stopped

        def end(exit_code: int, message: str, result: Result | None = None, **measured: Any) -> int:
            wall_s = time.perf_counter() - began_s
            usage = {"cpu_s": cpu_used_s() - used_s, "peak_gib": peak_gib()}
            if result is not None:
                measured = measures_of(result) | measured
            step_s = math.inf if result is None else result.objective
            return self.finish(folder, exit_code, message, step_s, wall_s, **usage, **measured)

        try:
            if self.problem is None:
                raise InputError(self.refused)
            with cpu_time(self.cpu_time):
                if self.solver == LOWER_BOUND:
                    return end(0, "", status="bound", bound_s=self._bound_s(self.problem))
                solver = make_solver(self.solver, self.options, self._pricer_maker)
                judge = solver.judge(self.problem)
                result = self._search(self.problem, solver, judge, report)
            (folder / self.key).mkdir(parents=True, exist_ok=True)
            judged: dict[str, Any] = {}
            if result.plan is not None and result.cost is not None:
                record = solver_to_dict(result, foreign_name(judge, self.problem))
                write_plan(folder / self.key / PLAN_FILE, self.problem, result.plan, result.cost, record)
                judged = self._judge(self.problem, result.plan)
            if stopped:
                return end(INTERRUPTED, "interrupted; the best plan so far is kept", result)
            code, reason = (3, f"{result.status}: {result.reason}") if result.plan is None else (0, "")
            return end(code, reason, result, **judged)
        except InputError as error:
            return end(2, str(error), status="refused")
        except InvalidPlanError as error:
            return end(1, str(error), status="failed")
        except Exception as error:  # a failing solver must not end the sweep
            return end(1, f"unexpected {type(error).__name__}: {error}", status="failed")

    @property
    def _pricer_maker(self) -> str | PricerMaker | None:
        """The cost model as `make_solver` takes it."""
        if self.pricer is None or ":" not in self.pricer:
            return self.pricer
        maker: PricerMaker = resolve_name(self.pricer)
        return maker

    def _bound_s(self, problem: Problem) -> float:
        """The bound; its threads keep all cores busy, so that CPU time passes as fast as there are cores."""
        cores = usable_cores() if self.cpu_time else 1
        return lower_bound_s(PlanPricer(problem), self.budget.time_limit_s, lambda: search_clock_s() / cores)

    def _search(self, problem: Problem, solver: Refereed, judge: Pricer, report: OnProgress) -> Result:
        if self.before is None:
            return solver.solve(problem, self.budget, seed=self.seed, on_progress=report, start=self.start, judge=judge)
        searches: list[Result] = []

        def search(start: Plan | None, pricer: Pricer | None, budget: Budget) -> Result:
            searches.append(
                solver.solve(problem, budget, seed=self.seed, pricer=pricer, on_progress=report, start=start)
            )
            return searches[-1]

        began_s = search_clock_s()
        wanted = Replanning(self.before, (), horizon_steps=1000.0, restart_s=0.0, checkpoint_gb_per_s=None)
        best = weigh(wanted, problem, search, self.budget).replacements[-1]
        steps = sum(result.steps for result in searches)
        spent_s = search_clock_s() - began_s
        return replace(searches[0], plan=best.plan, cost=best.cost, runtime_s=spent_s, steps=steps)

    def _judge(self, problem: Problem, plan: Plan) -> dict[str, Any]:
        """What the judge says of a plan, as a status has it: null for what is no number."""
        if self.judge is None:
            return {}
        figures: Mapping[str, float] = resolve_name(self.judge)(problem, plan)
        return {"judged": {name: value if math.isfinite(value) else None for name, value in figures.items()}}


_OPTIONAL = ("pricer", "judge", "cpu_time")  # fields that a job's data have only where they are set


def measures_of(result: Result) -> dict[str, Any]:
    """What a status says of a search beside its step time: how it ended, its bound, throughput and improvements;
    without a plan, the step and the GiB lacking of the one closest to fitting."""
    measured: dict[str, Any] = {"status": str(result.status), "bound_s": result.bound_s, "search_s": result.runtime_s}
    if result.closest_to_fitting is not None:
        _, cost = result.closest_to_fitting
        measured |= {"unfit_step_s": cost.step_time_s, "lacks_gib": cost.excess_bytes / GIB}
    if result.cost is not None:
        points = [(point.runtime_s, point.step_time_s) for point in result.trajectory]
        measured |= {"tokens_per_s": result.cost.tokens_per_s, "mfu": result.cost.mfu, "steps": result.steps}
        measured |= {"first_plan_s": points[0][0] if points else None, "trajectory": points}
    return measured


def provenance() -> dict[str, str]:
    """Machine, date and code of a measurement."""
    machine = f"{usable_cores()} cores, {platform.machine()}, Python {platform.python_version()}"
    return {"machine": machine, "date": datetime.now(UTC).date().isoformat(), "code": code_sha256()}


@cache
def code_sha256() -> str:
    """SHA-256 of the source and data files of hexiopt and its solvers."""
    digest, root = hashlib.sha256(), Path(hexiopt.__file__).parent.parent
    paths = [path for folder in _CODE for suffix in ("py", "yaml") for path in (root / folder).rglob(f"*.{suffix}")]
    for path in sorted(paths):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _usages() -> list[resource.struct_rusage]:
    return [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]


def cpu_used_s() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    return sum(usage.ru_utime + usage.ru_stime for usage in _usages())


def peak_gib() -> float:
    """The most memory in GiB that this process, and one that it has waited for, have had at once."""
    return sum(usage.ru_maxrss for usage in _usages()) * _KIB / 2**30


def job_from_dict(data: Mapping[str, Any]) -> SweepJob:
    """The inverse of `SweepJob.to_dict`."""
    problem_data, start = data["problem"], data.get("start")
    problem = None if problem_data is None else problem_from_section(Section(problem_data, "problem"))
    return SweepJob(
        tuple(data["overrides"]),
        problem,
        data["solver"],
        data["seed"],
        Budget(**data["budget"]),
        data["options"],
        data["refused"],
        plan_from_section(Section(start, "start"), problem.cluster) if start and problem else None,
        data.get("pricer"),
        data.get("judge"),
        data.get("cpu_time", False),
        _read_placed_plan(data["before"]) if "before" in data else None,
    )


def _read_placed_plan(data: Mapping[str, Any]) -> PlacedPlan:
    file = plan_file_from_section(Section(data, "before"))
    return PlacedPlan.of(file.problem, file.plan, file.solver)
