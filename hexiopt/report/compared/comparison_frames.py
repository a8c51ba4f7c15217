"""Frames that compare solvers on one problem: their results, and the counts of their operators."""

import math
from collections.abc import Sequence
from dataclasses import astuple, fields

from hexiopt.frame import Frame
from hexiopt.solving.result import OperatorCounts, Result

_COLUMNS = (
    "solver",
    "status",
    "step_time_s",
    "tokens_per_s",
    "mfu",
    "over_best",
    "lower_bound_s",
    "gap",
    "runtime_s",
    "overrun_s",
    "time_to_best_s",
    "steps",
    "seed",
    "reason",
)


def comparison_frame(results: Sequence[Result]) -> Frame:
    """One row per result; a result without a plan has empty cells and its reason."""
    best_s = min((result.objective for result in results), default=math.inf)
    rows = []
    for result in results:
        cost = result.cost
        achieved: tuple[float | None, ...] = (None,) * 4
        if cost:
            achieved = (cost.step_time_s, cost.tokens_per_s, cost.mfu, cost.step_time_s / best_s - 1)
        rows.append(
            (
                result.solver,
                str(result.status),
                *achieved,
                result.bound_s or None,
                result.gap if cost else None,
                result.runtime_s,
                result.overrun_s or None,
                result.trajectory[-1].runtime_s if result.trajectory else None,
                result.steps,
                result.seed,
                result.reason or None,
            )
        )
    return Frame(_COLUMNS, tuple(rows))


def operators_frame(results: Sequence[Result]) -> Frame:
    """One row per solver and operator, with the counts of its candidates' outcomes summed over runs: those that made
    most plans better first."""
    names = [field.name for field in fields(OperatorCounts)]
    sums: dict[tuple[str, str], list[float]] = {}
    for one in results:
        for counts in one.operators:
            operator, *numbers = astuple(counts)
            known = sums.get((one.solver, operator), [0] * len(numbers))
            sums[one.solver, operator] = [a + b for a, b in zip(known, numbers, strict=True)]
    solvers = list(dict.fromkeys(solver for solver, _ in sums))
    improved = names.index("improved") - 1
    order = sorted(sums, key=lambda key: (solvers.index(key[0]), -sums[key][improved]))
    return Frame(("solver", *names), tuple((*key, *sums[key]) for key in order))
