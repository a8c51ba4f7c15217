"""The contract that every stage type keeps: one example of each goes through every phase, before and after each other.

A new type is a row in `EXAMPLES`; without one, the first test fails.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, get_args

import pytest
from rich.console import Console

from hexiopt.bounds import lower_bound_s
from hexiopt.cost.breakdown import breakdown, busy_time
from hexiopt.cost.cost import Cost, violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.exports.trainable import untrainable
from hexiopt.files.plan_file import plan_from_section, plan_to_dict
from hexiopt.plan.check import check
from hexiopt.plan.holdings import Holdings, parameter_holders
from hexiopt.plan.parallelism import (
    ExpertParallel,
    ExpertReplica,
    Replica,
    Replicated,
    SequenceGroup,
    SequenceParallel,
    StageParallelism,
    TensorParallel,
)
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.reading import Section
from hexiopt.report.facts import PlanFacts
from hexiopt.report.table import plan_table
from hexiopt.report.trace import timeline_events
from hexiopt.schedules.registry import SCHEDULES
from runtime.mapping.layout import layout_of
from tests.hexiopt.cost.test_cost import PROBLEM as DENSE
from tests.hexiopt.shapes_of_kinds import DENSE_LAYER, EXPERT_LAYER, EXPERTS, model_of
from tests.spans import all_spans

PROBLEM = replace(DENSE, space=Space(sequence=True))
# Only layers with experts have them to share, and no sequence layout.
OF_EXPERTS = replace(DENSE, model=model_of(*[DENSE_LAYER, EXPERT_LAYER] * 5), space=Space(uneven_experts=True))
SIZE = 4  # sequences of a micro-batch
PAIRS = ((0, 1), (2, 3))  # the devices of a machine

# Of every type, the stage of two devices of a machine, which share the work unequally where they can.
EXAMPLES: dict[type, Callable[[int, int], StageParallelism]] = {
    TensorParallel: lambda a, b: TensorParallel((a, b), degree=2),
    Replicated: lambda a, b: Replicated((Replica((a,), 3), Replica((b,), 1))),
    SequenceParallel: lambda a, b: SequenceParallel((SequenceGroup((a, b), (1448, 600), (5, 3)),)),
    ExpertParallel: lambda a, b: ExpertParallel((ExpertReplica((a,), 3, (6,)), ExpertReplica((b,), 1, (10,)))),
}
ORDERS = [pair for pair in product(EXAMPLES, repeat=2) if {*pair} != {SequenceParallel, ExpertParallel}]
TYPES = pytest.mark.parametrize("kind", EXAMPLES, ids=lambda kind: kind.__name__)
EVERY_ORDER = pytest.mark.parametrize("kinds", ORDERS, ids=lambda kinds: "-".join(kind.__name__ for kind in kinds))


def problem_of(kinds: tuple[type, ...]) -> Problem:
    return OF_EXPERTS if ExpertParallel in kinds else PROBLEM


def plan_of(kinds: tuple[type, type], **choices: Any) -> Plan:
    """A pipeline of two stages of these types, each on a machine of its own."""
    cuts = ((0, 4), (4, problem_of(kinds).model.num_layers))
    stages = [Stage(EXAMPLES[kind](*devices), (cut,)) for kind, devices, cut in zip(kinds, PAIRS, cuts, strict=True)]
    return Plan((Pipeline(tuple(stages), PROBLEM.workload.global_batch // SIZE, SIZE),), **choices)


def price(plan: Plan, problem: Problem | None = None) -> Cost:
    kinds = tuple(type(stage.parallelism) for stage in plan.pipelines[0].stages)
    return PlanPricer(problem or problem_of(kinds)).price(plan)


def test_every_type_has_an_example() -> None:
    assert set(EXAMPLES) == set(get_args(StageParallelism))
    assert all(type(made(0, 1)) is kind for kind, made in EXAMPLES.items())


def test_what_is_no_stage_type_is_refused() -> None:
    other: Any = (0, 1)
    with pytest.raises(InputError, match=r"has parallelism .*; give TensorParallel, Replicated, Sequence"):
        Stage(other, ((0, 1),))


@TYPES
def test_it_answers_what_every_type_is_asked(kind: type) -> None:
    made = EXAMPLES[kind](2, 3)
    assert sorted(d for devices in made.executors for d in devices) == [2, 3]
    assert {d for devices in made.parameter_copies for d in devices} == {2, 3}
    assert len(made.token_layouts) == len(made.executors) == len(made.samples(SIZE))
    assert sum(made.samples(SIZE)) == SIZE
    assert {d for replica in made.replicas for d in replica.devices} <= {2, 3}
    assert hash(made) == hash(EXAMPLES[kind](2, 3))
    assert made != EXAMPLES[kind](3, 2)


@EVERY_ORDER
def test_it_passes_the_check(kinds: tuple[type, type]) -> None:
    plan, problem = plan_of(kinds), problem_of(kinds)
    assert check(problem, plan) == []
    assert violations(problem, plan, price(plan)) == []


@TYPES
@pytest.mark.parametrize("exclude", [(), ("a:1",)])
def test_the_check_looks_at_its_devices(kind: type, exclude: tuple[str, ...]) -> None:
    """One excluded, or one that the cluster lacks."""
    problem = problem_of((kind,))
    problem = replace(problem, space=replace(problem.space, exclude=exclude))
    plan = plan_of((kind, kind))
    if not exclude:
        [pipeline] = plan.pipelines
        beyond = replace(pipeline.stages[1], parallelism=EXAMPLES[kind](2, 4))
        plan = replace(plan, pipelines=(replace(pipeline, stages=(pipeline.stages[0], beyond)),))
    assert ("exclude" if exclude else "device") in {violation.rule for violation in check(problem, plan)}


@EVERY_ORDER
@pytest.mark.parametrize("zero", [0, 1])
def test_its_price_is_made_of_its_parts(kinds: tuple[type, type], zero: int) -> None:
    plan, pricer = plan_of(kinds, sharding=Sharding(zero)), PlanPricer(problem_of(kinds))
    cost = pricer.price(plan)
    assert cost.pipeline_s + cost.gradient_sync_s + cost.optimizer_s == pytest.approx(cost.step_time_s, rel=1e-12)
    shown = breakdown(pricer, plan, cost)
    assert sum(shown.parts.values()) == pytest.approx(cost.step_time_s, rel=1e-9)
    assert min(shown.parts[part] for part in ("compute", "messages", "bubble")) > 0.0
    for s, (stage, of_stage) in enumerate(zip(plan.pipelines[0].stages, cost.pipelines[0].stages, strict=True)):
        assert len(of_stage.executors) == len(stage.parallelism.executors)
        for r, executor in enumerate(of_stage.executors):
            taken_s = executor.forward_s + executor.backward_s
            assert busy_time(pricer, plan, cost, 0, s, r).total_s == pytest.approx(taken_s, rel=1e-9)
    assert lower_bound_s(pricer) <= cost.step_time_s


@EVERY_ORDER
def test_copies_of_its_parameters_are_synchronised(kinds: tuple[type, type]) -> None:
    """By rings over the devices that hold the same, of every layer of a stage that has copies, and no other."""
    plan, model = plan_of(kinds), problem_of(kinds).model
    holders = parameter_holders(Holdings.of(plan.pipelines), model.parameter_groups)
    copied = [stage for stage in plan.pipelines[0].stages if len(stage.parallelism.parameter_copies) > 1]
    groups = [tuple(row) for rows in holders.holders for row in rows.tolist()]
    assert sorted(groups) == [stage.devices for stage in copied]
    first, last = plan.pipelines[0].stages
    held = sum(layer_params(model, stage) for stage in copied)
    held += model.embedding_params * (first in copied) + model.head_params * (last in copied)
    assert sum(float(params.sum()) for params in holders.params) == held


def layer_params(model: ModelSpec, stage: Stage) -> int:
    """Parameters of the layers of a stage that its copies all have: all but experts where they share these."""
    if not model.layers:
        return stage.num_layers * model.layer_params
    numbers = [n for first, end in stage.layers for n in range(first, end)]
    layers = [model.layer_of(model.kinds[model.depth[n]]) for n in numbers]
    apart = [layer.params.experts * layer.kind.experts.count for layer in layers if layer.kind.experts is not None]
    return sum(layer.num_params for layer in layers) - isinstance(stage.parallelism, ExpertParallel) * sum(apart)


@TYPES
def test_its_memory_is_that_of_every_copy(kind: type) -> None:
    """Each on its GPUs; sharding spreads states over copies; where memory is short the check says so."""
    plan = plan_of((kind, kind))
    whole, spread = (price(replace(plan, sharding=Sharding(zero))).pipelines[0].stages for zero in (0, 1))
    for stage, of_stage, less in zip(plan.pipelines[0].stages, whole, spread, strict=True):
        gpu = problem_of((kind,)).cluster.gpu_of(stage.devices[0])
        copies = [copy for executor in of_stage.executors for copy in executor.copies]
        assert len(copies) == len(stage.parallelism.parameter_copies)
        assert all(copy.limit_bytes == gpu.usable_memory_bytes and copy.memory.activations > 0 for copy in copies)
        factor = 1 / len(copies)
        if kind is ExpertParallel:  # of experts there is no other copy
            assert factor * of_stage.memory.optimizer < less.memory.optimizer < of_stage.memory.optimizer
        else:
            assert less.memory.optimizer == pytest.approx(factor * of_stage.memory.optimizer, rel=1e-9)
        assert less.memory.weights == of_stage.memory.weights
    long = problem_of((kind,))
    wide = model_of(*[replace(EXPERT_LAYER, channels=(replace(EXPERTS, ffn_size=2**18),))] * 10)
    long = replace(long, model=wide if kind is ExpertParallel else replace(long.model, num_layers=6, ffn_size=2**20))
    assert {violation.rule for violation in violations(long, plan, price(plan, long))} == {"memory"}


@TYPES
def test_recomputing_takes_time_and_gives_memory(kind: type) -> None:
    def price_recomputed(policy: str) -> Cost:
        [pipeline] = plan_of((kind, kind)).pipelines
        stages = tuple(replace(stage, recompute=(policy,)) for stage in pipeline.stages)
        return price(Plan((replace(pipeline, stages=stages),)))

    plain, again = price_recomputed("none"), price_recomputed("full")
    assert again.step_time_s > plain.step_time_s
    for plain_stage, other in zip(plain.pipelines[0].stages, again.pipelines[0].stages, strict=True):
        assert plain_stage.memory.activations > other.memory.activations
        assert plain_stage.forward_s == other.forward_s


@EVERY_ORDER
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_simulation_ends_when_the_price_says(kinds: tuple[type, type], schedule: Any) -> None:
    plan = plan_of(kinds, schedule=schedule)
    cost = price(plan)
    ends_s: dict[tuple[int, int], float] = {}
    for span in all_spans(PlanPricer(problem_of(kinds)), plan, cost):
        if not span.is_message:
            at = span.stage, span.executor
            ends_s[at] = max(ends_s.get(at, 0.0), span.end_s)
    assert list(cost.pipelines[0].executor_end_s) == pytest.approx([ends_s[at] for at in sorted(ends_s)], rel=1e-9)
    assert cost.pipeline_s == pytest.approx(max(ends_s.values()), rel=1e-9)


@EVERY_ORDER
def test_every_sample_is_sent_on_and_its_gradient_back(kinds: tuple[type, type]) -> None:
    [pipeline] = price(plan_of(kinds)).pipelines
    for backward in (False, True):
        assert sum(message.samples for message in pipeline.messages if message.backward == backward) == SIZE
    assert all(seconds > 0.0 for seconds in pipeline.message_s)


@EVERY_ORDER
def test_a_plan_file_holds_it(kinds: tuple[type, type]) -> None:
    plan = plan_of(kinds)
    data = plan_to_dict(plan, PROBLEM.cluster)
    assert plan_from_section(Section(copy.deepcopy(data), "plan"), PROBLEM.cluster) == plan
    data["pipelines"][0]["stages"][0]["nonsense"] = 1
    with pytest.raises(InputError, match="nonsense"):
        plan_from_section(Section(data, "plan"), PROBLEM.cluster)


@EVERY_ORDER
def test_its_timeline_has_every_executor_to_the_end_of_the_step(kinds: tuple[type, type]) -> None:
    plan = plan_of(kinds)
    cost = price(plan)
    events = timeline_events(PlanFacts(problem_of(kinds), plan, cost))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    end_s = 1e-6 * max(event["ts"] + event["dur"] for event in slices)
    assert end_s == pytest.approx(cost.step_time_s, rel=1e-9)
    working = {event["tid"] for event in slices if event["cat"] in ("forward", "backward")}
    assert len(working) == sum(len(stage.parallelism.executors) for stage in plan.pipelines[0].stages)


def test_tables_tell_types_apart() -> None:
    def print_table(kind: type) -> str:
        plan = plan_of((kind, kind))
        with (console := Console(width=200)).capture() as captured:
            console.print(plan_table(PlanFacts(problem_of((kind,)), plan, price(plan))))
        return re.sub(r"[\d.]+ *(ms|s|GiB|%)", "", captured.get())

    texts = list(map(print_table, EXAMPLES))
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("kinds", [pair for pair in ORDERS if ExpertParallel not in pair], ids=str)
def test_the_runtime_lays_it_out_as_it_is_priced(kinds: tuple[type, type]) -> None:
    """Every parameter is held, by as many ranks as hold its copies; every executor has its ranks and samples.

    The ranks of a TP group all hold the norms.
    """
    plan, model = plan_of(kinds), PROBLEM.model
    workload = replace(PROBLEM.workload, precision="fp32")
    assert untrainable(model, workload, plan) is None
    layout = layout_of(plan, model)
    assert layout.devices == (0, 1, 2, 3)
    assert sum(prod(part.local_shape) for held in layout.held for part in held.parts) == model.num_params
    [line] = layout.lines
    for stage, executors in zip(plan.pipelines[0].stages, line.stages, strict=True):
        assert [tuple(sorted(devices)) for devices in stage.parallelism.executors] == [
            executor.ranks for executor in executors
        ]
        assert tuple(
            end - first for first, end in (executor.samples for executor in executors)
        ) == stage.parallelism.samples(SIZE)
    for held in layout.held:
        [stage] = [stage for stage in plan.pipelines[0].stages if held.ranks[0] in stage.devices]
        norms = all(part.name.endswith("norm.weight") for part in held.parts)
        assert len(held.ranks) == (len(stage.devices) if norms else len(stage.parallelism.parameter_copies))
