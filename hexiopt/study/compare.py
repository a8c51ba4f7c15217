"""Comparison of solvers on one problem: the same budget for each, several seeds, one lower bound."""

import math
import os
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from hexiopt.errors import InputError
from hexiopt.frame import Frame
from hexiopt.problem.problem import Problem
from hexiopt.reading import number_in, whole_in
from hexiopt.solving import MAX_SEED, MAX_TIME_LIMIT_S, Budget, Pricer, PricerMaker, Solver
from hexiopt.solving.referee import InvalidPlanError, Refereed
from hexiopt.solving.registry import make_pricer, make_solver
from hexiopt.solving.result import OperatorCounts, Result, Status
from hexiopt.study.price import lower_bound
from hexiopt.study.running import listener
from hexiopt.study.solution import Solution
from hexiopt.study.statistics import Mean, signed_rank_p

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_COLUMNS = (
    *("solver", "status", "step_time_s", "tokens_per_s", "mfu", "over_best", "lower_bound_s", "gap"),
    *("runtime_s", "overrun_s", "time_to_best_s", "steps", "seed", "reason"),
)


_SUMMARY = (
    *("solver", "runs", "plans", "best_s", "median_s", "worst_s"),
    *("mean_s", "low_s", "high_s", "over_best", "p"),
)


@dataclass(frozen=True, repr=False)
class Comparison(Frame):
    """The results of solvers as a table, one row per solver and seed, best first; `results` has the plans."""

    results: tuple[Solution, ...] = field(default=(), kw_only=True)

    @classmethod
    def among(
        cls, problem: Problem, results: Sequence[Result], bound_s: float = 0.0, pricer: Pricer | None = None
    ) -> "Comparison":
        """Compare `results` for `problem`, priced by `pricer` (None: our cost model).

        `bound_s` is a valid lower bound in seconds, or 0.
        """
        judge = make_pricer(pricer, problem)
        solved = tuple(Solution.of(problem, result, judge).above(bound_s) for result in results)
        best_s = min((result.objective for result in solved), default=math.inf)
        rows = [_row(result, best_s) for result in sorted(solved, key=lambda result: result.objective)]
        title = f"{problem.model.name} on {problem.cluster.name}"
        return cls.of(rows, _COLUMNS, title=title, results=solved)

    @property
    def best(self) -> Solution:
        """The result with the shortest step time, the first of equal ones."""
        return min(self.results, key=lambda result: result.objective)

    def summary(self) -> Frame:
        """One row per solver: numbers of runs and of plans; over seeds the best, median, worst and mean step time, with
        the 95 % interval of the mean; and `p`, by which chance the solver with the shortest median differs as much
        from this one, seed by seed (Wilcoxon's signed-rank test)."""
        by_solver: dict[str, dict[int, float]] = {result.solver: {} for result in self.results}
        for result in self.results:
            if result.plan is not None:
                by_solver[result.solver][result.seed] = result.objective
        order = sorted(by_solver, key=lambda name: median(by_solver[name].values() or [math.inf]))
        rows = []
        for name in order:
            times_s, runs = by_solver[name], sum(result.solver == name for result in self.results)
            row: dict[str, Any] = {"solver": name, "runs": runs, "plans": len(times_s)}
            if times_s:
                known, mean = list(times_s.values()), Mean.of(list(times_s.values()))
                row |= {"best_s": min(known), "median_s": median(known), "worst_s": max(known)}
                row |= {"mean_s": mean.mean, "low_s": mean.low, "high_s": mean.high}
                row |= {"over_best": row["median_s"] / self.best.objective - 1}
                first = by_solver[order[0]]
                row["p"] = signed_rank_p([times_s[seed] / first[seed] for seed in times_s if seed in first])
            rows.append(row)
        return Frame.of(rows, _SUMMARY, title=self.title)

    def trajectories(self) -> Frame:
        """One row per improvement: solver, seed, seconds and steps since the start, and the best step time so far."""
        columns = ("solver", "seed", "runtime_s", "steps", "step_time_s")
        points = ((run, point) for run in self.results for point in run.trajectory)
        rows = ((run.solver, run.seed, point.runtime_s, point.steps, point.step_time_s) for run, point in points)
        return Frame(columns, tuple(rows), title=self.title)

    def operators(self) -> Frame:
        """One row per solver and search operator: what became of its candidates, summed over runs.

        Operators that improved the best plan most often come first.
        """
        sums: dict[tuple[str, str], list[float]] = {}
        for result in self.results:
            for counts in result.operators:
                operator, *numbers = astuple(counts)
                total = sums.get((result.solver, operator), [0] * len(numbers))
                sums[result.solver, operator] = [a + b for a, b in zip(total, numbers, strict=True)]
        names = [field.name for field in fields(OperatorCounts)]
        solvers = list(dict.fromkeys(solver for solver, _ in sums))
        improved = names.index("improved") - 1
        order = sorted(sums, key=lambda key: (solvers.index(key[0]), -sums[key][improved]))
        return Frame(("solver", *names), tuple((*key, *sums[key]) for key in order))

    def plot(self) -> "Figure":
        """A matplotlib figure: best step time over search time and the lower bound on the left, bars on the right."""
        from hexiopt.report.compared.comparison import comparison_figure

        return comparison_figure(self.results, self.title)


