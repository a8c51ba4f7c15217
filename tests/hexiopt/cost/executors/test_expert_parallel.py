"""Stages whose replicas share experts in any numbers, by hand and beside equal shares."""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import product
from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexiopt.cost.breakdown import breakdown
from hexiopt.cost.executors.experts.times import DeviceShare, uneven_exchange_s
from hexiopt.cost.executors.experts.waves import WavePhases, wave_times
from hexiopt.cost.executors.routes import token_transfers
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.plan_file import plan_from_section, plan_to_dict
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.frameworks import frameworks
from hexiopt.plan.check import check
from hexiopt.plan.holdings import Holdings, parameter_holders, slices
from hexiopt.plan.parallelism import ExpertParallel, ExpertReplica, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.kinds import Experts
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules.registry import ONE_F_ONE_B
from tests.hexiopt.shapes_of_kinds import DENSE_LAYER, EQUAL, EXPERT_LAYER, EXPERTS, MIXED, model_of
from tests.solvers.problems import cluster

FREE = Space(uneven_experts=True)
WORK = Workload(global_batch=16, seq_len=1024)
SAME = cluster(("a", "fast", 4), ("b", "fast", 4), fast_gib=80)
MIXED_CLUSTER = cluster(("a", "fast", 4), ("b", "slow", 4), fast_gib=80, slow_gib=80)


