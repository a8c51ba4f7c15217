"""Messages that share the network while they are under way: between those alone and those that always share."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from hexiopt.cost.fair_network import FairShares, simulation_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.report.facts import PlanFacts
from tests.hexiopt.cost.test_sequence_plans import PROBLEM
from tests.solvers import problems
from tests.spans import all_spans
from tests.strategies import problems_with_plans, roomy_problems_with_plans

Ends = dict[tuple[int, int, int], float]


def ends_alone(model: PlanPricer, plan: Plan) -> Ends:
    """When replicas end if no message meets another."""
    cost = model.price(plan)
    pipelines = []
    for placed, priced in zip(model.place_pipelines(plan), cost.pipelines, strict=True):
        alone = {way.message: way.route.alone_s(way.num_bytes) for way in placed.messages}
        pipelines.append(replace(priced, message_s=tuple(alone[message] for message in priced.messages)))
    found: Ends = {}
    for span in all_spans(model, plan, replace(cost, pipelines=tuple(pipelines))):
        if not span.is_message:
            at = span.pipeline, span.stage, span.executor
            found[at] = max(found.get(at, 0.0), span.end_s)
    return found


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
def test_no_earlier_than_alone_and_as_priced_where_nothing_is_shared(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    model = PlanPricer(problem)
    fair = model.with_network(FairShares())
    simulated, alone = fair.price(plan), ends_alone(model, plan)
    for (p, s, r), end_s in alone.items():
        assert simulated.pipelines[p].replica_end_s[s][r] >= end_s * (1 - 1e-9)
    if most_ways(model, plan) <= 1:
        assert simulated.step_time_s == pytest.approx(model.price(plan).step_time_s, rel=1e-9)
    assert simulated.excess_bytes == model.price(plan).excess_bytes
    for p, pipeline in enumerate(simulated.pipelines):
        spans = list(fair.spans(plan, simulated, p))
        assert len(spans) == len(list(model.spans(plan, simulated, p)))
        ends = {(span.stage, span.executor): span.end_s for span in spans if not span.is_message}
        assert tuple(ends[at] for at in sorted(ends)) == pipeline.executor_end_s


def side_by_side(first: int, second: int) -> tuple[PlanPricer, Plan]:
    """Two pipelines with one micro-batch over the same two machines, with so many layers on the first one."""
    base = problems.easy()
    problem = replace(
        base,
        cluster=problems.cluster(("a", "fast", 2), ("b", "fast", 2)),
        model=replace(base.model, num_layers=8),
        workload=replace(base.workload, global_batch=2),
    )
    pipelines = tuple(
        Pipeline((Stage.of((k,), 0, n), Stage.of((2 + k,), n, 8)), 1) for k, n in enumerate((first, second))
    )
    return PlanPricer(problem), Plan(pipelines)


def test_messages_that_meet_take_turns_and_others_do_not() -> None:
    model, plan = side_by_side(4, 4)
    priced, simulated = model.price(plan), model.with_network(FairShares()).price(plan)
    assert simulated.pipeline_s == pytest.approx(priced.pipeline_s, rel=1e-9)

    model, plan = side_by_side(1, 6)
    priced, simulated = model.price(plan), model.with_network(FairShares()).price(plan)
    message_s = priced.pipelines[0].send_forward_s[0]
    layers_s = [stage.forward_s for stage in priced.pipelines[0].stages]
    assert message_s < layers_s[0], "the first message is there before the second one leaves"
    alone = ends_alone(model, plan)
    found = {
        (p, s, r): end
        for p, pipeline in enumerate(simulated.pipelines)
        for s, ends in enumerate(pipeline.replica_end_s)
        for r, end in enumerate(ends)
    }
    assert found == pytest.approx(alone, rel=1e-9)
    assert simulated.pipeline_s < priced.pipeline_s
    assert simulation_s(model, plan) == simulated.step_time_s
    facts = PlanFacts(model.problem, plan, simulated, pricer=model.with_network(FairShares()))
    drawn = {(s.pipeline, s.stage, s.executor): s.end_s for p in (0, 1) for s in facts.spans(p) if not s.is_message}
    assert drawn == found


def test_sequence_layouts_are_simulated() -> None:
    layout = SequenceParallel((SequenceGroup((0, 1), (20, 12), (6, 2)), SequenceGroup((4,), (32,), (8,))), "zigzag")
    plan = Plan((Pipeline((Stage(layout, ((0, 2),), ("selective",)), Stage.of((2, 3), 2, 3)), 4),))
    model = PlanPricer(PROBLEM)
    fair = model.with_network(FairShares())
    simulated = fair.price(plan)
    ends = {(s.stage, s.executor): s.end_s for s in fair.spans(plan, simulated, 0) if not s.is_message}
    assert tuple(ends[at] for at in sorted(ends)) == simulated.pipelines[0].executor_end_s
    assert simulation_s(model, plan) == pytest.approx(model.price(plan).step_time_s), "no message meets another"
