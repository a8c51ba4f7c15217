"""What a step is expected to take: as priced, as paced, or even; and that all ranks walk what rank 0 expects."""

import json
from dataclasses import replace
from typing import Any

import torch

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.mapping.layout import layout_of
from runtime.mapping.times import StepTimes
from tests.models import TINY
from tests.runtime.parallel.test_host_waits import MODEL, plan_of
from tests.runtime.parallel.test_training import trainee
from tests.runtime.stream_order import run_in_order
from tests.solvers import problems

PLAN = Plan((Pipeline((Stage.of((0,), 0, 1), Stage.of((1,), 1, 2)), 3), Pipeline((Stage.of((2,), 0, 2),), 2)))


def test_times_as_priced() -> None:
    problem = replace(problems.easy(), model=replace(TINY, num_layers=2))
    times = StepTimes.of_plan(problem, PLAN)
    assert times is not None
    cost = PlanPricer(problem).price(PLAN)
    for (first, *_), pipeline in zip(times.chunk_s, cost.pipelines, strict=True):
        assert first == pipeline.stages[0].executors[0].chunk_s
    line = cost.pipelines[0]
    assert times.message_s == (((line.send_forward_s[0], 0.0), (0.0, line.send_backward_s[0])), ((0.0, 0.0),))
    assert StepTimes.of_data(json.loads(json.dumps(times.to_data()))) == times


def test_balanced_pipelines_end_together() -> None:
    layout = layout_of(PLAN, replace(TINY, num_layers=2))
    times = StepTimes.even(layout, ONE_F_ONE_B)
    per_step = [
        line.num_micro_batches * sum(map(sum, stages[0]))
        for line, stages in zip(layout.lines, times.chunk_s, strict=True)
    ]
    assert per_step[0] == per_step[1]


def test_all_ranks_walk_what_rank_0_expects() -> None:
    """Which of them has other times changes nothing."""
    plan = plan_of(ONE_F_ONE_B, 2, 1, 4)
    layout = layout_of(plan, MODEL)
    slow_first = StepTimes((((((4.0, 8.0),), ((1.0, 1.0),))),), (((0.1, 0.1),) * 2,))
    even = StepTimes.even(layout, plan.schedule)

    def work(rank: int, times: tuple[StepTimes, StepTimes]) -> Any:
        rank_trainee = trainee(plan, MODEL, 4, times=times[rank])
        tokens = torch.zeros(4, 8, dtype=torch.int64)
        rank_trainee.step(lambda first, end: tokens[first:end], 1e-3)
        return list(map(str, rank_trainee.pipeline.actions))

    same, other = (run_in_order(2, lambda rank, t=t: work(rank, t)) for t in ((even, even), (even, slow_first)))
    assert same == other
    assert run_in_order(2, lambda rank: work(rank, (slow_first, even))) != same
