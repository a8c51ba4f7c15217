"""Seconds and bytes of adapters beside frozen matrices, against sums written out and against full training."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.app.configurations import named_cluster, named_model
from hexiopt.cost.executors.memory import UNSHARDED, MemoryModel, StateSharding
from hexiopt.cost.executors.stage_model import StageModel
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers.gpus import catalogue
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.lora import STORAGES, TARGETS, Lora
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.in_flight import holding

LLAMA, A100 = replace(named_model("llama2_7b"), num_layers=8), catalogue()["a100_80gb_sxm"]
CLUSTER = named_cluster("small_mixed")
FULL = Workload(global_batch=8, seq_len=1024)
STORAGE = st.sampled_from(tuple(STORAGES))
SOME = st.lists(st.sampled_from(TARGETS), min_size=1, unique=True)


def lora_work(**lora: Any) -> Workload:
    return replace(FULL, training="lora", lora=Lora(**lora))


def stage_model(workload: Workload) -> StageModel:
    return StageModel(Problem(CLUSTER, LLAMA, workload))


@given(targets=SOME, rank=st.integers(1, 64))
def test_a_layer_stores_what_gradients_need(targets: list[str], rank: int) -> None:
    """Element by element of a Llama layer, in BF16: norm inputs and what attention and activation read always; a
    matrix's input only where it has an adapter, whose inner product is stored too."""
    hidden, ffn, tokens = LLAMA.hidden_size, LLAMA.ffn_size, FULL.seq_len
    elements = 2 * hidden + 3 * hidden + 2 * ffn  # norm inputs; q, k, v; gate, up
    elements += hidden * bool({"q", "k", "v"} & set(targets)) + hidden * bool({"gate", "up"} & set(targets))
    elements += ffn * ("down" in targets) + rank * len(targets)
    elements += hidden  # attention's output, for its own backward
    statistics = 4 * (2 + LLAMA.num_heads)  # of norms; log-sum-exp of attention
    activations = MemoryModel(LLAMA, lora_work(targets=targets, rank=rank), A100, 1, 1).activations
    assert activations.layer_bytes("none") == tokens * (2 * elements + statistics)
    stored = elements - hidden * ("o" not in targets)  # selective recompute makes attention's output again
    assert activations.layer_bytes("selective") == tokens * (2 * stored + 8)
    assert activations.layer_bytes("full") == tokens * 2 * hidden


def test_all_targets_store_as_much_as_full_training() -> None:
    """Adapters save states, not activations, but for what the head's gradient reads."""
    rank = 16
    full, lora = (MemoryModel(LLAMA, work, A100, 1, 1).activations for work in (FULL, lora_work(rank=rank)))
    assert lora.layer_bytes("none") == full.layer_bytes("none") + FULL.seq_len * 2 * rank * len(TARGETS)
    assert full.final_norm - lora.final_norm == FULL.seq_len * 2 * LLAMA.hidden_size
    assert full.loss == lora.loss


def test_the_head_has_no_gradient_to_accumulate_in_chunks() -> None:
    full, lora = (
        MemoryModel(LLAMA, replace(work, loss_chunk_tokens=64), A100, 1, 1).activations for work in (FULL, lora_work())
    )
    assert full.loss - lora.loss == 2 * LLAMA.hidden_size * LLAMA.vocab_size


@given(storage=STORAGE, first=st.booleans(), last=st.booleans(), layers=st.integers(0, 8))
def test_states_of_a_stage(storage: str, first: bool, last: bool, layers: int) -> None:
    """Frozen layers as stored, ends in 16 bits; gradients and moments of adapters alone, no master weights."""
    memory = MemoryModel(LLAMA, lora_work(storage=storage, targets="qv", rank=8, adapter_bytes=4), A100, 1, 1)
    stage = memory.stage(layers, first, last, "full", holding(1), UNSHARDED)
    hidden, adapters = LLAMA.hidden_size, layers * 2 * 8 * 2 * LLAMA.hidden_size
    matrices = layers * (LLAMA.layer_params - 2 * hidden)
    ends = first * LLAMA.embedding_params + last * LLAMA.head_params + layers * 2 * hidden
    stored = STORAGES[storage].element_bytes or 2.0
    assert stage.weights == pytest.approx(stored * matrices + 2 * ends + 4 * adapters)
    assert (stage.gradients, stage.master, stage.optimizer) == (4 * adapters, 0.0, 8 * adapters)
    spread = memory.stage(layers, first, last, "full", holding(1), StateSharding(1, 4))
    assert (spread.weights, spread.optimizer) == (stage.weights, 2 * adapters)
    plain = MemoryModel(LLAMA, lora_work(targets="qv", rank=8), A100, 1, 1).activations
    buffer = 0 if storage == "16bit" else 2 * LLAMA.hidden_size * LLAMA.ffn_size
    assert memory.activations.buffers - plain.buffers == buffer


