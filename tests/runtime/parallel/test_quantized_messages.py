"""Messages between stages in 8 bits: what quantisation keeps and loses, what plans send, and how they train with it."""

import random
from collections import Counter, defaultdict
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import product
from math import log, sqrt
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers.messages import BLOCK, FP8, MESSAGE_PRECISIONS, quantized_bytes
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from runtime.model.decoder import DecoderChunk
from runtime.network import ProcessGroups
from runtime.parallel.quantization import dequantize, quantize
from runtime.settings import Settings
from runtime.training.trainee import Trainee, initial_values
from tests.conftest import STRESS
from tests.runtime.parallel.test_training import SEEDS, SETTINGS, equal_one_process, train
from tests.runtime.ranks import TIMEOUT_S, random_model, random_plan, random_sequence_plan, run_ranks
from tests.slow import slow_but
from tests.solvers.problems import cluster

WIDTHS = (1, 12, BLOCK, BLOCK + 1, 300, 2 * BLOCK)
TYPES = (torch.bfloat16, torch.float32, torch.float64)
FEW = (0, 13, 16, 24, 28)  # plans of several stages, with replicas, TP groups and layer ranges
LAYOUTS = (5, 16, 17, 24)  # beside groups, replicas and each other
SEQUENCE_LEN = 10
# Of many values, relative: a unit of the last of three bits over √12, over the root mean square of a mantissa from 1 to
# 2, which is √(3 / (2 ln 2)) where its logarithm is uniform.
ERROR = 2**-3 / sqrt(12) / sqrt(1.5 / log(2))


def after(values: Tensor) -> Tensor:
    """What a receiver has of values [t, B, H]."""
    received = torch.full_like(values, torch.nan)
    dequantize(quantize(values), received)
    return received


