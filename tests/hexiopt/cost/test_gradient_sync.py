"""Gradient groups against brute force over parameter fractions, and their times by hand."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.rings import RingTimes
from hexiopt.cost.step import after_sums_by_part
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.numbers.frameworks import default_framework
from hexiopt.plan.holdings import Holdings, ParameterHolders, parameter_holders, slices
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import ONE_F_ONE_B
from tests.models import TOY
from tests.strategies import problems_with_plans, roomy_problems_with_plans

MODEL = replace(TOY, num_layers=6)
AFTER = replace(default_framework(), gradient_sums="after")  # gradients are summed when the last backward has ended
Holders = tuple[int, ...]


def params_by_holders(groups: ParameterHolders) -> dict[Holders, float]:
    """Parameters by holders; every group of devices stands once."""
    rows = [
        (tuple(row), params)
        for holders, values in zip(groups.holders, groups.params, strict=True)
        for row, params in zip(holders.tolist(), values.tolist(), strict=True)
    ]
    assert len(dict(rows)) == len(rows) == groups.count
    return dict(rows)


def brute_force(pipelines: tuple[Pipeline, ...], model: ModelSpec) -> dict[Holders, float]:
    """Parameters by holders: for small equal parts of every tensor, which rank of each replica holds them."""
    stages = [stage for pipeline in pipelines for stage in pipeline.stages]
    parts = int(np.lcm.reduce([len(replica.devices) for stage in stages for replica in stage.parallelism.replicas]))
    out: Counter[Holders] = Counter()

    def add(members: list[Stage], params: float) -> None:
        for k in range(parts):
            middle = Fraction(2 * k + 1, 2 * parts)
            replicas = [replica.devices for stage in members for replica in stage.parallelism.replicas]
            holders = sorted(devices[int(middle * len(devices))] for devices in replicas)
            if len(holders) > 1:
                out[tuple(holders)] += params / parts  # type: ignore[assignment]

    for layer in range(model.num_layers):
        add(
            [s for p in pipelines for s in p.stages if any(first <= layer < end for first, end in s.layers)],
            model.layer_params,
        )
    firsts, lasts = [p.stages[0] for p in pipelines], [p.stages[-1] for p in pipelines]
    if model.tied_embeddings:
        both = firsts + [last for first, last in zip(firsts, lasts, strict=True) if last is not first]
        add(both, model.vocabulary_params)
        add(firsts, model.embedding_params - model.vocabulary_params)
        add(lasts, model.head_params)
    else:
        add(firsts, model.embedding_params)
        add(lasts, model.head_params)
    return {holders: params for holders, params in out.items() if params}


@given(pair=problems_with_plans() | roomy_problems_with_plans())
def test_groups_hold_what_brute_force_finds(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    assert params_by_holders(
        parameter_holders(Holdings.of(plan.pipelines), problem.model.parameter_groups)
    ) == pytest.approx(brute_force(plan.pipelines, problem.model))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_slices_cut_where_a_rank_ends(degrees: list[int]) -> None:
    widths, ranks = slices(tuple(degrees))
    assert sum(widths) == pytest.approx(1.0)
    at = Fraction(0)
    for width, row in zip(widths, np.asarray(ranks).tolist(), strict=True):
        end = at + Fraction(width).limit_denominator(10**6)
        for degree, rank in zip(degrees, row, strict=True):
            assert Fraction(rank, degree) <= at < end <= Fraction(rank + 1, degree)
        at = end
    assert at == 1
    assert len(widths) <= sum(degrees)


def test_aligned_cuts_make_few_groups() -> None:
    """All layers of equal stages share a buffer per rank; unaligned cuts add one for each piece."""

    def stages(base: int, *cuts: int) -> Pipeline:
        ends = [*cuts, 6]
        starts = [0, *cuts]
        return Pipeline(
            tuple(
                Stage.of((base + 2 * k, base + 2 * k + 1), a, b)
                for k, (a, b) in enumerate(zip(starts, ends, strict=True))
            ),
            1,
        )

    aligned = parameter_holders(Holdings.of((stages(0, 2), stages(4, 2), stages(8, 2))), MODEL.parameter_groups)
    assert aligned.count == 4  # two stages of two ranks; embedding and head in their buffers
    assert parameter_holders(Holdings.of((stages(0, 2), stages(4, 3), stages(8, 2))), MODEL.parameter_groups).count == 6


# ------------------------------------------------------------------ times


def two_machines(**changes: Any) -> Cluster:
    return cluster_from_section(
        Section(
            {
                "name": "two",
                "inter_machine": {"bandwidth_gb_per_s": 1, "latency_us": 1000},
                "machines": [
                    {"name": n, "gpu": "rtx_3090", "num_gpus": 2, "intra_bandwidth_gb_per_s": 4, **changes}
                    for n in "ab"
                ],
            },
            "test",
        )
    )


def test_two_rings_share_the_interfaces_by_hand() -> None:
    """Groups {a0, b0} and {a1, b1} of 3e8 and 1e8 parameters: each ring sends half of its buffer each way.

    Interface a transmits (1.5 + 0.5)e8 parameters; at 2 bytes and 1 GB/s that is 0.4 s for both groups.
    """
    groups = ParameterHolders((np.array([[0, 2], [1, 3]]),), (np.array([3e8, 1e8]),))
    (seconds,) = RingTimes(groups, two_machines()).ring_pass_s(2)
    assert seconds.tolist() == pytest.approx([0.401, 0.401])
    (seconds,) = RingTimes(groups, two_machines(network_interfaces=2)).ring_pass_s(2)
    assert seconds.tolist() == pytest.approx([0.301, 0.101])


def test_a_ring_crosses_each_machine_boundary_once() -> None:
    """Holders a0, a1, b0, b1 of 4e8 parameters: every edge carries 3e8; 4 GB/s inside, 1 GB/s outside."""
    groups = ParameterHolders((np.array([[0, 1, 2, 3]]),), (np.array([4e8]),))
    (seconds,) = RingTimes(groups, two_machines()).ring_pass_s(2)
    assert seconds.tolist() == pytest.approx([0.6 + 2 * 1e-3])  # two levels of 1 ms


def test_a_device_starts_its_groups_one_after_another() -> None:
    """b0 is in two groups, so both wait two latencies."""
    groups = ParameterHolders((np.array([[0, 2], [1, 2]]),), (np.array([1.0, 1.0]),))
    (seconds,) = RingTimes(groups, two_machines()).ring_pass_s(2)
    assert seconds.tolist() == pytest.approx([2e-3, 2e-3])


def test_zero_1_moves_the_bytes_of_plain_data_parallelism() -> None:
    """Two ring passes of gradients, or one of gradients and one of weights: the same bytes in BF16."""
    wide = replace(MODEL, ffn_size=10**6)  # so that the optimiser takes longer than a launch
    problem = Problem(two_machines(), wide, Workload(global_batch=2, seq_len=10))
    pipelines = (Pipeline((Stage.of((0, 1), 0, 6),), 1), Pipeline((Stage.of((2, 3), 0, 6),), 1))
    model = PlanPricer(problem, replace(AFTER, weight_gathers="after"))
    plain, sharded = (model.price(Plan(pipelines, ONE_F_ONE_B, Sharding(stage))) for stage in (0, 1))
    passes = [model.rings(Plan(pipelines)).within_group.ring_pass_s(2)[0].max() for _ in range(2)]
    assert plain.gradient_sync_s == pytest.approx(sum(passes))
    assert sharded.gradient_sync_s == pytest.approx(passes[0])
    assert sharded.optimizer_s - passes[1] == pytest.approx(plain.optimizer_s / 2)


def test_late_stages_synchronise_while_early_ones_compute() -> None:
    """Only what is not hidden counts: the last stages end long before the first ones do."""
    cluster = two_machines(nic_bandwidth_gb_per_s=400, nic_latency_us=0)
    problem = Problem(cluster, MODEL, Workload(global_batch=2, seq_len=1000))
    pipelines = (
        Pipeline((Stage.of((0,), 0, 3), Stage.of((1,), 3, 6)), 1),
        Pipeline((Stage.of((2,), 0, 3), Stage.of((3,), 3, 6)), 1),
    )
    model = PlanPricer(problem, AFTER)
    plan = Plan(pipelines)
    cost = model.price(plan)
    [first], [last] = cost.pipelines[0].replica_end_s
    assert first > last
    sync = model.rings(plan).within_group
    seconds = dict(zip(map(tuple, sync.groups.holders[0].tolist()), sync.ring_pass_s(2)[0], strict=True))
    assert last + 2 * seconds[1, 3] < first
    assert cost.gradient_sync_s == pytest.approx(2 * seconds[0, 2])


def test_rings_use_all_interfaces_of_their_machines() -> None:
    """A ring's data is shared by as many interfaces as its devices have in every machine."""

    def seconds(interfaces: int, devices: tuple[int, ...]) -> float:
        data = {
            "name": "two",
            "inter_machine": {"bandwidth_gb_per_s": 1.0, "latency_us": 0},
            "machines": [
                {
                    "name": "a",
                    "gpu": "a100_80gb_sxm",
                    "num_gpus": 4,
                    "count": 2,
                    "intra_bandwidth_gb_per_s": 1000,
                    "intra_latency_us": 0,
                    "network_interfaces": interfaces,
                }
            ],
        }
        cluster = cluster_from_section(Section(data, "test"))
        groups = ParameterHolders((np.array([devices], np.int64),), (np.array([1e9]),))
        ((ring_s,),) = RingTimes(groups, cluster).ring_pass_s(1.0)
        return float(ring_s)

    whole = tuple(range(8))
    assert seconds(1, whole) == pytest.approx(7 / 8)
    assert seconds(2, whole) == pytest.approx(7 / 16)
    assert seconds(4, whole) == pytest.approx(7 / 32)
    assert seconds(4, (0, 4)) == seconds(1, (0, 4)) == pytest.approx(1 / 2)
    # Three devices behind two interfaces meet one device behind one.
    assert seconds(2, (0, 1, 2, 4)) == pytest.approx(3 / 4)


