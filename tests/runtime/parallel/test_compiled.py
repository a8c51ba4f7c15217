"""Compiled layers and a loss in chunks: the gradients are those of plain layers and a whole loss, in float64."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.model import ModelSpec
from tests.runtime.parallel.test_training import SEQ_LEN, SETTINGS, trainee
from tests.runtime.parallel.test_training_of_kinds import MODELS
from tests.runtime.ranks import run_ranks
from tests.slow import slow_but

MODEL = ModelSpec(
    name="small",
    architecture="qwen3",
    num_layers=6,
    hidden_size=12,
    num_heads=6,
    num_kv_heads=3,
    head_dim=2,
    ffn_size=16,
    vocab_size=19,
    max_positions=64,
    attention_bias=True,
)
POLICIES = ("none", "none", "selective", "selective", "full", "full")
ONE = Plan((Pipeline((Stage(TensorParallel((0,)), ((0, 6),), POLICIES),), 2),))
UNEVEN = Plan((Pipeline((Stage(TensorParallel((0, 1), (4, 2)), ((0, 6),), POLICIES),), 2),))
TWO_STAGES = Plan(
    (
        Pipeline(
            (
                Stage(TensorParallel((0, 1)), ((0, 3),), POLICIES[:3]),
                Stage(TensorParallel((2, 3, 4)), ((3, 6),), POLICIES[3:]),
            ),
            2,
        ),
    )
)


def train(plan: Plan, model: ModelSpec, backend: str | None = None, chunk: int | None = None, **more: Any) -> list[Any]:
    """By rank: all gradients and the loss, of one step and after it; and how many graphs were compiled. Trainees get
    what is in `more`."""

    def work(rank: int) -> Any:
        counters.clear()
        compiling = partial(torch.compile, backend=backend) if backend else torch.compile
        with patch.object(torch, "compile", compiling), patch("torch._inductor.config.compile_threads", 1):
            rank_trainee = trainee(plan, model, 2, compile_layers=backend is not None, loss_chunk_tokens=chunk, **more)
            tokens = torch.randint(model.vocab_size, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
            loss = rank_trainee.gradients(lambda first, end: tokens[first:end])
            gradients = [bucket.gradient.numpy().copy() for bucket in rank_trainee.buckets]
            following = rank_trainee.step(lambda first, end: tokens[first:end], SETTINGS.lr)
        return gradients, loss, following, counters["stats"]["unique_graphs"]

    return run_ranks(len(plan.devices()), work)


def check_equal(results: list[Any], expected: list[Any]) -> None:
    for (gradients, loss, following, _), (wanted, of_loss, after, _) in zip(results, expected, strict=True):
        assert loss == pytest.approx(of_loss, rel=1e-12)
        assert following == pytest.approx(after, rel=1e-12)
        most = max(float(np.abs(values).max()) for values in wanted)
        for gradient, want in zip(gradients, wanted, strict=True):
            np.testing.assert_allclose(gradient, want, rtol=1e-12, atol=1e-12 * most)


@pytest.mark.parametrize(
    ("plan", "backend"),
    slow_but([(ONE, "eager")], [(ONE, "eager"), (ONE, "aot_eager"), (UNEVEN, "inductor")]),
)
def test_compiled_layers_train_as_plain_ones(plan: Plan, backend: str) -> None:
    results = train(plan, MODEL, backend)
    check_equal(results, train(plan, MODEL))
    # One graph for all layers of a policy; of those with full recompute one without a backward and one with it, which
    # is that of layers without recompute. In a TP group more: those between collectives.
    assert [graphs for *_, graphs in results] == [3] if plan == ONE else all(graphs > 3 for *_, graphs in results)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_compiled_layers_of_kinds_train_as_plain_ones(name: str) -> None:
    plan = Plan((Pipeline((Stage(TensorParallel((0,)), ((0, 4),), ("none", "selective", "full", "full")),), 2),))
    check_equal(train(plan, MODELS[name], "aot_eager"), train(plan, MODELS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["norms of all heads", "Mamba-2, a norm of all heads"])
def test_compiled_layers_sum_squares_over_ranks(name: str) -> None:
    plan = Plan((Pipeline((Stage(TensorParallel((0, 1)), ((0, 4),), ("none", "selective", "full", "full")),), 2),))
    check_equal(train(plan, MODELS[name], "aot_eager"), train(plan, MODELS[name]))


@pytest.mark.parametrize(
    ("chunk", "tied"), slow_but([(5, True)], [(chunk, tied) for chunk in (1, 5, SEQ_LEN, 99) for tied in (False, True)])
)
def test_a_loss_in_chunks_is_that_of_all_logits(chunk: int, tied: bool) -> None:
    model = replace(MODEL, tied_embeddings=tied)
    check_equal(train(TWO_STAGES, model, chunk=chunk), train(TWO_STAGES, model))
