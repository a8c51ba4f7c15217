"""Grouped products are the loop over experts, in types for which torch has a kernel, and in others."""

import pytest
import torch

from runtime.model.experts_part import ExpertRows, grouped_product
from runtime.model.tensor_parallel import LateProducts

pytestmark = pytest.mark.usefixtures("one_thread")
COUNTS = [3, 0, 2, 4]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("inward", "outward"), [(8, 16), (5, 3)])
@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0, 0]])
def test_a_grouped_product_is_the_loop_over_experts(
    counts: list[int], inward: int, outward: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((sum(counts), inward), (4, outward, inward), (4, outward))
    ]
    rows, weight, bias = leaves
    of = ExpertRows(counts, torch.tensor(counts).cumsum(0).to(torch.int32))
    products = grouped_product(rows, weight, bias, of)
    looped = torch.cat([some @ w.T + b for some, w, b in zip(rows.split(counts), weight, bias, strict=True)])
    grad = torch.randn(products.shape, generator=generator).to(dtype)
    near = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(products, looped, atol=near, rtol=near)
    ours, theirs = (torch.autograd.grad(product, leaves, grad) for product in (products, looped))
    torch.testing.assert_close(ours, theirs, atol=near, rtol=near)


def test_gradients_of_experts_can_be_put_off() -> None:
    late, of = LateProducts(), ExpertRows(COUNTS, torch.tensor(COUNTS).cumsum(0).to(torch.int32))
    rows, weight = torch.randn(9, 5, dtype=torch.float64), torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(grouped_product(rows, weight, None, of).sum(), [weight])
    for _ in range(2):
        with late.puts_off(0, {7: [weight]}):
            grouped_product(rows.requires_grad_(), weight, None, of, late).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None
    late.run(0, 7)
    torch.testing.assert_close(weight.grad, 2 * expected, atol=1e-14, rtol=0)
    late.run(0, 8)  # of a layer without any
