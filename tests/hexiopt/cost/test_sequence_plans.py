"""Plans with sequence stages: their cost, boundaries, gradient rings, shards, checks, bound and file."""

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.bounds import lower_bound_s
from hexiopt.cost.cost import violations
from hexiopt.cost.executors.routes import route, token_transfers
from hexiopt.cost.lockstep import backward_s, forward_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.plan_file import plan_from_section, plan_to_dict, prediction_to_dict
from hexiopt.numbers.frameworks import default_framework, frameworks
from hexiopt.plan.check import check
from hexiopt.plan.holdings import Holdings, parameter_holders
from hexiopt.plan.parallelism import Replica, SequenceGroup, SequenceParallel, TensorParallel, TokenLayout
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.plan.token_layout import token_ranges
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import ONE_F_ONE_B
from tests.hexiopt.cost.executors.test_sequence_stage import MODEL, TWO, pure
from tests.hexiopt.plan.layouts import layouts_of, with_layouts
from tests.spans import all_spans
from tests.strategies import problems_with_plans, roomy_problems_with_plans

CASES = with_layouts(problems_with_plans() | roomy_problems_with_plans())
WORK = Workload(global_batch=4, seq_len=64, precision="fp16")
PROBLEM = Problem(TWO, MODEL, WORK, Space(sequence=True))


def stage_of(layout: SequenceParallel, first: int, end: int) -> Stage:
    return Stage(layout, ((first, end),), ("none",))


