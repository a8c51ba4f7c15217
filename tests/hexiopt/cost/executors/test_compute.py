"""Compute: FLOPs against the model's own count, efficiency, launches, and the busiest rank by brute force."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.executors.compute import (
    OperatorTimes,
    embedding_compute,
    head_compute,
    layer_compute,
    optimizer_compute_s,
)
from hexiopt.numbers.frameworks import frameworks
from hexiopt.numbers.gpus import Efficiency, Gpu, catalogue
from hexiopt.problem.model import ModelSpec, largest_shard
from hexiopt.problem.workload import Workload
from tests.strategies import models

A100 = catalogue()["a100_80gb_sxm"]
PEAK = 1e12
# A GPU on which only FLOPs take time.
PURE = replace(A100, flops_bf16=PEAK, hbm_bytes_per_s=math.inf, efficiency=Efficiency(1.0, 0.0, 1.0, 1.0, 0.0))
GROUPED = ModelSpec(
    name="m",
    architecture="llama",
    num_layers=3,
    hidden_size=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    ffn_size=1000,
    vocab_size=5000,
    max_positions=4096,
)
PROJECTED = ModelSpec(
    name="opt",
    architecture="opt",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    ffn_size=256,
    vocab_size=1000,
    max_positions=128,
    projected_embedding=32,
    attention_bias=True,
    mlp_bias=True,
    tied_embeddings=True,
    final_norm=False,
    activation="relu",
)
WORK = Workload(global_batch=8, seq_len=1024)


def flops_of(model: ModelSpec, seq_len: int, size: int, tp: int = 1) -> tuple[float, float]:
    """Forward and backward FLOPs of the whole model on one pure GPU, from the times."""
    work = replace(WORK, seq_len=seq_len)
    layer = layer_compute(model.layer, work, PURE, tp, size, frameworks()["hexiopt_flash"])
    ends = [embedding_compute(model, work, PURE, tp, size), head_compute(model, work, PURE, tp, size)]
    forward = model.num_layers * layer.forward_s + sum(end.forward_s for end in ends)
    backward = model.num_layers * layer.backward_s + sum(end.backward_s for end in ends)
    return forward * PEAK, backward * PEAK


@given(model=models(), seq_len=st.integers(1, 4096), size=st.sampled_from((1, 2, 4)))
def test_flops_are_the_models(model: ModelSpec, seq_len: int, size: int) -> None:
    """Forward exactly; backward twice that, and half an attention more for recomputed scores (fused)."""
    forward, backward = flops_of(model, seq_len, size)
    tokens = size * seq_len
    counted = tokens * model.model_flops_per_token(seq_len) / 3
    attention = tokens * model.num_layers * model.attention_flops_per_token(seq_len)
    assert forward == pytest.approx(counted, rel=1e-12)
    assert backward == pytest.approx(2 * counted + 0.5 * attention, rel=1e-12)


def test_flops_of_a_projected_embedding() -> None:
    """OPT-350M's LM head is as narrow as its embedding, and projections stand before and after the layers."""
    forward, _ = flops_of(PROJECTED, 128, 1)
    assert forward == pytest.approx(128 * PROJECTED.model_flops_per_token(128) / 3)


def test_even_tensor_parallelism_divides_the_flops() -> None:
    whole, half = flops_of(GROUPED, 512, 1), flops_of(GROUPED, 512, 2, tp=2)
    assert half == pytest.approx(whole)  # twice the tokens on half the width


# ------------------------------------------------------------------ shards


@st.composite
def heads(draw: st.DrawFn) -> ModelSpec:
    num_kv_heads = draw(st.integers(1, 16))
    return replace(
        GROUPED,
        num_kv_heads=num_kv_heads,
        num_heads=num_kv_heads * draw(st.integers(1, 8)),
        ffn_size=draw(st.integers(1, 100)),
        vocab_size=draw(st.integers(1, 100)),
    )


