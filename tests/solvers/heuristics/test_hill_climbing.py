"""Polishing keeps to the plan space."""

import random
from collections.abc import Iterator
from dataclasses import replace

from hexiopt.plan.check import check
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.completion.completer import PlanCompleter
from solvers.core.search import Search
from solvers.heuristics.hill_climbing import HillClimber
from tests.solvers import problems


def stages(problem: Problem, first: int, count: int) -> Iterator[Stage]:
    """Stages of one device each, from device `first`; short pipelines gain most by small micro-batches."""
    layers = problem.model.num_layers
    for k in range(count):
        yield Stage.of((first + k,), k * layers // count, (k + 1) * layers // count)


def test_smaller_micro_batches_stay_even() -> None:
    """Two pipelines differ by one micro-batch of two sequences: of one sequence that would be two."""
    problem = problems.easy(Space(uneven_batch=False))
    problem = replace(problem, workload=replace(problem.workload, global_batch=10, optimizer_sharding="0"))
    pipelines = tuple(Pipeline(tuple(stages(problem, first, 4)), count, 2) for first, count in ((0, 3), (4, 2)))
    plan = Plan(pipelines, ONE_F_ONE_B, Sharding(0))
    assert check(problem, plan) == []
    search = Search("test", problem, Budget(3600.0, 200), 0)
    search.offer(plan)
    HillClimber(search, PlanCompleter(search.pricer), random.Random(0)).finish((), search.until())
    assert search.plan is not None
    assert check(problem, search.plan) == []


def test_the_best_plan_is_tried_in_every_zero_stage() -> None:
    """At once, not when a draw says so: in as many steps as there are stages and groups."""
    problem = problems.easy()
    pipelines = tuple(Pipeline(tuple(stages(problem, first, 1)), 8, 1) for first in (0, 1))
    plans = {
        Sharding(stage, groups): Plan(pipelines, ONE_F_ONE_B, Sharding(stage, groups))
        for stage in range(4)
        for groups in (("all", "machine") if stage else ("all",))
    }
    search = Search("test", problem, Budget(3600.0, len(plans)), 0)
    first, *others = plans.values()
    search.offer(first)
    least_s = min(cost.step_time_s for plan in others if (cost := search.pricer.price(plan)).fits)
    assert least_s < search.best_s, "else there is nothing to find"
    HillClimber(search, PlanCompleter(search.pricer), random.Random(0)).finish((), search.until())
    assert search.best_s <= least_s
