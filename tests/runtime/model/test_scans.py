"""Recurrences in chunks are those of their definitions, token by token, with all gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from runtime.model.scans import causal_convolution, delta_scan, mamba_scan

SAMPLES, TOKENS, HEADS, KEY, VALUE = 2, 11, 6, 5, 4
CHUNKS = (1, 4, 11, 64)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def inputs() -> list[Tensor]:
    """Values, two numbers of each head, keys and queries."""
    numbers = (drawn(SAMPLES, TOKENS, HEADS, seed=seed) for seed in (1, 2))
    keys = (drawn(SAMPLES, TOKENS, HEADS, KEY, seed=seed) for seed in (3, 4))
    return [x.requires_grad_() for x in (drawn(SAMPLES, TOKENS, HEADS, VALUE), *numbers, *keys)]


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


def check_equal(found: Tensor, expected: Tensor, given: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    weight = drawn(*found.shape, seed=9)
    for own, other in zip(
        *(torch.autograd.grad(x, given, weight, retain_graph=True) for x in (found, expected)), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_mamba_is_that_of_each_token(chunk: int) -> None:
    values, steps, _, keys, queries = inputs()
    decays = (-drawn(HEADS).exp()).detach().requires_grad_()
    positive = functional.softplus(steps)
    found, expected = (
        mamba_scan(chunk, values, positive, decays, keys, queries),
        slow_mamba(values, positive, decays, keys, queries),
    )
    check_equal(found, expected, [values, steps, decays, keys, queries])


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_delta_rule_is_that_of_each_token(chunk: int) -> None:
    values, writes, logs, keys, queries = given = inputs()
    share, decay = writes.sigmoid(), -functional.softplus(logs)
    found, expected = (
        delta_scan(chunk, values, share, decay, keys, queries),
        slow_delta(values, share, decay, keys, queries),
    )
    check_equal(found, expected, given)


def test_a_convolution_sees_no_later_token() -> None:
    x, weight, bias = drawn(SAMPLES, TOKENS, 3).requires_grad_(), drawn(3, 1, 4), drawn(3)
    found = causal_convolution(x, weight, bias)
    expected = bias + sum(weight[:, 0, 3 - back] * functional.pad(x, (0, 0, back, 0))[:, :TOKENS] for back in range(4))
    torch.testing.assert_close(found, functional.silu(expected))