def in_one(devices: tuple[int, ...], *tokens: int) -> SequenceParallel:
    """One group of devices that share the heads."""
    heads = tuple(8 // len(devices) + (k < 8 % len(devices)) for k in range(len(devices)))
    return SequenceParallel((SequenceGroup(devices, tokens, heads),))


@given(pair=CASES)
def test_the_simulation_ends_when_the_cost_says_and_nothing_beats_the_bound(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    model = PlanPricer(problem)
    cost = model.price(plan)
    ended = max(event.end_s for event in all_spans(model, plan, cost) if not event.is_message)
    assert ended == pytest.approx(cost.pipeline_s, rel=1e-9)
    assert 0.0 < lower_bound_s(model, 1.0) <= cost.pipeline_s <= cost.step_time_s
    for pipeline, priced in zip(plan.pipelines, cost.pipelines, strict=True):
        for stage, stage_cost in zip(pipeline.stages, priced.stages, strict=True):
            assert len(stage.parallelism.parameter_copies) == len(stage_cost.copies)
            assert stage_cost.excess_bytes == max(copy.excess_bytes for copy in stage_cost.copies)
    memory = prediction_to_dict(problem, plan, cost)["memory_gib"]
    assert set(memory) == {problem.cluster.device_name(d) for d in plan.devices()}
    assert {v.rule for v in violations(problem, plan, cost)} <= {
        "memory",
        "recompute",
        "schedule",
        "sharding",
        "constraints",
    }


@given(pair=problems_with_plans(plain=True), zero=st.integers(0, 3), groups=st.sampled_from(("all", "machine")))
def test_layouts_of_one_device_cost_what_tp_1_costs(pair: tuple[Problem, Plan], zero: int, groups: str) -> None:
    problem, plan = pair
    seq_len, heads = problem.workload.seq_len, problem.model.num_heads
    changed = []
    for pipeline in plan.pipelines:
        alone = [replace(stage, parallelism=TensorParallel(stage.devices[:1])) for stage in pipeline.stages]
        changed.append(replace(pipeline, stages=tuple(alone)))
    if zero >= 2:  # which wants equal pipelines
        plan, changed = replace(plan, schedule=ONE_F_ONE_B), changed[:1]
    plan = replace(plan, pipelines=tuple(changed), sharding=Sharding(zero, groups))
    layouts = []
    for pipeline in plan.pipelines:
        each = [
            replace(s, parallelism=SequenceParallel((SequenceGroup(s.devices, (seq_len,), (heads,)),)))
            for s in pipeline.stages
        ]
        layouts.append(replace(pipeline, stages=tuple(each)))
    model = PlanPricer(problem, frameworks()["hexiopt_flash"])  # one speed of attention, whole or in blocks
    cost, other = model.price(plan), model.price(replace(plan, pipelines=tuple(layouts)))
    for word in ("step_time_s", "pipeline_s", "excess_bytes", "mfu"):
        assert getattr(other, word) == pytest.approx(getattr(cost, word), rel=1e-9)
    for word in ("gradient_sync_s", "optimizer_s"):
        assert getattr(other, word) == pytest.approx(getattr(cost, word), rel=1e-9, abs=1e-9 * cost.step_time_s)


@given(st.data())
def test_each_token_crosses_once_from_owner_to_owner(data: st.DataObject) -> None:
    seq_len = 24

    def ends(devices: tuple[int, ...]) -> TokenLayout:
        layout = layouts_of(devices, seq_len, 8)
        return data.draw(layout | st.integers(1, 4).map(lambda n: devices[:n]))

    def owners(which: TokenLayout) -> list[int]:
        if not isinstance(which, SequenceParallel):
            return [which[token * len(which) // seq_len] for token in range(seq_len)]
        owner_by_token = [-1] * seq_len
        for group, shards in zip(which.groups, token_ranges(which), strict=True):
            for device, runs in zip(group.devices, shards, strict=True):
                for run in runs:
                    owner_by_token[run[0] : run[1]] = [device] * (run[1] - run[0])
        return owner_by_token

    here, there = ends((0, 1, 2, 3)), ends((4, 5, 6, 7))
    expected = Counter(zip(owners(here), owners(there), strict=True))
    transfers = {(a, b): share * seq_len for a, b, share in token_transfers(here, there)}
    assert transfers == pytest.approx(dict(expected))
    # Everything to machines h and v goes out of machine a's one interface.
    out = TWO.network.transmit_interface(0)
    assert dict(route(TWO, here, there).shared)[out] == pytest.approx(1 / 10e9)


def test_ragged_receivers_share_a_port() -> None:
    way = route(TWO, (0, 1), in_one((2, 3), 60, 4))
    assert way.port_s_per_byte == pytest.approx(60 / 64 / 100e9)


def test_gradients_are_shared_as_by_replicas_of_one_device() -> None:
    tp = Pipeline((Stage.of((4, 5), 0, 3),), 2)
    layout = Pipeline((stage_of(in_one((0, 1, 6), 30, 20, 14), 0, 2), stage_of(in_one((2, 3), 32, 32), 2, 3)), 2)
    copies = Pipeline(
        (
            Stage.of_replicas(tuple(Replica((d,), 2) for d in (0, 1, 6)), ((0, 2),)),
            Stage.of_replicas(tuple(Replica((d,), 3) for d in (2, 3)), ((2, 3),)),
        ),
        *(1, 6),
    )
    for tied in (False, True):
        model = replace(MODEL, tied_embeddings=tied)
        holders, expected = (
            parameter_holders(Holdings.of((pipeline, tp)), model.parameter_groups) for pipeline in (layout, copies)
        )
        for a, b in zip((*holders.holders, *holders.params), (*expected.holders, *expected.params), strict=True):
            assert a.tolist() == b.tolist()


def test_states_are_spread_over_all_devices_that_hold_them() -> None:
    model = PlanPricer(PROBLEM)
    whole, spread = (
        model.price(
            Plan((Pipeline((stage_of(in_one((0, 1, 4, 6), 16, 16, 16, 16), 0, 3),), 4),), sharding=Sharding(*zero))
        )
        for zero in ((0,), (1,))
    )
    by_machine = model.price(
        Plan((Pipeline((stage_of(in_one((0, 1, 4, 6), 16, 16, 16, 16), 0, 3),), 4),), sharding=Sharding(1, "machine"))
    )
    optimizer = [
        [copy.memory.optimizer for copy in cost.pipelines[0].stages[0].copies] for cost in (whole, spread, by_machine)
    ]
    assert optimizer[0] == [8 * PROBLEM.model.num_params] * 4
    assert optimizer[1] == pytest.approx([2 * PROBLEM.model.num_params] * 4)
    assert optimizer[2] == pytest.approx([(4, 4, 8, 8)[k] * PROBLEM.model.num_params for k in range(4)])
    assert whole.gradient_sync_s > 0


def test_sequence_stages_share_an_interface_equally() -> None:
    """Two pipelines whose all-to-alls cross the same interfaces take longer than one, and no longer than twice."""
    model, layout = PlanPricer(PROBLEM, replace(default_framework(), layer_host_s=0.0)), in_one
    first, second = layout((0, 4), 32, 32), layout((1, 6), 32, 32)
    single, double = (
        model.price(
            Plan(tuple(Pipeline((stage_of(group_layout, 0, 3),), 4 // len(layouts)) for group_layout in layouts))
        )
        for layouts in ((first,), (first, second))
    )
    alone, shared = (cost.pipelines[0].stages[0].forward_s for cost in (single, double))
    assert alone < shared < 2 * alone
    apart = Plan((Pipeline((stage_of(first, 0, 3),), 2), Pipeline((stage_of(layout((2, 3), 32, 32), 0, 3),), 2)))
    assert model.price(apart).pipelines[0].stages[0].forward_s == alone


BROKEN = {
    "the switch": (replace(PROBLEM, space=Space()), stage_of(in_one((0, 1), 32, 32), 0, 3), "space.sequence=true"),
    "tokens": (PROBLEM, stage_of(in_one((0, 1), 32, 31), 0, 3), "the groups have 63 tokens, a sequence 64"),
    "heads": (
        PROBLEM,
        stage_of(SequenceParallel((SequenceGroup((0, 1), (32, 32), (4, 3)),)), 0, 3),
        "group 0 has 7 heads, the model 8",
    ),
    "too many devices": (
        replace(PROBLEM, model=replace(MODEL, num_heads=2, num_kv_heads=2, head_dim=32)),
        stage_of(in_one((0, 1, 2, 3), 16, 16, 16, 16), 0, 3),
        "group 0 has 4 devices for 2 heads; a device computes at least one, so leave some out",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_layouts_are_refused_in_one_line(name: str) -> None:
    problem, stage, message = BROKEN[name]
    messages = [str(violation) for violation in check(problem, Plan((Pipeline((stage,), 4),)))]
    assert any(message in line for line in messages), messages
    assert all("\n" not in line for line in messages)


@pytest.mark.parametrize("groups", ["all", "machine"])
def test_weights_are_gathered_and_gradients_scattered_unit_by_unit(groups: str) -> None:
    """ZeRO-3 on four devices of two machines, each with all layers: rings of four, or of the two of each machine."""
    model = PlanPricer(PROBLEM)
    layout = in_one((0, 1, 4, 5), 16, 16, 16, 16)
    plan = Plan((Pipeline((stage_of(layout, 0, 3),), 4),), sharding=Sharding(3, groups))
    stage = model.price(plan).pipelines[0].stages[0]
    within = model.rings(plan).within_group
    assert [rows.tolist() for rows in within.groups.holders] == (
        [[[0, 1, 4, 5]]] if groups == "all" else [[[0, 1], [4, 5]]]
    )
    sequence_stage, spec, n = model.stages.sequence_stage(layout, 1), PROBLEM.model, 4 if groups == "all" else 2
    units = [spec.embedding_params, *[spec.layer_params] * 3, spec.head_params]
    assert sum(units) == within.groups.params[0][0] == spec.num_params

    def passes_s(element_bytes: int) -> list[float]:
        wait_s = max(within.ring_pass_s(0.0)[0])
        rate = max((within.ring_pass_s(1.0)[0] - within.ring_pass_s(0.0)[0]) / within.groups.params[0])
        return [rate * element_bytes * params + wait_s for params in units]

    gather, scatter = passes_s(WORK.element_bytes), passes_s(WORK.states.gradient)
    slowed, (embedding, head), layer = model.framework.contention, sequence_stage.ends_s, sequence_stage.layer_s("none")
    forward = [embedding.forward_s, *[layer[0]] * 3, head.forward_s]
    backward = [embedding.backward_s, *[layer[1]] * 3, head.backward_s]
    expected = (
        forward_s([s + slowed * g for s, g in zip(forward, gather, strict=True)], gather),
        backward_s([s + slowed * (g + r) for s, g, r in zip(backward, gather, scatter, strict=True)], gather, scatter),
    )
    assert (stage.forward_s, stage.backward_s) == pytest.approx(expected, rel=1e-9)
    for copy in stage.copies:
        assert copy.memory.optimizer == pytest.approx(8 * spec.num_params / n)
        whole = 2 * (spec.layer_params - spec.layer.vectors.whole)  # of these three layers, embedding and head
        assert copy.memory.weights == copy.memory.gradients < 2 * (spec.num_params / n + 1.01 * whole)
    assert violations(PROBLEM, plan, model.price(plan)) == []


def test_late_sharding_wants_equal_pipelines() -> None:
    first, second = (stage_of(in_one(devices, 32, 32), 0, 3) for devices in ((0, 4), (1, 6)))
    tensor = Stage(TensorParallel((1, 2)), ((0, 3),), ("none",))
    line = Pipeline((first,), 2)
    assert PlanPricer(PROBLEM).price(Plan((line, Pipeline((second,), 2)), sharding=Sharding(2))).fits
    with pytest.raises(InputError, match="ZeRO-2 over pipelines with unequal TP degrees in stage 0"):
        Plan((line, Pipeline((tensor,), 2)), sharding=Sharding(2))


def test_a_device_in_two_groups_is_refused() -> None:
    layout = SequenceParallel((SequenceGroup((0,), (32,), (8,)), SequenceGroup((0,), (32,), (8,))))
    with pytest.raises(InputError, match="device 0 is used 2 times; give each device one place in the plan"):
        Plan((Pipeline((stage_of(layout, 0, 3),), 4),))


@given(pair=CASES)
def test_plans_go_through_files(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    text = json.dumps(plan_to_dict(plan, problem.cluster))
    assert plan_from_section(Section(json.loads(text), "plan.json"), problem.cluster) == plan


def test_the_bound_is_reached_where_only_flops_take_time() -> None:
    model = replace(MODEL, vocab_size=1)
    problem = Problem(pure(), model, Workload(global_batch=4, seq_len=4096), Space(sequence=True))
    groups = tuple(SequenceGroup((2 * g, 2 * g + 1), (1024, 1024), (4, 4)) for g in range(2))
    plan = Plan((Pipeline((stage_of(SequenceParallel(groups, "zigzag"), 0, 3),), 4),))
    priced = PlanPricer(problem, frameworks()["hexiopt_flash"])  # one speed of attention, whole or in blocks
    assert lower_bound_s(priced) == pytest.approx(priced.price(plan).step_time_s, rel=1e-6)
