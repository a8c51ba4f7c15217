"""ZeRO 1 to 3 and sharding groups: by hand, against each other, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hexiopt.cost.context import state_sharding
from hexiopt.cost.executors.memory import UNSHARDED, Memory, MemoryModel, StateSharding
from hexiopt.cost.lockstep import backward_s, forward_s, scatter_backward_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.files.huggingface import read_model
from hexiopt.numbers.frameworks import default_framework
from hexiopt.numbers.gpus import catalogue
from hexiopt.plan.check import check
from hexiopt.plan.holdings import sharding_groups
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules.in_flight import holding
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from tests.conftest import ROOT
from tests.strategies import aligned_plans, models, problems, problems_with_plans, roomy_problems, workloads

A100 = catalogue()["a100_80gb_sxm"]
LLAMA = read_model(ROOT / "conf" / "model" / "llama2_7b.yaml")
MODEL = ModelSpec(
    name="six",
    architecture="llama",
    num_layers=6,
    hidden_size=1024,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=4096,
    vocab_size=32000,
    max_positions=4096,
)
TIED = replace(MODEL, tied_embeddings=True)


def two_machines(*, network_gb_per_s: float = 1.0, latency_us: float = 0.0, **changes: Any) -> Cluster:
    """Devices a:0 to a:3 and b:0 to b:3, machines of two GPU types."""
    machines = [
        {"name": name, "gpu": gpu, "num_gpus": 4, "intra_bandwidth_gb_per_s": 10, "intra_latency_us": latency_us}
        for name, gpu in (("a", "a100_80gb_sxm"), ("b", "rtx_3090"))
    ]
    network = {"bandwidth_gb_per_s": network_gb_per_s, "latency_us": latency_us}
    return cluster_from_section(
        Section({"name": "two", "inter_machine": network, "machines": [m | changes for m in machines]}, "test")
    )


PROBLEM = Problem(two_machines(), MODEL, Workload(global_batch=16, seq_len=2048))


def data_parallel(devices: tuple[int, ...], zero: int, groups: Any = "all", policy: str = "none") -> Plan:
    """All layers on every device, 16 sequences dealt evenly."""
    lines = tuple(Pipeline((Stage.of((d,), 0, 6, policy),), 16 // len(devices)) for d in devices)
    return Plan(lines, ONE_F_ONE_B, Sharding(zero, groups))


# ------------------------------------------------------------------ units beside each other


@given(st.integers(1, 9), *(st.integers(0, 9) for _ in range(3)))
def test_equal_units_are_the_closed_forms(n: int, c: int, g: int, r: int) -> None:
    assert forward_s([c] * n, [g] * n) == g + (n - 1) * max(c, g) + c
    ends = c if n == 1 else max(c, g) + (n - 2) * max(c, g + r) + max(c, r)
    assert backward_s([c] * n, [g] * n, [r] * n) == g + ends + r
    assert scatter_backward_s([c] * n, [r] * n) == c + (n - 1) * max(c, r) + r


def test_unequal_units_by_hand() -> None:
    """Embedding, two layers, head. The backward starts at the head."""
    assert forward_s([1, 5, 5, 4], [2, 3, 3, 6]) == 2 + max(1, 3) + max(5, 3) + max(5, 6) + 4
    hidden = max(8, 3) + max(10, 6 + 3) + max(10, 3 + 2) + max(2, 3)
    assert backward_s([2, 10, 10, 8], [2, 3, 3, 6], [2, 3, 3, 6]) == 6 + hidden + 2
    assert (
        backward_s([2, 4, 8], [2, 3, 6], [2, 3, 20]) == 6 + max(8, 3) + max(4, 20 + 2) + max(2, 3) + 2
    )  # a large head
    assert scatter_backward_s([2, 10, 10, 8], [2, 3, 3, 6]) == 8 + max(10, 6) + max(10, 3) + max(2, 3) + 2


# ------------------------------------------------------------------ memory


def states(memory: Memory) -> float:
    return memory.weights + memory.gradients + memory.master + memory.optimizer


def test_llama2_7b_over_eight_devices_by_hand() -> None:
    """Weight 2, gradient 4, master 4, moments 8 bytes. ZeRO-2 holds whole gradients of two layers, ZeRO-3 their weights
    too; neither spreads the norms."""
    model = MemoryModel(LLAMA, Workload(gradient_bytes=4), A100, 1, 1)
    params, layer, norm = 6_738_415_616, 202_383_360, 4096
    held = (params - 65 * norm) / 8 + 65 * norm + 2 * (layer - 2 * norm)
    whole, zero_1, zero_2, zero_3 = (
        model.stage(32, True, True, "full", holding(1), StateSharding(zero, 8)) for zero in range(4)
    )
    assert (whole.weights, whole.gradients, whole.master, whole.optimizer) == (
        2 * params,
        4 * params,
        4 * params,
        8 * params,
    )
    assert (zero_1.weights, zero_1.gradients, zero_1.master, zero_1.optimizer) == (
        2 * params,
        4 * params,
        params / 2,
        params,
    )
    assert (zero_2.weights, zero_2.gradients, zero_2.master, zero_2.optimizer) == (
        2 * params,
        4 * held,
        params / 2,
        params,
    )
    assert zero_3.weights == 2 * held
    assert zero_3.gradients == 4 * held
    assert (zero_3.master, zero_3.optimizer) == (params / 2, params)
    for memory in (zero_1, zero_2, zero_3):
        assert (memory.activations, memory.logits) == (whole.activations, whole.logits)


def test_the_embedding_is_gathered_whole_where_it_is_larger_than_a_layer() -> None:
    wide = MemoryModel(replace(LLAMA, vocab_size=128_000), Workload(), A100, 1, 1)
    embedding, layer = 128_000 * 4096, 202_383_360 - 2 * 4096  # without norms
    assert wide.whole_params(4, True, False) == embedding + layer
    assert wide.whole_params(4, False, True) == layer + embedding
    assert wide.whole_params(4, False, False) == 2 * layer
    assert wide.whole_params(1, False, False) == layer
    tied = MemoryModel(replace(LLAMA, tied_embeddings=True), Workload(), A100, 1, 1)
    assert tied.whole_params(4, True, True) == 2 * layer


@given(
    model=models(),
    workload=workloads(),
    tp=st.integers(1, 4),
    layers=st.integers(6, 20),
    policy=st.sampled_from(("none", "selective", "full")),
    held=st.integers(1, 4),
    devices=st.integers(2, 64),
)
def test_sharding_more_never_holds_more_state(  # type: ignore[no-untyped-def]
    model, workload, tp, layers, policy, held, devices
) -> None:
    """From six layers on: ZeRO-2 has gradients of two layers whole beside the shards, ZeRO-3 their weights too."""
    memory = MemoryModel(model, workload, A100, tp, 1)
    at = (layers, False, False, policy, holding(held))
    state_bytes = [states(memory.stage(*at, StateSharding(zero, devices))) for zero in range(4)]
    assert state_bytes[0] >= state_bytes[1] >= state_bytes[2] * (1 - 1e-12)
    assert state_bytes[2] >= state_bytes[3] * (1 - 1e-12)
    alone = [memory.stage(*at, StateSharding(zero, 1)) for zero in range(4)]
    assert alone == [memory.stage(*at, UNSHARDED)] * 4


# ------------------------------------------------------------------ who shares what


def test_holders_of_a_machine_by_hand() -> None:
    """Layers 0 to 2 on a:0 (TP 1), a:1 and a:2 (TP 2), b:0; then on b:1, b:2 and a:3."""
    lines = (
        Pipeline((Stage.of((0,), 0, 3), Stage.of((5,), 3, 6)), 4),
        Pipeline((Stage.of((1, 2), 0, 3), Stage.of((6,), 3, 6)), 4),
        Pipeline((Stage.of((4,), 0, 3), Stage.of((3,), 3, 6)), 4),
    )
    plan = Plan(lines, ONE_F_ONE_B, Sharding(1, "machine"))
    shardings = state_sharding(plan, sharding_groups(plan, PROBLEM.cluster))
    assert [spread.by_layer for spread in shardings] == [
        (((2, 2, 2),), ((2, 2, 2),)),
        (((2, 2, 2),), ((2, 2, 2),)),
        (((1, 1, 1),), ((1, 1, 1),)),
    ]
    model = PlanPricer(PROBLEM)
    cost, unsharded = model.price(plan), model.price(replace(plan, sharding=Sharding(0)))
    for p, parts in enumerate((2, 2, 1)):
        for s in (0, 1):
            memory, whole = cost.pipelines[p].stages[s].memory, unsharded.pipelines[p].stages[s].memory
            assert memory == replace(whole, master=whole.master / parts, optimizer=whole.optimizer / parts)


def test_a_tied_matrix_is_spread_over_the_ends_of_all_pipelines_by_hand() -> None:
    """Of four stages' ends in two pipelines and of a pipeline of one stage, which is both: five copies; in a machine, a
    has three of them and b two."""
    lines = (
        Pipeline((Stage.of((0,), 0, 3), Stage.of((1,), 3, 6)), 4),
        Pipeline((Stage.of((2,), 0, 2), Stage.of((5,), 2, 4), Stage.of((4,), 4, 6)), 4),
        Pipeline((Stage.of((6,), 0, 6),), 4),
    )
    model = PlanPricer(replace(PROBLEM, model=TIED))
    whole = [line.stages for line in model.price(Plan(lines, ONE_F_ONE_B)).pipelines]
    matrix = 4.0 * TIED.vocabulary_params
    for groups, of_a, of_b, others in (("all", 5, 5, ((3, 3), (3, 3, 3), (3,))), ("machine", 3, 2, None)):
        cost = model.price(Plan(lines, ONE_F_ONE_B, Sharding(1, groups)))
        for p, pipeline_cost in enumerate(cost.pipelines):
            for s, stage in enumerate(pipeline_cost.stages):
                at_end, in_a = s in (0, len(pipeline_cost.stages) - 1), lines[p].stages[s].devices[0] < 4
                share = matrix / (of_a if in_a else of_b) if at_end else 0.0
                rest = whole[p][s].memory.master - matrix * at_end
                if others is not None:
                    assert stage.memory.master == pytest.approx(share + rest / others[p][s])
                assert share + rest / 3 <= stage.memory.master * (1 + 1e-12) <= share + rest * (1 + 1e-9)


def test_slices_in_unequal_groups_spread_as_much_as_they_do_together() -> None:
    """TP 2 against TP 1: the first half of a layer is shared by two devices, the second is alone in its group."""
    lines = (Pipeline((Stage.of((0, 1), 0, 6),), 8), Pipeline((Stage.of((2,), 0, 6),), 8))
    plan = Plan(lines, ONE_F_ONE_B, Sharding(1, ((0, 2), (1,))))
    first, second = state_sharding(plan, sharding_groups(plan, PROBLEM.cluster))
    assert first.by_layer == (((1,) * 6,),)  # rank 1 shares with nobody, and is the fullest
    assert second.by_layer[0][0] == pytest.approx([1 / (0.5 / 2 + 0.5)] * 6)


def test_rings_inside_and_between_groups_by_hand() -> None:
    """Holders a:0, a:1, b:0 of all parameters: a pass inside a, then halves against the same halves of b:0's whole."""
    rings = PlanPricer(PROBLEM).rings(data_parallel((0, 1, 4), 1, "machine"))
    (inside,), (params,) = rings.within_group.groups.holders, rings.within_group.groups.params
    assert inside.tolist() == [[0, 1]]
    assert params.tolist() == [MODEL.num_params]
    (between,), (params,) = rings.between_groups.groups.holders, rings.between_groups.groups.params
    assert between.tolist() == [[0, 4], [1, 4]]
    assert params.tolist() == [MODEL.num_params / 2] * 2


