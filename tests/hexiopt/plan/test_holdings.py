"""Who holds which parameters: what memory counts on a device is what the holdings of its plan say."""

from dataclasses import replace

import pytest
from hypothesis import given

from hexiopt.cost.cost import copy_costs
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.holdings import Holdings, intervals
from hexiopt.plan.plan import Plan
from hexiopt.problem.model import largest_shard
from hexiopt.problem.problem import Problem
from tests.hexiopt.plan.layouts import with_layouts
from tests.strategies import problems_with_plans, roomy_problems_with_plans

PAIRS = problems_with_plans() | roomy_problems_with_plans()


@given(pair=PAIRS | with_layouts(PAIRS))
def test_memory_counts_what_each_copy_holds(pair: tuple[Problem, Plan]) -> None:
    """On the fullest rank of every copy: all its groups of parameters, as TP divides them; a tied matrix once."""
    problem, plan = pair
    plan = replace(plan, sharding=replace(plan.sharding, stage=0))
    held, model = Holdings.of(plan.pipelines), problem.model
    expected = [0.0] * len(held.copies)
    for group, units, copies in held.groups(model.parameter_groups):
        for copy in copies:
            expected[copy] += len(units) * group.split.on(largest_shard(model, len(held.copies[copy])))
    priced = list(copy_costs(plan, PlanPricer(problem).price(plan)))
    assert [devices for _, _, devices, _ in priced] == list(held.copies)
    assert [copy.num_params for *_, copy in priced] == pytest.approx(expected, rel=1e-12)
    width = problem.workload.states.weight
    assert [copy.memory.weights for *_, copy in priced] == pytest.approx([width * n for n in expected], rel=1e-12)


@given(pair=PAIRS | with_layouts(PAIRS))
def test_copies_are_numbered_by_stage_and_their_ranks_hold_all(pair: tuple[Problem, Plan]) -> None:
    _, plan = pair
    held = Holdings.of(plan.pipelines)
    for pipeline, numbers in zip(plan.pipelines, held.stages, strict=True):
        for stage, copies in zip(pipeline.stages, numbers, strict=True):
            assert tuple(held.copies[copy] for copy in copies) == stage.parallelism.parameter_copies
            layers = [layer for first, end in stage.layers for layer in range(first, end)]
            for copy in copies:
                assert sorted(n for units, holders in held.layers if copy in holders for n in units) == layers
    for devices in held.copies:
        parts = intervals(devices)
        assert [device for device, _, _ in parts] == list(devices)
        assert [start for _, start, _ in parts] == [0.0, *(end for _, _, end in parts[:-1])]
        assert parts[-1][2] == 1.0
