"""The CP-SAT model: which columns make up a plan.

A column stands for pipelines with a given use of devices, and states the most sequences that one of them can process
within the step time asked about. A plan with that step time is a choice of columns that fit the devices together and
process the global batch. If there is no choice, there is no plan, and the step time is a lower bound. All numbers are
integers, so nothing is rounded but the step time, by the bisection that asks.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from hexiopt.plan.token_layout import Ints

DeviceCounts = tuple[int, ...]
ColumnChoice = tuple[tuple[int, int], ...]  # (column, how many), ascending


@dataclass
class PipelineColumn:
    """Equivalent pipelines: their possible uses of devices (number from each class), and the most sequences of one."""

    usages: tuple[DeviceCounts, ...]
    most_sequences: int


@dataclass(frozen=True)
class PackingLimits:
    """The limits of a plan: devices of each class, sequences to process, and the most and fewest pipelines."""

    devices: DeviceCounts
    global_batch: int
    most_pipelines: int
    least_pipelines: int = 1


class Packing:
    """The model of a choice of `columns`, each with a multiplicity, within `limits`, excluding those already
    `refuted`.
    """

    def __init__(
        self, columns: Sequence[PipelineColumn], limits: PackingLimits, refuted: Collection[ColumnChoice] = ()
    ) -> None:
        self.columns, self.limits = columns, limits
        model = self._model = cp_model.CpModel()
        self._literals: dict[tuple[int, int], cp_model.IntVar] = {}

        # Step 1, variables: how many pipelines column c gives usage k, how many it has, and how many there are in all.
        self._numbers: dict[tuple[int, int], cp_model.IntVar] = {}
        self._totals: dict[int, cp_model.IntVar] = {}
        for c, column in enumerate(columns):
            if column.most_sequences < 1:
                continue
            fitting = [(k, self._most(usage)) for k, usage in enumerate(column.usages) if self._most(usage)]
            if fitting:
                for k, most in fitting:
                    self._numbers[c, k] = model.new_int_var(0, most, f"column_{c}_usage_{k}")
                self._totals[c] = model.new_int_var(0, limits.most_pipelines, f"column_{c}")
        pipelines = model.new_int_var(limits.least_pipelines, limits.most_pipelines, "pipelines")

        # Step 2, constraints. A column has the pipelines of its usages, the plan those of its columns.
        for c, total in self._totals.items():
            model.add(total == sum(number for (own, _), number in self._numbers.items() if own == c))
        model.add(pipelines == sum(self._totals.values()))
        # No class gives more devices than it has.
        for b, devices in enumerate(limits.devices):
            taken = [(columns[c].usages[k][b], number) for (c, k), number in self._numbers.items()]
            model.add(sum(used * number for used, number in taken if used) <= devices)
        # The pipelines can process the global batch; they may be able to process more.
        self._sequences = sum(columns[c].most_sequences * total for c, total in self._totals.items())
        model.add(self._sequences >= limits.global_batch)

        # A refuted choice is excluded: one of its columns counts less, or there is another pipeline.
        for choice in refuted:
            if all(c in self._totals for c, _ in choice):
                literals = [~self._at_least(self._totals[c], count) for c, count in choice]
                model.add_bool_or(*literals, self._at_least(pipelines, sum(count for _, count in choice) + 1))

        # Step 3, objective: none, since `choices` asks for all feasible solutions.

    def _at_least(self, variable: cp_model.IntVar, count: int) -> cp_model.IntVar:
        """A literal that says whether `variable` is at least `count`."""
        key = (variable.index, count)
        if key not in self._literals:
            literal = self._literals[key] = self._model.new_bool_var(f"{variable.name}_at_least_{count}")
            self._model.add(variable >= count).only_enforce_if(literal)
            self._model.add(variable <= count - 1).only_enforce_if(~literal)
        return self._literals[key]

    def choices(self, wanted: int, deterministic_s: float) -> tuple[list[ColumnChoice], bool]:
        """At most `wanted` choices, those that can process most first, and whether these are all."""
        collector = _Collector(self._totals, wanted)
        solver = _solver(deterministic_s)
        solver.parameters.enumerate_all_solutions = True
        status = solver.solve(self._model, collector)
        found = sorted(collector.found, key=lambda choice: (-self.sequences(choice), choice))
        return found, status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)

    def sequences(self, choice: ColumnChoice) -> int:
        """The most sequences that a choice can process."""
        return sum(self.columns[c].most_sequences * count for c, count in choice)

    def _most(self, usage: DeviceCounts) -> int:
        """The most pipelines with this use of devices that fit."""
        fit = min(have // used for have, used in zip(self.limits.devices, usage, strict=True) if used)
        return min(fit, self.limits.most_pipelines)


class _Collector(cp_model.CpSolverSolutionCallback):
    """Collects the choices that the solver finds; one that can be placed in several ways counts once."""

    def __init__(self, totals: dict[int, cp_model.IntVar], wanted: int) -> None:
        super().__init__()
        self.found: set[ColumnChoice] = set()
        self._totals, self._wanted = totals, wanted

    def on_solution_callback(self) -> None:
        counts = ((c, self.value(total)) for c, total in self._totals.items())
        self.found.add(tuple((c, count) for c, count in counts if count))
        if len(self.found) >= self._wanted:
            self.stop_search()


def _solver(deterministic_s: float) -> cp_model.CpSolver:
    """A solver with one worker and a limit on counted work, so that the same model gives the same answer."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = deterministic_s
    return solver


def most_together(most: Ints) -> Ints:
    """Upper bound on the sequences of any number of pipelines, by devices of each kind, given the most of one pipeline.

    `most[u]` is for u devices of each kind; neither decreases with more devices. An unbounded knapsack.
    """
    best = most.copy()
    for axis in range(best.ndim):
        np.maximum.accumulate(best, axis=axis, out=best)
    single = best.copy()
    # A pipeline that processes no more than one on fewer devices is skipped.
    useful = [
        u
        for u in np.ndindex(*single.shape)
        if single[u] > max((single[_less(u, k)] for k in range(len(u)) if u[k]), default=0)
    ]
    for u in np.ndindex(*best.shape):
        for used in useful:
            if all(a <= b for a, b in zip(used, u, strict=True)):
                rest = tuple(b - a for a, b in zip(used, u, strict=True))
                best[u] = max(best[u], best[rest] + single[used])
    return best


def _less(u: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(n - (k == axis) for k, n in enumerate(u))
