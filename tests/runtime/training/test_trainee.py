"""Initial values: the same whichever part is drawn, and little drawn beside it."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from runtime.mapping.parts import ParameterPart
from runtime.training import trainee
from runtime.training.trainee import initial_values


def part(start: int, end: int, dim: int, name: str = "m.weight", shape: tuple[int, ...] = (37, 23)) -> ParameterPart:
    return ParameterPart(name, shape, dim, start, end)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("block", [1, 64, 10**6])
def test_parts_are_slices_of_the_whole(monkeypatch: pytest.MonkeyPatch, dim: int, block: int) -> None:
    monkeypatch.setattr(trainee, "_BLOCK_ELEMENTS", block)
    total = (37, 23)[dim]
    whole = initial_values(7, part(0, total, dim))
    cuts = [0, 1, 1, 5, 17, total]
    for start, end in pairwise(cuts):
        assert torch.equal(initial_values(7, part(start, end, dim)), whole.narrow(dim, start, end - start))
    assert not torch.equal(initial_values(8, part(0, total, dim)), whole)
    assert not torch.equal(initial_values(7, part(0, total, dim, "other.weight")), whole)


def test_values_are_normal() -> None:
    values = initial_values(0, part(0, 2000, 0, shape=(2000, 600)))
    assert values.dtype == torch.float32
    assert float(values.std()) == pytest.approx(0.02, rel=0.01)
    assert abs(float(values.mean())) < 1e-4
    assert float(torch.corrcoef(values[::437])[0, 1:].abs().max()) < 0.2  # rows of different blocks


@pytest.mark.parametrize("dim", [0, 1])
def test_a_rank_draws_little_beside_its_own_part(monkeypatch: pytest.MonkeyPatch, dim: int) -> None:
    shape, elements = (4096, 1024), []
    randn = torch.randn

    def count(size: Any, **how: Any) -> torch.Tensor:
        values = randn(size, **how)
        elements.append(values.numel())
        return values

    monkeypatch.setattr(torch, "randn", count)
    total = shape[dim]
    initial_values(0, part(total // 8 + 1, total // 4 + 1, dim, shape=shape))
    assert sum(elements) <= shape[0] * shape[1] // 8 + 2 * trainee._BLOCK_ELEMENTS


def test_norms_are_one_and_biases_zero() -> None:
    assert initial_values(0, part(0, 4, 0, "norm.weight", (9,))).tolist() == [1.0] * 4
    assert initial_values(0, part(0, 4, 0, "q_proj.bias", (9,))).tolist() == [0.0] * 4
