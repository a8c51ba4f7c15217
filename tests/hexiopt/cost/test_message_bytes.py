"""Messages in 8 bits: fewer bytes between stages and nowhere else, for seconds and buffers of quantising them."""

from dataclasses import replace

import pytest
from hypothesis import given

from hexiopt.cost.breakdown import breakdown
from hexiopt.cost.executors.memory import MEMORY_PARTS
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers.messages import BLOCK, FP8, TRAINING
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import INTERLEAVED
from tests.hexiopt.cost.test_cost import PROBLEM
from tests.hexiopt.plan.layouts import with_layouts
from tests.strategies import problems_with_plans, roomy_problems_with_plans

PAIRS = problems_with_plans() | roomy_problems_with_plans()


def with_messages(problem: Problem, precision: str) -> Problem:
    return replace(problem, workload=replace(problem.workload, message_precision=precision))


@pytest.mark.parametrize(
    ("hidden", "num_bytes"), [(1, 1 + 4), (BLOCK, BLOCK + 4), (BLOCK + 1, BLOCK + 1 + 8), (4096, 4096 + 128)]
)
def test_a_byte_a_value_and_a_scale_a_block(hidden: int, num_bytes: int) -> None:
    for precision in ("bf16", "fp8", "fp32"):
        assert Workload(precision=precision, message_precision=FP8).message_bytes(hidden) == num_bytes
        width = 4 if precision == "fp32" else 2
        assert Workload(precision=precision).message_bytes(hidden) == width * hidden


@given(pair=PAIRS | with_layouts(PAIRS))
def test_messages_alone_change(pair: tuple[Problem, Plan]) -> None:
    """Their bytes by one factor, seconds of stages by what quantisation takes, and memory by buffers and what they
    add to the reserve; pipelines of one stage not at all, but for the room reserved for messages."""
    problem, plan = pair
    whole, small = PlanPricer(with_messages(problem, TRAINING)), PlanPricer(with_messages(problem, FP8))
    workload, hidden = small.problem.workload, problem.model.hidden_size
    factor = workload.message_bytes(hidden) / (workload.element_bytes * hidden)
    for before, after in zip(whole.place_pipelines(plan), small.place_pipelines(plan), strict=True):
        wide_bytes, narrow_bytes = ([message.num_bytes for message in line.messages] for line in (before, after))
        assert [factor * num_bytes for num_bytes in wide_bytes] == pytest.approx(narrow_bytes, rel=1e-12)
        for wide, narrow in zip(before.stages, after.stages, strict=True):
            for plain, rounding in zip(wide.executors, narrow.executors, strict=True):
                assert plain.quantization_s == 0.0
                assert (rounding.quantization_s > 0.0) == (len(before.stages) > 1)
                assert rounding.forward_s == pytest.approx(plain.forward_s + rounding.quantization_s, rel=1e-12)
                assert rounding.backward_s == pytest.approx(plain.backward_s + rounding.quantization_s, rel=1e-12)
                for whole_copy, small_copy in zip(plain.copies, rounding.copies, strict=True):
                    for part in set(MEMORY_PARTS) - {"buffers", "reserve"}:
                        assert getattr(whole_copy.memory, part) == getattr(small_copy.memory, part)


def test_stages_by_hand() -> None:
    """Each rank converts its part of every message, once at either end, twice in the middle: it reads one form and
    writes the other. Of buffers there are four messages, and two as they are computed."""
    stages = (Stage.of((0, 1), 0, 2, "full"), Stage.of((2,), 2, 4, "full"), Stage.of((3,), 4, 6, "full"))
    plan, hidden = Plan((Pipeline(stages, 1, 8),)), PROBLEM.model.hidden_size
    whole, small = (PlanPricer(with_messages(PROBLEM, precision)) for precision in (TRAINING, FP8))
    wide, narrow = 2 * hidden, hidden + 4 * hidden // 128
    ends = zip(whole.price(plan).pipelines[0].stages, small.price(plan).pipelines[0].stages, (1, 2, 1), strict=True)
    for stage, (before, after, times) in zip(stages, ends, strict=True):
        gpu, tokens = PROBLEM.cluster.gpu_of(stage.devices[0]), 8 * PROBLEM.workload.seq_len // len(stage.devices)
        once_s = tokens * (wide + narrow) / (gpu.hbm_bytes_per_s * gpu.efficiency.memory_max)
        assert after.forward_s - before.forward_s == pytest.approx(times * once_s)
        assert after.backward_s - before.backward_s == pytest.approx(times * once_s)
        assert before.memory.buffers - after.memory.buffers == tokens * (4 * wide - 4 * narrow - 2 * wide)


def test_layer_ranges_convert_each_of_their_messages() -> None:
    ranges = (((0, 2), (3, 5)), ((2, 3), (5, 6)))
    stages = tuple(Stage(TensorParallel((s,)), layers) for s, layers in enumerate(ranges))
    plan = Plan((Pipeline(stages, 8),), INTERLEAVED)
    model = PlanPricer(with_messages(PROBLEM, FP8))
    once_s = model.stages.quantization_s(model.tp_group((0,)), 1)
    for stage in model.price(plan).pipelines[0].stages:
        assert stage.executors[0].quantization_s == pytest.approx(3 * once_s)


def test_a_breakdown_counts_conversion_among_messages() -> None:
    plan = Plan((Pipeline((Stage.of((0, 1), 0, 3, "full"), Stage.of((2, 3), 3, 6)), 1, 8),))
    model = PlanPricer(with_messages(PROBLEM, FP8))
    cost = model.price(plan)
    parts_of_step = breakdown(model, plan, cost)
    (pipeline,) = cost.pipelines
    (ahead,), (back,) = pipeline.send_forward_s, pipeline.send_backward_s
    converted_s = 2 * pipeline.stages[parts_of_step.stage].executors[0].quantization_s
    assert parts_of_step.parts["messages"] == pytest.approx(ahead + back + converted_s)
