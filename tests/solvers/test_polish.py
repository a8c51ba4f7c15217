"""Polishing keeps to the plan space."""

import random
from dataclasses import replace

from hexiopt.check import check
from hexiopt.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.space import Space
from solvers.base import Budget, Search
from solvers.polish import Polisher
from solvers.structure import Builder
from tests.solvers import problems


def test_smaller_micro_batches_stay_even() -> None:
    """Two pipelines differ by one micro-batch of two sequences: of one sequence that would be two."""
    problem = problems.easy(Space(uneven_batch=False))
    problem = replace(problem, workload=replace(problem.workload, global_batch=10, optimizer_sharding="0"))
    layers = problem.model.num_layers
    pipelines = tuple(Pipeline((Stage.of((d,), 0, layers),), count, 2) for d, count in enumerate((3, 2)))
    plan = Plan(pipelines, "1f1b", Sharding(0))
    assert check(problem, plan) == []
    search = Search("test", problem, Budget(60.0, 200), 0)
    search.offer(plan)
    Polisher(search, Builder(search), random.Random(0)).finish()
    assert search.plan is not None
    assert check(problem, search.plan) == []