def test_first_and_last_stage_spread_a_tied_matrix_each_and_sum_it_once() -> None:
    """Each stage its own ring; the matrix's gradient is all-reduced between the stages, shard by shard."""
    problem = replace(PROBLEM, model=TIED)
    lines = tuple(Pipeline((Stage.of((k,), 0, 3), Stage.of((2 + k,), 3, 6)), 8) for k in range(2))
    rings = PlanPricer(problem).rings(Plan(lines, ONE_F_ONE_B, Sharding(3)))
    half = TIED.layer_params * 3 + TIED.vocabulary_params
    params_by_ring = dict(
        zip(map(tuple, rings.within_group.groups.holders[0].tolist()), rings.within_group.groups.params[0], strict=True)
    )
    assert params_by_ring == {(0, 1): half, (2, 3): half + TIED.head_params}
    (between,), (params,) = rings.between_groups.groups.holders, rings.between_groups.groups.params
    assert between.tolist() == [[0, 2], [1, 3]]
    assert params.tolist() == [TIED.vocabulary_params / 2] * 2


# ------------------------------------------------------------------ seconds


def test_zero_3_on_one_machine_by_hand() -> None:
    """Four equal devices: three quarters of a layer cross each link of 10 GB/s, in two levels of 5 µs."""
    problem = replace(PROBLEM, cluster=two_machines(latency_us=5.0))
    model = PlanPricer(problem)
    cost = model.price(data_parallel((0, 1, 2, 3), 3))
    tp_group = model.tp_group((0,))
    layer, (embedding, head) = model.stages.layer_s(tp_group, 1, "none"), model.stages.ends_s(tp_group, 1)

    def ring_pass_s(params: float) -> float:
        return 0.75 * params * 2 / 10e9 + 2 * 5e-6

    units = [MODEL.embedding_params, *[MODEL.layer_params] * 6, MODEL.head_params]
    moved = [ring_pass_s(params) for params in units]
    forward = forward_s([embedding.forward_s, *[layer[0]] * 6, head.forward_s], moved)
    backward = backward_s([embedding.backward_s, *[layer[1]] * 6, head.backward_s], moved, moved)
    for pipeline in cost.pipelines:
        assert pipeline.stages[0].forward_s == pytest.approx(forward)
        assert pipeline.stages[0].backward_s == pytest.approx(backward)
    assert cost.pipeline_s == pytest.approx(4 * (forward + backward))
    assert cost.gradient_sync_s == 0.0
    assert cost.optimizer_s == pytest.approx(model.price(data_parallel((0,), 0)).optimizer_s / 4)


