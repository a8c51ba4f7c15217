"""The event simulation: nothing overlaps, nothing starts before its input, and it ends when the cost says."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings

from hexiopt.cost.model import CostModel
from hexiopt.plan import Plan
from hexiopt.problem import Problem
from hexiopt.simulate import Event, simulate
from tests.strategies import problems_with_plans


@settings(max_examples=400, deadline=None)
@given(pair=problems_with_plans())
def test_the_simulation_ends_when_the_cost_says(pair: tuple[Problem, Plan]) -> None:
    """On random asymmetric plans, with and without shared links: shares are static in both."""
    problem, plan = pair
    cost = CostModel(problem).price(plan)
    ends: dict[tuple[int, int], float] = defaultdict(float)
    for event in simulate(plan, cost):
        if event.kind in ("forward", "backward"):
            at = event.pipeline, event.stage
            ends[at] = max(ends[at], event.end_s)
    assert max(ends.values()) == pytest.approx(cost.pipeline_s, rel=1e-9)
    for p, pipeline in enumerate(cost.pipelines):
        assert [ends[p, s] for s in range(len(pipeline.stages))] == pytest.approx(list(pipeline.stage_end_s), rel=1e-9)
        assert pipeline.end_s == max(pipeline.stage_end_s)


@settings(max_examples=100, deadline=None)
@given(pair=problems_with_plans(max_batch=12))
def test_every_event_waits_for_its_input_and_its_place(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    events = simulate(plan, CostModel(problem).price(plan))
    found = {(e.kind, e.pipeline, e.stage, e.micro_batch): e for e in events}
    expected = sum(p.num_micro_batches * (2 * len(p.stages) + 2 * (len(p.stages) - 1)) for p in plan.pipelines)
    assert len(events) == len(found) == expected

    for event in events:
        assert event.end_s >= event.start_s >= 0.0
        for cause in causes(event, len(plan.pipelines[event.pipeline].stages)):
            before = found[(cause[0], event.pipeline, cause[1], event.micro_batch)]
            assert before.end_s <= event.start_s

    places: dict[tuple[int, int, str], list[Event]] = defaultdict(list)
    for event in events:
        kind = event.kind if event.kind.startswith("send") else "compute"
        places[event.pipeline, event.stage, kind].append(event)
    for held in places.values():
        held.sort(key=lambda e: (e.start_s, e.end_s))
        for before, after in pairwise(held):
            assert before.end_s <= after.start_s


def causes(event: Event, num_stages: int) -> list[tuple[str, int]]:
    """(kind, stage) of what must have ended before an event of the same micro-batch."""
    s, last = event.stage, num_stages - 1
    return {
        "forward": [("send_forward", s - 1)] if s else [],
        "send_forward": [("forward", s)],
        "backward": [("forward", s)] + ([("send_backward", s + 1)] if s < last else []),
        "send_backward": [("backward", s)],
    }[event.kind]
