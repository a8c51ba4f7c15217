"""Rotary position embedding."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.mapping.parts import Range
from runtime.model.functions import rotated


class Rope:
    """Rotary position embedding (Su et al., arXiv 2104.09864) of runs of tokens, halves rotated as in Llama: of
    vectors of `dim` values, with the base `theta`. `like` has the type and device of its tables."""

    def __init__(self, dim: int, theta: float, tokens: Sequence[Range], like: Tensor) -> None:
        steps = torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32)
        frequency = 1.0 / (theta ** (steps / dim))
        positions = torch.cat([torch.arange(*run, dtype=torch.float32) for run in tokens])
        angle = positions[:, None] * frequency
        both = torch.cat([angle, angle], dim=-1)
        # Of the halves swapped, the first one is the second one, negated.
        sin = torch.cat([-angle.sin(), angle.sin()], dim=-1)
        self._cos, self._sin = (table.to(like)[:, None, None] for table in (both.cos(), sin))

    def tensors(self) -> list[Tensor]:
        """What lasts."""
        return [self._cos, self._sin]

    def __call__(self, q_tbnd: Tensor, k_tbnd: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated by their positions."""
        return rotated(self._cos, self._sin, q_tbnd, k_tbnd)