@given(model=heads(), tp=st.integers(1, 20))
def test_the_busiest_rank_by_brute_force(model: ModelSpec, tp: int) -> None:
    """Heads dealt out in order, as evenly as they go; a rank needs the key-value heads that its heads use."""
    ranks: list[list[int]] = []
    start = 0
    for rank in range(tp):
        end = start + len(range(rank, model.num_heads, tp))
        ranks.append(list(range(start, end)))
        start = end
    group = model.num_heads // model.num_kv_heads
    shard = largest_shard(model, tp)
    assert start == model.num_heads
    assert shard.heads == max(map(len, ranks))
    assert shard.kv_heads == max(len({head // group for head in rank}) for rank in ranks)
    assert shard.ffn == max(len(range(rank, model.ffn_size, tp)) for rank in range(tp))
    assert shard.vocab == max(len(range(rank, model.vocab_size, tp)) for rank in range(tp))
    assert shard.tp == tp


def test_uneven_heads_cost_what_the_fullest_rank_takes() -> None:
    uneven = replace(GROUPED, num_heads=5, num_kv_heads=5)
    fuller = replace(GROUPED, num_heads=6, num_kv_heads=6)
    assert layer_compute(uneven.layer, WORK, PURE, 2, 1) == layer_compute(fuller.layer, WORK, PURE, 2, 1)


# ------------------------------------------------------------------ rates


def clock(**changes: float) -> OperatorTimes:
    pure = {"gemm_max": 1.0, "gemm_half_flops": 0.0, "attention_max": 1.0, "memory_max": 1.0, "launch_s": 0.0}
    efficiency = Efficiency(**(pure | changes))
    return OperatorTimes(replace(A100, flops_bf16=PEAK, hbm_bytes_per_s=1e9, efficiency=efficiency), "bf16")


def test_efficiency_falls_for_small_products() -> None:
    timed = clock(gemm_max=0.8, gemm_half_flops=1e9)
    assert 1e9 / timed.gemm_s(1e9) == pytest.approx(0.4 * PEAK)  # half of gemm_max at gemm_half_flops
    assert 1e15 / timed.gemm_s(1e15) == pytest.approx(0.8 * PEAK, rel=1e-5)
    rates = [flops / timed.gemm_s(flops) for flops in (1e6, 1e8, 1e10, 1e12)]
    assert rates == sorted(rates)


def test_nothing_is_faster_than_its_launch() -> None:
    timed = clock(launch_s=1e-5)
    assert timed.gemm_s(1.0) == timed.attention_s(1.0) == timed.memory_s(1.0) == 1e-5
    assert timed.memory_s(1.0, kernels=3) == pytest.approx(3e-5)
    assert timed.gemm_s(1e9) == pytest.approx(1e-3)
    assert timed.memory_s(1e9) == pytest.approx(1.0)


def test_launches_dominate_small_micro_batches_at_high_tp() -> None:
    """Four products, one attention, six memory kernels."""
    slow = replace(A100, efficiency=replace(A100.efficiency, launch_s=1.0))
    layer = layer_compute(GROUPED.layer, replace(WORK, seq_len=1), slow, 8, 1)
    assert layer.forward_s == pytest.approx(4 + 1 + 6)


@given(model=models(), tp=st.sampled_from((1, 2, 3)), size=st.sampled_from((1, 4)))
def test_unfused_attention_costs_more(model: ModelSpec, tp: int, size: int) -> None:
    fused = layer_compute(model.layer, WORK, A100, tp, size)
    unfused = layer_compute(model.layer, WORK, replace(A100, flash_attention=False), tp, size)
    assert unfused.forward_s > fused.forward_s
    assert unfused.backward_s > fused.backward_s
    assert unfused.attention_s > fused.attention_s


@pytest.mark.parametrize("gpu", [PURE, replace(PURE, flash_attention=False), replace(A100, flash_attention=False)])
def test_chunks_cost_as_sequences_of_their_own(gpu: Gpu) -> None:
    """Also where a GPU holds all scores."""
    (kind,) = GROUPED.kinds
    assert kind.attention is not None
    chunked = replace(kind, mixers=(replace(kind.attention, window=1024, chunked=True),))
    long, short = replace(WORK, seq_len=4096), replace(WORK, seq_len=1024)
    of_chunks = layer_compute(GROUPED.layer_of(chunked), long, gpu, 1, 2)
    expected = layer_compute(GROUPED.layer, short, gpu, 1, 8)
    assert of_chunks.attention_s == pytest.approx(expected.attention_s)


def slow_down(gpu: Gpu) -> Gpu:
    return replace(gpu, flops_bf16=(gpu.flops_bf16 or 0) / 2, hbm_bytes_per_s=gpu.hbm_bytes_per_s / 2)


@given(model=models(), tp=st.integers(1, 6), size=st.sampled_from((1, 2)))
def test_more_work_and_slower_hardware_take_longer(model: ModelSpec, tp: int, size: int) -> None:
    for function in (layer_compute, embedding_compute, head_compute):
        what: Any = model.layer if function is layer_compute else model
        times = function(what, WORK, A100, tp, size)
        for other in (
            function(what, WORK, A100, tp, 2 * size),
            function(what, WORK, slow_down(A100), tp, size),
            function(what, replace(WORK, precision="fp32"), A100, tp, size),
        ):
            assert other.forward_s >= times.forward_s
            assert other.backward_s >= times.backward_s
    if model.num_heads == model.num_kv_heads:  # else a rank's heads may meet more key-value heads
        wider, times = (layer_compute(model.layer, WORK, A100, t, size) for t in (tp + 1, tp))
        assert wider.forward_s <= times.forward_s * (1 + 1e-12)


def test_the_optimiser_moves_its_states() -> None:
    """BF16: master and two moments read and written (24), gradient (2) read, weight (2) written."""
    gpu = replace(A100, hbm_bytes_per_s=1e9, efficiency=replace(A100.efficiency, memory_max=1.0))
    assert optimizer_compute_s(WORK, gpu, 1e9) == pytest.approx(28.0)
    assert optimizer_compute_s(replace(WORK, gradient_bytes=4), gpu, 1e9) == pytest.approx(30.0)