def test_zero_2_scatters_every_time_and_gathers_once() -> None:
    model = PlanPricer(PROBLEM, replace(default_framework(), gradient_sums="after", weight_gathers="after"))
    devices = (0, 1, 2, 3)
    plain, two, three = (model.price(data_parallel(devices, zero)) for zero in (1, 2, 3))
    one_pass = 0.75 * MODEL.num_params * 2 / 10e9
    assert plain.gradient_sync_s == pytest.approx(one_pass)
    assert two.gradient_sync_s == 0.0
    assert two.optimizer_s == pytest.approx(plain.optimizer_s)
    assert three.optimizer_s == pytest.approx(plain.optimizer_s - one_pass)
    assert two.pipelines[0].stages[0].forward_s == pytest.approx(plain.pipelines[0].stages[0].forward_s)
    assert plain.pipeline_s < two.pipeline_s < three.pipeline_s


def test_a_stage_is_as_slow_as_its_slowest_holder() -> None:
    """A100 and RTX 3090 in lockstep, with a network that takes no time: all wait for the RTX 3090."""
    problem = replace(PROBLEM, cluster=two_machines(network_gb_per_s=1e5, intra_bandwidth_gb_per_s=1e5))
    model = PlanPricer(problem)
    stage_by_device = {d: model.price(data_parallel((d,), 0)).pipelines[0].stages[0] for d in (0, 4)}
    assert stage_by_device[0].forward_s < stage_by_device[4].forward_s
    for zero in (2, 3):
        together = model.price(data_parallel((0, 4), zero))
        apart = model.price(data_parallel((0, 4), zero, "machine"))
        for k, d in enumerate((0, 4)):
            assert together.pipelines[k].stages[0].forward_s == pytest.approx(stage_by_device[4].forward_s, rel=1e-3)
            assert apart.pipelines[k].stages[0].forward_s == pytest.approx(stage_by_device[d].forward_s, rel=1e-9)
            # Alone in its machine, a device holds everything.
            assert states(apart.pipelines[k].stages[0].memory) == states(stage_by_device[d].memory)


