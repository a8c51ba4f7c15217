"""One search of a table, what it is identified by, and what it measured."""

import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from experiments.tables.host import this_machine
from experiments.tables.markdown import Cell
from hexiopt.bounds import lower_bound_s
from hexiopt.cost.model import CostModel
from hexiopt.errors import InputError
from hexiopt.problem.problem import Problem, sha256_of
from hexiopt.readers.plan_file import solver_to_dict, write_plan
from hexiopt.result import Result
from hexiopt.solving import Budget
from solvers.registry import make_solver

BOUND = "lower_bound"
"""In place of a solver: the lower bound of all plans, raised for as long as the time limit allows."""

_TWO_CORES = ("portfolio", "cp_sat", BOUND)
_KIB = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
K = TypeVar("K")


@dataclass(frozen=True)
class Task:
    """A problem, a solver with its options, and its budget."""

    problem: Problem
    solver: str
    time_limit_s: float
    seed: int = 0
    options: tuple[tuple[str, str | bool], ...] = ()

    @cached_property
    def sha256(self) -> str:
        """Identifies everything that goes in."""
        return sha256_of(
            {
                "problem": self.problem.sha256,
                "solver": self.solver,
                "options": dict(self.options),
                "time_limit_s": self.time_limit_s,
                "seed": self.seed,
            }
        )

    @property
    def cores(self) -> int:
        """How many cores it keeps busy."""
        return 2 if self.solver in _TWO_CORES else 1

    def cells(self, outcome: "Outcome", *, memory: bool = False) -> dict[str, Cell]:
        """Columns of a CSV file: what the search took, with its peak of memory where asked for, and what it was."""
        return {
            "runtime_s": outcome.runtime_s,
            "time_limit_s": self.time_limit_s,
            **({"peak_gib": outcome.peak_gib} if memory else {}),
            "seed": self.seed,
            "search_sha256": self.sha256,
            "reason": outcome.reason,
        }

    def __str__(self) -> str:
        options = "".join(f" {key}={value}" for key, value in self.options)
        return f"{self.solver}{options} on {self.problem.cluster.name}, {self.problem.model.name}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What a search found. `status` is a result's, `refused` (the solver does not take the problem), `overran` or
    `failed`; `trajectory` has (seconds since the start, best step time then)."""

    status: str
    runtime_s: float
    bound_s: float = 0.0
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    trajectory: tuple[tuple[float, float], ...] = ()
    reason: str = ""
    peak_gib: float = 0.0
    machine: str = ""

    @property
    def objective(self) -> float:
        """Step time in seconds, infinite without a plan."""
        return math.inf if self.step_time_s is None else self.step_time_s

    def over(self, other: "Outcome") -> float | None:
        """Throughput over another's on the same workload; None where either has no plan."""
        if self.step_time_s is None or other.step_time_s is None:
            return None
        return other.step_time_s / self.step_time_s

    def gap(self, bound_s: float) -> float | None:
        """How far its plan is at most from the best there is, by a lower bound of all plans; None without a plan."""
        return None if self.step_time_s is None else 1 - bound_s / self.step_time_s

    def cells(self, *, mfu: bool = True) -> dict[str, Cell]:
        """Columns of a CSV file: what was found, without its MFU where not asked for."""
        return {
            "status": self.status,
            "step_time_s": self.step_time_s,
            "tokens_per_s": self.tokens_per_s,
            **({"mfu": self.mfu} if mfu else {}),
        }

    @property
    def first_plan_s(self) -> float | None:
        """Seconds to the first plan."""
        return self.trajectory[0][0] if self.trajectory else None

    def time_to_s(self, step_time_s: float) -> float | None:
        """Seconds until the best step time was at most `step_time_s`; None if it never was."""
        return next((at for at, best in self.trajectory if best <= step_time_s), None)

    def best_at_s(self, time_s: float) -> float:
        """The best step time after `time_s` seconds, infinite before the first plan."""
        return min((best for at, best in self.trajectory if at <= time_s), default=math.inf)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Outcome":
        """From what `to_dict` made, or JSON of it."""
        points = tuple((float(at), float(best)) for at, best in data["trajectory"])
        return cls(**{**data, "trajectory": points})


def fastest(outcomes: Mapping[K, Outcome]) -> tuple[K, Outcome]:
    """Who has the best plan, and its outcome; the first where none has a plan."""
    return min(outcomes.items(), key=lambda item: item[1].objective)


def perform(task: Task, plan_path: Path | None = None) -> Outcome:
    """Run a search; its plan goes into `plan_path`."""
    start = time.perf_counter()
    try:
        if task.solver == BOUND:
            bound_s = lower_bound_s(CostModel(task.problem), task.time_limit_s)
            outcome = Outcome("bound", time.perf_counter() - start, bound_s)
        else:
            solver = make_solver(task.solver, **dict(task.options))
            result = solver.solve(task.problem, Budget(task.time_limit_s), seed=task.seed)
            outcome = _measured(task, result, plan_path)
    except InputError as error:
        outcome = Outcome("refused", time.perf_counter() - start, reason=str(error))
    used = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return replace(outcome, peak_gib=used * _KIB / 2**30, machine=this_machine())


def _measured(task: Task, result: Result, plan_path: Path | None) -> Outcome:
    cost = result.cost
    if cost is None or result.plan is None:
        return Outcome(str(result.status), result.runtime_s, result.bound_s, reason=result.reason)
    if plan_path is not None:
        write_plan(plan_path, task.problem, result.plan, cost, solver_to_dict(result))
    return Outcome(
        status=str(result.status),
        runtime_s=result.runtime_s,
        bound_s=result.bound_s,
        step_time_s=cost.step_time_s,
        tokens_per_s=cost.tokens_per_s,
        mfu=cost.mfu,
        trajectory=tuple((point.runtime_s, point.step_time_s) for point in result.trajectory),
    )


class Found:
    """Outcomes by task."""

    def __init__(self, outcomes: Mapping[str, Outcome]) -> None:
        self._outcomes = outcomes

    def __getitem__(self, task: Task) -> Outcome:
        return self._outcomes[task.sha256]

    def bound_s(self, *tasks: Task) -> float:
        """The best bound that any of these tasks, all on one problem, has proven; 0 where none has."""
        assert len({task.problem for task in tasks}) == 1, "a bound holds for one problem"
        return max(self[task].bound_s for task in tasks)

    def machines(self, tasks: Sequence[Task]) -> list[str]:
        """The machines that measured."""
        return list(dict.fromkeys(self[task].machine for task in tasks if self[task].machine))
