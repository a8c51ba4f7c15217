"""Messages that share the network while they are under way: between those alone and those that always share."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import links_of, stage_times
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.report.facts import PlanFacts
from hexiopt.simulation.engine import Step
from tests.alone import Alone
from tests.hexiopt.cost.test_sequence_plans import PROBLEM
from tests.solvers import problems
from tests.strategies import problems_with_plans, roomy_problems_with_plans

Ends = dict[tuple[int, int, int], float]


def ends_alone(model: PlanPricer, plan: Plan) -> Ends:
    """When replicas end if no message meets another."""
    return {
        (p, s, r): end_s
        for p, pipeline in enumerate(model.with_network(Alone()).price(plan).pipelines)
        for s, ends in enumerate(pipeline.replica_end_s)
        for r, end_s in enumerate(ends)
    }


def most_ways(model: PlanPricer, plan: Plan) -> int:
    """Of all resources of the network, the most ways of messages over one."""
    over = Counter(
        resource
        for placed in model.place_pipelines(plan)
        for way in placed.messages
        for resource, _ in way.route.shared
    )
    return max(over.values(), default=0)


@given(pair=problems_with_plans(max_batch=20) | roomy_problems_with_plans())
def test_no_earlier_than_alone_and_as_alone_where_nothing_is_shared(pair: tuple[Problem, Plan]) -> None:
    """And as the event simulation says, to the last digit."""
    problem, plan = pair
    model = PlanPricer(problem)
    cost, estimate = model.price(plan), model.with_network(Alone()).price(plan)
    for (p, s, r), end_s in ends_alone(model, plan).items():
        assert cost.pipelines[p].replica_end_s[s][r] >= end_s * (1 - 1e-9)
    if most_ways(model, plan) <= 1:
        assert cost.step_time_s == pytest.approx(estimate.step_time_s, rel=1e-9)
    assert cost.excess_bytes == estimate.excess_bytes
    for p, pipeline in enumerate(cost.pipelines):
        spans = list(model.spans(plan, cost, p))
        ends = {(span.stage, span.executor): span.end_s for span in spans if not span.is_message}
        assert tuple(ends[at] for at in sorted(ends)) == pipeline.executor_end_s
        sent_s: dict[tuple[int, int, int, bool], list[float]] = {}
        for span in spans:
            if span.is_message:
                at = span.stage, span.executor, span.receiver, span.kind == "send_backward"
                sent_s.setdefault(at, []).append(span.end_s - span.start_s)
        for message, mean_s in zip(pipeline.messages, pipeline.message_s, strict=True):
            each = sent_s[message.stage, message.sender, message.receiver, message.backward]
            assert mean_s == pytest.approx(sum(each) / len(each), rel=1e-9)


def side_by_side(*on_first: int, micro_batches: int = 1) -> tuple[PlanPricer, Plan]:
    """Pipelines over the same two machines, with so many layers on the first one."""
    count = len(on_first)
    base = problems.easy()
    problem = replace(
        base,
        cluster=problems.cluster(("a", "fast", count), ("b", "fast", count)),
        model=replace(base.model, num_layers=8),
        workload=replace(base.workload, global_batch=count * micro_batches),
    )
    pipelines = tuple(
        Pipeline((Stage.of((k,), 0, n), Stage.of((count + k,), n, 8)), micro_batches) for k, n in enumerate(on_first)
    )
    return PlanPricer(problem), Plan(pipelines)


def test_messages_that_meet_take_turns_and_others_do_not() -> None:
    model, plan = side_by_side(4, 4)
    (pipeline, _), latency_s = model.price(plan).pipelines, model.problem.cluster.network.pair_latency(0, 2)
    alone_s = [message.route.alone_s(message.num_bytes) for message in model.place_pipelines(plan)[0].messages]
    assert pipeline.message_s == pytest.approx([2 * seconds - latency_s for seconds in alone_s])

    model, plan = side_by_side(1, 6)
    cost = model.price(plan)
    message_s = cost.pipelines[0].send_forward_s[0]
    layers_s = [stage.forward_s for stage in cost.pipelines[0].stages]
    assert message_s < layers_s[0], "the first message is there before the second one leaves"
    ends = {
        (p, s, r): end
        for p, pipeline in enumerate(cost.pipelines)
        for s, stage_ends in enumerate(pipeline.replica_end_s)
        for r, end in enumerate(stage_ends)
    }
    assert ends == pytest.approx(ends_alone(model, plan), rel=1e-9)
    facts = PlanFacts(model.problem, plan, cost, pricer=model)
    drawn = {(s.pipeline, s.stage, s.executor): s.end_s for p in (0, 1) for s in facts.spans(p) if not s.is_message}
    assert drawn == ends


def test_equal_pipelines_have_the_spans_of_one_that_stands_for_them() -> None:
    """Three equal ones and one that is not, over one network: as where all four are simulated."""
    model, plan = side_by_side(4, 4, 4, 6, micro_batches=5)
    placed = list(model.place_pipelines(plan))
    links = [link for p, line in enumerate(placed) for link in links_of(p, line)]
    running, orders = {p: stage_times(line) for p, line in enumerate(placed)}, dict(enumerate(model.orders(plan)))
    whole = list(Step(running, plan.schedule, links, orders).spans())
    for p in range(4):
        expected = [span for span in whole if span.pipeline == p]
        spans = list(model.spans(plan, model.price(plan), p))
        assert [replace(span, start_s=0.0, end_s=0.0) for span in spans] == [
            replace(span, start_s=0.0, end_s=0.0) for span in expected
        ]
        for ends in ("start_s", "end_s"):
            assert [getattr(s, ends) for s in spans] == pytest.approx([getattr(s, ends) for s in expected], rel=1e-9)


def test_sequence_layouts_end_when_the_event_simulation_says() -> None:
    layout = SequenceParallel((SequenceGroup((0, 1), (20, 12), (6, 2)), SequenceGroup((4,), (32,), (8,))), "zigzag")
    plan = Plan((Pipeline((Stage(layout, ((0, 2),), ("selective",)), Stage.of((2, 3), 2, 3)), 4),))
    model = PlanPricer(PROBLEM)
    cost = model.price(plan)
    ends = {(s.stage, s.executor): s.end_s for s in model.spans(plan, cost, 0) if not s.is_message}
    assert tuple(ends[at] for at in sorted(ends)) == cost.pipelines[0].executor_end_s
    estimate = model.with_network(Alone()).price(plan)
    assert cost.step_time_s == pytest.approx(estimate.step_time_s), "no message meets another"
