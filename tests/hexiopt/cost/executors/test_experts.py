"""Experts by hand: products, permutation, all-to-alls inside machines and between them, groups over machines."""

from dataclasses import replace
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.validation.shapes import expert_model
from hexiopt import Cluster
from hexiopt.cost.executors.compute import OperatorTimes
from hexiopt.cost.executors.experts.times import ExpertSharing, ExpertTimes, copies_across, exchange_s, expert_load
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.executors.tp_groups import TpGroup, TpGroups
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.frameworks import Framework, default_framework, frameworks
from hexiopt.numbers.gpus import catalogue
from hexiopt.problem.kinds import Attention, Dense, Experts, LayerKind
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from tests.hexiopt.shapes_of_kinds import model_of

GPU = catalogue()["h100_80gb_sxm"]
PART = Experts(count=128, top_k=8, ffn_size=768)
FORCED = Workload(global_batch=64, seq_len=4096, precision="bf16", routing="forced")
HIDDEN = 2048
ATTENTION = Attention(heads=16, kv_heads=16, qk_dim=64, v_dim=64)
PLAIN, FUSED = frameworks()["megatron_moe_2026"], frameworks()["megatron_moe_2026_fused"]


def group(devices: int, machines: int = 1, bandwidth: float = 1e11, across: float = 1e10) -> TpGroup:
    return TpGroup(GPU, devices, bandwidth, 0.0, 1, machines, across)


def seconds(framework: Framework, devices: int) -> tuple[float, float]:
    """Of one sequence for each device."""
    times = ExpertTimes(GPU, FORCED, framework, HIDDEN)
    return times.seconds(PART, ExpertSharing(devices, devices, devices), 4096.0)


def test_products_permutation_and_activation_by_hand() -> None:
    tokens, devices = 4096.0, 8
    rows = tokens * 8  # each device gets as many copies as it sends
    clock = OperatorTimes(GPU, "bf16")
    tiles = ceil(rows / 16 / 128) * 128

    def product_s(width_in: int, width_out: int, weight_bytes: int) -> float:
        flops = 2.0 * 16 * tiles * width_in * width_out
        moved = 16 * width_in * width_out * weight_bytes + rows * (width_in + width_out) * 2
        return clock.gemm_s(flops) + clock.memory_s(moved)

    forward_s = product_s(HIDDEN, 1536, 2) + product_s(768, HIDDEN, 2)
    weights_s = product_s(HIDDEN, 1536, 4) + product_s(768, HIDDEN, 4)  # gradients in 2 bytes, read and written
    permute_s = (2 * tokens + 4 * rows) * HIDDEN * 2 / (0.5 * GPU.hbm_bytes_per_s) + 4 * GPU.efficiency.launch_s
    activation_s = clock.memory_s(PLAIN.memory_traffic * rows * 3 * 768 * 2, 2)
    router_s = clock.memory_s(tokens * 128 * 24, 8)
    there_s, back_s = seconds(PLAIN, devices)
    assert there_s == pytest.approx(forward_s + permute_s + activation_s + router_s, rel=1e-12)
    assert back_s == pytest.approx(forward_s + weights_s + permute_s + 2 * (activation_s + router_s), rel=1e-12)


def test_what_is_fused_is_a_share_of_permutation_and_activation() -> None:
    plain, fused = (seconds(framework, 8) for framework in (PLAIN, FUSED))
    rows, hbm = 4096.0 * 8, GPU.hbm_bytes_per_s
    permute_s = (2 * 4096.0 + 4 * rows) * HIDDEN * 2 / (0.5 * hbm)
    activation_s = OperatorTimes(GPU, "bf16").memory_s(PLAIN.memory_traffic * rows * 3 * 768 * 2, 2)
    left = 1 - FUSED.expert_passes
    assert plain[0] - fused[0] == pytest.approx(left * (permute_s + activation_s))
    assert plain[1] - fused[1] == pytest.approx(left * (permute_s + 2 * activation_s))


