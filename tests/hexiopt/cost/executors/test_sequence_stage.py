"""Sequence stages: one device as TP 1, compute and bytes counted by hand, a simulation that ends when the cost says."""

import math
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexiopt.cost.executors.memory import MEMORY_PARTS, Memory, StateSharding
from hexiopt.cost.executors.sequence.phases import ends_s
from hexiopt.cost.executors.sequence.stage import SequenceStage
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.numbers.frameworks import frameworks
from hexiopt.numbers.gpus import Efficiency, catalogue
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.token_layout import group_ranges, head_ranges, kv_range, sub_rings
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import RECOMPUTE_POLICIES, Workload
from hexiopt.reading import Section
from hexiopt.schedules.in_flight import holding
from tests.hexiopt.cost.executors.simulate_sequence import simulate_layer
from tests.hexiopt.plan.layouts import layouts_of
from tests.strategies import problems

MODEL = ModelSpec(
    name="m",
    architecture="llama",
    num_layers=3,
    hidden_size=256,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=512,
    vocab_size=1000,
    max_positions=4096,
)


def cluster(*machines: dict[str, object], **more: object) -> Cluster:
    data = {"name": "c", "inter_machine": {"bandwidth_gb_per_s": 10, "latency_us": 3}, "machines": list(machines)}
    return cluster_from_section(Section(data | more, "test"))


def of(gpu: str, num_gpus: int, name: str, **more: object) -> dict[str, object]:
    return {"name": name, "gpu": gpu, "num_gpus": num_gpus, "intra_bandwidth_gb_per_s": 100, **more}


TWO = cluster(
    of("a100_80gb_sxm", 4, "a"), of("h100_80gb_sxm", 2, "h", network_interfaces=2), of("v100_16gb_sxm", 2, "v")
)


@st.composite
def layout_cases(draw: st.DrawFn) -> tuple[Problem, SequenceParallel, int]:
    """A problem, a layout of some of its devices in any order, and a micro-batch size."""
    problem = draw(problems().filter(lambda p: p.workload.seq_len >= 16))
    devices = draw(st.permutations(range(problem.cluster.num_devices)))
    chosen = tuple(devices[: draw(st.integers(1, min(len(devices), problem.workload.seq_len)))])
    layout = draw(layouts_of(chosen, problem.workload.seq_len, problem.model.num_heads))
    return problem, layout, draw(st.sampled_from((1, 2, 4)))


def alone(problem: Problem, device: int) -> SequenceParallel:
    return SequenceParallel(
        (SequenceGroup((device,), (problem.workload.seq_len,), (problem.model.num_heads,)),), "zigzag"
    )


@settings(max_examples=20, deadline=None)
@given(problem=problems(), size=st.sampled_from((1, 2, 8)), zero=st.integers(0, 1), held=st.integers(0, 3))
def test_one_device_takes_what_tp_1_takes(problem: Problem, size: int, zero: int, held: int) -> None:
    """By the same kernels."""
    model = PlanPricer(problem, frameworks()["hexiopt_flash"])
    tp_group, stage = model.tp_group((0,)), model.stages.sequence_stage(alone(problem, 0), size)
    layers, shards = problem.model.num_layers, StateSharding(zero, 3)
    for policy, first, last in product(RECOMPUTE_POLICIES, (False, True), (False, True)):
        times = stage.stage_s((policy,) * layers, first, last)
        assert times == pytest.approx(model.stage_s(tp_group, layers, first, last, size, policy), rel=1e-12)
        (memory,) = stage.memory.per_device(stage.memory.stage(((policy,) * layers,), first, last, (held,), shards))
        expected = model.stages.memory_model(tp_group, size).stage(layers, first, last, policy, holding(held), shards)
        for part in MEMORY_PARTS:
            assert getattr(memory, part) == pytest.approx(getattr(expected, part), rel=1e-12), part


