"""Tokens come to their experts and back, whoever holds what: sums and gradients are those of one dense formula."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runtime.mapping.parts import ExpertCell
from runtime.model.experts_part import ExpertRows, grouped_product
from runtime.parallel.token_exchange import CellExchange
from tests.runtime.stream_order import run_in_order

pytestmark = pytest.mark.usefixtures("one_thread")
EXPERTS, TOP, WIDTH = 6, 2, 3
# Experts by turn, tokens of each rank, and the turn of each.
CELLS: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...] = (
    ((6,), (5,), (0,)),
    ((3, 3), (4, 7), (1, 0)),
    ((2, 0, 4), (3, 5, 2), (0, 1, 2)),  # a rank without experts
    ((0, 1, 5), (4, 0, 0), (2, 0, 1)),  # two without tokens
)


def random_inputs(tokens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens of all ranks [N, H], their experts and weights [N, k], and a matrix of each expert [E, H, H]."""
    generator = torch.Generator().manual_seed(sum(tokens))
    total = sum(tokens)
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP] for _ in range(total)])
    x, weights, matrices = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((total, WIDTH), (total, TOP), (EXPERTS, WIDTH, WIDTH))
    )
    return x, experts, weights, matrices


def reference(
    tokens: Sequence[int], capacity: float | None, *, scales_input: bool = False
) -> tuple[Tensor, list[Tensor]]:
    """By a loop over tokens: sums, and gradients of x, weights and matrices where sums have the gradient `x`."""
    x, experts, weights, matrices = random_inputs(tokens)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, weights, matrices)]
    sums = torch.zeros_like(x)
    for first, end in pairwise([0, *accumulate(tokens)]):
        most = None if capacity is None else ceil(capacity * (end - first) * TOP / EXPERTS)
        used = [0] * EXPERTS
        for n in range(first, end):
            for k, expert in enumerate(experts[n].tolist()):
                used[expert] += 1
                if most is None or used[expert] <= most:
                    weight, product = leaves[1][n, k], leaves[2][expert] @ leaves[0][n]
                    term = (weight * product).tanh() if scales_input else weight * product.tanh()
                    sums = torch.cat([sums[:n], (sums[n] + term).unsqueeze(0), sums[n + 1 :]])
    if sums.requires_grad:
        (sums * x).sum().backward()  # type: ignore[no-untyped-call]
    return sums.detach(), [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


@pytest.mark.parametrize("capacity", [None, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("scales_input", [False, True])
def test_sums_and_gradients_are_those_of_a_loop(cell: Any, capacity: float | None, scales_input: bool) -> None:
    counts, tokens, turns = cell
    held = ExpertCell(tuple(range(len(counts))), turns, counts).experts(EXPERTS)
    x, experts, weights, matrices = random_inputs(tokens)
    want, gradients = reference(tokens, capacity, scales_input=scales_input)
    bounds = list(pairwise([0, *accumulate(tokens)]))

    def work(rank: int) -> Any:
        group = dist.new_group(list(range(len(tokens)))) if len(tokens) > 1 else None
        exchange = CellExchange(held, rank, group, torch.device("cpu"), capacity=capacity, num_tokens=tokens, top_k=TOP)
        some = slice(*bounds[rank])
        leaves = [tensor.clone().requires_grad_() for tensor in (x[some], weights[some], matrices[slice(*held[rank])])]

        def run(rows: Tensor, of: ExpertRows) -> Tensor:
            return grouped_product(rows, leaves[2], None, of).tanh()

        sums, _ = exchange(leaves[0], experts[some], leaves[1], run, scales_input=scales_input)
        (sums * x[some]).sum().backward()  # type: ignore[no-untyped-call]
        return sums.detach(), [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]

    results = run_in_order(len(tokens), work)
    torch.testing.assert_close(torch.cat([sums for sums, _ in results]), want, atol=1e-14, rtol=0)
    for rank, (_, of_rank) in enumerate(results):
        some, mine = slice(*bounds[rank]), slice(*held[rank])
        expected = (gradients[0][some], gradients[1][some], gradients[2][mine])
        for gradient, wanted in zip(of_rank, expected, strict=True):
            torch.testing.assert_close(gradient, wanted, atol=1e-13, rtol=0)
    whole, _ = reference(tokens, None, scales_input=scales_input)
    assert capacity is None or capacity > 0.5 or not torch.equal(want, whole), "nothing is dropped"


def test_what_runs_meanwhile_is_beside() -> None:
    x, experts, weights, _ = random_inputs((4,))
    exchange = CellExchange([(0, EXPERTS)], 0, None, torch.device("cpu"))
    sums, beside = exchange(x, experts, weights, lambda rows, of: rows, lambda: torch.ones(2))
    torch.testing.assert_close(sums, x * weights.sum(1, keepdim=True), atol=1e-14, rtol=0)
    assert torch.equal(beside, torch.ones(2))
