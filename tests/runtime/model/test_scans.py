"""Recurrences in chunks are those of their definitions, token by token, with all gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from runtime.model.scans import causal_convolution, delta_scan, mamba_scan

SAMPLES, TOKENS, HEADS, KEY, VALUE = 2, 11, 6, 5, 4
CHUNKS = (1, 4, 11, 64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def inputs() -> list[Tensor]:
    """Values, two numbers of each head, keys and queries."""
    numbers = (draw(SAMPLES, TOKENS, HEADS, seed=seed) for seed in (1, 2))
    keys = (draw(SAMPLES, TOKENS, HEADS, KEY, seed=seed) for seed in (3, 4))
    return [x.requires_grad_() for x in (draw(SAMPLES, TOKENS, HEADS, VALUE), *numbers, *keys)]


def slow_mamba(values: Tensor, steps: Tensor, decays: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
    state, outputs = torch.zeros(SAMPLES, HEADS, KEY, VALUE, dtype=torch.float64), []
    for t in range(TOKENS):
        written = (steps[:, t, :, None] * keys[:, t]).unsqueeze(-1) * values[:, t].unsqueeze(-2)
        state = (steps[:, t] * decays).exp()[..., None, None] * state + written
        outputs.append((queries[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, dim=1)


def slow_delta(values: Tensor, writes: Tensor, logs: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
    keys, queries = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (keys, queries))
    queries = queries / KEY**0.5
    state, outputs = torch.zeros(SAMPLES, HEADS, KEY, VALUE, dtype=torch.float64), []
    for t in range(TOKENS):
        state = logs[:, t].exp()[..., None, None] * state
        change = writes[:, t, :, None] * (values[:, t] - (keys[:, t].unsqueeze(-2) @ state).squeeze(-2))
        state = state + keys[:, t].unsqueeze(-1) * change.unsqueeze(-2)
        outputs.append((queries[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, dim=1)


def check_equal(output: Tensor, expected: Tensor, given: list[Tensor]) -> None:
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-11)
    weight = draw(*output.shape, seed=9)
    for gradient, other in zip(
        *(torch.autograd.grad(x, given, weight, retain_graph=True) for x in (output, expected)), strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_mamba_is_that_of_each_token(chunk: int) -> None:
    values, steps, _, keys, queries = inputs()
    decays = (-draw(HEADS).exp()).detach().requires_grad_()
    positive = functional.softplus(steps)
    output, expected = (
        mamba_scan(chunk, values, positive, decays, keys, queries),
        slow_mamba(values, positive, decays, keys, queries),
    )
    check_equal(output, expected, [values, steps, decays, keys, queries])


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_delta_rule_is_that_of_each_token(chunk: int) -> None:
    values, writes, logs, keys, queries = given = inputs()
    share, decay = writes.sigmoid(), -functional.softplus(logs)
    output, expected = (
        delta_scan(chunk, values, share, decay, keys, queries),
        slow_delta(values, share, decay, keys, queries),
    )
    check_equal(output, expected, given)


def test_a_convolution_sees_no_later_token() -> None:
    x, weight, bias = draw(SAMPLES, TOKENS, 3).requires_grad_(), draw(3, 1, 4), draw(3)
    output = causal_convolution(x, weight, bias)
    expected = bias + sum(weight[:, 0, 3 - back] * functional.pad(x, (0, 0, back, 0))[:, :TOKENS] for back in range(4))
    torch.testing.assert_close(output, functional.silu(expected))