@settings(max_examples=30, deadline=None)
@given(case=layout_cases(), policy=st.sampled_from(RECOMPUTE_POLICIES))
def test_the_simulation_ends_when_the_recurrence_says(case: tuple[Problem, SequenceParallel, int], policy: str) -> None:
    problem, layout, size = case
    stage = PlanPricer(problem).stages.sequence_stage(layout, size)
    for phases in (list(stage.forward()), list(stage.backward(policy))):
        events = simulate_layer(stage, phases)
        ended = np.zeros(len(layout.devices))
        for event in events:
            for place in {event.place, event.receiver} if event.kind == "ring" else {event.place}:
                ended[place] = max(ended[place], event.end_s)
        assert ended == pytest.approx(ends_s(stage.members, stage.peers, phases), rel=1e-9)
    host_s = stage.framework.layer_host_s * (2 if policy == "full" else 1)
    assert stage.layer_s(policy)[1] == pytest.approx(max(host_s, *(event.end_s for event in events)), rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(case=layout_cases())
def test_events_of_a_device_do_not_overlap_and_messages_wait(case: tuple[Problem, SequenceParallel, int]) -> None:
    problem, layout, size = case
    stage = PlanPricer(problem).stages.sequence_stage(layout, size)
    events = simulate_layer(stage, stage.backward("selective"))
    begun: dict[tuple[int, int, int], float] = {}
    for event in events:
        if event.kind in ("work", "attention"):
            begun[event.place, event.phase, event.step] = event.start_s
    for event in events:
        if event.kind == "ring":
            ends = [begun[place, event.phase, event.step] for place in (event.place, event.receiver)]
            assert event.start_s == max(ends)
            for place in (event.place, event.receiver):
                assert begun.get((place, event.phase, event.step + 1), math.inf) >= event.end_s
        elif event.kind == "exchange":
            before = [begun[place, event.phase - 1, step] for place, p, step in begun if p == event.phase - 1]
            assert not before or event.start_s >= min(before)


def test_rings_carry_the_keys_that_are_needed_and_gradients_all_the_way() -> None:
    """Bytes of each message counted over sub-rings and blocks: only bandwidth takes time, on links of their own."""
    machines = [of("a100_80gb_sxm", 1, name) for name in "abcdef"]
    problem = Problem(
        cluster(*machines, inter_machine={"bandwidth_gb_per_s": 1, "latency_us": 0}), MODEL, Workload(seq_len=64)
    )
    groups = (
        SequenceGroup((0, 1), (20, 4), (5, 3)),
        SequenceGroup((2, 3), (10, 6), (2, 6)),
        SequenceGroup((4, 5), (7, 17), (4, 4)),
    )
    for order in ("contiguous", "zigzag"):
        layout = SequenceParallel(groups, order)
        stage = SequenceStage(problem, PlanPricer(problem).framework, layout, 2)
        runs, rings = group_ranges(layout), sub_rings(layout, 8, 2)
        sent: Counter[tuple[bool, int, int, int]] = Counter()
        for back, (block, ring) in product((False, True), product(range(3), rings)):
            num_bytes = 2 * 2 * (ring.kv_heads[1] - ring.kv_heads[0]) * 32 * 2 * sum(groups[block].tokens)
            needed = [
                any(
                    k <= q
                    for run in runs[(block + j) % 3]
                    for q in range(*run)
                    for keys in runs[block]
                    for k in range(*keys)
                )
                for j in range(3)
            ]
            for step in range(2):
                if any(needed[step + 1 :]):
                    sender = (block + step) % 3
                    sent[back, step, groups[sender].devices[ring.places[sender]], _next(groups, ring, sender)] += (
                        num_bytes
                    )
            for step in range(3) if back else ():
                sender = (block + step) % 3
                sent[back, step + 1, groups[sender].devices[ring.places[sender]], _next(groups, ring, sender)] += (
                    num_bytes
                )
        for back in (False, True):
            phases = list(stage.backward("none") if back else stage.forward())
            of_device: Counter[tuple[bool, int, int]] = Counter()
            into: Counter[tuple[bool, int, int]] = Counter()
            for (backward, step, a, b), num_bytes in sent.items():
                of_device[backward, step, a] += num_bytes
                into[backward, step, b] += num_bytes
            seconds = {
                (event.step, layout.devices[event.place], layout.devices[event.receiver]): event.end_s - event.start_s
                for event in simulate_layer(stage, phases)
                if event.kind == "ring"
            }
            expected = {
                (step, a, b): max(of_device[back, step, a], into[back, step, b]) / 1e9
                for (backward, step, a, b) in sent
                if backward == back
            }
            assert seconds == pytest.approx(expected, rel=1e-9)


def _next(groups: tuple[SequenceGroup, ...], ring: object, sender: int) -> int:
    after = (sender + 1) % len(groups)
    return groups[after].devices[ring.places[after]]  # type: ignore[attr-defined]


def test_all_to_alls_carry_each_token_to_each_head_that_reads_it() -> None:
    problem = Problem(TWO, MODEL, Workload(seq_len=64, precision="fp16"))
    group = SequenceGroup((0, 1, 4, 5), (30, 4, 20, 10), (3, 1, 2, 2))
    layout = SequenceParallel((group,))
    stage = PlanPricer(problem).stages.sequence_stage(layout, 2)
    ranges = head_ranges(group.heads)
    moved = {}
    for (i, a), (j, b) in product(enumerate(group.devices), repeat=2):
        low, high = kv_range(ranges[j], 8, 2)
        moved[a, b] = 0 if a == b else 2 * group.tokens[i] * (group.heads[j] + 2 * (high - low)) * 32 * 2
    # Device 4 and 5 have an interface each, devices 0 and 1 share one.
    out = moved[0, 4] + moved[0, 5] + moved[1, 4] + moved[1, 5]
    into = [moved[0, b] + moved[1, b] for b in (4, 5)]
    inside = max(moved[0, 1], moved[1, 0]) / 100e9, max(moved[4, 5], moved[5, 4]) / 100e9
    back = [(moved[4, a] + moved[5, a]) for a in (0, 1)]
    machine = TWO.machines[0]
    crossing_s = max(out, sum(back), *into) / 10e9 + 3e-6
    assert machine.nic_bandwidth_bytes_per_s == 10e9
    phases = list(stage.forward())
    times = [e.end_s - e.start_s for e in simulate_layer(stage, phases) if e.kind == "exchange" and e.phase == 1]
    assert max(times) == pytest.approx(max(crossing_s, max(inside) + machine.intra_latency_s), rel=1e-9)
    assert len(times) == 12


PURE = replace(
    catalogue()["a100_80gb_sxm"],
    flops_bf16=1e12,
    hbm_bytes_per_s=math.inf,
    efficiency=Efficiency(1.0, 0.0, 1.0, 1.0, 0.0),
)


def pure() -> Cluster:
    """Four devices on which only FLOPs take time."""
    machine = replace(TWO.machines[0], gpu=PURE, intra_bandwidth_bytes_per_s=math.inf, intra_latency_s=0.0)
    return replace(TWO, machines=(machine,))


@given(st.sampled_from(((1, 4), (2, 2), (4, 1), (1, 2))), st.sampled_from((2, 8)))
def test_equal_shards_of_equal_devices_end_together(shape: tuple[int, int], kv_heads: int) -> None:
    count, size = shape
    devices = range(count * size)
    problem = Problem(pure(), replace(MODEL, num_kv_heads=kv_heads), Workload(seq_len=128))
    groups = tuple(
        SequenceGroup(tuple(devices[g * size : (g + 1) * size]), (128 // count // size,) * size, (8 // size,) * size)
        for g in range(count)
    )
    stage = PlanPricer(problem).stages.sequence_stage(SequenceParallel(groups, "zigzag"), 1)
    for phases in (stage.forward(), stage.backward("none")):
        ended = ends_s(stage.members, stage.peers, phases)
        assert ended == pytest.approx(np.full(len(ended), ended[0]), rel=1e-9)


def test_attention_counts_every_pair_once() -> None:
    """On a GPU on which only attention takes time, a ring of one-device groups does the pairs of the causal mask."""
    problem = Problem(pure(), MODEL, Workload(seq_len=96))
    layout = SequenceParallel(tuple(SequenceGroup((d,), (t,), (8,)) for d, t in enumerate((10, 50, 6, 30))), "zigzag")
    stage = PlanPricer(problem).stages.sequence_stage(layout, 1)
    attention: Counter[int] = Counter()
    for event in simulate_layer(stage, stage.forward()):
        if event.kind == "attention":
            attention[event.place] += round((event.end_s - event.start_s) * 1e12)  # type: ignore[assignment]
    for place, runs in enumerate(group_ranges(layout)):
        pairs = sum(q + 0.5 for run in runs for q in range(*run))
        assert attention[place] == pytest.approx(4 * 32 * 8 * pairs, abs=1e3)


@settings(max_examples=20, deadline=None)
@given(case=layout_cases(), policy=st.sampled_from(RECOMPUTE_POLICIES), held=st.integers(1, 4))
def test_memory_counts_own_tokens_and_own_heads(
    case: tuple[Problem, SequenceParallel, int], policy: str, held: int
) -> None:
    problem, layout, size = case
    model, width = problem.model, problem.workload.element_bytes
    stage = PlanPricer(problem).stages.sequence_stage(layout, size)

    def memory(layers: int) -> tuple[Memory, ...]:
        return stage.memory.per_device(stage.memory.stage(((policy,) * layers,), False, False, (held,)))

    statistics = 4 * (2 if model.norm_bias else 1)
    ranges = [held_ for group in layout.groups for held_ in head_ranges(group.heads)]
    places = [(g, k) for g, group in enumerate(layout.groups) for k in range(len(group.devices))]
    for (g, k), heads, few, many in zip(places, ranges, memory(1), memory(2), strict=True):
        group = layout.groups[g]
        tokens, together = size * group.tokens[k], size * sum(group.tokens)
        kv = kv_range(heads, model.num_heads, model.num_kv_heads)
        q_size, kv_size = (heads[1] - heads[0]) * model.head_dim, (kv[1] - kv[0]) * model.head_dim
        if policy == "full":
            expected = tokens * width * model.hidden_size
        else:
            inner = (3 if model.gated_mlp else 2) * model.ffn_size
            expected = tokens * (2 * (2 * model.hidden_size * width + statistics) + width * (inner + model.q_size))
            expected += together * width * 2 * kv_size + together * width * q_size
        if policy == "none":
            continue
        assert many.activations - few.activations == pytest.approx(held * expected, rel=1e-9)
        assert many.weights - few.weights == model.layer_params * width


@given(
    st.sampled_from(
        (
            ((8, 8), (40, 24), "the groups have 65 tokens"),
            ((9,), (65,), "group 0 has 9 heads"),
        )
    )
)
def test_what_does_not_fit_is_refused(case: tuple[tuple[int, ...], tuple[int, ...], str]) -> None:
    heads, tokens, message = case
    groups = tuple(
        SequenceGroup((d,), (t + (d == 0) * (len(heads) == 2),), (h,))
        for d, (t, h) in enumerate(zip(tokens, heads, strict=True))
    )
    problem = Problem(TWO, MODEL, Workload(seq_len=64, precision="fp16"), Space(sequence=True))
    with pytest.raises(ValueError, match=message):
        PlanPricer(problem).stages.sequence_stage(SequenceParallel(groups), 1)
