"""Memory: parameters, activations by schedule position, the largest stage that fits, Llama-2 7B by hand."""

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.executors.memory import MEMORY_PARTS, MemoryModel, StateSharding
from hexiopt.files.huggingface import read_model
from hexiopt.numbers import coefficients as c
from hexiopt.numbers.gpus import Gpu, catalogue
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import RECOMPUTE_POLICIES, Workload
from hexiopt.schedules.in_flight import holding, in_flight
from hexiopt.schedules.registry import INTERLEAVED
from hexiopt.schedules.schedule import StagePosition
from hexiopt.units import GIB
from tests.conftest import ROOT
from tests.strategies import compositions, models, workloads

A100, V100, H100 = (catalogue()[name] for name in ("a100_80gb_sxm", "v100_32gb_sxm", "h100_80gb_sxm"))
LLAMA = read_model(ROOT / "conf" / "model" / "llama2_7b.yaml")
OPTIONS = {
    "model": models(),
    "workload": workloads(),
    "gpu": st.sampled_from((A100, V100)),
    "tp": st.integers(1, 8),
    "size": st.sampled_from((1, 2, 8)),
}


# ------------------------------------------------------------------ parameters


@given(model=models(), data=st.data())
def test_stages_of_a_pipeline_hold_every_parameter_once(model: ModelSpec, data: st.DataObject) -> None:
    """A tied matrix has a second copy on the last stage, unless that is also the first."""
    memory = MemoryModel(model, Workload(), A100, 1, 1)
    count = data.draw(st.integers(1, model.num_layers))
    layers = data.draw(compositions(model.num_layers, count))
    total = sum(memory.num_params(n, k == 0, k == count - 1) for k, n in enumerate(layers))
    copy = model.vocabulary_params if model.tied_embeddings and count > 1 else 0
    assert total == model.num_params + copy


@given(model=models(), tp=st.integers(1, 8))
def test_the_fullest_rank_holds_at_least_its_share(model: ModelSpec, tp: int) -> None:
    memory = MemoryModel(model, Workload(), A100, tp, 1)
    share = memory.num_params(model.num_layers, True, True)
    assert share >= model.num_params / tp * (1 - 1e-12)
    assert share <= model.num_params


def test_bytes_per_parameter() -> None:
    """BF16: weight 2, gradient 2 or 4, master 4, Adam 8. FP32: 4 + 4 + 8."""
    for workload, expected in (
        (Workload(), (2, 2, 4, 8)),
        (Workload(gradient_bytes=4), (2, 4, 4, 8)),
        (Workload(precision="fp32"), (4, 4, 0, 8)),
        (Workload(precision="tf32", gradient_bytes=2), (4, 4, 0, 8)),
    ):
        memory = MemoryModel(LLAMA, workload, A100, 1, 1).stage(32, True, True, "none", holding(1))
        states = (memory.weights, memory.gradients, memory.master, memory.optimizer)
        assert [part / LLAMA.num_params for part in states] == pytest.approx(expected)


def test_zero_1_shards_master_and_moments_only() -> None:
    model = MemoryModel(LLAMA, Workload(), A100, 2, 1)
    whole, sharded = (model.stage(8, True, False, "none", holding(4), StateSharding(1, n)) for n in (1, 4))
    assert (sharded.master, sharded.optimizer) == (whole.master / 4, whole.optimizer / 4)
    assert replace(sharded, master=0, optimizer=0) == replace(whole, master=0, optimizer=0)


# ------------------------------------------------------------------ Llama-2 7B by hand


