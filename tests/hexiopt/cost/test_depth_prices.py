"""Prices of plans whose stages state how many micro-batches they have in flight: times and bytes by the simulation."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import FairShares
from hexiopt.numbers.coefficients import FRAGMENTATION
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.schedules.registry import ONE_F_ONE_B, SPLIT_SCHEDULES
from hexiopt.simulation.engine import Span
from tests.hexiopt.cost.test_late_weights import choose_orders, ends_of, late_bytes
from tests.hexiopt.plan.test_depths import DEPTHS
from tests.spans import all_spans
from tests.strategies import problems_with_depths

ZB = SPLIT_SCHEDULES[0]
COUNT, LAYERS = DEPTHS.workload.global_batch, DEPTHS.model.num_layers
FIRST, LAST = Stage.of((0,), 0, LAYERS // 2), Stage.of((2,), LAYERS // 2, LAYERS)


def usual(plan: Plan) -> Plan:
    """The plan with the schedule's own depths."""
    pipelines = [
        replace(pipeline, stages=tuple(replace(stage, in_flight=None) for stage in pipeline.stages))
        for pipeline in plan.pipelines
    ]
    return replace(plan, pipelines=tuple(pipelines))


@given(problems_with_depths())
def test_the_clock_ends_when_the_event_simulation_does(pair: tuple[Problem, Plan]) -> None:
    """To the last digit; equal pipelines are one only where they have equal depths."""
    problem, plan = pair
    model = PlanPricer(problem)
    cost = model.price(plan)
    for p, pipeline in enumerate(cost.pipelines):
        ends = {(span.stage, span.executor): span.end_s for span in model.spans(plan, cost, p) if not span.is_message}
        assert tuple(ends[at] for at in sorted(ends)) == pipeline.executor_end_s


