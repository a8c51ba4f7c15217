"""`cp_sat`: `exact`, with the packing level of its proof decided by constraint programming (OR-Tools)."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from hexiopt.plan.token_layout import Ints
from solvers.exact.exact import Exact
from solvers.proof.partitions import Packings, Partition
from solvers.proof.tables import ProofTables
from solvers.proof.usages import Case, Use

_MISFIT = -(1 << 40)  # sequences of pipelines that do not fit on the machines
_AT_ONCE = 256  # partitions of one enumeration; the next one leaves out those before


class PackingModel:
    """Which pipelines share the devices: how many are on each usage, of which one processes at most `sequences`
    [usages], within `devices` [machines] and from `least` to `most` in all.

    With `enough`, a case and a number of sequences, all packings of the case are asked for that process so many.
    CP-SAT has one worker, so that the same model gives the same answer.
    """

    def __init__(
        self, vectors: Ints, sequences: Ints, devices: Ints, least: int, most: int,
        enough: tuple[Case, int] | None = None,
    ) -> None:  # fmt: skip
        model = self._model = cp_model.CpModel()
        self._at_least: dict[tuple[int, int], cp_model.IntVar] = {}

        # Variables: the number of pipelines on each usage, and in all.
        fits = (vectors <= devices).all(axis=1) & (sequences >= 1)
        fits[0] = False
        self._on = {w: model.new_int_var(0, most, f"on_usage_{w}") for w in np.flatnonzero(fits).tolist()}
        pipelines = model.new_int_var(least, most, "pipelines")

        # Constraints: pipelines are on usages, and take no more devices of a machine than there are.
        model.add(pipelines == sum(self._on.values()))
        for m, count in enumerate(devices.tolist()):
            model.add(sum(int(vectors[w, m]) * number for w, number in self._on.items()) <= count)
        processed = sum(int(sequences[w]) * number for w, number in self._on.items())
        if enough is not None:
            case, batch = enough
            model.add(processed >= batch)
            for m, use in enumerate(case):
                using = {w for w in self._on if vectors[w, m]}
                used = sum(self._on[w] for w in using)
                wholly = sum(self._on[w] for w in using if vectors[w, m] == vectors[w].sum())
                if use in (Use.NONE, Use.ALL):
                    model.add(used == (pipelines if use is Use.ALL else 0))
                else:
                    model.add(used >= 1)
                    model.add(used <= pipelines - 1)
                    model.add(wholly >= 1 if use is Use.WHOLE else wholly == 0)

        # Objective: the most sequences; none where all packings are asked for.
        if enough is None:
            model.maximize(processed)

    def best(self) -> tuple[int, Partition]:
        """The most sequences, and pipelines that process them; far below 0 where no pipelines fit."""
        solver = _solver()
        if solver.solve(self._model) != cp_model.OPTIMAL:
            return _MISFIT, ()
        return round(solver.objective_value), _partition({w: solver.value(number) for w, number in self._on.items()})

    def leave_out(self, parts: Partition) -> None:
        """Ask for other packings of as many pipelines: some usage has fewer of them."""
        self._model.add_bool_or(*(~self._literal(w, parts.count(w)) for w in set(parts)))

    def _literal(self, usage: int, count: int) -> cp_model.IntVar:
        """Whether so many pipelines or more are on a usage."""
        if (usage, count) not in self._at_least:
            literal = self._at_least[usage, count] = self._model.new_bool_var(f"{count}_on_usage_{usage}")
            self._model.add(self._on[usage] >= count).only_enforce_if(literal)
            self._model.add(self._on[usage] < count).only_enforce_if(~literal)
        return self._at_least[usage, count]

    def some(self, most: int) -> list[Partition]:
        """Up to `most` packings, those that ascend first."""
        collector, solver = _Collector(self._on, most), _solver()
        solver.parameters.enumerate_all_solutions = True
        solver.solve(self._model, collector)
        return sorted(collector.found)


class PackingProgram(Packings):
    """By CP-SAT. A case's own conditions are in the model, rather than looked at afterwards."""

    def __init__(self, tables: ProofTables, sequences: Ints, most_pipelines: int | None = None) -> None:
        super().__init__(tables, sequences, most_pipelines)
        self._answers: dict[tuple[int, int, int], tuple[int, Partition]] = {}

    @property
    def most(self) -> int:
        """As of `Packings`."""
        return max(0, self._best(2, self.most_pipelines)[0])

    def most_of(self, num_pipelines: int) -> int:
        """As of `Packings`."""
        return self._best(num_pipelines, num_pipelines)[0]

    def needed(self, usage: int, num_pipelines: int | None = None) -> int:
        """As of `Packings`."""
        others = (1, self.most_pipelines - 1) if num_pipelines is None else (num_pipelines - 1,) * 2
        return self.tables.batch - self._best(*others, usage)[0]

    def best(self, num_pipelines: int | None = None) -> Partition:
        """As of `Packings`."""
        return self._best(*((2, self.most_pipelines) if num_pipelines is None else (num_pipelines,) * 2))[1]

    def _best(self, least: int, most: int, beside: int = 0) -> tuple[int, Partition]:
        """The most sequences of `least` to `most` pipelines beside one on a usage, and which they are."""
        if least > most:
            return _MISFIT, ()
        key = (least, most, beside)
        if key not in self._answers:
            self._answers[key] = self._model(least, most, beside).best()
        return self._answers[key]

    def _model(self, least: int, most: int, beside: int = 0, enough: tuple[Case, int] | None = None) -> PackingModel:
        usages = self.tables.usages
        devices = usages.most - usages.vectors[beside]
        return PackingModel(usages.vectors, self.sequences, devices, least, most, enough)

    def every(self, num_pipelines: int, case: Case, keep_on: Callable[[], None]) -> Iterator[Partition]:
        """As of `Packings`."""
        met = list[Partition]()
        while True:
            keep_on()
            # The sequences may have fallen meanwhile.
            model = self._model(num_pipelines, num_pipelines, enough=(case, self.tables.batch))
            for parts in met:
                if (self.sequences[list(parts)] >= 1).all():
                    model.leave_out(parts)
            new = model.some(_AT_ONCE)
            yield from new
            met += new
            if len(new) < _AT_ONCE:
                return


class _Collector(cp_model.CpSolverSolutionCallback):
    """Collects up to `most` packings."""

    def __init__(self, on: dict[int, cp_model.IntVar], most: int) -> None:
        super().__init__()
        self.found: list[Partition] = []
        self._on, self._most = on, most

    def on_solution_callback(self) -> None:
        self.found.append(_partition({w: self.value(number) for w, number in self._on.items()}))
        if len(self.found) >= self._most:
            self.stop_search()


def _partition(counts: dict[int, int]) -> Partition:
    return tuple(w for w, count in counts.items() for _ in range(count))


def _solver() -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    return solver


@dataclass(frozen=True)
class CpSat(Exact):
    """As `exact`; which pipelines share the devices, a CP-SAT model decides.

    Steps are those of `exact`. `gap`: as there.
    """

    name = "cp_sat"
    packings = PackingProgram