def test_llama2_7b_by_hand() -> None:
    """One A100, one sequence of 4,096 tokens, BF16, all in one stage.

    A layer keeps 4 h + q + 2 kv + attention output + 3 f numbers a token: (4 + 4)·4096 + 3·11008 = 65,792,
    that is 514 MiB; 4 bytes of a scale for each token and norm, and 4 of log-sum-exp for each token and head. The loss
    keeps FP32 probabilities, beside one micro-batch's BF16 logits or their gradient. Embedding and loss keep token
    numbers of 8 bytes.
    """
    tokens = 4096
    layer = tokens * (2 * 65_792 + 2 * 4)
    internals = tokens * 32 * 4
    norm = tokens * (2 * 2 * 4096 + 4)
    assert tokens * 2 * 65_792 == 514 * 2**20
    model = MemoryModel(LLAMA, Workload(), A100, 1, 1)
    assert model.layer_activation_bytes("none") == layer + internals
    assert model.layer_activation_bytes("selective") == layer
    assert model.layer_activation_bytes("full") == tokens * 2 * 4096

    memory = model.stage(32, True, True, "none", holding(1))
    assert memory.weights + memory.gradients + memory.master + memory.optimizer == 6_738_415_616 * 16
    assert memory.activations == 32 * (layer + internals) + norm + tokens * 8
    assert memory.logits == tokens * (32_000 * (4 + 2) + 8)
    assert memory.buffers == 4 * tokens * 2 * 4096 + 2 * tokens * 2 * 128
    transient = memory.activations + memory.logits + memory.buffers
    assert memory.reserve == c.FRAGMENTATION * transient
    assert memory.communicators == 0  # none stated
    assert memory.total == pytest.approx(sum(getattr(memory, part) for part in MEMORY_PARTS))
    assert 117 * GIB < memory.total < 120 * GIB

    # What the final norm kept is gone when the last layer is recomputed.
    full = model.stage(32, True, True, "full", holding(1))
    assert full.activations == 32 * tokens * 2 * 4096 + (layer + internals - tokens * 2 * 4096) + tokens * 8


def test_llama2_7b_over_four_ranks_by_hand() -> None:
    """Everything of a layer is split by four; norms' parameters are not, the final one's neither."""
    model = MemoryModel(LLAMA, Workload(), A100, 4, 1)
    tokens = 4096
    assert model.layer_activation_bytes("selective") == tokens * (2 * 65_792 + 2 * 4) / 4
    assert model.layer_activation_bytes("full") == tokens * 2 * 1024
    norms = 2 * 4096
    assert model.num_params(1, False, False) == (LLAMA.layer_params - norms) / 4 + norms
    assert model.num_params(0, False, True) == LLAMA.vocabulary_params / 4 + 4096
    tied = MemoryModel(replace(LLAMA, tied_embeddings=True), Workload(), A100, 4, 1)
    assert [tied.num_params(0, first, True) for first in (False, True)] == [
        LLAMA.vocabulary_params / 4 + 4096,
        LLAMA.vocabulary_params / 4 + 4096,
    ]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "copied"),
    [(32, 32, 3, 0), (32, 8, 4, 0), (32, 8, 16, 0), (6, 3, 2, 1), (6, 2, 4, 0), (8, 2, 3, 1)],
)
def test_keys_are_copied_where_heads_share_them_unevenly(heads: int, kv_heads: int, tp: int, copied: int) -> None:
    """(6, 3, 2): heads 0 to 2 meet key heads 0, 0, 1. (8, 2, 3): heads 3 to 5 meet 0, 1, 1; heads 0 to 2 only 0."""
    model = replace(LLAMA, num_heads=heads, num_kv_heads=kv_heads)
    plain, split = (MemoryModel(model, Workload(), A100, n, 1) for n in (1, tp))
    of_a_head = 4096 * 4  # log-sum-exp
    internals = split.layer_activation_bytes("none") - split.layer_activation_bytes("selective")
    assert internals == math.ceil(heads / tp) * of_a_head + copied * 2 * 128 * 2 * 4096
    assert plain.layer_activation_bytes("none") - plain.layer_activation_bytes("selective") == heads * of_a_head


def test_unfused_attention_keeps_its_probabilities() -> None:
    """V100: 32 heads · 4,096² · 2 bytes = 1 GiB a layer, which selective recompute saves."""
    model = MemoryModel(LLAMA, Workload(precision="fp16"), V100, 1, 1)
    assert model.layer_activation_bytes("none") - model.layer_activation_bytes("selective") == GIB


