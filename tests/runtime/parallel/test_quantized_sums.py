"""Gradients summed in 8 bits: what a sum keeps and loses, and how plans train with it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from hexiopt.numbers.messages import BLOCK, FP8
from hexiopt.plan.plan import Plan
from hexiopt.problem.model import ModelSpec
from runtime.parallel import quantized_sums
from runtime.parallel.quantization import dequantize, quantize
from runtime.parallel.quantized_sums import QuantizedSum
from tests.runtime.parallel.test_quantized_messages import ERROR
from tests.runtime.parallel.test_training import equal_one_process, train
from tests.runtime.ranks import random_plan, run_ranks
from tests.runtime.stream_order import run_in_order
from tests.slow import slow_but

PLANS = (0, 2, 7, 10, 12, 13, 15, 16, 20, 22, 24, 28)  # whose pipelines or replicas share parameters


def values_of(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    """Normal values, blocks of very different sizes: two blocks for each share."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(2 * count, BLOCK, generator=generator, dtype=torch.float64)
    return (values * 10.0 ** torch.randint(-6, 6, (2 * count, 1), generator=generator)).to(dtype).flatten()


def received_values(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What a receiver has of values."""
    received = torch.full_like(values, torch.nan, dtype=dtype)
    dequantize(quantize(values), received)
    return received


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [2, 3])
def test_each_value_is_rounded_on_its_way_to_the_sum_and_each_sum_on_its_way_back(
    count: int, dtype: torch.dtype
) -> None:
    def work(rank: int) -> Any:
        values = values_of(rank, count, dtype)
        quantized_sum = QuantizedSum(values, None)
        held = quantized_sum.num_bytes
        quantized_sum.reduce()
        reduced = values.clone()
        quantized_sum.spread()
        quantized_sum.finish()
        return held, reduced.double().numpy(), values.double().numpy()

    exact = torch.promote_types(dtype, torch.float32)
    results = run_ranks(count, work)
    every = [values_of(rank, count, dtype).view(count, -1, 1, BLOCK) for rank in range(count)]
    sums = []
    for owner in range(count):
        total = every[owner][owner].to(exact, copy=True)
        for rank in range(count):
            if rank != owner:
                total += received_values(every[rank][owner], exact)
        sums.append(total.to(dtype))
    whole = torch.cat([received_values(part, dtype).flatten() for part in sums]).double().numpy()
    for rank, (held, reduced, values) in enumerate(results):
        assert held == 2 * (count - 1) * 2 * (BLOCK + 4)
        share = slice(rank * 2 * BLOCK, (rank + 1) * 2 * BLOCK)
        assert np.array_equal(reduced[share], sums[rank].flatten().double().numpy())
        assert np.array_equal(values, whole)


# ------------------------------------------------------------------ how plans train


@contextmanager
def lossless() -> Iterator[None]:
    """Within, 8 bits are all bits of float64."""

    def pack(values: Tensor) -> Tensor:
        return values.double().contiguous().view(torch.uint8).flatten()

    def unpack(sent: Tensor, values: Tensor) -> None:
        values.copy_(sent.view(torch.float64).view(values.shape))

    with (
        patch.object(quantized_sums, "quantize", pack),
        patch.object(quantized_sums, "dequantize", unpack),
        patch.object(quantized_sums, "quantized_bytes", lambda hidden: 8 * hidden),
    ):
        yield


@pytest.mark.parametrize("seed", slow_but(PLANS[3:4], PLANS))
def test_but_for_rounding_a_plan_trains_as_one_process(seed: int) -> None:
    """ZeRO-0 and 1, over all, machines or lists of devices; TP, replicas, layer ranges, tied matrices."""
    with lossless():
        equal_one_process(random_plan(random.Random(seed)), 4, gradient_precision=FP8)


@pytest.mark.parametrize("seed", slow_but(PLANS[1:2], PLANS))
def test_so_it_does_over_queues_as_of_gpus(seed: int) -> None:
    run = partial(run_in_order, one_queue=bool(seed % 2))
    with lossless():
        equal_one_process(random_plan(random.Random(seed), 6), 4, run=run, gradient_precision=FP8)


@pytest.mark.parametrize("seed", slow_but(PLANS[:1], PLANS))
def test_gradients_are_off_by_what_e4m3_rounds(seed: int) -> None:
    """Twice at most, in every bucket; and all holders of a parameter have the same bits."""
    case: tuple[Plan, ModelSpec, int] = random_plan(random.Random(seed))
    exact, near = train(*case, 0), train(*case, 0, gradient_precision=FP8)
    same: dict[Any, bytes] = {}
    errors = []
    for (whole, _), (rounded, _) in zip(exact, near, strict=True):
        for (parts, expected, _), (others, values, _) in zip(whole, rounded, strict=True):
            assert [part.name for part in parts] == [part.name for part in others]
            if not case[0].sharding.stage:
                size = sum(int(np.prod(part.local_shape)) for part in parts)
                errors.append(np.linalg.norm(values[:size] - expected[:size]) / np.linalg.norm(expected[:size]))
                key = tuple((part.name, part.start, part.end) for part in others)
                assert same.setdefault(key, values.tobytes()) == values.tobytes()
    assert all(error < 3 * ERROR for error in errors)
    assert not errors or max(errors) > 0
