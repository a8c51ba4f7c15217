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


def step_time_s(one: Annealer, partition: Partition) -> float:
    """In seconds; infinite where it does not fit."""
    found = one.evaluate(partition)
    assert found is not None
    return math.exp(found.energy) if found.energy < 50.0 else math.inf


def settings(one: Annealer, start: Partition) -> Iterator[Partition]:
    """`start` in every schedule that is not interleaved, with every sharding below ZeRO-2."""
    problem = one.search.problem
    for schedule in (own for own in schedules(problem.workload) if not own.chunked):
        for stage in plain_stages(problem):
            for groups in sharding_groups(problem, stage):
                yield replace(start, schedule=schedule, sharding=stage, groups=groups)


def test_the_best_schedule_and_sharding_of_a_grid_are_found() -> None:
    one, checked = annealer(100), annealer(100)
    grid = next(g for g in whole_grids(one.search.problem) if len(g.pipeline_groups[0].stages) == 3)
    least_s = min(step_time_s(checked, own) for own in settings(checked, grid))
    assert least_s < 0.9 * step_time_s(checked, grid), "else there is nothing to find"
    found = one.best_sharding(one.best_schedule(grid, one.search.until()).partition, one.search.until())
    assert math.exp(found.energy) == pytest.approx(least_s)
    assert found.partition.pipeline_groups == grid.pipeline_groups
    assert 0 < one.search.steps <= 9


def test_without_steps_a_start_stays_as_it_is() -> None:
    one = annealer(1)
    grid = next(whole_grids(one.search.problem))
    assert one.search.step()
    for settled in one.best_schedule, one.best_sharding:
        assert settled(grid, one.search.until()).partition == grid
    assert one.search.steps == 1