def test_hybrid_sharding_all_reduces_shards_between_machines_once() -> None:
    """Two devices a machine: half of all gradients, on the network of 1 GB/s, two passes over two rings at once."""
    model = PlanPricer(PROBLEM)
    cost = model.price(data_parallel((0, 1, 4, 5), 3, "machine"))
    assert cost.gradient_sync_s == pytest.approx(2 * 2 * 0.5 * (MODEL.num_params / 2) * 2 / 1e9)
    shorter = replace(PROBLEM, workload=replace(PROBLEM.workload, global_batch=4))
    plan = data_parallel((0, 1, 4, 5), 3, "machine")
    once = replace(plan, pipelines=tuple(replace(p, num_micro_batches=1) for p in plan.pipelines))
    assert PlanPricer(shorter).price(once).gradient_sync_s == pytest.approx(cost.gradient_sync_s)


def test_policies_may_differ_between_holders_layer_by_layer() -> None:
    """The slowest holder of every layer decides: a layer that one of them recomputes takes all that long."""
    model = PlanPricer(replace(PROBLEM, cluster=two_machines(intra_bandwidth_gb_per_s=1e5)))
    tp_group = model.tp_group((0,))
    extra_s = model.stages.layer_s(tp_group, 1, "full")[1] - model.stages.layer_s(tp_group, 1, "none")[1]
    mixed = [("none",) * 4 + ("full",) * 2, ("full",) + ("none",) * 5]
    lines = tuple(Pipeline((Stage(TensorParallel((d,)), ((0, 6),), policies),), 8) for d, policies in enumerate(mixed))
    plain = model.price(data_parallel((0, 1), 2)).pipelines[0].stages[0].backward_s
    cost = model.price(Plan(lines, ONE_F_ONE_B, Sharding(2)))
    for pipeline in cost.pipelines:
        assert pipeline.stages[0].backward_s == pytest.approx(plain + 3 * extra_s, rel=1e-3)