def one_stage(group: ExpertParallel | TensorParallel, size: int, zero: int = 0, layers: int = 6) -> Plan:
    stage = Stage(group, ((0, layers),), ("full",))
    return Plan((Pipeline((stage,), 16 // size, size),), ONE_F_ONE_B, Sharding(zero))


def replicas(*rows: tuple[Sequence[int], int, Sequence[int]]) -> ExpertParallel:
    return ExpertParallel(tuple(ExpertReplica(tuple(d), n, tuple(experts)) for d, n, experts in rows))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("devices", [(0, 1, 2, 3), (0, 1, 4, 5), (0, 1, 2, 3, 4, 5, 6, 7)], ids=len)
def test_even_shares_cost_what_a_cell_costs(devices: tuple[int, ...], degree: int, zero: int) -> None:
    """A group of devices that share experts equally, inside a machine and over two, by either statement."""
    if degree == 4 and devices == (0, 1, 4, 5):
        pytest.skip("a replica stands in one machine")
    pricer, count = PlanPricer(Problem(SAME, EQUAL, WORK, FREE)), len(devices)
    rows = [(devices[at : at + degree], 8 * degree // count, [16 // count] * degree) for at in range(0, count, degree)]
    cell, shares = one_stage(TensorParallel(devices, degree=degree), 8, zero), one_stage(replicas(*rows), 8, zero)
    cell_cost, shares_cost = pricer.price(cell), pricer.price(shares)
    assert shares_cost.step_time_s == pytest.approx(cell_cost.step_time_s, rel=1e-9)
    for copy, like in zip(
        shares_cost.pipelines[0].stages[0].executors[0].copies,
        cell_cost.pipelines[0].stages[0].executors[0].copies,
        strict=True,
    ):
        assert copy.memory.total == pytest.approx(like.memory.total, rel=1e-12)
        assert copy.num_params == like.num_params


def test_copies_of_tokens_by_hand() -> None:
    """Three devices in two machines: what ports and interfaces pass, with a copy for every expert."""
    part, work = Experts(count=16, top_k=2, ffn_size=512), Workload(global_batch=8, seq_len=1000, routing="forced")
    network = SAME.network
    shares = [DeviceShare(0, 0, 1e11, 500.0, 8), DeviceShare(1, 0, 1e11, 500.0, 4), DeviceShare(4, 1, 1e11, 1000.0, 4)]
    token_bytes = 512 * work.element_bytes
    # Device 0 receives from 1, and half of what machine 1 sends there, which arrives at either device.
    received = 8 / 16 * 2 * (500 + 0.5 * 1000) * token_bytes
    inside_s = received / (1e11 * c.ALL_TO_ALL_OF_RING)
    out = {0: 1000 * 2 * 4 / 16 * token_bytes, 1: 1000 * 2 * 12 / 16 * token_bytes}
    slowest = min(bytes_per_s for _, bytes_per_s in network.path(0, 4)[2])
    expected = max(inside_s, max(out.values()) / slowest) + c.ALL_TO_ALL_S * log2(3)
    assert uneven_exchange_s(part, work, 512, network, shares, False) == pytest.approx(expected)
    # With one copy to a machine fewer leave it, and links inside pass on as many.
    out = {
        m: tokens * (1 - (1 - share) ** 2) * token_bytes
        for m, (tokens, share) in enumerate([(1000, 0.25), (1000, 0.75)])
    }
    expected = max(inside_s, max(out.values()) / slowest) + c.ALL_TO_ALL_S * log2(3)
    assert uneven_exchange_s(part, work, 512, network, shares, True) == pytest.approx(expected)


def test_phases_wait_for_the_slowest() -> None:
    """A layer lasts as long as what mixes tokens on the slowest replica, and experts on the slowest device."""
    problem = Problem(MIXED_CLUSTER, EQUAL, replace(WORK, routing="forced"), FREE)
    stages = PlanPricer(problem).stages

    def layer_s(samples: tuple[int, int], experts: tuple[int, int]) -> tuple[float, float]:
        group = replicas(((0,), samples[0], experts[:1]), ((4,), samples[1], experts[1:]))
        return stages.expert_stage(group).layer_s(0, "none")

    fast, slow = stages.tp_group((0,)), stages.tp_group((4,))
    assert stages.layer_apart(slow, 2, 0).forward_s > stages.layer_apart(fast, 2, 0).forward_s
    shifted, even = layer_s((2, 2), (12, 4)), layer_s((2, 2), (8, 8))
    assert shifted < even
    # With all experts on the fast device the slow one waits for them, and the other way round even longer.
    assert layer_s((2, 2), (0, 16)) > layer_s((2, 2), (16, 0))
    assert stages.expert_stage(replicas(((0,), 4, (16,)))).exchange_s(0) == 0.0


def test_devices_with_experts_alone() -> None:
    """They hold experts and their states, copies of tokens, and nothing else; no sample comes to them."""
    problem = Problem(MIXED_CLUSTER, EQUAL, WORK, FREE)
    plan = one_stage(replicas(((0, 1), 4, (2, 2)), ((4, 5), 0, (6, 6))), 4)
    assert check(problem, plan) == []
    (executor,) = PlanPricer(problem).price(plan).pipelines[0].stages[0].executors
    of_replica, *alone = executor.copies
    assert [copy.num_params for copy in alone] == [6 * 6 * 3 * 512 * 512] * 2
    dense = EQUAL.num_params - 6 * 16 * 3 * 512 * 512
    assert of_replica.num_params >= dense / 2 + 6 * 2 * 3 * 512 * 512
    assert all(0 < copy.memory.activations < of_replica.memory.activations for copy in alone)
    assert all(copy.memory.logits == 0 for copy in alone)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_expert_is_summed_by_its_holders(data: st.DataObject) -> None:
    """Rings of two pipelines that cut experts in any two ways: expert by expert, who holds it."""
    cuts = []
    for _ in range(2):
        n = data.draw(st.integers(1, 4))
        ends = sorted(data.draw(st.lists(st.integers(0, 16), min_size=n - 1, max_size=n - 1)))
        cuts.append([b - a for a, b in zip([0, *ends], [*ends, 16], strict=True)])
    lines = []
    for p, cut in enumerate(cuts):
        rows = [((4 * p + k,), 1, (n,)) for k, n in enumerate(cut)]
        lines.append(Pipeline((Stage(replicas(*rows), ((0, 6),)),), 2, len(cut)))
    plan = Plan(tuple(lines))
    problem = Problem(SAME, EQUAL, WORK, FREE)
    rings = parameter_holders(Holdings.of(plan.pipelines), problem.parameters.trained_groups)
    by_ring: dict[tuple[int, ...], float] = {}
    for rows_of, params in zip(rings.holders, rings.params, strict=True):
        for row, amount in zip(rows_of.tolist(), params.tolist(), strict=True):
            by_ring[tuple(row)] = by_ring.get(tuple(row), 0.0) + amount
    expected: dict[tuple[int, ...], float] = {}
    owners = [np.repeat(np.arange(len(cut)) + 4 * p, cut) for p, cut in enumerate(cuts)]
    for expert in range(16):
        ring = tuple(int(owner[expert]) for owner in owners)
        expected[ring] = expected.get(ring, 0.0) + 6 * 3 * 512 * 512
    dense = tuple(sorted(d for p, cut in enumerate(cuts) for d in range(4 * p, 4 * p + len(cut))))
    expected[dense] = expected.get(dense, 0.0) + EQUAL.num_params - 6 * 16 * 3 * 512 * 512
    assert by_ring == pytest.approx(expected)


def test_slices_of_uneven_cuts() -> None:
    widths, ranks = slices((2, (3, 0, 5)))
    assert widths == [3 / 8, 1 / 8, 4 / 8]
    assert ranks.tolist() == [[0, 0], [0, 2], [1, 2]]


REFUSED = {
    "no samples": (
        lambda: replicas(((0,), 0, (16,))),
        "no replica of the stage has samples; give some to at least one",
    ),
    "no experts": (lambda: replicas(((0,), 1, (0,))), "no device of the stage has experts; give every expert to one"),
    "neither": (
        lambda: replicas(((0,), 1, (16,)), ((1,), 0, (0,))),
        "a replica of the stage has experts (0,); give every device at least 1, or leave it out",
    ),
    "too few numbers": (
        lambda: replicas(((0, 1), 1, (16,))),
        "a replica of the stage has 2 devices and experts (16,); state one number for every device",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_stage_can_be_is_refused(name: str) -> None:
    build, line = REFUSED[name]
    with pytest.raises(InputError) as caught:
        build()
    assert str(caught.value) == line


def test_what_a_problem_does_not_allow() -> None:
    plan = one_stage(replicas(((0,), 1, (10,)), ((4,), 1, (6,))), 2)
    assert check(Problem(SAME, EQUAL, WORK, FREE), plan) == []
    [violation] = check(Problem(SAME, EQUAL, WORK), plan)
    assert str(violation) == "stage 0 of pipeline 0 states experts; allow that with space.uneven_experts=true"
    [violation] = check(Problem(SAME, model_of(*[DENSE_LAYER] * 6), WORK, FREE), plan)
    assert str(violation) == "stage 0 of pipeline 0 has 16 experts; layers of kinds have none"
    few = model_of(*[replace(EXPERT_LAYER, channels=(replace(EXPERTS, count=8),))] * 6)
    [violation] = check(Problem(SAME, few, WORK, FREE), plan)
    assert str(violation) == "stage 0 of pipeline 0 has 16 experts; layers of kinds have 8"
    alone = replicas(((0,), 2, (0,)), ((4,), 0, (16,)))
    stages = Stage(alone, ((0, 1),), ("full",)), Stage.of((1,), 1, 6)
    dense_first = Plan((Pipeline(stages, 8, 2),), ONE_F_ONE_B, Sharding(0))
    assert check(Problem(SAME, EQUAL, WORK, FREE), dense_first) == []
    [violation] = check(Problem(SAME, MIXED, WORK, FREE), dense_first)
    what = "stage 0 of pipeline 0 has devices for experts alone, and no layer with experts; give it one"
    assert str(violation) == what
    with pytest.raises(InputError, match="ZeRO-2 over stages that share experts unevenly; take ZeRO-1"):
        replace(plan, sharding=Sharding(2))
    with pytest.raises(InputError, match="sharding groups over stages that share experts unevenly; take groups: all"):
        replace(plan, sharding=Sharding(1, "machine"))
    further = replace(EQUAL, extra_layers=(EXPERT_LAYER,))
    with pytest.raises(InputError, match=r"predicts further tokens; plan with space\.uneven_experts=false"):
        PlanPricer(Problem(SAME, further, WORK, FREE)).price(plan)


def test_micro_batches_resize_with_their_shares() -> None:
    pipeline = one_stage(replicas(((0,), 3, (10,)), ((4,), 1, (6,)), ((5,), 0, (2,))), 4).pipelines[0]
    resized = pipeline.resize(8)
    assert resized is not None
    assert resized.stages[0].parallelism.num_samples == 8
    assert [replica.samples for replica in resized.stages[0].parallelism.replicas] == [6, 2]
    assert pipeline.resize(2) is None


def test_messages_go_where_samples_are() -> None:
    """Between a TP group and replicas of unequal samples: every byte of both ends, and nothing else."""
    shares = replicas(((4, 5), 3, (4, 4)), ((6,), 1, (8,)))
    for senders, receivers in (((0, 1), shares), (shares, (0, 1)), (shares, shares)):
        moved = list(token_transfers(senders, receivers))
        assert sum(share for *_, share in moved) == pytest.approx(1.0)
        by_receiver: dict[int, float] = {}
        for _, to, share in moved:
            by_receiver[to] = by_receiver.get(to, 0.0) + share
        expected = {4: 3 / 8, 5: 3 / 8, 6: 1 / 4} if receivers is shares else {0: 0.5, 1: 0.5}
        assert by_receiver == pytest.approx(expected)
    whole = list(token_transfers((0, 1), shares, divided=False))
    assert sorted((to, share) for _, to, share in whole) == [(4, 0.75), (5, 0.75), (6, 0.25)]


def test_frameworks_that_hide_exchanges() -> None:
    problem = Problem(MIXED_CLUSTER, EQUAL, WORK, FREE)
    group = replicas(((0,), 2, (8,)), ((4,), 2, (8,)))
    plain, hidden = (
        PlanPricer(problem, frameworks()[name]).stages.expert_stage(group).exchange_s(0)
        for name in ("megatron_moe_2026", "megatron_moe_2026_overlapped")
    )
    assert 0 < hidden < plain


def test_layers_without_experts() -> None:
    """Layers of several kinds: those without experts last as long as on the slowest replica."""
    model = model_of(DENSE_LAYER, EXPERT_LAYER, DENSE_LAYER, EXPERT_LAYER)
    stages = PlanPricer(Problem(MIXED_CLUSTER, model, WORK, FREE)).stages
    group = replicas(((0,), 2, (8,)), ((4,), 2, (8,)))
    for kind, policy in product((0, 1), ("none", "selective", "full")):
        of_stage = stages.expert_stage(group).layer_s(kind, policy)
        alone = stages.layer_s(stages.tp_group((4,)), 2, policy, kind)
        if kind == 0:
            assert of_stage == pytest.approx(alone)


NETWORK = -1  # beside the numbers of devices


def simulate_waves(phases: WavePhases, layers: int) -> list[float]:
    """When each layer ends for both waves, by events: every device and the network runs its jobs in order, each of them
    once all jobs of the wave's phase before have ended."""
    devices = range(len(phases.apart_s))
    names = [(layer, phase) for layer in range(layers) for phase in range(4)]
    jobs = {
        (layer, phase, wave): ({NETWORK: phases.exchange_s} if phase % 2 else dict(enumerate(seconds)))
        for layer, phase in names
        for wave in (0, 1)
        for seconds in [(phases.apart_s, (), phases.experts_s, ())[phase]]
    }
    queues: dict[int, list[tuple[int, int, int]]] = {
        worker: [(layer, phase, wave) for layer, phase in names if phase % 2 == odd for wave in (0, 1)]
        for worker, odd in [*((d, 0) for d in devices), (NETWORK, 1)]
    }
    left = {job: {worker for worker, seconds in work.items() if seconds} for job, work in jobs.items()}
    running, busy = list[tuple[float, int, int, tuple[int, int, int]]](), set[int]()
    clock, ended = 0.0, dict[tuple[int, int, int], float]()
    for count in range(10**6):
        for worker, queue in queues.items():
            while queue and not jobs[queue[0]].get(worker, 0.0):  # nothing to do there
                queue.pop(0)
            if worker in busy or not queue:
                continue
            layer, phase, wave = queue[0]
            before = (layer, phase - 1, wave) if phase else (layer - 1, 3, wave)
            if before[0] >= 0 and left[before]:
                continue
            queue.pop(0)
            busy.add(worker)
            heappush(running, (clock + jobs[layer, phase, wave][worker], count, worker, (layer, phase, wave)))
        if not running:
            break
        clock, _, worker, job = heappop(running)
        busy.discard(worker)
        left[job].discard(worker)
        ended[job] = clock
    return [max(ended[layer, 3, wave] for wave in (0, 1)) for layer in range(layers)]


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_waves_by_events(data: st.DataObject) -> None:
    seconds = st.floats(0.1, 3.0)
    count = data.draw(st.integers(1, 4))
    apart = data.draw(st.lists(seconds, min_size=count, max_size=count))
    experts = data.draw(st.lists(seconds, min_size=count, max_size=count))
    alone = data.draw(st.integers(0, count - 1))
    phases = WavePhases([*apart[: count - alone], *[0.0] * alone], experts, data.draw(st.floats(0.0, 3.0)) or 0.0)
    if not phases.exchange_s:
        phases = phases._replace(exchange_s=1e-9)
    ends_s, times = simulate_waves(phases, 12), wave_times(phases)
    assert times.first_s == pytest.approx(ends_s[0])
    assert times.further_s == pytest.approx((ends_s[11] - ends_s[3]) / 8)
    whole = max(phases.apart_s) + max(experts) + 2 * phases.exchange_s
    assert times.first_s <= 2 * whole * (1 + 1e-9)
    assert max(a + b for a, b in zip(phases.apart_s, experts, strict=True)) * 2 <= times.further_s * (1 + 1e-9)


def test_waves_hide_exchanges_and_experts_elsewhere() -> None:
    """Where exchanges are long, halves that alternate are faster though each computes less at once."""
    problem = Problem(MIXED_CLUSTER, EQUAL, replace(WORK, seq_len=4096), FREE)
    rows = [((0,), 4, (8,)), ((4,), 4, (8,))]
    one_wave, two_waves = replicas(*rows), replace(replicas(*rows), waves=2)
    stages = PlanPricer(problem).stages
    assert sum(stages.expert_stage(two_waves).layer_s(0, "none")) < sum(
        stages.expert_stage(one_wave).layer_s(0, "none")
    )
    plans = [one_stage(group, 8) for group in (one_wave, two_waves)]
    costs = [PlanPricer(problem).price(plan) for plan in plans]
    assert costs[1].step_time_s < costs[0].step_time_s
    shown = breakdown(PlanPricer(problem), plans[1], costs[1])
    assert sum(shown.parts.values()) == pytest.approx(costs[1].step_time_s)
    data = plan_to_dict(plans[1], MIXED_CLUSTER)
    assert plan_from_section(Section(data, "plan"), MIXED_CLUSTER) == plans[1]
    with pytest.raises(InputError, match=r"has 2 waves and replicas of 3 \+ 4 samples; give all replicas even numbers"):
        replace(replicas(((0,), 3, (8,)), ((4,), 4, (8,))), waves=2)
