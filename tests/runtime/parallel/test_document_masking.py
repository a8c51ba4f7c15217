"""Under document masking, gradients are those of each document alone, whatever the plan."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional

from hexiopt.exports.trainable import untrainable
from hexiopt.plan.plan import Plan
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.workload import Workload
from runtime.data.batches import Batches
from runtime.mapping.layout import Chunk
from runtime.mapping.model_parts import whole_parts
from runtime.mapping.parts import RankShard
from runtime.model import attention
from runtime.model.decoder import DecoderChunk, empty_weights
from runtime.model.part_calls import part_calls
from runtime.model.tensor_parallel import RankTpGroup
from runtime.training.trainee import initial_values
from tests.runtime.parallel.test_compiled import MODEL, ONE, TWO_STAGES
from tests.runtime.parallel.test_training import features, trainee
from tests.runtime.ranks import random_plan, random_sequence_plan, run_ranks
from tests.slow import slow_but

pytestmark = pytest.mark.usefixtures("one_thread")
SEQ_LEN, SEPARATOR = 13, 3
QUICK = (5, 13)  # seeds of plans
CPU = torch.device("cpu")


def corpus(folder: Path, model: ModelSpec, batch: int) -> Batches:
    """Documents of any length from none to more than a sequence."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.vocab_size, SEQ_LEN * batch + 1)
    tokens[rng.random(len(tokens)) < 0.25] = SEPARATOR
    if batch > 1:
        tokens[: SEQ_LEN + 1] = 5  # one without a border
    np.save(folder / "tokens.npy", tokens)
    return Batches(folder / "tokens.npy", SEQ_LEN, 0, SEPARATOR)


def document_loss(model: ModelSpec, weights: dict[str, Any], tokens: Tensor, labels: Tensor, place: int) -> Tensor:
    """The sum of cross entropies of one document, by a decoder that is as long as it is, its first token at `place`."""
    length, shard = len(tokens), RankShard()
    chunk = Chunk(0, (0, model.num_layers), ("none",) * model.num_layers, first=True, last=True)
    tp = RankTpGroup(0, ((0, length),))
    calls = part_calls(model, shard, tp, [(place, place + length)], torch.empty(0, dtype=torch.float64))
    decoder = DecoderChunk(model, chunk, shard, tp, calls, weights)
    return decoder.loss(decoder.hidden(tokens[:, None]), labels[:, None])


def reference(model: ModelSpec, batches: Batches, batch: int, *, resets: bool) -> tuple[dict[str, Tensor], float]:
    parts = whole_parts(model)
    weights = empty_weights(parts, torch.float64, CPU)
    for part in parts:
        weights[part.name].data.copy_(initial_values(1, part))
    total, count = 0.0, 0
    for sequence in torch.from_numpy(batches.sequences(0, batch)):
        first = 0
        for end in range(1, SEQ_LEN + 1):
            if sequence[end - 1] == SEPARATOR or end == SEQ_LEN:
                loss = document_loss(
                    model, weights, sequence[first:end], sequence[first + 1 : end + 1], 0 if resets else first
                )
                (loss / (batch * SEQ_LEN)).backward()  # type: ignore[no-untyped-call]
                total, first, count = total + loss.item() / (batch * SEQ_LEN), end, count + 1
    assert count > batch
    gradients = {name: values.grad for name, values in weights.items()}
    return {name: values for name, values in gradients.items() if values is not None}, total


def check(
    plan: Plan, model: ModelSpec, batch: int, folder: Path, *, also_reset: bool = False, **more: Any
) -> list[int]:
    """Returns how many graphs each rank has compiled."""
    batches = corpus(folder, model, batch)

    def read(what: Any) -> Any:
        return lambda first, end: torch.from_numpy(what(first, end))

    def work(rank: int) -> Any:
        counters.clear()
        rank_trainee = trainee(plan, model, batch, seq_len=SEQ_LEN, **more)
        loss = rank_trainee.gradients(read(batches.sequences), read(batches.borders))
        gradients = [
            (bucket.parts, bucket.summed_gradient.numpy().copy(), bucket.share.start) for bucket in rank_trainee.buckets
        ]
        graphs = counters["stats"]["unique_graphs"]
        return gradients, loss, rank_trainee.gradients(read(batches.sequences)), graphs

    results = run_ranks(len(plan.devices()), work)
    # Rotary positions are relative: it is the rounding of their tables, in float32, that differs where they are reset.
    for resets, close in ((False, 1e-10), (True, 1e-6))[: 1 + also_reset]:
        of_name, expected = reference(model, batches, batch, resets=resets)
        for gradients, loss, across, _ in results:
            assert loss == pytest.approx(expected, rel=close)
            assert abs(across / expected - 1) > 1e-5, "documents do not matter here"
            for parts, flat, start in gradients:
                want = torch.cat([of_name[p.name].narrow(p.dim, p.start, p.end - p.start).flatten() for p in parts])
                share = want[start : start + len(flat)]
                scale = max(float(of_name[p.name].norm()) for p in parts)
                assert float((torch.from_numpy(flat)[: len(share)] - share).norm()) <= close * scale
    return [graphs for *_, graphs in results]


@pytest.mark.parametrize("seed", slow_but(QUICK, range(24)))
def test_gradients_are_those_of_each_document_alone(seed: int, tmp_path: Path) -> None:
    """With tensor parallelism, pipelines, replicas, windows, and every recompute policy."""
    check(*random_plan(random.Random(seed)), tmp_path)


def test_the_quick_ones_have_what_matters() -> None:
    plan_features = set().union(*(features(*random_plan(random.Random(seed))[:2]) for seed in QUICK))
    assert plan_features >= {"none", "selective", "full", "TP 2", "2 stages", "replicas"}, plan_features


def of_any_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    borders: Tensor,
    *_: Any,
    window_size: tuple[int, int],
    enable_gqa: bool,
    scale: float | None,
) -> Tensor:
    """What `varlen_attn` does, of what a compiler can look into on a CPU."""
    at = torch.arange(len(q), dtype=torch.int32)
    document = torch.searchsorted(borders, at, right=True)
    sees = (document[:, None] == document) & (at[:, None] >= at)
    query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=sees, enable_gqa=enable_gqa, scale=scale
    )
    return output[0].transpose(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("has_flash", [False, True])
def test_compiled_layers_keep_to_documents(has_flash: bool, tmp_path: Path) -> None:
    """One graph for each recompute policy, whatever the number of documents."""
    with (
        patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")),
        patch.object(attention, "has_flash_attention", lambda *arguments: has_flash),
        patch.object(attention, "varlen_attn", of_any_lengths),
    ):
        assert check(ONE, MODEL, 2, tmp_path, compile_layers=True) == [3]


def test_a_window_within_documents(tmp_path: Path) -> None:
    check(
        TWO_STAGES,
        replace(MODEL, architecture="mistral", attention_bias=False, attention_window=3),
        2,
        tmp_path,
        also_reset=True,
    )


def test_sequence_layouts_are_refused_in_one_line() -> None:
    plan, model, _ = random_sequence_plan(random.Random(2), SEQ_LEN)
    workload = Workload(4, SEQ_LEN, precision="fp32")
    assert untrainable(model, workload, plan) is None
    refusal = untrainable(model, workload, plan, document_masking=True)
    assert refusal is not None
    assert refusal.startswith("train.document_masking: stage ")
    assert "has a sequence layout, whose attention knows no documents; plan with space.sequence=false" in refusal
