"""Grids: candidates like all others, laid as they say, the same for the same seed."""

from dataclasses import replace

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from solvers.compiled.state import SearchState, new_state, new_work
from solvers.compiled.step import FAR
from solvers.compiled.tables import tables_of
from solvers.loop.edits import is_group
from solvers.loop.grids import EVERYWHERE, ONE_BY_ONE, Grid, Grids, steps_up_to
from solvers.loop.starts import clear
from tests.models import TINY
from tests.solvers.drawn import drawn_problem
from tests.solvers.loop.candidates import check_devices
from tests.solvers.problems import cluster

Stages = list[list[tuple[int, int]]]  # machine and mask, stage by stage, of each pipeline
LOW, HIGH, ALL = 0b0011, 0b1100, 0b1111


def grids_of(problem: Problem, seed: int = 0) -> tuple[Grids, SearchState]:
    tables = tables_of(PlanPricer(problem))
    return Grids(tables, new_work(tables), seed), new_state(tables)


def stages_of(state: SearchState) -> Stages:
    count = int(state.plan[0]["num_pipelines"])
    rows = [state.stages[p, : state.pipelines[p]["num_stages"]] for p in range(count)]
    return [list(zip(row["machine"].tolist(), row["mask"].tolist(), strict=True)) for row in rows]


@pytest.mark.parametrize("number", [6, 8, 13, 14, 15])
def test_each_device_in_one_group(number: int) -> None:
    grids, state = grids_of(drawn_problem(number))
    fits = 0
    for _ in range(200):
        fits += grids.make(state) < FAR
        check_devices(grids.tables, state)
        for pipeline in stages_of(state):
            assert all(is_group(grids.tables, m, mask) for m, mask in pipeline)
    assert fits > 0


@pytest.mark.parametrize("number", [8, 14])
def test_the_same_seed_gives_the_same_grids(number: int) -> None:
    def make_grids(seed: int) -> list[tuple[float, Stages]]:
        grids, state = grids_of(drawn_problem(number), seed)
        return [(grids.make(state), stages_of(state)) for _ in range(60)]

    assert make_grids(3) == make_grids(3)
    assert make_grids(3) != make_grids(4)


@pytest.mark.parametrize(
    ("grid", "stages"),
    [
        # Both TP groups of each machine are in the same stage, of one pipeline each.
        (Grid((0, 1), degree=2, pipelines=2), [[(m, mask) for m in range(4)] for mask in (LOW, HIGH)]),
        (Grid((1, 0), degree=4, pipelines=2), [[(2, ALL), (0, ALL)], [(3, ALL), (1, ALL)]]),
        # All machines are in both pipelines, whatever the degree.
        (Grid((0, 1), degree=4, pipelines=2, way=EVERYWHERE), [[(m, mask) for m in range(4)] for mask in (LOW, HIGH)]),
        # Pipelines of two stages, one after another.
        (Grid((0,), degree=2, pipelines=2, way=ONE_BY_ONE), [[(m, LOW), (m, HIGH)] for m in range(2)]),
        # Halves of the machines, and every second one.
        (Grid((0, 1), degree=4, parts=2), [[(0, ALL), (1, ALL)], [(2, ALL), (3, ALL)]]),
        (Grid((0, 1), degree=4, parts=2, dealt=True), [[(0, ALL), (2, ALL)], [(1, ALL), (3, ALL)]]),
        # The last TP group is free where three pipelines would be unequally long.
        (Grid((0, 1), degree=4, pipelines=3), [[(m, ALL)] for m in range(3)]),
        (Grid((0, 1), degree=4, pipelines=3, way=ONE_BY_ONE), [[(m, ALL) for m in range(3)]]),
    ],
)
def test_grids_on_four_machines_by_hand(grid: Grid, stages: Stages) -> None:
    machines = cluster(("a", "fast", 4), ("b", "fast", 4), ("c", "slow", 4), ("d", "slow", 4))
    grids, state = grids_of(Problem(machines, replace(TINY, num_layers=6), Workload(global_batch=16, seq_len=512)))
    clear(grids.tables, state)
    grids.lay(state, grid)
    check_devices(grids.tables, state)
    assert stages_of(state) == stages


def test_the_best_grids_are_better_than_the_first() -> None:
    """Those near the best are drawn too: a thousand improve on the best of the first fifty."""
    grids, state = grids_of(drawn_problem(14))
    objectives = [grids.make(state) for _ in range(1000)]
    assert min(objectives) < min(objectives[:50])


def test_steps_up_to() -> None:
    assert steps_up_to(1) == [1]
    assert steps_up_to(14) == [1, 2, 3, 4, 6, 8, 12, 14]
