"""A job of a sweep: one problem, one solver, one budget and one seed, identified by its hash."""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from hexiopt.files.plan_file import plan_from_section, plan_to_dict, solver_to_dict, write_plan, write_text
from hexiopt.files.problem_file import problem_from_section, problem_to_dict
from hexiopt.files.sweep_files import FINAL, PLAN_FILE, STATUS_FILE, read_status, status_to_dict
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section, sha256_of
from hexiopt.solving import Budget, OnProgress, Progress, foreign_name
from hexiopt.solving.referee import InvalidPlanError
from hexiopt.solving.registry import make_solver

INTERRUPTED = 130


@dataclass(frozen=True)
class SweepJob:
    """One job. `overrides` are the KEY=VALUE pairs that distinguish it from the others of its sweep; the search begins
    from the plan `start` if there is one, and is by the declared cost model `pricer`, None for ours.

    If the overrides do not form a problem, `problem` is None and `refused` says why, in one line.
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

    @cached_property
    def key(self) -> str:
        """The name of the job's folder: 16 hexadecimal digits of a hash of everything that determines its result."""
        data = self.to_dict()
        return sha256_of(data if self.problem is None else data | {"overrides": []})[:16]

    def to_dict(self) -> dict[str, Any]:
        """The job as plain data that `job_from_dict` reads."""
        more: dict[str, Any] = {} if self.pricer is None else {"pricer": self.pricer}
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
        """How many of `usable` cores its solver keeps busy; 1 where there is no such solver."""
        try:
            return make_solver(self.solver, self.options).capabilities.busy(usable)
        except InputError:
            return 1

    def is_done(self, folder: Path) -> bool:
        """Whether an earlier run finished the job in `folder`."""
        return read_status(folder / self.key).get("exit_code") in FINAL

    def ended(
        self, folder: Path, exit_code: int, message: str, step_time_s: float = math.inf, runtime_s: float | None = None
    ) -> int:
        """Write the job's `status.json`; returns the exit code."""
        said = " ".join(message.split())
        status = status_to_dict(exit_code, said, self.overrides, step_time_s, runtime_s, self.key)
        (folder / self.key).mkdir(parents=True, exist_ok=True)
        write_text(folder / self.key / STATUS_FILE, json.dumps(status, indent=1, allow_nan=False) + "\n")
        return exit_code

    def run(self, folder: Path, listen: OnProgress) -> int:
        """Search, and write `plan.json` and `status.json` into the job's folder; returns the command line's exit code.

        Every exception but an interrupt becomes an exit code. 130 means that `listen` stopped the search; the plan is
        then the best so far.
        """
        stopped, began_s = False, time.perf_counter()

        def heed(progress: Progress) -> bool:
            nonlocal stopped
            stopped = not listen(progress)
            return not stopped

        def end(exit_code: int, message: str, step_time_s: float = math.inf) -> int:
            return self.ended(folder, exit_code, message, step_time_s, time.perf_counter() - began_s)

        try:
            if self.problem is None:
                raise InputError(self.refused)
            solver = make_solver(self.solver, self.options, self.pricer)
            judge = solver.judge(self.problem)
            result = solver.solve(
                self.problem, self.budget, seed=self.seed, on_progress=heed, start=self.start, judge=judge
            )
            own = folder / self.key
            own.mkdir(parents=True, exist_ok=True)
            if result.plan is not None and result.cost is not None:
                record = solver_to_dict(result, foreign_name(judge, self.problem))
                write_plan(own / PLAN_FILE, self.problem, result.plan, result.cost, record)
            if stopped:
                return end(INTERRUPTED, "interrupted; the best plan so far is kept", result.objective)
            code, said = (3, f"{result.status}: {result.reason}") if result.plan is None else (0, "")
            return end(code, said, result.objective)
        except InputError as error:
            return end(2, str(error))
        except InvalidPlanError as error:
            return end(1, str(error))
        except Exception as error:  # a failing solver must not end the sweep
            return end(1, f"unexpected {type(error).__name__}: {error}")


def job_from_dict(data: Mapping[str, Any]) -> SweepJob:
    """The inverse of `SweepJob.to_dict`."""
    stated, start = data["problem"], data.get("start")
    problem = None if stated is None else problem_from_section(Section(stated, "problem"))
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
    )
