"""Plans whose backwards are split train as one process does, in any order that has gradients of weights late."""

import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest

from hexiopt.cost.sharing import StageOrders
from hexiopt.plan.plan import Plan
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload
from hexiopt.schedules.operation import Operation, OperationKind
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B, SPLIT_SCHEDULES
from hexiopt.schedules.schedule import Schedule, operations, positions
from runtime.mapping import buckets
from runtime.mapping.actions import check_actions, rank_actions
from runtime.mapping.buckets import BucketCollective, bucket_parts
from runtime.mapping.layout import Layout, PipelineLayout, layout_of
from runtime.mapping.lowering import Action, ActionKind
from runtime.mapping.times import StepTimes
from tests.conftest import STRESS
from tests.runtime.memory_cases import LLAMA, compare, even_plan
from tests.runtime.parallel.test_training import SEQ_LEN, equal_one_process
from tests.runtime.ranks import random_plan
from tests.runtime.stream_order import run_in_order
from tests.slow import slow_but

ZB, ZB_INTERLEAVED = SPLIT_SCHEDULES
SPLIT: dict[Schedule, Schedule] = {ONE_F_ONE_B: ZB, INTERLEAVED: ZB_INTERLEAVED}
KIND_OF = {
    ActionKind.FORWARD: OperationKind.FORWARD,
    ActionKind.BACKWARD: OperationKind.BACKWARD,
    ActionKind.INPUT: OperationKind.BACKWARD,
    ActionKind.WEIGHTS: OperationKind.WEIGHTS,
}


def split_plan(seed: int, max_ranks: int = 8) -> tuple[Plan, ModelSpec, int]:
    """A plan of two stages or more somewhere, with TP, replicas, any recompute, and perhaps ZeRO-1."""
    rng = random.Random(seed)
    while True:
        plan, model, batch = random_plan(rng, max_ranks)
        if plan.schedule in SPLIT and max(len(pipeline.stages) for pipeline in plan.pipelines) > 1:
            return replace(plan, schedule=SPLIT[plan.schedule]), model, batch


def random_orders(rng: random.Random, line: PipelineLayout, schedule: Schedule) -> StageOrders:
    """Orders in which each backward puts off some of its layers, for any time."""
    orders = []
    each = positions(len(line.stages), line.num_micro_batches, line.num_chunks)
    for (executor, *_), at in zip(line.stages, each, strict=True):
        most = [end - first for first, end in (chunk.layers for chunk in executor.chunks)]
        counts = [rng.choice((count, rng.randint(0, count))) for count in most]
        patience = rng.choice((0.0, 0.5, 0.9, 1.0))
        order, late = list[Operation](), deque[Operation]()
        for operation in operations(schedule, at):
            while late and rng.random() > patience:
                order.append(late.popleft())
            order.append(operation)
            if operation.kind is OperationKind.BACKWARD:
                late.extend([operation._replace(kind=OperationKind.WEIGHTS)] * counts[operation.chunk])
        orders.append((*order, *late))
    return tuple(orders)


def random_times(seed: int) -> Callable[[Layout, Schedule], StepTimes]:
    """In place of `StepTimes.even`: with random orders, the same on all ranks."""
    even = StepTimes.even

    def times(layout: Layout, schedule: Schedule) -> StepTimes:
        step_times, rng = even(layout, schedule), random.Random(seed)
        orders = tuple(random_orders(rng, line, schedule) for line in layout.lines) if schedule.splits else ()
        return replace(step_times, orders=orders)

    return times


@pytest.mark.parametrize("seed", range(100) if STRESS else slow_but((2,), range(30)))
def test_a_plan_with_split_backwards_trains_as_one_process(seed: int) -> None:
    with patch.object(StepTimes, "even", random_times(seed)):
        equal_one_process(split_plan(seed), 4)


