"""Symmetric candidates: machines cut into TP groups of one degree, and these into equally long pipelines side by side,
so that gradients are summed, and states are sharded, inside machines.

Which grid is good is not known before it is evaluated, but few numbers say all of it, so these are searched: at random,
and near the best so far.
"""

import random
from bisect import insort
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from solvers.compiled.kernels import entry, kernel
from solvers.compiled.state import SearchState, SearchWork
from solvers.compiled.tables import Tables
from solvers.loop.edits import add_pipeline, count_devices, dissolve, drop, insert, is_group, pick, release
from solvers.loop.starts import clear, estimate

_BEST = 8  # grids near which others are proposed
_PERMUTED = 4  # kinds of machines up to which all their orders are drawn; of more, those by speed and by memory
_SIZES = 3  # smallest micro-batch sizes of grids
IN_TURNS, EVERYWHERE, ONE_BY_ONE = range(3)  # ways to share TP groups among pipelines
RESPECTS = ("kinds", "degree", "pipelines", "size", "parts", "way", "mode")  # in which grids differ


@dataclass(frozen=True)
class Grid:
    """What says a grid.

    `kinds` of machines, the others left out, in the order of stages. `degree` of TP at most. `pipelines` beside each
    other; of `ONE_BY_ONE`, stages of each. `size`, `mode`: rows of the micro-batch size and of the sharding mode.
    `parts` of the machines, which have pipelines of their own: consecutive or, with `dealt`, every so manieth. `way`:
    TP groups of a machine are stages of pipelines `IN_TURNS`, so that a stage is on like devices of all of them; so and
    so narrow that every machine has a stage of each, `EVERYWHERE`; or of pipelines `ONE_BY_ONE`.
    """

    kinds: tuple[int, ...]
    degree: int = 1
    pipelines: int = 1
    size: int = 0
    parts: int = 1
    dealt: bool = False
    way: int = IN_TURNS
    mode: int = 0