# ------------------------------------------------------------------ against each other


@st.composite
def deep(draw: st.DrawFn) -> tuple[Problem, Plan]:
    """A problem, and a plan in lockstep."""
    problem = draw(st.one_of(problems(), roomy_problems()))
    zero = draw(st.sampled_from(("2", "3")))
    schedule = problem.workload.schedule if problem.workload.schedule != "interleaved" else "1f1b"
    problem = replace(problem, workload=replace(problem.workload, schedule=schedule))
    problem = problem.replace(workload=problem.workload.replace(optimizer_sharding=zero, gradient_precision="training"))
    return problem, draw(aligned_plans(problem))


@given(pair=deep())
def test_deep_plans_are_valid_and_keep_the_least_state(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    assert check(problem, plan) == []
    free = replace(problem, workload=replace(problem.workload, optimizer_sharding="auto"))
    model = PlanPricer(free)
    each = [model.price(replace(plan, sharding=Sharding(zero, plan.sharding.groups))) for zero in (0, 1, 2)]
    held = [[executor.memory for p in cost.pipelines for s in p.stages for executor in s.executors] for cost in each]
    for whole, zero_1, zero_2 in zip(*held, strict=True):
        assert states(whole) >= states(zero_1) * (1 - 1e-12)
        # From ZeRO-2 on either end spreads a tied matrix by itself.
        assert free.model.tied_embeddings or (zero_2.master, zero_2.optimizer) == (zero_1.master, zero_1.optimizer)
        assert (zero_2.master, zero_2.optimizer) >= (zero_1.master, zero_1.optimizer)
        same = {
            "gradients": zero_1.gradients,
            "master": zero_1.master,
            "optimizer": zero_1.optimizer,
            "reserve": zero_1.reserve,
        }
        assert replace(zero_2, **same) == zero_1
        assert zero_2.gradients <= 2 * zero_1.gradients  # of two units whole, which may be all that there are
    # Scattering layer by layer takes no less than computing does.
    assert each[2].pipeline_s >= each[1].pipeline_s * (1 - 1e-12)
    deepest = model.price(replace(plan, sharding=Sharding(3, plan.sharding.groups)))
    assert deepest.pipeline_s >= each[2].pipeline_s * (1 - 1e-12)


@given(pair=problems_with_plans(), zero=st.integers(0, 3))
def test_on_one_machine_all_holders_are_the_machine(pair: tuple[Problem, Plan], zero: int) -> None:
    problem, plan = pair
    free = replace(problem, workload=replace(problem.workload, optimizer_sharding="auto"))
    assume(Sharding(zero).broken_rule(plan.pipelines, plan.schedule) is None)
    plan = replace(plan, sharding=Sharding(zero))
    model = PlanPricer(free)
    machine_of = problem.cluster.machine_of.tolist()
    machines = sorted({machine_of[d] for d in plan.devices()})
    by_machine = tuple(tuple(d for d in plan.devices() if machine_of[d] == m) for m in machines)
    hybrid = model.price(replace(plan, sharding=Sharding(zero, "machine")))
    assert hybrid == model.price(replace(plan, sharding=Sharding(zero, by_machine)))
    one_list = model.price(replace(plan, sharding=Sharding(zero, (plan.devices(),))))
    whole = model.price(plan)
    assert one_list.step_time_s == pytest.approx(whole.step_time_s, rel=1e-9)
    assert one_list.excess_bytes == pytest.approx(whole.excess_bytes, rel=1e-9, abs=1.0)
    if len(machines) == 1:
        assert hybrid.step_time_s == pytest.approx(whole.step_time_s, rel=1e-9)
        assert hybrid.excess_bytes == pytest.approx(whole.excess_bytes, rel=1e-9, abs=1.0)


# ------------------------------------------------------------------ what is refused

LINE = Pipeline((Stage.of((0,), 0, 3), Stage.of((1,), 3, 6)), 4, 2)
OTHER = Pipeline((Stage.of((2,), 0, 3), Stage.of((4,), 3, 6)), 4, 2)
REFUSED = {
    "stages": (LINE, Pipeline((Stage.of((2,), 0, 6),), 4, 2)),
    "layers": (LINE, Pipeline((Stage.of((2,), 0, 2), Stage.of((4,), 2, 6)), 4, 2)),
    "TP": (LINE, Pipeline((Stage.of((2, 3), 0, 3), Stage.of((4,), 3, 6)), 4, 2)),
    "micro-batches": (LINE, replace(OTHER, num_micro_batches=8, micro_batch_size=1)),
}


@pytest.mark.parametrize("word", REFUSED)
@pytest.mark.parametrize("zero", [2, 3])
def test_pipelines_out_of_step_are_refused_in_one_line(word: str, zero: int) -> None:
    with pytest.raises(InputError, match=f"plan: sharding: ZeRO-{zero} over pipelines .*{word}"):
        Plan(REFUSED[word], ONE_F_ONE_B, Sharding(zero))
    assert check(PROBLEM, Plan(REFUSED[word], ONE_F_ONE_B, Sharding(1))) == []


def test_the_interleaved_schedule_is_out_of_step() -> None:
    with pytest.raises(InputError, match="ZeRO-3 under the interleaved schedule; take 1f1b or gpipe"):
        Plan((LINE, OTHER), INTERLEAVED, Sharding(3))


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (((0, 1, 2),), "device 4 is in 0 sharding groups"),
        (((0, 1), (1, 2, 4)), "device 1 is in 2 sharding groups"),
        ((), "device 0 is in 0 sharding groups"),
        ("rack", "'rack' is not known; known: all, machine"),
    ],
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_groups_divide_the_devices(groups: Any, words: str, zero: int) -> None:
    with pytest.raises(InputError, match=words):
        Plan((LINE, OTHER), ONE_F_ONE_B, Sharding(zero, groups))
    assert check(PROBLEM, Plan((LINE, OTHER), ONE_F_ONE_B, Sharding(zero, ((0, 1, 7), (2, 4))))) == []
