"""The event simulation: nothing overlaps, nothing starts before its input, and it ends when the cost says."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.problem.problem import Problem
from hexiopt.simulation.engine import Span
from tests.spans import all_spans
from tests.strategies import problems_with_plans, roomy_problems_with_plans


@given(pair=problems_with_plans() | roomy_problems_with_plans())
def test_the_simulation_ends_when_the_cost_says(pair: tuple[Problem, Plan]) -> None:
    """On random asymmetric plans, with and without shared links: shares are static in both."""
    problem, plan = pair
    model = PlanPricer(problem)
    cost = model.price(plan)
    ends: dict[tuple[int, int, int], float] = defaultdict(float)
    for span in all_spans(model, plan, cost):
        if not span.is_message:
            at = span.pipeline, span.stage, span.executor
            ends[at] = max(ends[at], span.end_s)
    assert max(ends.values()) == pytest.approx(cost.pipeline_s, rel=1e-9)
    for p, (pipeline, priced) in enumerate(zip(plan.pipelines, cost.pipelines, strict=True)):
        stage_ends = [
            [ends[p, s, r] for r in range(len(stage.parallelism.replicas))] for s, stage in enumerate(pipeline.stages)
        ]
        assert list(priced.executor_end_s) == pytest.approx([end for stage in stage_ends for end in stage], rel=1e-9)
        assert priced.end_s == max(priced.executor_end_s)
        timed = list(zip(priced.messages, priced.message_s, strict=True))
        for s in range(len(priced.send_forward_s)):
            ahead, back = (
                [seconds for x, seconds in timed if (x.backward, x.stage) == at] for at in ((0, s), (1, s + 1))
            )
            assert (priced.send_forward_s[s], priced.send_backward_s[s]) == (max(ahead), max(back))


@given(pair=problems_with_plans(max_batch=12) | roomy_problems_with_plans())
def test_every_event_waits_for_its_input_and_its_place(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    model = PlanPricer(problem)
    events = all_spans(model, plan, model.price(plan))
    event_by_key = {(e.kind, e.pipeline, e.stage, e.executor, e.chunk, e.micro_batch, e.receiver): e for e in events}
    assert len(events) == len(event_by_key) == sum(map(num_events, plan.pipelines))

    for event in events:
        assert event.end_s >= event.start_s >= 0.0
        for kind, *where in causes(event, plan.pipelines[event.pipeline]):
            before = event_by_key[(kind, event.pipeline, *where[:3], event.micro_batch, where[3])]
            assert before.end_s <= event.start_s

    places: dict[tuple[object, ...], list[Span]] = defaultdict(list)
    for event in events:
        way: tuple[object, ...] = (event.kind, event.receiver) if event.is_message else ()
        places[(event.pipeline, event.stage, event.executor, *way)].append(event)
    for held in places.values():
        held.sort(key=lambda e: (e.start_s, e.end_s))
        for before, after in pairwise(held):
            assert before.end_s <= after.start_s


def samples(pipeline: Pipeline, stage: int, replica: int) -> set[int]:
    """The samples of every micro-batch that a replica takes."""
    sizes = [r.samples or pipeline.micro_batch_size for r in pipeline.stages[stage].parallelism.replicas]
    return set(range(sum(sizes[:replica]), sum(sizes[: replica + 1])))


def pairs(pipeline: Pipeline, stage: int, other: int) -> list[tuple[int, int]]:
    """Replicas of two stages that have samples in common."""
    return [
        (a, b)
        for a in range(len(pipeline.stages[stage].parallelism.replicas))
        for b in range(len(pipeline.stages[other].parallelism.replicas))
        if samples(pipeline, stage, a) & samples(pipeline, other, b)
    ]


def num_events(pipeline: Pipeline) -> int:
    """Operations and messages of a pipeline, from its virtual stages."""
    count, chunks = len(pipeline.stages), len(pipeline.stages[0].layers)
    operations = chunks * sum(len(stage.parallelism.replicas) for stage in pipeline.stages)
    boundaries = [(q % count, (q + 1) % count) for q in range(count * chunks - 1)]
    messages = sum(len(pairs(pipeline, s, t)) for s, t in boundaries)
    return pipeline.num_micro_batches * 2 * (operations + messages)


def causes(event: Span, pipeline: Pipeline) -> list[tuple[str, int, int, int, int]]:
    """(kind, stage, replica, range, receiver) of what must have ended before an event of the same micro-batch."""
    s, r, c = event.stage, event.executor, event.chunk
    if event.kind.startswith("send_"):
        return [(event.kind.removeprefix("send_"), s, r, c, 0)]
    count, chunks = len(pipeline.stages), len(pipeline.stages[0].layers)
    inputs = [("forward", s, r, c, 0)] if event.kind == "backward" else []
    source = c * count + s + (-1 if event.kind == "forward" else 1)
    if not 0 <= source < count * chunks:
        return inputs
    t, d = source % count, source // count
    return inputs + [(f"send_{event.kind}", t, a, d, r) for a, b in pairs(pipeline, t, s) if b == r]
