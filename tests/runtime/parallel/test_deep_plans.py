"""Plans whose stages state how many micro-batches they have in flight train as one process does, in that order."""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest

from hexiopt.plan.plan import Pipeline, Plan
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload
from hexiopt.schedules.in_flight import most_in_flight
from hexiopt.schedules.registry import ONE_F_ONE_B, SPLIT_SCHEDULES
from hexiopt.schedules.schedule import Schedule
from runtime.mapping.actions import check_actions, rank_actions
from runtime.mapping.buckets import bucket_parts
from runtime.mapping.layout import layout_of
from runtime.mapping.lowering import Action, ActionKind
from runtime.mapping.times import StepTimes
from tests.conftest import STRESS
from tests.runtime.memory_cases import LLAMA, compare, even_plan
from tests.runtime.parallel.test_split_backwards import random_times
from tests.runtime.parallel.test_training import SEQ_LEN, equal_one_process
from tests.runtime.ranks import random_plan
from tests.runtime.stream_order import run_in_order
from tests.slow import slow_but

ZB = SPLIT_SCHEDULES[0]


def deep_plan(seed: int, max_ranks: int = 8) -> tuple[Plan, ModelSpec, int]:
    """A plan of 1F1B or zb with other depths somewhere, with TP, replicas, any recompute, and perhaps ZeRO-1."""
    rng = random.Random(seed)
    while True:
        plan, model, _ = random_plan(rng, max_ranks)
        if plan.schedule != ONE_F_ONE_B or all(len(pipeline.stages) == 1 for pipeline in plan.pipelines):
            continue
        pipelines = tuple(_deep(rng, pipeline) for pipeline in plan.pipelines)
        plan = replace(plan, pipelines=pipelines, schedule=rng.choice((ONE_F_ONE_B, ZB)))
        if any(plan.other_depths()):
            return plan, model, sum(pipeline.num_sequences for pipeline in pipelines)


def _deep(rng: random.Random, pipeline: Pipeline) -> Pipeline:
    count = rng.randint(2, 7)
    depths = sorted((rng.randint(1, count) for _ in pipeline.stages), reverse=True)
    stages = [replace(stage, in_flight=n) for stage, n in zip(pipeline.stages, depths, strict=True)]
    return replace(pipeline, stages=tuple(stages), num_micro_batches=count)


@pytest.mark.parametrize("seed", range(100) if STRESS else slow_but((1,), range(30)))
def test_a_plan_with_depths_trains_as_one_process(seed: int) -> None:
    with patch.object(StepTimes, "even", random_times(seed)):
        equal_one_process(deep_plan(seed), 4)


@pytest.mark.parametrize("seed", slow_but(range(2), range(12)))
def test_a_plan_with_depths_trains_over_one_queue(seed: int) -> None:
    """As on GPUs, where a receive or a sum in another order would hang."""
    with patch.object(StepTimes, "even", random_times(seed)):
        equal_one_process(deep_plan(seed, max_ranks=5), 1, SEQ_LEN, partial(run_in_order, one_queue=True))


@pytest.mark.parametrize("seed", range(40))
def test_lists_have_as_many_in_flight_as_are_stated(seed: int) -> None:
    """And one order in which all can communicate; as many receives are posted ahead as that asks for."""
    plan, model, _ = deep_plan(seed)
    layout = layout_of(plan, model)
    lists = rank_actions(layout, plan.schedule, model, SEQ_LEN, bucket_parts(layout.held, plan.sharding.stage))
    check_actions(layout, SEQ_LEN, lists)
    for executor, actions in zip(layout.executor_of, lists, strict=True):
        stage = plan.pipelines[executor.pipeline].stages[executor.stage]
        held = most = 0
        begun = Counter[ActionKind]()
        for action in actions:
            if not isinstance(action, Action) or action.part:
                continue
            begun[action.kind] += 1
            held += (action.kind is ActionKind.FORWARD) - (action.kind in (ActionKind.BACKWARD, ActionKind.INPUT))
            most = max(most, held)
        assert most == stage.in_flight
        assert begun[ActionKind.FORWARD] == plan.pipelines[executor.pipeline].num_micro_batches
        at = layout.lines[executor.pipeline].positions()[executor.stage]
        assert most_in_flight(plan.schedule, at) == most


@pytest.mark.parametrize(
    ("schedule", "policy", "depths"),
    slow_but(
        [(ONE_F_ONE_B, "full", (4, 3, 1))],
        [
            (ONE_F_ONE_B, "none", (5, 1)),
            (ONE_F_ONE_B, "full", (4, 3, 1)),
            (ONE_F_ONE_B, "selective", (1, 1)),
            (ONE_F_ONE_B, "full", (6, 2)),
            (ZB, "none", (5, 1)),
        ],
    ),
)
def test_memory_is_what_is_predicted(schedule: Schedule, policy: str, depths: tuple[int, ...]) -> None:
    """Activations closely, and all that is alive at once, messages that wait among it, as plans of 1F1B."""
    model = replace(LLAMA, num_layers=12)
    plan = even_plan(model, schedule, policy, stages=len(depths), batches=6)
    stages = [replace(stage, in_flight=n) for stage, n in zip(plan.pipelines[0].stages, depths, strict=True)]
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=tuple(stages)),))
    usual = compare(even_plan(model, schedule, policy, stages=len(depths), batches=6), model, Workload(6, 128))
    for comparison, was in zip(compare(plan, model, Workload(6, 128)), usual, strict=True):
        assert abs(comparison.off("activations")) <= 0.01
        assert abs(comparison.off("logits")) <= 0.01
        assert -0.03 <= comparison.predicted.tensors / comparison.peak_bytes - 1 <= 0.01
        other = stages[comparison.stage].in_flight != len(depths) - comparison.stage
        assert (comparison.measured.activations != was.measured.activations) == other