def test_an_all_to_all_inside_a_machine_by_hand() -> None:
    # 4,096 tokens a device, 8 copies of 4 KiB each, of which 7 of 8 leave the device.
    sent = 4096 * 8 * 7 / 8 * HIDDEN * 2
    assert exchange_s(PART, FORCED, HIDDEN, group(8), 8, False) == pytest.approx(
        sent / (1e11 * c.ALL_TO_ALL_OF_RING) + 3 * c.ALL_TO_ALL_S
    )
    assert exchange_s(PART, FORCED, HIDDEN, group(1), 1, False) == 0.0


def test_between_machines_a_copy_goes_to_each_expert_or_to_each_machine() -> None:
    # Two machines: 4 of 8 copies leave; to a machine one does, unless all 8 experts stand at home (1 of 256).
    assert copies_across(PART, 2, False) == pytest.approx(4.0)
    assert copies_across(PART, 2, True) == pytest.approx(1 - 1 / 256)
    assert copies_across(PART, 1, True) == copies_across(PART, 1, False) == 0.0
    over = group(16, machines=2)
    token_bytes = 4096 * HIDDEN * 2
    for to_machines, copies in ((False, 4.0), (True, 1 - 1 / 256)):
        inside_s = token_bytes * 8 * 7 / 8 / (1e11 * c.ALL_TO_ALL_OF_RING)
        seconds = max(inside_s, token_bytes * copies / 1e10) + 4 * c.ALL_TO_ALL_S
        assert exchange_s(PART, FORCED, HIDDEN, over, 16, to_machines) == pytest.approx(seconds)