@pytest.mark.parametrize("seed", slow_but(range(2), range(12)))
def test_a_plan_with_split_backwards_trains_over_one_queue(seed: int) -> None:
    """As on GPUs, where a receive or a sum in another order would hang."""
    with patch.object(StepTimes, "even", random_times(seed)):
        equal_one_process(split_plan(seed, max_ranks=5), 1, SEQ_LEN, partial(run_in_order, one_queue=True))


@pytest.mark.parametrize("seed", range(40))
def test_lists_are_the_orders_and_have_one_order(seed: int) -> None:
    """Also with sums of gradients, which wait for the weight gradients of their own layers alone."""
    plan, model, _ = split_plan(seed)
    layout = layout_of(plan, model)
    times = random_times(seed)(layout, plan.schedule)
    lists = rank_actions(layout, plan.schedule, model, SEQ_LEN, bucket_parts(layout.held, plan.sharding.stage), times)
    check_actions(layout, SEQ_LEN, lists)
    for executor, actions in zip(layout.executor_of, lists, strict=True):
        count, order = len(layout.lines[executor.pipeline].stages), times.orders[executor.pipeline][executor.stage]
        computed = [action for action in actions if isinstance(action, Action) and action.kind in KIND_OF]
        whole = [action for action in computed if not action.part or action.kind is ActionKind.WEIGHTS]
        assert [Operation(KIND_OF[a.kind], a.stage // count, a.micro_batch) for a in whole] == list(order)


def test_a_sum_waits_for_its_own_layers_alone() -> None:
    """Of two pipelines of one stage: those of the last layers begin while weights of the first are still to come."""
    model = replace(LLAMA, num_layers=6)
    layout = layout_of(even_plan(model, ZB, stages=1, pipelines=2, batches=2), model)
    with patch.object(buckets, "BUCKET_ELEMENTS", 100_000):
        shared = bucket_parts(layout.held, 0)
    actions, _ = rank_actions(layout, ZB, model, SEQ_LEN, shared, StepTimes.even(layout, ZB))
    sums = [k for k, action in enumerate(actions) if isinstance(action, BucketCollective)]
    late = [k for k, action in enumerate(actions) if isinstance(action, Action) and action.kind is ActionKind.WEIGHTS]
    assert len(late) == 2 * model.num_layers
    assert sums[0] < late[-model.num_layers + 1] < late[-1] < sums[-1]


@pytest.mark.parametrize(
    ("schedule", "policy", "tp", "low", "high"),
    slow_but(
        [(ZB, "full", 1, 0.015, 0.06)],
        [
            (ZB, "none", 1, 0.001, 0.001),
            (ZB, "full", 1, 0.015, 0.06),
            (ZB, "selective", 1, 0.001, 0.001),
            (ZB, "none", 2, 0.03, 0.01),
            (ZB_INTERLEAVED, "selective", 1, 0.015, 0.01),
            (ZB_INTERLEAVED, "full", 2, 0.02, 0.08),
        ],
    ),
)
def test_memory_is_what_is_predicted(schedule: Schedule, policy: str, tp: int, low: float, high: float) -> None:
    """In the order that is priced. Less, by a share of `low`, where gradients of a layer are put off before all of its
    activations are gone; more, by `high`, as of a layer that is recomputed all counts until its end."""
    model = replace(LLAMA, num_layers=8)
    plan = even_plan(model, schedule, policy, stages=2, tp=tp, batches=4, chunks=1 + (schedule == ZB_INTERLEAVED))
    for comparison in compare(plan, model, Workload(4, 128)):
        assert -low <= comparison.off("activations") <= high
        assert comparison.off("logits") == 0.0
        assert -0.04 <= comparison.predicted.tensors / comparison.peak_bytes - 1 <= 0.01


def test_orders_travel_as_plain_data() -> None:
    for seed in range(10):
        plan, model, _ = split_plan(seed)
        times = random_times(seed)(layout_of(plan, model), plan.schedule)
        assert StepTimes.of_data(json.loads(json.dumps(times.to_data()))) == times