def values_of(hidden: int, dtype: torch.dtype, seed: int = 0, shape: tuple[int, int] = (3, 2)) -> Tensor:
    """Normal values, blocks of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, hidden, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** torch.randint(-9, 9, (*shape, 1), generator=generator)).to(dtype)


# ------------------------------------------------------------------ quantisation


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("hidden", WIDTHS)
def test_errors_are_those_of_e4m3(hidden: int, dtype: torch.dtype) -> None:
    """Half a unit of three bits of mantissa, or of the least exponent; the largest value of a block stays."""
    values = values_of(hidden, dtype)
    sent, received = quantize(values), after(values)
    assert sent.dtype == torch.uint8
    assert sent.numel() == 6 * quantized_bytes(hidden)
    for block, near in zip(values.split(BLOCK, -1), received.split(BLOCK, -1), strict=True):
        largest = block.abs().amax(-1, keepdim=True)
        bound = torch.maximum(block.abs().double() / 2**4, largest.double() / 448 * 2**-10)
        assert ((near - block).abs() <= bound * (1 + 1e-5) + block.abs() * torch.finfo(dtype).eps).all()
        top = block.abs() == largest
        torch.testing.assert_close(near[top], block[top], rtol=1e-6 + torch.finfo(dtype).eps, atol=0.0)


def test_the_error_of_normal_values_is_a_fortieth() -> None:
    values = values_of(1024, torch.float32, shape=(64, 8))
    error = float((after(values) - values).norm() / values.norm())
    assert error == pytest.approx(ERROR, rel=0.1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("hidden", [BLOCK, 300])
def test_special_values(hidden: int, dtype: torch.dtype) -> None:
    """Zeros stay, also beside the least of values; what is not finite spoils its block, and no other."""
    values = torch.zeros(2, 2, hidden, dtype=dtype)
    assert after(values).equal(values)
    values[0, 0, 3], values[1, 0, 5] = torch.finfo(torch.float32).tiny / 2, -torch.finfo(dtype).max
    received = after(values)
    assert received[0, 0].abs().max() <= torch.finfo(torch.float32).tiny
    assert received.isfinite().all() == (dtype != torch.float64)  # beyond FP32 it is infinite
    assert received[:, 1].equal(values[:, 1])
    for bad in (torch.inf, -torch.inf, torch.nan):
        values = torch.ones(2, 2, hidden, dtype=dtype)
        values[1, 0, 1] = bad
        received = after(values)
        assert received[1, 0, :BLOCK].isnan().all()
        received[1, 0, :BLOCK] = 1.0
        assert received.equal(torch.ones_like(received))


@pytest.mark.parametrize("hidden", WIDTHS)
def test_any_cut_of_tokens_and_samples_carries_the_same(hidden: int) -> None:
    """So that a split of a message over ranks changes nothing; also where conversion goes in several runs of tokens."""
    values = values_of(hidden, torch.bfloat16, shape=(7, 3))
    received = after(values)
    scattered, at_once = torch.tensor([5, 0, 3]), quantize(values)
    for tokens, samples in ((slice(0, 2), slice(0, 3)), (slice(2, 7), slice(1, 2)), (scattered, slice(2))):
        assert after(values[tokens, samples]).equal(received[tokens, samples])
    with patch("runtime.parallel.quantization._VALUES", 2 * 3 * hidden):
        assert quantize(values).equal(at_once)
        assert after(values).equal(received)


# ------------------------------------------------------------------ what plans send


def sent_bytes(plan: Plan, problem: Problem) -> dict[tuple[int, int, int], int]:
    """By executor (pipeline, stage, replica), the bytes that its ranks send in a step."""

    def work(rank: int) -> Any:
        total, send, workload = 0, ProcessGroups.send, problem.workload

        def count(groups: ProcessGroups, part: Tensor, receiver: int) -> Any:
            nonlocal total
            total += part.nbytes
            return send(groups, part, receiver)

        run = Settings(adam=SETTINGS, timeout_s=TIMEOUT_S)
        trainee = Trainee(problem, plan, run, torch.float32, torch.device("cpu"), partial(initial_values, 1))
        tokens = torch.zeros(workload.global_batch, workload.seq_len + 1, dtype=torch.int64)
        with patch.object(ProcessGroups, "send", count):
            trainee.gradients(lambda first, end: tokens[first:end])
        executor = trainee.layout.executor_of[rank]
        return (executor.pipeline, executor.stage, executor.replica), total

    totals: Counter[tuple[int, int, int]] = Counter()
    for executor, total in run_ranks(len(plan.devices()), work):
        totals[executor] += total
    return {executor: total for executor, total in totals.items() if total}


def equal_heads(plan: Plan) -> Plan:
    """The plan without the heads that it states for TP groups, which are not priced."""

    def plain(stage: Stage) -> Stage:
        if isinstance(stage.parallelism, SequenceParallel):
            return stage
        replicas = tuple(replace(replica, heads=None) for replica in stage.parallelism.replicas)
        return Stage.of_replicas(replicas, stage.layers, stage.recompute)

    pipelines = [replace(line, stages=tuple(map(plain, line.stages))) for line in plan.pipelines]
    return replace(plan, pipelines=tuple(pipelines))


@pytest.mark.parametrize(
    ("with_layouts", "seed", "precision"),
    slow_but(
        [(False, 13, FP8), (False, 24, "training"), (True, 5, FP8), (True, 16, "training")],
        [(*case, p) for case in (*product([False], FEW), *product([True], LAYOUTS)) for p in MESSAGE_PRECISIONS],
    ),
)
def test_an_executor_sends_what_is_priced_to_the_byte(with_layouts: bool, seed: int, precision: str) -> None:
    rng = random.Random(seed)
    plan, model, batch = random_sequence_plan(rng, SEQUENCE_LEN) if with_layouts else random_plan(rng)
    plan, model = equal_heads(plan), model.replace(attention_window=None)
    workload = Workload(batch, SEQUENCE_LEN, "fp32", message_precision=precision)
    problem = Problem(cluster(("a", "fast", max(plan.devices()) + 1)), model, workload)
    priced: Counter[tuple[int, int, int]] = Counter()
    for p, line in enumerate(PlanPricer(problem).place_pipelines(plan)):
        for message, _, num_bytes in line.messages:
            end = 0 if message.backward else len(line.stages) - 1  # has a layer range from which nothing goes on
            times = line.num_micro_batches * (plan.pipelines[p].num_chunks - (message.stage == end))
            priced[p, message.stage, message.sender] += round(times * num_bytes)
    assert sent_bytes(plan, problem) == priced


# ------------------------------------------------------------------ how plans train


class Rounded(torch.autograd.Function):
    """Hidden states, and their gradients, of some samples as messages carry them."""

    @staticmethod
    def forward(context: Any, x_tbh: Tensor, samples: list[slice]) -> Tensor:
        context.samples = samples
        return _round(x_tbh, samples)

    @staticmethod
    def backward(context: Any, gradient_tbh: Tensor) -> Any:
        return _round(gradient_tbh, context.samples), None


def _round(values_tbh: Tensor, samples: list[slice]) -> Tensor:
    rounded_tbh = values_tbh.clone()
    for some in samples:
        rounded_tbh[:, some] = after(values_tbh[:, some])
    return rounded_tbh


def round_between_stages(plan: Plan) -> AbstractContextManager[Any]:
    """One process that holds everything rounds the samples of each pipeline where its stages meet."""
    ends, at = defaultdict[int, list[slice]](list), 0
    for pipeline in plan.pipelines:
        some = slice(at, at := at + pipeline.num_sequences)
        for stage in pipeline.stages:
            for _, end in stage.layers:
                ends[end].append(some)
    plain = DecoderChunk.parts

    def parts(chunk: DecoderChunk, *arguments: Any, **more: Any) -> list[Any]:
        embedded, *layers, loss = plain(chunk, *arguments, **more)

        def round_after(layer: Any, samples: list[slice]) -> Any:
            return lambda x_tbh: Rounded.apply(layer(x_tbh), samples)

        cut = [round_after(layer, ends[k + 1]) for k, layer in enumerate(layers[:-1])]
        return [embedded, *cut, layers[-1], loss]

    return patch.object(DecoderChunk, "parts", parts)


@pytest.mark.parametrize("seed", slow_but(FEW[1:2], SEEDS if STRESS else FEW))
def test_a_plan_trains_as_one_process_that_rounds_where_stages_meet(seed: int) -> None:
    case = random_plan(random.Random(seed))
    equal_one_process(case, 4, alone=round_between_stages(case[0]), message_precision=FP8)


@pytest.mark.parametrize("seed", slow_but(LAYOUTS[:1], LAYOUTS))
def test_so_do_sequence_layouts(seed: int) -> None:
    case = random_sequence_plan(random.Random(seed), SEQUENCE_LEN)
    equal_one_process(case, 4, SEQUENCE_LEN, alone=round_between_stages(case[0]), message_precision=FP8)


def test_gradients_are_off_by_what_e4m3_rounds() -> None:
    """Two stages of a model as wide as two blocks: behind the cut, gradients feel what went ahead, before it both."""
    shape = {"hidden_size": 256, "num_heads": 8, "num_kv_heads": 8, "head_dim": 32, "ffn_size": 512, "vocab_size": 64}
    model = random_model(random.Random(0), 4).replace(architecture="llama", **shape)
    plan = Plan((Pipeline((Stage.of((0,), 0, 2), Stage.of((1,), 2, 4)), 2, 2),))
    exact, near = (train(plan, model, 4, 0, 16, message_precision=precision) for precision in MESSAGE_PRECISIONS)
    for (buckets, _), (others, _) in zip(exact, near, strict=True):
        for (_, expected, _), (_, rounded, _) in zip(buckets, others, strict=True):
            error = float(np.linalg.norm(rounded - expected) / np.linalg.norm(expected))
            assert 0.5 * ERROR < error < 1.5 * ERROR
