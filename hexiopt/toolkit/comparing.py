"""Solvers side by side on one problem: the same budget for each, over seeds, above one lower bound."""

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
from hexiopt.report.compared import comparison_frame, operators_frame
from hexiopt.result import Result
from hexiopt.solving import Budget, OnProgress, Solver
from hexiopt.toolkit.running import Interrupt
from hexiopt.toolkit.solution import Solution

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Comparison(Frame):
    """What solvers found, a row a solver and seed. `results` are the same with their plans; `plot` draws them."""

    results: tuple[Solution, ...] = field(default=(), kw_only=True)

    @classmethod
    def among(cls, problem: Problem, results: Sequence[Result], bound_s: float = 0.0) -> "Comparison":
        """The comparison of `results`, found for `problem`, above a lower bound of `bound_s`, which must hold."""
        solved = tuple(Solution.of(problem, result).above(bound_s) for result in results)
        frame = comparison_frame(solved)
        rows = sorted(frame.rows, key=lambda row: (row[2] is None, row[2]))
        title = f"{problem.model.name} on {problem.cluster.name}"
        return cls(frame.columns, tuple(rows), title=title, results=solved)

    @property
    def best(self) -> Solution:
        """The result with the shortest step, the first of equal ones."""
        return min(self.results, key=lambda result: result.objective)

    def summary(self) -> Frame:
        """One row a solver: its runs, how many found a plan, and the best, median and worst step time over seeds."""
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
        """One row an improvement: solver, seed, seconds and steps since the start, and the best step time then."""
        columns = ("solver", "seed", "runtime_s", "steps", "step_time_s")
        points = ((one, point) for one in self.results for point in one.trajectory)
        rows = ((one.solver, one.seed, point.runtime_s, point.steps, point.step_time_s) for one, point in points)
        return Frame(columns, tuple(rows), title=self.title)

    def operators(self) -> Frame:
        """One row an operator of a search, with what became of its candidates."""
        return operators_frame(self.results)

    def plot(self) -> "Figure":
        """Best step time over search time with the lower bound, and a bar a solver, as a figure of matplotlib."""
        from hexiopt.report.comparison import comparison_figure

        return comparison_figure(self.results, self.title)


def each_result(
    problem: Problem,
    solvers: Iterable[tuple[str, Solver]],
    budget: Budget,
    seeds: Iterable[int],
    listen: OnProgress,
    interrupt: Interrupt,
) -> Iterator[Result]:
    """The result of each solver with each seed, called by its label; none is begun after an interrupt.

    A plan that breaks a rule is taken away, its result marked `invalid`. Raises InputError as solvers do.
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
    """A step time in seconds that no plan beats, searched for `limit_s` seconds; 0 where there is no plan to hold
    against it."""
    if limit_s == 0.0 or all(result.plan is None for result in results):
        return 0.0
    return lower_bound_s(PlanPricer(problem), limit_s)


def labelled(solvers: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Solvers by what the comparison calls them: their own names, or the keys. Raises InputError for one that stands
    twice, and for none."""
    if isinstance(solvers, Mapping):
        named = [(str(label), solver) for label, solver in solvers.items()]
    else:
        named = [(one if isinstance(one, str) else str(getattr(one, "name", one)), one) for one in solvers]
    if not named:
        raise InputError("solvers: is empty; name at least one, such as portfolio")
    for label, _ in named:
        if sum(1 for other, _ in named if other == label) > 1:
            raise InputError(f"solvers: {label!r} stands twice; give a mapping with a label for each")
    return dict(named)