# ------------------------------------------------------------------ activations


@given(**OPTIONS, layers=st.integers(1, 9), held=st.integers(1, 9), last=st.booleans())
def test_recompute_stores_less(model, workload, gpu, tp, size, layers, held, last) -> None:  # type: ignore[no-untyped-def]
    memory = MemoryModel(model, workload, gpu, tp, size)
    none, selective, full = (memory.layer_activation_bytes(policy) for policy in RECOMPUTE_POLICIES)
    assert none >= selective >= full > 0
    # Recomputing a layer needs no more than having stored it.
    for policy in RECOMPUTE_POLICIES:
        stored, working = memory.layer_activation_bytes(policy), memory.recompute_working_set_bytes(policy)
        assert working >= 0
        assert stored + working <= none * (1 + 1e-12)
    stages = [memory.stage(layers, False, last, policy, holding(held)).total for policy in RECOMPUTE_POLICIES]
    assert stages[0] >= stages[1] * (1 - 1e-12) >= stages[2] * (1 - 1e-12) ** 2
    more = memory.stage(layers, False, last, "none", holding(held + 1))
    assert more.activations > memory.stage(layers, False, last, "none", holding(held)).activations


@given(**OPTIONS, held=st.integers(1, 9), layers=st.integers(1, 9), ends=st.tuples(st.booleans(), st.booleans()))
def test_one_policy_for_every_layer_is_one_policy(
    model: ModelSpec,
    workload: Workload,
    gpu: Gpu,
    tp: int,
    size: int,
    held: int,
    layers: int,
    ends: tuple[bool, bool],
) -> None:
    memory = MemoryModel(model, workload, gpu, tp, size)
    for policy in RECOMPUTE_POLICIES:
        whole = memory.stage(layers, *ends, policy, holding(held))
        for chunks in ([(policy,) * layers], [(policy,)] * layers):
            mixed = memory.stage_of_ranges(list(map(Counter, chunks)), *ends, ((held,) * len(chunks),))
            assert [getattr(mixed, part) for part in MEMORY_PARTS] == pytest.approx(
                [getattr(whole, part) for part in MEMORY_PARTS], rel=1e-12
            )


def test_policies_per_layer_add_up() -> None:
    """Layers none, full, selective; three micro-batches of the first range and two of the second, with the head."""
    memory = MemoryModel(LLAMA, Workload(), A100, 1, 1)
    none, selective, full = (memory.layer_activation_bytes(policy) for policy in RECOMPUTE_POLICIES)
    mixed = memory.stage_of_ranges([{"none": 1, "full": 1}, {"selective": 1}], False, True, ((3, 2),))
    plain = memory.stage(0, False, True, "none", holding(2))
    working = memory.recompute_working_set_bytes("full", last=True)
    assert mixed.activations == pytest.approx(3 * (none + full) + 2 * selective + working + plain.activations)
    assert mixed.logits == plain.logits
    assert mixed.weights == memory.stage(3, False, True, "none", holding(2)).weights


def test_what_products_in_fp8_read_is_kept_in_fp8() -> None:
    """Outputs of two norms, of attention (beside its own) and of the activation; the head stays in BF16."""
    half, quarter = (MemoryModel(LLAMA, Workload(precision=name), H100, 1, 1) for name in ("bf16", "fp8"))
    tokens, hidden, ffn = 4096, 4096, 11008
    saved = half.layer_activation_bytes("none") - quarter.layer_activation_bytes("none")
    assert saved == tokens * (2 * hidden - hidden + ffn)
    assert half.layer_activation_bytes("full") == quarter.layer_activation_bytes("full")