@given(storage=STORAGE, limit_gib=st.floats(1.0, 30.0), policy=st.sampled_from(("none", "full")))
def test_the_most_layers_that_fit(storage: str, limit_gib: float, policy: str) -> None:
    memory, limit = MemoryModel(LLAMA, lora_work(storage=storage), A100, 1, 1), limit_gib * 2**30
    most = memory.max_layers(limit, False, False, policy, holding(2))
    fits = [memory.stage(n, False, False, policy, holding(2)).total <= limit for n in (max(most, 0), most + 1)]
    assert fits == [most >= 0, False]


def test_frozen_products_take_one_pass_back() -> None:
    """Against full training: the backward saves a product each of the forward, the embedding's and the head's too; the
    forward is longer by adapters."""
    full, lora = stage_model(FULL), stage_model(lora_work(targets="qv", rank=1))
    group = full.tp_group((0,))
    layer = LLAMA.layer.on(LLAMA.layer.shard(1, 0))
    products = sum(2.0 * FULL.seq_len * product.weights for product in layer.products)
    clock = full.clock(group.gpu)
    (forward_s, backward_s), (lora_forward_s, lora_backward_s) = (m.layer_s(group, 1, "none") for m in (full, lora))
    assert lora_forward_s > forward_s
    saved_s = backward_s - lora_backward_s
    assert 0.8 * clock.gemm_s(products) < saved_s < 1.1 * clock.gemm_s(products)
    for (embedding, head), (frozen_embedding, frozen_head) in [(full.ends_s(group, 1), lora.ends_s(group, 1))]:
        assert frozen_embedding.backward_s == 0.0 < embedding.backward_s
        assert frozen_embedding.forward_s == embedding.forward_s
        head_s = clock.gemm_s(2.0 * FULL.seq_len * LLAMA.hidden_size * LLAMA.vocab_size)
        assert head.backward_s - frozen_head.backward_s == pytest.approx(head_s)


def test_dequantisation_takes_each_pass_of_a_layer_longer() -> None:
    """A forward once, a backward once, and once more where the layer is recomputed."""
    plain, quantised = stage_model(lora_work()), stage_model(lora_work(storage="nf4"))
    group = plain.tp_group((0,))
    moved = STORAGES["nf4"].moved_bytes * (LLAMA.layer_params - 2 * LLAMA.hidden_size)
    each_s = plain.clock(group.gpu).memory_s(moved)
    for policy, passes in (("none", 1), ("full", 2)):
        (f, b), (qf, qb) = (model.layer_s(group, 1, policy) for model in (plain, quantised))
        assert (qf - f, qb - b) == (pytest.approx(each_s), pytest.approx(passes * each_s))


@pytest.mark.parametrize("zero", [0, 1])
def test_adapters_alone_are_synchronised_and_stepped(zero: int) -> None:
    """Twice the rank, twice the bytes of gradients on the ring and of the optimizer's step."""
    plan = Plan(tuple(Pipeline((Stage.of((d,), 0, 8),), 4) for d in (0, 1)), sharding=Sharding(zero))

    def ring_s(workload: Workload) -> float:
        pricer = PlanPricer(Problem(CLUSTER, LLAMA, workload))
        [seconds], [wait] = (
            pricer.rings(plan).within_group.ring_pass_s(n) for n in (float(workload.states.gradient), 0.0)
        )
        return float((seconds - wait).sum())

    rank_64_s, rank_128_s = (ring_s(lora_work(rank=rank)) for rank in (64, 128))
    assert rank_128_s == pytest.approx(2 * rank_64_s)
    trained = Problem(CLUSTER, LLAMA, lora_work(rank=64)).parameters.num_trained_params
    assert ring_s(FULL) / rank_64_s == pytest.approx(2 * LLAMA.num_params / (4 * trained))
