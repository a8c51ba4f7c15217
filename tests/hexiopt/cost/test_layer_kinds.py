"""Prices of layers of several kinds, and of replicas that share experts."""

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexiopt.bounds import compute_bound_s
from hexiopt.cost.executors.collectives import ring_collective_s
from hexiopt.cost.executors.experts.times import ExpertSharing
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers import coefficients as c
from hexiopt.plan.holdings import Holdings, parameter_holders
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.kinds import LayerKind
from hexiopt.problem.lora import Lora
from hexiopt.problem.parameters import adapted_matrices
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.in_flight import holding
from hexiopt.schedules.registry import ONE_F_ONE_B
from tests.hexiopt.shapes_of_kinds import (
    ATTENTION,
    DENSE,
    DENSE_LAYER,
    EQUAL,
    EXPERT_LAYER,
    EXPERTS,
    KINDS,
    MAMBA,
    MIXED,
    model_of,
)
from tests.solvers.problems import cluster

CLUSTER = cluster(("a", "fast", 4), ("b", "slow", 4), fast_gib=80, slow_gib=80)
WORK = Workload(global_batch=16, seq_len=1024)
ADAPTERS = replace(WORK, training="lora", lora=Lora(4, "attention"))


def _plan(*stages: tuple[Sequence[int], int, tuple[int, int]], pipelines: int = 1, zero: int = 1) -> Plan:
    """Pipelines of (devices, degree, layers); pipeline p on devices 4·p more."""
    lines = [
        tuple(
            Stage(TensorParallel(tuple(d + 4 * p for d in devices), degree=degree), (span,), ("none",))
            for devices, degree, span in stages
        )
        for p in range(pipelines)
    ]
    return Plan(tuple(Pipeline(line, 4 // pipelines, 4) for line in lines), ONE_F_ONE_B, Sharding(zero))


@given(st.lists(st.sampled_from(KINDS), min_size=1, max_size=6), st.integers(1, 5), st.data())
@settings(max_examples=40, deadline=None)
def test_a_stage_is_the_sum_of_its_layers(kinds: list[LayerKind], cut: int, data: st.DataObject) -> None:
    """Seconds and bytes of stages add up over layers, wherever these stand."""
    model = model_of(DENSE_LAYER, *kinds)
    cut, work = min(cut, len(kinds)), data.draw(st.sampled_from((WORK, ADAPTERS)))
    pricer = PlanPricer(Problem(CLUSTER, model, work))
    policy = data.draw(st.sampled_from(("none", "selective", "full")))
    spans = ((0, cut), (cut, model.num_layers))
    stages = [Stage(TensorParallel((d,)), (span,), (policy,)) for d, span in enumerate(spans)]
    costs = pricer.pipelines(Plan((Pipeline(tuple(stages), 8, 2),), ONE_F_ONE_B))[0].stages
    group = pricer.tp_group((0,))
    embedding, head = pricer.stages.ends_s(group, 2)
    for cost, (start, end), ends in zip(costs, spans, (embedding, head), strict=True):
        each = [pricer.stages.layer_s(group, 2, policy, model.depth[n]) for n in range(start, end)]
        assert cost.forward_s == pytest.approx(sum(forward for forward, _ in each) + ends.forward_s)
        assert cost.backward_s == pytest.approx(sum(backward for _, backward in each) + ends.backward_s)
    params = sum(cost.executors[0].num_params for cost in costs)
    matrices = [row for kind in model.layers for row in adapted_matrices(model, kind, work.lora)]
    whole = model.layer_of(model.layers[0]).shard(1, 0)._replace(ffn=DENSE.ffn_size)
    adapters = work.lora.rank * sum(matrix.inputs.on(whole) + matrix.outputs.on(whole) for matrix in matrices)
    assert params == (model.num_params if work == WORK else adapters)


def test_equal_kinds_cost_as_one() -> None:
    """A model that states one kind for every layer costs what two equal kinds of other names would: by kind or not."""
    pricer = PlanPricer(Problem(CLUSTER, EQUAL, WORK))
    memory = pricer.stages.memory_model(pricer.tp_group((0,)), 2)
    whole = memory.stage_of_ranges(({"none": 3, "full": 2},), True, False, holding(2))
    assert memory.stage_of_kinds((({"none": 3, "full": 2},),), True, False, holding(2)) == whole


def test_mean_layer() -> None:
    """The mean layer of a model of several kinds is the mean of its layers."""
    stages = PlanPricer(Problem(CLUSTER, MIXED, WORK)).stages
    group = stages.tp_group((0,))
    dense, experts = (stages.layer_s(group, 2, "full", kind) for kind in (0, 1))
    mean = tuple((a + 5 * b) / 6 for a, b in zip(dense, experts, strict=True))
    assert stages.layer_s(group, 2, "full") == pytest.approx(mean)
    memory = stages.memory_model(group, 2)
    assert 6 * memory.num_params(1, False, False) == pytest.approx(memory.num_params((1, 5), False, False))


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_states_of_replicas(degree: int) -> None:
    """Every device has its TP share of what is dense and its experts; ZeRO spreads the first over the replicas too."""
    stages = PlanPricer(Problem(CLUSTER, EQUAL, WORK)).stages
    cell = stages.tp_groups.with_degree(stages.tp_group((0, 1, 2, 3)), degree)
    memory, replicas = stages.memory_model(cell, 4), 4 // degree
    experts = 6 * 16 * 3 * 512 * 512
    plain = stages.tp_groups.with_degree(stages.tp_group((0, 1)[:1]), 1)
    whole = stages.memory_model(plain, 4).num_params(6, True, True)
    params = memory.num_params(6, True, True)
    assert params >= (whole - experts) / degree + experts / 4
    assert params <= (whole - experts) / degree * 1.05 + experts / 4
    one_pipeline = Plan(_plan(((0, 1, 2, 3), degree, (0, 6))).pipelines, ONE_F_ONE_B, Sharding(1))
    cost = PlanPricer(Problem(CLUSTER, EQUAL, WORK)).price(one_pipeline)
    (executor,) = cost.pipelines[0].stages[0].executors
    spread = (params - experts / 4) / replicas + experts / 4
    assert executor.memory.master == pytest.approx(4 * spread)
    assert len(executor.copies) == replicas


def test_rings_of_replicas() -> None:
    """Two pipelines of four devices, as two replicas of two: experts are summed by pairs, all else by four."""
    problem = Problem(CLUSTER, EQUAL, WORK)
    plan = _plan(((0, 1, 2, 3), 2, (0, 6)), pipelines=2)
    holders = parameter_holders(Holdings.of(plan.pipelines), problem.parameters.trained_groups)
    sizes = {group.shape[1]: float(params.sum()) for group, params in zip(holders.holders, holders.params, strict=True)}
    experts = 6 * 16 * 3 * 512 * 512
    assert sizes == pytest.approx({2: experts, 4: EQUAL.num_params - experts})
    pairs = {tuple(row) for group in holders.holders for row in group.tolist() if len(row) == 2}
    assert pairs == {(d, d + 4) for d in range(4)}


@pytest.mark.parametrize("routing", ["natural", "forced"])
def test_rows_of_experts(routing: str) -> None:
    work = replace(WORK, routing=routing)
    load = c.EXPERT_IMBALANCE if routing == "natural" else 1.0
    assert ExpertSharing(4, 2, 2).rows(EXPERTS, work) == pytest.approx(load * 2 * 1024 * 2 / 4)
    assert ExpertSharing(1, 1, 2).rows(EXPERTS, work) == 2 * 1024 * 2


def test_degree_left_open_is_the_fastest() -> None:
    """What a plan leaves open costs what the best of all degrees does, and is stated."""
    pricer = PlanPricer(Problem(CLUSTER, MIXED, WORK))
    open_plan = Plan((Pipeline((Stage(TensorParallel((0, 1, 2, 3)), ((0, 6),), ("none",)),), 4, 4),), ONE_F_ONE_B)
    stated = [replace_degree(open_plan, degree) for degree in (1, 2, 4)]
    steps = [pricer.price(plan).step_time_s for plan in stated]
    assert pricer.price(open_plan).step_time_s == min(steps)
    assert pricer.with_degrees(open_plan) == stated[steps.index(min(steps))]


def replace_degree(plan: Plan, degree: int) -> Plan:
    """The plan of one stage with a degree."""
    (pipeline,) = plan.pipelines
    (stage,) = pipeline.stages
    with_degree = replace(stage, parallelism=TensorParallel(stage.devices, degree=degree))
    return replace(plan, pipelines=(replace(pipeline, stages=(with_degree,)),))


@given(st.lists(st.sampled_from((DENSE_LAYER, EXPERT_LAYER, *KINDS[2:8])), min_size=3, max_size=7), st.data())
@settings(max_examples=60, deadline=None)
def test_bound(kinds: list[LayerKind], data: st.DataObject) -> None:
    """No plan is faster than the compute bound."""
    model, work = model_of(DENSE_LAYER, *kinds), data.draw(st.sampled_from((WORK, ADAPTERS)))
    pricer = PlanPricer(Problem(CLUSTER, model, work))
    cut = data.draw(st.integers(1, len(kinds)))
    plan = _plan(((0, 1), data.draw(st.sampled_from((1, 2))), (0, cut)), ((4, 5), 2, (cut, len(kinds) + 1)))
    assert compute_bound_s(pricer) <= pricer.price(plan).step_time_s


@pytest.mark.parametrize(
    ("kind", "tp", "sums", "backwards"),
    [
        (replace(DENSE_LAYER, mixers=(replace(ATTENTION, qk_norm="whole"),)), 2, 2, 1),
        (LayerKind((MAMBA,), (), norms=1), 4, 2, 2),
        (LayerKind((MAMBA,), (), norms=1), 2, 0, 2),
        (DENSE_LAYER, 2, 0, 1),
    ],
)
def test_norms_whose_width_is_cut_take_sums(kind: LayerKind, tp: int, sums: int, backwards: int) -> None:
    """Of the squares of two norms of all heads, or of two groups of Mamba-2, which its backward makes once more."""
    problem = Problem(CLUSTER, model_of(DENSE_LAYER, kind), WORK)

    def seconds() -> tuple[float, float]:
        stages = PlanPricer(problem).stages
        return stages.layer_s(stages.tp_group(tuple(range(tp))), 4, "none", len(problem.model.kinds) - 1)

    with patch.object(LayerKind, "norm_sums", lambda self, tp: (0, 0)):
        without = seconds()
    group = PlanPricer(problem).stages.tp_group(tuple(range(tp)))
    sum_s = 2 * ring_collective_s(4.0 * WORK.seq_len * sums * 4, tp, group.bandwidth, group.latency_s) * (sums > 0)
    expected = [sum_s, backwards * sum_s]
    assert [a - b for a, b in zip(seconds(), without, strict=True)] == pytest.approx(expected, abs=1e-12)


def test_windows_and_imbalance_cost_what_they_should() -> None:
    """A window takes less time than whole attention, natural routing more than forced."""

    def seconds(kind: object, **workload: object) -> float:
        model = model_of(DENSE_LAYER, kind)  # type: ignore[arg-type]
        stages = PlanPricer(Problem(CLUSTER, model, replace(WORK, seq_len=8192, **workload))).stages  # type: ignore[arg-type]
        return sum(stages.layer_s(stages.tp_groups.with_degree(stages.tp_group((0, 1, 2, 3)), 1), 4, "none", 1))

    window = KINDS[3]
    assert seconds(window) < seconds(replace(window, mixers=DENSE_LAYER.mixers))
    assert seconds(EXPERT_LAYER, routing="forced") < seconds(EXPERT_LAYER)
