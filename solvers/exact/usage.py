"""Usage vectors: how many devices of which machines a pipeline takes, equal machines not told apart.

A bin is a machine, or, coarsely, all machines of a kind together; coarse vectors forget where machines end, which
only adds plans. Bins of a run are equal, so of vectors that differ in their names only the sorted one is kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, product
from math import comb, prod

import numpy as np
from numpy.typing import NDArray

from hexiopt.problem.problem import Problem

Vector = tuple[int, ...]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Run:
    """Equal bins: how many, devices in each, the TP degrees that fit, and the machines that they are."""

    count: int
    size: int
    degrees: tuple[int, ...]
    machines: tuple[int, ...]

    @property
    def machine(self) -> int:
        """One of the machines, to look up what they share."""
        return self.machines[0]


@dataclass(frozen=True)
class Lattice:
    """All usage vectors of a problem's runs of bins. Vector 0 uses nothing, the last one everything."""

    runs: tuple[Run, ...]

    @classmethod
    def of(cls, problem: Problem, *, coarse: bool = False) -> "Lattice":
        """Bins are machines, or kinds of machines where `coarse`."""
        members: dict[object, list[int]] = {}
        for machine, own in problem.usable_by_machine.items():
            members.setdefault((problem.cluster.machines[machine].kind, len(own)), []).append(machine)
        runs = []
        for machines in members.values():
            size = len(problem.usable_by_machine[machines[0]])
            degrees = tuple(
                tp for tp in problem.space.allowed_tp(problem.cluster.machines[machines[0]].num_gpus) if tp <= size
            )
            count, devices = (1, size * len(machines)) if coarse else (len(machines), size)
            runs.append(Run(count, devices, degrees, tuple(machines)))
        return cls(tuple(runs))

    @property
    def size(self) -> int:
        """Number of vectors."""
        return prod(comb(run.count + run.size, run.count) for run in self.runs)

    @cached_property
    def vectors(self) -> tuple[Vector, ...]:
        """Devices used in every bin, in the order of runs; within a run descending."""
        each = [
            [found[::-1] for found in combinations_with_replacement(range(run.size + 1), run.count)]
            for run in self.runs
        ]
        return tuple(tuple(used for own in parts for used in own) for parts in product(*each))

    @cached_property
    def index(self) -> dict[Vector, int]:
        """Where a vector stands in `vectors`."""
        return {vector: k for k, vector in enumerate(self.vectors)}

    @cached_property
    def totals(self) -> Ints:
        """Devices by vector and run."""
        return np.array([[sum(self.part(vector, k)) for k in range(len(self.runs))] for vector in self.vectors])

    @cached_property
    def spans(self) -> Ints:
        """Bins that each vector uses."""
        return np.array([sum(used > 0 for used in vector) for vector in self.vectors])

    def part(self, vector: Vector, run: int) -> Vector:
        """The vector's counts in the bins of a run."""
        start = sum(other.count for other in self.runs[:run])
        return vector[start : start + self.runs[run].count]

    @cached_property
    def _steps(self) -> dict[tuple[int, int], list[tuple[Ints, Ints]]]:
        return {}

    def steps(self, run: int, devices: int) -> list[tuple[Ints, Ints]]:
        """(from, to) of all ways to take `devices` more of one bin of a run, in batches without equal targets."""
        found = self._steps.get((run, devices))
        if found is None:
            batches: list[tuple[list[int], list[int], set[int]]] = []
            for here, there in self._pairs(run, devices):
                batch = next((batch for batch in batches if there not in batch[2]), None)
                if batch is None:
                    batches.append(([here], [there], {there}))
                else:
                    batch[0].append(here)
                    batch[1].append(there)
                    batch[2].add(there)
            found = self._steps[run, devices] = [(np.array(a), np.array(b)) for a, b, _ in batches]
        return found

    def _pairs(self, run: int, devices: int) -> Iterator[tuple[int, int]]:
        start = sum(other.count for other in self.runs[:run])
        end, size = start + self.runs[run].count, self.runs[run].size
        for k, vector in enumerate(self.vectors):
            own = vector[start:end]
            for used in sorted(set(own)):
                if used + devices <= size:
                    at = own.index(used)
                    more = sorted((*own[:at], used + devices, *own[at + 1 :]), reverse=True)
                    yield k, self.index[(*vector[:start], *more, *vector[end:])]