def test_logits_and_final_norm_stand_on_the_last_stage_only() -> None:
    model = MemoryModel(LLAMA, Workload(), A100, 1, 1)
    middle, last = (model.stage(4, False, end, "full", holding(2)) for end in (False, True))
    assert middle.logits == 0
    assert last.logits == 2 * 4096 * (32_000 * 4 + 8) + 4096 * 32_000 * 2
    # One of the two final norms has been let go of when most is recomputed.
    assert last.activations - middle.activations == 4096 * (2 * 2 * 4096 + 4)


def test_normed_queries_and_keys_are_kept_twice() -> None:
    normed = replace(LLAMA, architecture="qwen3", num_kv_heads=8)
    plain = replace(normed, architecture="llama")
    for policy, more in (("none", 1), ("selective", 1), ("full", 0)):
        with_norms, without = (
            MemoryModel(model, Workload(), A100, 2, 1).layer_activation_bytes(policy) for model in (normed, plain)
        )
        assert with_norms - without == more * 4096 * (2 * (16 + 4) * 128 + 4 * (16 + 4))


# ------------------------------------------------------------------ what fits

IN_FLIGHT = st.one_of(
    st.integers(1, 9).map(holding),
    st.builds(
        lambda s, p, turns, v: in_flight(INTERLEAVED, StagePosition(s % p, p, turns * p, v)),
        *map(st.integers, (0, 1, 1, 2), (8, 5, 20, 4)),
    ),
)


@given(
    **OPTIONS,
    first=st.booleans(),
    last=st.booleans(),
    policy=st.sampled_from(RECOMPUTE_POLICIES),
    held=IN_FLIGHT,
    shards=st.builds(StateSharding, st.integers(0, 3), st.integers(1, 4)),
    layers=st.integers(0, 60),
    nudge=st.sampled_from((-1.0, -1e-9, 0.0, 1e-9, 1.0)),
)
def test_max_layers_is_the_largest_that_fits(  # type: ignore[no-untyped-def]
    model, workload, gpu, tp, size, first, last, policy, held, shards, layers, nudge
) -> None:
    """Limits exactly at, just below and just above what some number of layers takes."""
    memory = MemoryModel(model, workload, gpu, tp, size)
    at = (first, last, policy, held, shards)
    limit = memory.stage(layers, *at).total + nudge
    scan = max((n for n in range(200) if memory.stage(n, *at).total <= limit), default=-1)
    max_layers = memory.max_layers(limit, *at)
    assert max_layers == scan or (scan == -1 and max_layers < 0)


@given(
    **OPTIONS,
    first=st.booleans(),
    last=st.booleans(),
    held=IN_FLIGHT,
    shards=st.builds(StateSharding, st.integers(0, 3), st.integers(1, 4)),
    layers=st.integers(1, 20),
    num_smaller=st.integers(1, 20),
    pair=st.sampled_from(tuple(combinations(RECOMPUTE_POLICIES, 2))),
    nudge=st.sampled_from((-1e6, 1e6)),
)
def test_least_lean_is_the_fewest_that_fit(  # type: ignore[no-untyped-def]
    model, workload, gpu, tp, size, first, last, held, shards, layers, num_smaller, pair, nudge
) -> None:
    """Against a scan, with limits just below and above what some number of leaner layers takes."""
    memory, (faster, smaller) = MemoryModel(model, workload, gpu, tp, size), pair

    def needed_bytes(n: int, k: int) -> float:
        return memory.stage_of_layers((smaller,) * k + (faster,) * (n - k), first, last, held, shards).total

    limit = needed_bytes(layers, min(num_smaller, layers)) + nudge
    counts = range(max(1, layers - 1), layers + 2)
    fewest = memory.min_recompute_layers(limit, counts, first, last, smaller, faster, held, shards)
    saves = memory.layer_activation_bytes(faster) > memory.layer_activation_bytes(smaller)
    for n, num_leaner in zip(counts, fewest, strict=True):
        fitting = (k for k in range(1, n) if needed_bytes(n, k) <= limit)
        assert min(num_leaner, n) == (next(fitting, n) if saves else n)
