"""A search that begins from a plan: nobody returns a slower one, and those that move from plan to plan begin there."""

from functools import cache
from typing import Any

import pytest

from hexiopt.errors import InputError
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget, Capabilities
from hexiopt.solving.referee import Refereed
from hexiopt.solving.result import Result
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import partition_of
from solvers.core.search import Search
from solvers.registry import make_solver
from tests.solvers import problems
from tests.solvers.every_solver.contract import allow_layouts, in_turns, solve


@cache
def best_of(problem: Problem) -> Plan:
    plan = solve("portfolio", problem, steps=200).plan
    assert plan is not None
    return plan


@in_turns(2)
def test_nobody_is_behind_the_start(name: str) -> None:
    problem = allow_layouts(name, problems.loose())
    start = best_of(problem)
    best_s = Search("start", problem, Budget(1.0), 0).offer(start).step_time_s
    result = solve(name, problem, steps=1, start=start)
    assert result.objective <= best_s


def test_a_partition_has_the_devices_stages_and_policies_of_its_plan() -> None:
    """Like pipelines form one group; completed, the partition is a plan over the same devices."""
    problem = problems.loose()
    two = tuple(Pipeline((Stage.of((device,), 0, problem.model.num_layers),), 1) for device in (1, 2))
    alone = Pipeline((Stage.of((0,), 0, problem.model.num_layers),), 2)
    partition = partition_of(Plan((*two, alone)))
    assert partition is not None
    assert [group.stages for group in partition.pipeline_groups] == [(((1,), (2,), (0,)),)]
    uneven = partition_of(Plan((two[0], Pipeline(alone.stages, 1, 2))))
    assert uneven is not None
    assert [group.micro_batch_size for group in uneven.pipeline_groups] == [1, 2]
    completed = PlanCompleter(Search("start", problem, Budget(1.0), 0).pricer).complete(partition)
    assert completed


def test_annealing_begins_at_the_start() -> None:
    """A step prices one partition, and the first is the start's, whose estimate was the best."""
    problem = problems.sixteen_gpus()
    start = solve("portfolio", problem, steps=60).plan
    assert start is not None
    without = solve("local_search", problem, steps=2)
    assert solve("local_search", problem, steps=2, start=start).objective < without.objective


class StartsNowhere:
    """A stranger without `start`."""

    name = "nowhere"
    capabilities = Capabilities()

    def solve(
        self, problem: Problem, budget: Budget, *, seed: int = 0, pricer: Any = None, on_progress: Any = None
    ) -> Result:
        return solve("random", problem, steps=1)


def test_bad_starts_are_refused_in_a_line() -> None:
    problem = problems.loose()
    start = solve("portfolio", problem, steps=60).plan
    assert start is not None
    with pytest.raises(InputError, match="start: nowhere begins from no plan; leave it out"):
        Refereed(StartsNowhere()).solve(problem, Budget(1.0), start=start)
    short = Plan(start.pipelines[:1]) if len(start.pipelines) > 1 else None
    other = problem.replace(workload=problem.workload.replace(global_batch=problem.workload.global_batch * 2))
    with pytest.raises(InputError, match=r"start: breaks the rule .*; give a plan of this problem"):
        make_solver("portfolio").solve(other, Budget(1.0, 1), start=short or start)