# ------------------------------------------------------------------ beside the last backward


@given(roomy_problems_with_plans())
def test_sums_begin_with_the_last_backward_and_end_after_its_last_part(task: tuple[Problem, Plan]) -> None:
    """Ring by ring, in plain loops."""
    problem, plan = task
    if plan.sharding.stage >= 2:
        return
    model = PlanPricer(problem)
    rings, rng = model.rings(plan), np.random.default_rng(0)
    copies = int(rings.copy_of.max()) + 1
    ended = rng.uniform(1.0, 2.0, copies)
    began = ended - rng.uniform(0.0, 1.0, copies)
    done = after_sums_by_part(rings.within_group, rings.copy_of, began, ended, 2.0, 2)
    expected, groups = ended.copy(), rings.within_group.groups
    for k, seconds in enumerate(rings.within_group.ring_pass_s(2.0)):
        for row, params, last, once in zip(groups.holders[k], groups.params[k], groups.last[k], seconds, strict=True):
            members = rings.copy_of[row]
            end = max(began[members].max() + 2 * once, ended[members].max() + 2 * once * last / params)
            expected[members] = np.maximum(expected[members], end)
    assert done == pytest.approx(expected, rel=1e-12)


@given(roomy_problems_with_plans())
def test_summing_beside_the_last_backward_saves_no_more_than_that(task: tuple[Problem, Plan]) -> None:
    problem, plan = task
    after, beside = PlanPricer(problem, AFTER).price(plan), PlanPricer(problem).price(plan)
    executors = [executor for line in beside.pipelines for stage in line.stages for executor in stage.executors]
    saved_s = after.step_time_s - beside.step_time_s
    assert -1e-12 <= saved_s <= max(executor.last_backward_s for executor in executors) + 1e-12
    if plan.sharding.stage >= 2:
        assert saved_s == 0.0


