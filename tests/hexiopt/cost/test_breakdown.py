"""Where the seconds of a step go: the parts add up, and each is what it says."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from hexiopt.cost.breakdown import breakdown, busy_time
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from tests.hexiopt.cost.test_cost import PROBLEM
from tests.hexiopt.plan.layouts import with_layouts
from tests.strategies import problems_with_plans, roomy_problems_with_plans

PAIRS = problems_with_plans() | roomy_problems_with_plans()


@settings(max_examples=100)
@given(pair=PAIRS | with_layouts(PAIRS))
def test_the_parts_add_up_to_the_step_and_to_every_executor(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    model = PlanPricer(problem)
    cost = model.price(plan)
    step_breakdown = breakdown(model, plan, cost)
    parts = step_breakdown.parts
    assert sum(parts.values()) == pytest.approx(cost.step_time_s, rel=1e-12, abs=0)
    assert all(seconds >= -1e-12 * cost.step_time_s for seconds in parts.values())
    assert plan.sharding.stage in (1, 2) or step_breakdown.parts["weight all-gather"] == 0.0
    for p, pipeline in enumerate(cost.pipelines):
        for s, stage in enumerate(pipeline.stages):
            for r, executor in enumerate(stage.executors):
                busy = busy_time(model, plan, cost, p, s, r)
                assert busy.total_s == pytest.approx(executor.forward_s + executor.backward_s, rel=1e-12, abs=0)
                assert plan.sharding.stage >= 2 or busy.lockstep_s == 0.0


def test_two_stages_by_hand() -> None:
    stages = (Stage.of((0, 1), 0, 3, "full"), Stage.of((2, 3), 3, 6))
    plan = Plan((Pipeline(stages, 1, 8),))
    model = PlanPricer(PROBLEM)
    cost = model.price(plan)
    step_breakdown = breakdown(model, plan, cost)
    first, second = cost.pipelines[0].stages
    (ahead,), (back,) = cost.pipelines[0].send_forward_s, cost.pipelines[0].send_backward_s
    assert (step_breakdown.pipeline, step_breakdown.stage, step_breakdown.executor) == (0, 0, 0)
    assert step_breakdown.parts["messages"] == pytest.approx(ahead + back)
    assert step_breakdown.parts["bubble"] == pytest.approx(second.forward_s + second.backward_s)
    busy_s = (
        step_breakdown.parts["compute"] + step_breakdown.parts["recompute"] + step_breakdown.parts["TP collectives"]
    )
    assert busy_s == pytest.approx(first.forward_s + first.backward_s)
    assert step_breakdown.parts["recompute"] > 0.0
    assert step_breakdown.parts["TP collectives"] > 0.0
    none = replace(plan, pipelines=(Pipeline((Stage.of((0, 1), 0, 3), stages[1]), 1, 8),))
    bare = breakdown(model, none, model.price(none))
    assert bare.parts["recompute"] == 0.0
    assert bare.parts["compute"] == pytest.approx(step_breakdown.parts["compute"])


def test_sharded_weights_are_gathered_after_the_optimizer() -> None:
    pipelines = tuple(Pipeline((Stage.of(devices, 0, 6, "full"),), 1, 4) for devices in ((0, 1), (2, 3)))
    model = PlanPricer(PROBLEM)
    whole, sharded = (Plan(pipelines, sharding=Sharding(zero_stage)) for zero_stage in (0, 1))
    cost = model.price(sharded)
    before, after = breakdown(model, whole, model.price(whole)), breakdown(model, sharded, cost)
    slowest_s = max(pipeline.stages[0].executors[0].copies[0].optimizer_s for pipeline in cost.pipelines)
    assert after.parts["optimizer"] == pytest.approx(slowest_s)
    assert before.parts["weight all-gather"] == 0.0
    assert after.parts["weight all-gather"] == pytest.approx(cost.optimizer_s - slowest_s)
    assert after.parts["weight all-gather"] > before.parts["gradient sync"] / 8