@entry
def lay_grid(tables: Any, work: Any, state: Any, machines: Any, grid: Any) -> None:
    """Lay pipelines on free devices of `machines`, in this order. `grid` [5]: degree, pipelines, size, parts and way,
    as `Grid` has them."""
    degree, count, size, parts, way = grid[0], grid[1], grid[2], grid[3], grid[4]
    free, stages, pipelines, plan = state.free, state.stages, state.pipelines, state.plan[0]
    for part in range(parts):
        first, number = plan.num_pipelines, 0
        for k in range(part * len(machines) // parts, (part + 1) * len(machines) // parts):
            m = machines[k]
            most = max(1, min(degree, count_devices(free[m]) // count)) if way == EVERYWHERE else degree
            while free[m]:
                mask = widest(tables, free, m, most)
                p = first + (number // count if way == ONE_BY_ONE else number % count)
                if mask == 0 or p >= len(pipelines) or (p < plan.num_pipelines and is_full(stages, pipelines, p)):
                    break
                if p == plan.num_pipelines:
                    add_pipeline(work, state, size)
                free[m] &= ~mask
                insert(work, state, p, pipelines[p].num_stages, m, mask)
                number += 1
        if number > count:
            cut_rest(work, state, first, number % count, way)


@kernel
def is_full(stages: Any, pipelines: Any, p: int) -> Any:
    """Whether pipeline p has as many stages as it may."""
    return pipelines[p].num_stages >= stages.shape[1]


@kernel
def widest(tables: Any, free: Any, m: int, most: int) -> int:
    """The mask of the widest TP group of at most `most` free devices of machine m; 0 where there is none."""
    while most > 0:
        mask = pick(free[m], most)
        if mask and is_group(tables, m, mask):
            return mask
        most -= 1
    return 0


@kernel
def cut_rest(work: Any, state: Any, first: int, rest: int, way: int) -> None:
    """Free the last `rest` stages, which make pipelines from number `first` on unequally long."""
    if way == ONE_BY_ONE:
        if rest:
            dissolve(work, state, state.plan[0].num_pipelines - 1)
    else:
        for p in range(first, first + rest):
            last = state.pipelines[p].num_stages - 1
            release(state, p, last)
            drop(work, state, p, last)


class Grids:
    """Makes grids of the machines of `tables`, each drawn by what became of those before."""

    def __init__(self, tables: Tables, work: SearchWork, seed: int) -> None:
        self.tables, self._work, self._rng = tables, work, random.Random(seed)
        usable = tables.machines["usable"] > 0
        kinds = np.unique(tables.machines["kind"][usable]).tolist()
        self._members = {kind: np.flatnonzero((tables.machines["kind"] == kind) & usable) for kind in kinds}
        self._orders = list(permutations(kinds)) if len(kinds) <= _PERMUTED else self._by_speed_and_memory(kinds)
        self._counts = steps_up_to(int(tables.problem[0]["most_pipelines"]))
        self._parts = steps_up_to(int(usable.sum()))
        self._best: list[tuple[float, Grid]] = []  # of unlike objectives, best first

    def _by_speed_and_memory(self, kinds: list[int]) -> list[tuple[int, ...]]:
        def row(kind: int) -> int:
            uneven = int(self.tables.machines[self._members[kind][0]]["uneven"])
            rows = self.tables.kind_group[kind] if uneven < 0 else self.tables.mask_group[uneven]
            return int(rows[rows >= 0][0])

        def device_s(kind: int) -> float:
            return float(self.tables.costs[row(kind), 0]["forward_s"] * self.tables.groups[row(kind), 0]["degree"])

        def memory(kind: int) -> float:
            return float(self.tables.groups[row(kind), 0]["limit_bytes"])

        orders = [tuple(sorted(kinds, key=value)) for value in (device_s, memory)]
        return [*orders, *(order[::-1] for order in orders)]

    def make(self, state: SearchState) -> float:
        """Make `state` a grid: any, or one that differs from one of the best in one or two respects, each as often; an
        estimate of its objective."""
        grid, respects = Grid(()), list(RESPECTS)
        if self._best and self._rng.random() < 0.5:
            grid, respects = self._rng.choice(self._best)[1], self._rng.sample(RESPECTS, self._rng.randint(1, 2))
        for respect in respects:
            grid = self._redraw(grid, respect)
        clear(self.tables, state)
        self.lay(state, grid)
        objective = estimate(self.tables, self._work, state)
        if all(objective != other for other, _ in self._best):
            insort(self._best, (objective, grid), key=lambda item: item[0])
            del self._best[_BEST:]
        return objective

    def _redraw(self, grid: Grid, respect: str) -> Grid:
        rng, tables = self._rng, self.tables
        if respect == "kinds":
            order = rng.choice(self._orders)
            return replace(grid, kinds=order[rng.randrange(len(order)) if rng.random() < 0.5 else 0 :])
        if respect == "degree":
            return replace(grid, degree=int(rng.choice(tables.degrees)))
        if respect == "pipelines":
            return replace(grid, pipelines=rng.choice(self._counts))
        if respect == "size":
            return replace(grid, size=rng.randrange(min(_SIZES, len(tables.sizes))))
        if respect == "parts":
            parts = rng.choice(self._parts) if rng.random() < 0.5 else 1
            return replace(grid, parts=parts, dealt=rng.random() < 0.5)
        if respect == "way":
            return replace(grid, way=rng.randrange(3))
        return replace(grid, mode=rng.randrange(len(tables.modes)))

    def lay(self, state: SearchState, grid: Grid) -> None:
        """Lay a grid on the free devices of `state`."""
        state.plan[0]["zero_stage"], state.plan[0]["by_machine"] = self.tables.modes[grid.mode]
        machines = np.concatenate([self._members[kind] for kind in grid.kinds])
        parts = min(grid.parts, len(machines))
        if grid.dealt:
            machines = np.concatenate([machines[part::parts] for part in range(parts)])
        numbers = np.array([grid.degree, grid.pipelines, grid.size, parts, grid.way], np.int64)
        lay_grid(self.tables, self._work, state, machines, numbers)


def steps_up_to(most: int) -> list[int]:
    """Powers of two and the numbers half-way between them, up to `most`, and `most`."""
    return sorted(
        {count for k in range(most.bit_length()) for count in (1 << k, 3 << k >> 1) if count <= most} | {most}
    )
