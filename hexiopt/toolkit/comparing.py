"""Comparison of solvers on one problem: the same budget for each, several seeds, one lower bound."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from hexiopt.bounds import lower_bound_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.frame import Frame
from hexiopt.problem.problem import Problem
from hexiopt.referee import InvalidPlanError
from hexiopt.report.compared.comparison_frames import comparison_frame, operators_frame
from hexiopt.result import Result
from hexiopt.solving import Budget, OnProgress, Solver
from hexiopt.toolkit.running import Interrupt
from hexiopt.toolkit.solution import Solution

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Comparison(Frame):
    """The results of solvers as a table, one row per solver and seed, best first; `results` has the plans."""

    results: tuple[Solution, ...] = field(default=(), kw_only=True)

    @classmethod
    def among(cls, problem: Problem, results: Sequence[Result], bound_s: float = 0.0) -> "Comparison":
        """A comparison of `results` for `problem`. `bound_s` is a valid lower bound in seconds, or 0."""
        solved = tuple(Solution.of(problem, result).above(bound_s) for result in results)
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

    A result whose plan breaks a rule is marked `invalid` and loses its plan. Raises InputError as solvers do.
    """
    labelled_solvers = list(solvers)
    for seed in seeds:
        for label, solver in labelled_solvers:
            if interrupt.pressed:
                return
            try:
                result = solver.solve(problem, budget, seed=seed, on_progress=listen)
            except InvalidPlanError as invalid:
                result = invalid.result
            yield replace(result, solver=label)


def bound_above(problem: Problem, results: Sequence[Result], limit_s: float) -> float:
    """A lower bound on the step time in seconds, computed within `limit_s` seconds; 0 if no result has a plan."""
    if limit_s == 0.0 or all(result.plan is None for result in results):
        return 0.0
    return lower_bound_s(PlanPricer(problem), limit_s)


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
