"""Products fused with the collectives of a TP group compute what plain ones do: by torch's own fallback over gloo, as
the kernels need several GPUs."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hexiopt.errors import InputError
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.schedules.registry import SCHEDULES, SPLIT_SCHEDULES
from hexiopt.schedules.schedule import Schedule
from runtime import network
from runtime.device import check_async_tp
from runtime.model import tensor_parallel
from runtime.model.tensor_parallel import LateProducts, RankTpGroup
from runtime.training import trainee
from tests.runtime.parallel.test_training import equal_one_process
from tests.runtime.parallel.test_training_of_kinds import MODELS, PRECISE
from tests.runtime.ranks import run_ranks
from tests.slow import slow_but

HIDDEN, SAMPLES, TOKENS = 6, 2, ((0, 4), (4, 8))
COLUMNS = (5, 3)  # of each rank


def draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


def compute(rank: int, is_async: bool, adapted: bool, late: LateProducts | None) -> list[Any]:
    """What a rank makes by two products there and one back, and all gradients."""
    tp = RankTpGroup(rank, TOKENS, dist.group.WORLD, late, 0.5, is_async)
    assert (tp.fused_group is not None) == is_async
    x, width = draw(1 + rank, 4, SAMPLES, HIDDEN), COLUMNS[rank]
    gate, up, down = draw(3 + rank, width, HIDDEN), draw(5 + rank, width, HIDDEN), draw(7 + rank, HIDDEN, width)
    bias, leaves = draw(9 + rank, width), list[Tensor]()

    def adapter(seed: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor] | None:
        pair = draw(seed, 2, inputs), draw(seed + 1, outputs, 2)
        leaves.extend(pair)
        return pair if adapted else None

    products = tp.columns(x, [gate, up], [bias, None], [adapter(20, HIDDEN, width), None])
    output = tp.rows(products[0] * products[1], down, adapter(30, width, HIDDEN))
    matrices = {0: [gate, up, down]}
    if late is None:
        (output * draw(40 + rank, *output.shape)).sum().backward()
    else:
        with late.puts_off(0, matrices):
            (output * draw(40 + rank, *output.shape)).sum().backward()
        assert down.grad is None
        late.run(0, 0)
    gradients = [leaf.grad for leaf in (x, gate, up, down, bias, *leaves)]
    return [None if tensor is None else tensor.numpy().copy() for tensor in (output.detach(), *gradients)]


@pytest.mark.parametrize("case", ["plain", "adapters", "late"])
def test_values_and_gradients_are_those_of_plain_products(case: str) -> None:
    def work(rank: int) -> Any:
        calls: list[str] = []

        def count_calls(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                calls.append(function.__name__)
                return function(*arguments, **named)

            return call

        with ExitStack() as stack:
            for function in (network.gathered_products, network.scattered_product):
                stack.enter_context(patch.object(tensor_parallel, function.__name__, count_calls(function)))
            both = [
                compute(rank, is_async, case == "adapters", LateProducts() if case == "late" else None)
                for is_async in (False, True)
            ]
        return both, calls

    for (plain, fused), calls in run_ranks(2, work):
        # Adapters' second matrices read what is summed, so that their product back is a plain one.
        expected = ["gathered_products", "scattered_product", "gathered_products"]
        assert calls == (expected[:1] if case == "adapters" else expected)
        assert len([tensor for tensor in plain if tensor is not None]) == (10 if case == "adapters" else 6)
        for values, other in zip(fused, plain, strict=True):
            assert (values is None) == (other is None)
            if values is None:
                continue
            np.testing.assert_allclose(values, other, rtol=1e-12, atol=1e-13)


def test_unequally_many_tokens_are_exchanged_plainly() -> None:
    group: Any = object()
    assert RankTpGroup(0, ((0, 4), (4, 8)), group, is_async=True).fused_group is group
    assert RankTpGroup(0, ((0, 4), (4, 7)), group, is_async=True).fused_group is None
    assert RankTpGroup(0, ((0, 4),), is_async=True).fused_group is None


@pytest.mark.parametrize("schedule", slow_but(SPLIT_SCHEDULES[:1], (*SCHEDULES, *SPLIT_SCHEDULES)), ids=str)
def test_a_plan_trains_as_one_process(schedule: Schedule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal TP groups, whose heads are cut unevenly."""
    model = MODELS["windows and norms of heads"]
    stages = tuple(
        Stage(
            TensorParallel((2 * s, 2 * s + 1), (4, 2)),
            tuple((2 * c + s, 2 * c + s + 1) for c in range(2)) if schedule.chunked else ((2 * s, 2 * s + 2),),
            ("none",),
        )
        for s in range(2)
    )
    monkeypatch.setattr(trainee, "RankTpGroup", lambda *given: replace(RankTpGroup(*given), is_async=True))
    of_gradients, _ = equal_one_process((Plan((Pipeline(stages, 4),), schedule), model, 4), steps=2, seq_len=8)
    assert of_gradients <= PRECISE


def test_it_needs_gpus_that_read_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"train\.async_tp: true needs GPUs, and this process computes on a CPU"):
        check_async_tp(torch.device("cpu"))
    monkeypatch.setattr("runtime.device.num_gpus", lambda: 3)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: other != 2)
    with pytest.raises(InputError, match="GPU 0 cannot read the memory of GPU 2; take false"):
        check_async_tp(torch.device("cuda", 0))