def _row(result: Solution, best_s: float) -> dict[str, Any]:
    """A row of the comparison; where there is no plan, cells are empty and `reason` says why."""
    row: dict[str, Any] = {"solver": result.solver, "status": str(result.status)}
    if cost := result.cost:
        row |= {"step_time_s": cost.step_time_s, "tokens_per_s": cost.tokens_per_s, "mfu": cost.mfu}
        row |= {"over_best": cost.step_time_s / best_s - 1, "gap": result.gap}
    return row | {
        "lower_bound_s": result.bound_s or None,
        "runtime_s": result.runtime_s,
        "overrun_s": result.overrun_s or None,
        "time_to_best_s": result.trajectory[-1].runtime_s if result.trajectory else None,
        "steps": result.steps,
        "seed": result.seed,
        "reason": result.reason or None,
    }


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
    allows. Ctrl-C ends the comparison, and the results so far are returned. Raises InputError, also where all solvers
    refuse the problem.
    """
    budget = Budget(time_limit_s, max_steps)
    numbers = seeds if isinstance(seeds, Iterable) else range(whole_in(seeds, "seeds", at_least=1, at_most=10**6))
    valid_seeds = [whole_in(seed, "seeds", at_least=0, at_most=MAX_SEED) for seed in numbers]
    limit_s = bound_limit_s(budget, bound_time_limit_s)
    judge = make_pricer(pricer, problem)
    by_label = {label: make_solver(solver, {}, pricer) for label, solver in _labels(solvers).items()}
    results: list[Result] = []
    refused: set[str] = set()
    with listener(problem.workload.tokens, budget.time_limit_s, progress) as (listen, interrupt):
        for seed, label in product(valid_seeds, by_label):
            if interrupt.pressed:
                break
            fail = partial(_failure, label, seed, time.perf_counter())
            try:
                result = by_label[label].solve(problem, budget, seed=seed, on_progress=listen, judge=judge)
            except InvalidPlanError as invalid:
                result = invalid.result
            except InputError as error:
                refused.add(label)
                if len(refused) == len(by_label):
                    raise
                result = fail(Status.REFUSED, str(error))
            except Exception as error:  # foreign code may raise anything
                if os.environ.get("HEXIOPT_DEBUG") == "1":
                    traceback.print_exception(error)
                result = fail(Status.CRASHED, _origin(error, by_label[label]))
            results.append(replace(result, solver=label))
    bound_s = 0.0
    if limit_s and not interrupt.pressed and any(result.plan is not None for result in results):
        bound_s = lower_bound(problem, limit_s, pricer=judge)
    return Comparison.among(problem, results, bound_s, judge)


def bound_limit_s(budget: Budget, bound_time_limit_s: float | None) -> float:
    """Seconds for the lower bound next to searches of `budget`: half the time limit by default. Raises InputError."""
    limit_s = 0.5 * budget.time_limit_s if bound_time_limit_s is None else bound_time_limit_s
    return number_in(limit_s, "bound_time_limit_s", at_least=0.0, at_most=MAX_TIME_LIMIT_S)


def _failure(label: str, seed: int, began_s: float, status: Status, reason: str) -> Result:
    return Result(label, status, seed, time.perf_counter() - began_s, 0, reason=" ".join(reason.split())[:300])


def _origin(error: Exception, solver: Refereed) -> str:
    """What was raised, and where: `ZeroDivisionError in planner.py:11 (division by zero)`.

    The line is the innermost in the file of the solver or of its cost model, else the innermost of all.
    """
    makers = [solver.solver, *getattr(solver.pricer_of, "args", ())]
    files = {sys.modules[name].__file__ for maker in makers if (name := _module(maker)) in sys.modules}
    frames = traceback.extract_tb(error.__traceback__)
    origin = next((frame for frame in reversed(frames) if frame.filename in files), frames[-1])
    text = f" ({error})" if str(error) else ""
    return f"{type(error).__name__} in {Path(origin.filename).name}:{origin.lineno}{text}"


def _module(maker: object) -> str:
    """The module of a solver, a class or a function."""
    return str(getattr(maker, "__module__", ""))


def _labels(solvers: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Solvers by label: the keys of a mapping, else their names. Raises InputError for duplicates and for none."""
    if isinstance(solvers, Mapping):
        pairs = [(str(label), solver) for label, solver in solvers.items()]
    else:
        pairs = [(s if isinstance(s, str) else str(getattr(s, "name", s)), s) for s in solvers]
    if not pairs:
        raise InputError("solvers: is empty; name at least one, such as portfolio")
    for label, _ in pairs:
        if sum(1 for other, _ in pairs if other == label) > 1:
            raise InputError(f"solvers: {label!r} appears twice; give a mapping with a label for each")
    return dict(pairs)
