"""A lower bound of the step time where there are too many lines: columns are usage vectors.

For a step time T the most sequences of a pipeline are bounded for every usage vector (`floors.py`,
`replicated_floors.py`); the CP-SAT model says whether pipelines that fit on the devices together may process the global
batch. Where they may not, no plan takes T seconds or less. The plans are divided by what memory and the end of a step
depend on; a plan of T seconds must be ruled out in every part.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hexiopt.cost.executors.memory import Shards
from hexiopt.cost.model import CostModel
from hexiopt.problem.space import sharding_stages
from solvers.core.search import Search
from solvers.exact.floors import Family, Floors
from solvers.exact.packing import Column, Limits, Packing
from solvers.exact.replicated_floors import ReplicatedFloors
from solvers.exact.stage_times import StageTable
from solvers.exact.usage import Lattice

Ints = NDArray[np.int64]
_MOST_VECTORS = 300
_ROUNDS = 8  # of the bisection
_EFFORT_S = 5.0  # most deterministic seconds of one program


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the plans: a family of single groups, and whether stages may be replicated; pipelines at most."""

    family: Family
    replicated: bool
    most_pipelines: int


class StepBound:
    """Raises the bound of one search by bisection between it and the incumbent."""

    def __init__(self, search: Search) -> None:
        assert isinstance(search.pricer, CostModel)
        self._search, self._problem = search, search.problem
        lattice = Lattice.of(self._problem)
        self._lattice = lattice if lattice.size <= _MOST_VECTORS else Lattice.of(self._problem, coarse=True)
        self._model = search.pricer

    def rise(self) -> None:
        """Raise the bound as far as the budget lasts."""
        if self._lattice.size > _MOST_VECTORS:
            return
        search, table = self._search, StageTable(self._model)
        floors, replicated = Floors(self._model, table, self._lattice), ReplicatedFloors(self._model, table)
        low_s, high_s = search.bound_s, search.best_s
        for _ in range(_ROUNDS):
            step_s = (low_s + high_s) / 2
            for part in self._parts():
                search.step()
                possible = self._possible(floors, replicated, part, step_s)
                if possible is None:
                    return
                if possible:
                    high_s = step_s
                    break
            else:
                low_s = search.bound_s = step_s

    def _parts(self) -> Iterator[Part]:
        """One pipeline without replicas; several holders up to ZeRO-1; several from ZeRO-2 on."""
        devices, stages = len(self._problem.usable_devices), sharding_stages(self._problem.workload)
        asked = self._problem.space.num_pipelines
        most = asked or min(devices, self._problem.workload.global_batch)
        shallow = [stage for stage in stages if stage < 2]
        yield Part(Family(0, 1, True), False, 1)
        if shallow:
            yield Part(Family(shallow[-1], devices, False), self._problem.space.replicas, most)
        if stages[-1] >= 2:
            yield Part(Family(stages[-1], devices, False), self._problem.space.replicas, most)

    def _possible(self, floors: Floors, replicated: ReplicatedFloors, part: Part, step_s: float) -> bool | None:
        """Whether the bounds let a plan of a part take `step_s` seconds; None where the budget is spent."""
        lattice, family = self._lattice, part.family
        most = floors.most_sequences(step_s, family, self._search.go_on)
        if most is not None and part.replicated:
            shards = Shards(family.sharding, family.holders)
            beside = replicated.most_sequences(step_s, shards, self._search.go_on)
            most = None if beside is None else np.maximum(most, beside[tuple(lattice.totals.T)])
        if most is None:
            return None
        # Equal machines are not told apart: what counts is how many devices all of them give.
        columns = [Column((tuple(total),), int(n)) for total, n in zip(lattice.totals.tolist(), most, strict=True)]
        devices = tuple(run.count * run.size for run in lattice.runs)
        limits = Limits(devices, self._problem.workload.global_batch, part.most_pipelines)
        return Packing(columns, limits).most(_EFFORT_S) >= limits.global_batch
