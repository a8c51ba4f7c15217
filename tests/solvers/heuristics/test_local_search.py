"""Starts are tried in every schedule and sharding, in counted steps."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hexiopt.problem.space import schedules
from hexiopt.solving import Budget
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import Partition
from solvers.core.search import Search
from solvers.core.zero import plain_stages, sharding_groups
from solvers.frame.starts import whole_grids
from solvers.heuristics.local_search import Annealer
from tests.solvers.drawn import drawn_problem

SLOW_SYNC = 14  # a problem where sync and schedule decide between grids


def annealer(max_steps: int) -> Annealer:
    search = Search("test", drawn_problem(SLOW_SYNC), Budget(3600.0, max_steps), 0)
    return Annealer(search, PlanCompleter(search.pricer), random.Random(0))


def step_time_s(annealing: Annealer, partition: Partition) -> float:
    """In seconds; infinite where it does not fit."""
    state = annealing.evaluate(partition)
    assert state is not None
    return math.exp(state.energy) if state.energy < 50.0 else math.inf


def settings(annealing: Annealer, start: Partition) -> Iterator[Partition]:
    """`start` in every schedule that is not interleaved, with every sharding below ZeRO-2."""
    problem = annealing.search.problem
    for schedule in (candidate for candidate in schedules(problem.workload) if not candidate.chunked):
        for stage in plain_stages(problem):
            for groups in sharding_groups(problem, stage):
                yield replace(start, schedule=schedule, sharding=stage, groups=groups)


def test_the_best_schedule_and_sharding_of_a_grid_are_found() -> None:
    annealing, checked = annealer(100), annealer(100)
    grid = next(g for g in whole_grids(annealing.search.problem) if len(g.pipeline_groups[0].stages) == 3)
    least_s = min(step_time_s(checked, setting) for setting in settings(checked, grid))
    assert least_s < 0.9 * step_time_s(checked, grid), "else there is nothing to find"
    state = annealing.best_sharding(
        annealing.best_schedule(grid, annealing.search.until()).partition, annealing.search.until()
    )
    assert math.exp(state.energy) == pytest.approx(least_s)
    assert state.partition.pipeline_groups == grid.pipeline_groups
    assert 0 < annealing.search.steps <= 9


def test_without_steps_a_start_stays_as_it_is() -> None:
    annealing = annealer(1)
    grid = next(whole_grids(annealing.search.problem))
    assert annealing.search.step()
    for settled in annealing.best_schedule, annealing.best_sharding:
        assert settled(grid, annealing.search.until()).partition == grid
    assert annealing.search.steps == 1