@given(st.integers(1, 16), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_copies_to_machines_are_those_of_drawn_experts(machines: int, top_k: int, seed: int) -> None:
    drawn = np.random.default_rng(seed).integers(machines, size=(4000, top_k))
    elsewhere = np.mean([len(set(row) - {0}) for row in drawn.tolist()])  # the token is in machine 0
    part = Experts(count=256, top_k=top_k, ffn_size=8)
    # Of all machines but its own, each with an expert gets one.
    expected = copies_across(part, machines, True)
    assert elsewhere == pytest.approx(expected, abs=5 * 0.5 * np.sqrt(machines) / np.sqrt(4000) + 1e-12)


def test_natural_routing_fills_the_fullest_device() -> None:
    natural = Workload(global_batch=64, seq_len=4096, precision="bf16", routing="natural")
    assert expert_load(natural, 8) == c.EXPERT_IMBALANCE
    assert expert_load(natural, 1) == expert_load(FORCED, 8) == 1.0
    times = [exchange_s(PART, work, HIDDEN, group(8), 8, False) - 3 * c.ALL_TO_ALL_S for work in (natural, FORCED)]
    assert times[0] == pytest.approx(c.EXPERT_IMBALANCE * times[1])


def test_groups_over_machines_have_the_links_of_the_slowest() -> None:
    cluster = Cluster.of({"h100_80gb_sxm": 24}, inter_gb_per_s=50)
    groups = TpGroups(cluster, shares_experts=True)
    inside, over = groups.of(tuple(range(8))), groups.of(tuple(range(16)))
    assert (inside.machines, over.machines, over.tp) == (1, 2, 16)
    assert (over.bandwidth, over.latency_s) == (inside.bandwidth, inside.latency_s)
    users = 8 // cluster.machines[0].num_interfaces
    assert over.across_bandwidth == pytest.approx(cluster.machines[0].nic_bandwidth_bytes_per_s / users)
    assert groups.of(tuple(range(8, 24))) is over, "equal groups are one class"
    assert groups.with_degree(over, 2).replicas == 8
    assert groups.with_degree(over, 2).across_bandwidth == over.across_bandwidth
    assert inside.across_bandwidth == float("inf")
    assert log2(over.tp) == 4


def test_shapes_of_models_with_experts_are_exact() -> None:
    # Published counts of the safetensors on the Hub.
    published = {
        "qwen3-30b-a3b": 30_532_122_624,
        "qwen3-235b-a22b": 235_093_634_560,
        "qwen3-next-80b-a3b": 79_674_391_296,
        "gpt-oss-20b": 20_914_757_184,
        "gpt-oss-120b": 116_829_156_672,
        "deepseek-v3": 671_026_404_352,
        "glm-4.5-air": 106_852_245_504,
        "mixtral-8x22b": 140_630_071_296,
        "nemotron-3-nano-30b-a3b": 31_577_937_344,
        "nemotron-3-super-120b-a12b": 120_668_687_360,
    }
    for name, count in published.items():
        model = expert_model(name)
        assert model is not None
        assert model.num_params == count, name
    assert expert_model("unknown") is None


def test_experts_cut_by_columns_are_narrower_ones_of_one_device() -> None:
    whole, cut = ExpertSharing(8, 4, 2), ExpertSharing(8, 1, 2, by_columns=True)
    assert whole.on_device(PART) == (PART, whole)
    assert cut.on_device(PART) == (replace(PART, ffn_size=96), ExpertSharing(1, 1, 2))
    assert cut.count(PART) == whole.count(PART) == 16


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_one_expert_by_columns_is_an_mlp_with_a_router(tp: int) -> None:
    """TP of experts by columns is that of an MLP: what one of them adds to a layer is the router and permutation."""
    cluster, work = Cluster.of({"h100_80gb_sxm": 8}), Workload(64, 4096)
    columns = replace(default_framework(), expert_columns=True, layer_host_s=0.0)
    expert, dense = (
        StageModel(Problem(cluster, model_of(LayerKind((ATTENTION,), (channels,))), work), columns)
        for channels in (Experts(count=1, top_k=1, ffn_size=4096), Dense(ffn_size=4096))
    )
    times, bytes_ = [], []
    for stages in (expert, dense):
        cell = stages.cell(stages.tp_group(tuple(range(tp))), 1)
        assert (cell.degree, cell.replicas) == (tp, 1)
        times.append(stages.layer_s(cell, 1, "none"))
        bytes_.append(stages.memory_model(cell, 1).of_kind[0].layer)
    rows, hbm = 4096.0, GPU.hbm_bytes_per_s
    clock = OperatorTimes(GPU, "bf16")
    routed_s = (2 * rows + 4 * rows) * 512 * 2 / (0.5 * hbm) + 4 * GPU.efficiency.launch_s
    routed_s += clock.memory_s(rows * c.ROUTER_SCORE_BYTES, c.ROUTER_KERNELS)
    for there, mlp, passes in zip(*times, (1, 2), strict=True):
        # Grouped products pass their operands through the memory beside the tiles; and a product of the router.
        assert there >= mlp
        assert there - mlp < passes * (routed_s + 3e-4)
    assert 0 <= bytes_[0] - bytes_[1] <= 3 * rows * 512 * 2


def test_whole_experts_take_less_time_and_room_than_columns() -> None:
    cluster, work, model = Cluster.of({"h100_80gb_sxm": 8}), Workload(64, 4096), expert_model("qwen3-30b-a3b")
    assert model is not None
    whole, cut = (
        StageModel(Problem(cluster, model, work), replace(default_framework(), expert_columns=by_columns))
        for by_columns in (False, True)
    )
    group_s = [sum(stages.layer_s(stages.tp_group(tuple(range(8))), 8, "none")) for stages in (whole, cut)]
    assert group_s[1] > 1.5 * group_s[0]
    layer_bytes = []
    for stages in (whole, cut):
        cell = stages.tp_groups.with_degree(stages.tp_group(tuple(range(8))), 8)
        layer_bytes.append(stages.memory_model(cell, 8).of_kind[0].layer)
    # 8 copies of a token, of 2,048 values, on every device, or on one of eight.
    assert layer_bytes[1] > layer_bytes[0] + 4096 * 8 * 2048 * 2
