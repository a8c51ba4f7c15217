"""Comparison of solvers on one problem: the same budget for each, several seeds, one lower bound."""

import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hexiopt.bounds import bound_under_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.frame import Frame
from hexiopt.problem.problem import Problem
from hexiopt.report.compared.comparison_frames import comparison_frame, operators_frame
from hexiopt.solving import Budget, OnProgress, Pricer, Solver
from hexiopt.solving.referee import InvalidPlanError
from hexiopt.solving.result import Result, Status
from hexiopt.study.running import Interrupt
from hexiopt.study.solution import Solution

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Comparison(Frame):
    """The results of solvers as a table, one row per solver and seed, best first; `results` has the plans."""

    results: tuple[Solution, ...] = field(default=(), kw_only=True)

    @classmethod
    def among(
        cls, problem: Problem, results: Sequence[Result], bound_s: float = 0.0, pricer: Pricer | None = None
    ) -> "Comparison":
        """A comparison of `results` for `problem`, which `pricer` priced. `bound_s` is a valid lower bound in seconds,
        or 0."""
        solved = tuple(Solution.of(problem, result, pricer).above(bound_s) for result in results)
        frame = comparison_frame(solved)
        rows = sorted(frame.rows, key=lambda row: (row[2] is None, row[2]))
        title = f"{problem.model.name} on {problem.cluster.name}"
        return cls(frame.columns, tuple(rows), title=title, results=solved)

    @property
    def best(self) -> Solution:
        """The result with the shortest step time; the first of equals."""
        return min(self.results, key=lambda result: result.objective)

    def summary(self) -> Frame:
        """One row per solver: numbers of runs and of plans, and the best, median and worst step time over seeds."""
        rows = []
        for name in dict.fromkeys(result.solver for result in self.results):
            runs = [result for result in self.results if result.solver == name]
            found_s = [run.objective for run in runs if run.plan is not None]
            row: dict[str, Any] = {"solver": name, "runs": len(runs), "plans": len(found_s)}
            if found_s:
                spread = {"best_s": min(found_s), "median_s": median(found_s), "worst_s": max(found_s)}
                row |= spread | {"over_best": spread["median_s"] / self.best.objective - 1}
            rows.append(row)
        columns = ("solver", "runs", "plans", "best_s", "median_s", "worst_s", "over_best")
        return Frame.of(sorted(rows, key=lambda row: row.get("median_s", float("inf"))), columns, title=self.title)

    def trajectories(self) -> Frame:
        """One row per improvement: solver, seed, seconds and steps since the start, and the best step time so far."""
        columns = ("solver", "seed", "runtime_s", "steps", "step_time_s")
        points = ((one, point) for one in self.results for point in one.trajectory)
        rows = ((one.solver, one.seed, point.runtime_s, point.steps, point.step_time_s) for one, point in points)
        return Frame(columns, tuple(rows), title=self.title)

    def operators(self) -> Frame:
        """One row per search operator, with the counts of its candidates' outcomes."""
        return operators_frame(self.results)

    def plot(self) -> "Figure":
        """A matplotlib figure: best step time over search time above the lower bound, beside one bar per solver."""
        from hexiopt.report.compared.comparison import comparison_figure

        return comparison_figure(self.results, self.title)


def each_result(
    problem: Problem,
    solvers: Iterable[tuple[str, Solver]],
    budget: Budget,
    seeds: Iterable[int],
    listen: OnProgress,
    interrupt: Interrupt,
) -> Iterator[Result]:
    """The result of each (label, solver) with each seed, named by the label; an interrupt ends the iteration.

    No solver ends it for the others: a result whose plan breaks a rule loses it and is marked `invalid`, a solver that
    does not take the problem `refused`, and one that raises an exception `crashed`, each with the reason. Raises
    InputError where all solvers refuse the problem.
    """
    labelled_solvers = list(solvers)
    refused: dict[str, InputError] = {}
    for seed in seeds:
        for label, solver in labelled_solvers:
            if interrupt.pressed:
                return
            began_s = time.perf_counter()
            failed = partial(_failed, label, seed, began_s)
            try:
                result = solver.solve(problem, budget, seed=seed, on_progress=listen)
            except InvalidPlanError as invalid:
                result = invalid.result
            except InputError as error:
                refused[label] = error
                if len(refused) == len(labelled_solvers):
                    raise
                result = failed(Status.REFUSED, str(error))
            except Exception as error:  # foreign code may raise anything
                if os.environ.get("HEXIOPT_DEBUG") == "1":
                    traceback.print_exception(error)
                result = failed(Status.CRASHED, _whence(error, solver))
            yield replace(result, solver=label)


def _failed(label: str, seed: int, began_s: float, status: Status, reason: str) -> Result:
    return Result(label, status, seed, time.perf_counter() - began_s, 0, reason=" ".join(reason.split())[:300])


def _whence(error: Exception, solver: Solver) -> str:
    """What was raised, and where: `ZeroDivisionError in planner.py:11 (division by zero)`. Of the lines in between,
    that of the solver or its cost model, if one of these is on the way."""
    makers = [getattr(solver, "solver", solver), *getattr(getattr(solver, "pricer_of", None), "args", ())]
    own = {sys.modules[name].__file__ for made in makers if (name := _module(made)) in sys.modules}
    frames = traceback.extract_tb(error.__traceback__)
    at = next((frame for frame in reversed(frames) if frame.filename in own), frames[-1])
    text = f" ({error})" if str(error) else ""
    return f"{type(error).__name__} in {Path(at.filename).name}:{at.lineno}{text}"


def _module(made: object) -> str:
    """The name of the module of a solver, or of a class or function."""
    return str(getattr(made, "__module__", ""))


def bound_above(problem: Problem, results: Sequence[Result], limit_s: float, pricer: Pricer | None = None) -> float:
    """A lower bound on the step time in seconds by `pricer`, our cost model where there is none, computed within
    `limit_s` seconds; 0 if no result has a plan."""
    if limit_s == 0.0 or all(result.plan is None for result in results):
        return 0.0
    return bound_under_s(pricer or PlanPricer(problem), problem, limit_s)


def labelled(solvers: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Solvers by label: the keys of a mapping, else their own names. Raises InputError for duplicates and for none."""
    if isinstance(solvers, Mapping):
        named = [(str(label), solver) for label, solver in solvers.items()]
    else:
        named = [(one if isinstance(one, str) else str(getattr(one, "name", one)), one) for one in solvers]
    if not named:
        raise InputError("solvers: is empty; name at least one, such as portfolio")
    for label, _ in named:
        if sum(1 for other, _ in named if other == label) > 1:
            raise InputError(f"solvers: {label!r} appears twice; give a mapping with a label for each")
    return dict(named)