@given(problems_with_depths(ZB))
def test_split_backwards_are_chosen_as_by_the_event_simulation(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    placed, network = PlanPricer(problem).place_pipelines(plan), FairShares()
    ends, orders = choose_orders(placed)
    assert dict(enumerate(network.orders(placed))) == orders
    assert ends_of(network(placed)) == pytest.approx(ends, rel=1e-9)


@given(problems_with_depths())
def test_as_much_is_held_as_the_simulation_says(pair: tuple[Problem, Plan]) -> None:
    """Micro-batches in flight, from the start of their forward to the end of their backward."""
    problem, plan = pair
    model = PlanPricer(problem)
    cost, before = model.price(plan), model.price(usual(plan))
    spans = all_spans(model, plan, cost)
    others = set(plan.other_depths())
    for p, (pipeline, priced, was) in enumerate(zip(plan.pipelines, cost.pipelines, before.pipelines, strict=True)):
        for s, stage in enumerate(pipeline.stages):
            executor_spans = [span for span in spans if (span.pipeline, span.stage, span.executor) == (p, s, 0)]
            counts = peak_in_flight([span for span in executor_spans if not span.is_message])
            depth = min(pipeline.num_micro_batches, len(pipeline.stages) - s)
            assert counts == (stage.in_flight or depth)
            assert ((p, s) in others) == (counts != depth)
            memory, without = priced.stages[s].executors[0].memory, was.stages[s].executors[0].memory
            stored, held = stored_bytes(model, pipeline, s), memory.activations + memory.logits
            assert held - without.activations - without.logits == pytest.approx(
                (counts - depth) * stored, rel=1e-9, abs=1e-6 * without.total
            )
            more = held + memory.buffers - without.activations - without.logits - without.buffers
            assert memory.reserve - without.reserve == pytest.approx(FRAGMENTATION * more, abs=1e-6 * without.total)


@given(problems_with_depths(ZB))
def test_what_is_put_off_is_held_beside_as_many_micro_batches(pair: tuple[Problem, Plan]) -> None:
    """Beside those of the same depths under 1F1B, as the order has it, operation by operation."""
    problem, plan = pair
    model = PlanPricer(problem)
    cost, whole = model.price(plan), model.price(replace(plan, schedule=ONE_F_ONE_B))
    assert cost.fits or not whole.fits
    for placed, priced, before, orders in zip(
        model.place_pipelines(plan), cost.pipelines, whole.pipelines, model.orders(plan), strict=True
    ):
        splits = iter(placed.graph.split)
        for stage, was, order in zip(priced.stages, before.stages, orders, strict=True):
            for executor, without in zip(stage.executors, was.executors, strict=True):
                more = executor.memory.activations - without.memory.activations
                late = late_bytes(executor, next(splits), order)
                assert more == pytest.approx(late, abs=1e-6 * without.memory.total)


def peak_in_flight(computed: list[Span]) -> int:
    """The most micro-batches in flight in an executor that has run these."""
    changes = sorted(
        [(span.start_s, 1, 1) for span in computed if span.kind == "forward"]
        + [(span.end_s, 0, -1) for span in computed if span.kind == "backward"],
        key=lambda change: change[:2],
    )
    most = held = 0
    for _, _, change in changes:
        held += change
        most = max(most, held)
    return most


def stored_bytes(model: PlanPricer, pipeline: Pipeline, s: int) -> float:
    """What a micro-batch stores on the fullest device of the first executor of a stage."""
    stage, last = pipeline.stages[s], s == len(pipeline.stages) - 1
    assert not isinstance(stage.parallelism, SequenceParallel)
    samples = stage.parallelism.samples(pipeline.micro_batch_size)[0]
    group = model.tp_group(stage.parallelism.executors[0])
    sizes = model.stages.memory_model(group, samples).activations
    return float(sizes.of_range(Counter(stage.policies()[0]), s == 0, last))


@given(problems_with_depths())
def test_messages_that_wait_have_buffers(pair: tuple[Problem, Plan]) -> None:
    """Beside the most micro-batches in flight, no more messages are with a stage, on their way or waiting, than there
    are buffers for: those of any stage, those that 1F1B may have beyond, and those of deeper queues."""
    problem, plan = pair
    model = PlanPricer(problem)
    cost, before = model.price(plan), model.price(usual(plan))
    for p, (pipeline, priced, was) in enumerate(zip(plan.pipelines, cost.pipelines, before.pipelines, strict=True)):
        spans = [span for span in model.spans(plan, cost, p) if span.executor == span.receiver == 0]
        count, last = pipeline.num_micro_batches, len(pipeline.stages) - 1
        for s, stage in enumerate(pipeline.stages):
            executor, without = priced.stages[s].executors[0], was.stages[s].executors[0]
            samples = stage.parallelism.samples(pipeline.micro_batch_size)[0]
            sizes = model.stages.memory_model(model.tp_group(stage.parallelism.executors[0]), samples).activations
            more = (executor.memory.buffers - without.memory.buffers) / sizes.message
            assert more == pytest.approx(round(more), abs=1e-6)
            assert not more or any(plan.other_depths())
            of_1f1b = 1 if s == last else min(count, last + 1 - max(0, s - 1))
            most = most_waiting(spans, s, stage.in_flight or min(count, last + 1 - s))
            assert most <= max(4, of_1f1b) + round(more)


def most_waiting(spans: list[Span], stage: int, full: int) -> int:
    """The most messages that a stage's executor holds at a time when it has `full` micro-batches in flight: those that
    are sent to it and not yet read, and its own until they have come."""
    begins = {(span.kind, span.stage, span.micro_batch): span.start_s for span in spans if not span.is_message}
    ends = {(span.kind, span.stage, span.micro_batch): span.end_s for span in spans if not span.is_message}
    moments: list[tuple[float, int, int, int]] = []  # time, ends before begins, messages, micro-batches in flight
    for span in spans:
        kind = span.kind.removeprefix("send_")
        if span.is_message:
            target = span.stage + (1 if kind == "forward" else -1)
            made_s = ends[kind, span.stage, span.micro_batch]
            if span.stage == stage:
                moments += [(made_s, 1, 1, 0), (span.end_s, 0, -1, 0)]
            if target == stage:
                moments += [(made_s, 1, 1, 0), (begins[kind, target, span.micro_batch], 0, -1, 0)]
        elif span.stage == stage:
            begin = kind == "forward"
            moments.append((span.start_s if begin else span.end_s, int(begin), 0, 1 if begin else -1))
    most = waiting = held = 0
    for _, _, message, batch in sorted(moments):
        waiting, held = waiting + message, held + batch
        if held == full:
            most = max(most, waiting)
    return most


def test_a_deeper_stage_hides_slow_messages_behind_compute() -> None:
    """With room for as many as a round trip lasts, the step is shorter by what the stages waited."""
    machines = tuple(replace(machine, nic_bandwidth_bytes_per_s=2e8) for machine in DEPTHS.cluster.machines)
    model = PlanPricer(replace(DEPTHS, cluster=replace(DEPTHS.cluster, machines=machines)))
    plans = {n: Plan((Pipeline((replace(FIRST, in_flight=n), LAST), COUNT),)) for n in (1, None, 3, 5)}
    ends_s = [model.price(plan).pipelines[0].end_s for plan in plans.values()]
    assert ends_s == sorted(ends_s, reverse=True)
    assert ends_s[-1] < 0.8 * ends_s[1]