def test_the_last_part_of_a_backward_makes_a_layer_or_the_embedding() -> None:
    """Of a first stage the embedding, of others a layer; of a ring of the head alone, all of it."""
    pipelines = tuple(Pipeline((Stage.of((d,), 0, 4), Stage.of((d + 1,), 4, 6)), 1) for d in (0, 2))
    groups = parameter_holders(Holdings.of(pipelines), MODEL.parameter_groups)
    last = {
        tuple(row): n
        for rows, values in zip(groups.holders, groups.last, strict=True)
        for row, n in zip(rows.tolist(), values, strict=True)
    }
    params = params_by_holders(groups)
    layer, embedding = float(MODEL.layer_params), float(MODEL.embedding_params)
    assert last[0, 2] == max(layer, embedding)
    assert params[0, 2] == 4 * layer + embedding
    assert last[1, 3] == layer
    assert params[1, 3] == 2 * layer + MODEL.head_params
    assert groups.last_shares[0].max() <= 1.0


def test_sums_between_sharding_groups_follow_the_last_backward() -> None:
    problem = Problem(two_machines(), MODEL, Workload(global_batch=4, seq_len=1000))
    lines = tuple(Pipeline((Stage.of((d,), 0, 6),), 1) for d in (0, 1, 2, 3))
    plan = Plan(lines, ONE_F_ONE_B, Sharding(1, "machine"))
    model = PlanPricer(problem)
    cost = model.price(plan)
    between_s = 2 * model.rings(plan).between_groups.ring_pass_s(problem.workload.states.gradient)[0].max()
    assert cost.gradient_sync_s >= between_s * (1 - 1e-12)
