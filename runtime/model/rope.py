"""What positions do to queries and keys: rotary embedding, its frequencies scaled for contexts longer than those first
trained on, or a temperature."""

from collections.abc import Sequence
from math import ceil, floor, log, pi

import torch
from torch import Tensor

from hexiopt.files.models.execution import yarn_scale
from hexiopt.problem.execution import Rotation, Temperature
from runtime.mapping.parts import Range
from runtime.model.functions import as_type_of, rotate


class Rope:
    """The rotation of queries and keys [T, B, n, D] of runs of `tokens`: of the first `dim` of the D values, in
    pairs of values of two halves, or of neighbours, which it leaves in halves. `like` has the type and device of its
    tables."""

    def __init__(
        self, rotation: Rotation, dim: int, tokens: Sequence[Range], like: Tensor, is_interleaved: bool = False
    ) -> None:
        angle = _positions(tokens)[:, None] * frequencies(rotation, dim)
        both = torch.cat([angle, angle], dim=-1)
        # Of the halves swapped, the first one is the second one, negated.
        sin = torch.cat([-angle.sin(), angle.sin()], dim=-1)
        factor = attention_factor(rotation)
        self._cos, self._sin = ((factor * table).to(like)[:, None, None] for table in (both.cos(), sin))
        self._dim, self._is_interleaved = dim, is_interleaved

    def __call__(self, q_tbnd: Tensor, k_tbnd: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, rotated by their positions."""
        if q_tbnd.shape[-1] == self._dim:
            return self._rotate(q_tbnd, k_tbnd)
        first = self._rotate(q_tbnd[..., : self._dim], k_tbnd[..., : self._dim])
        q, k = (torch.cat([turned, x[..., self._dim :]], -1) for turned, x in zip(first, (q_tbnd, k_tbnd), strict=True))
        return q, k

    def _rotate(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self._is_interleaved:
            q, k = (x.view(*x.shape[:-1], -1, 2).mT.flatten(-2) for x in (q, k))
        return rotate(self._cos, self._sin, q, k)


class QueryScale:
    """Queries [T, B, n, D] of runs of `tokens` times the factors of a temperature; keys as they are."""

    def __init__(self, temperature: Temperature, tokens: Sequence[Range], like: Tensor) -> None:
        often = ((_positions(tokens) + 1) / temperature.tokens).floor()
        self._factors = (temperature.scale * often.log1p() + 1).to(like.device)[:, None, None, None]

    def __call__(self, q_tbnd: Tensor, k_tbnd: Tensor) -> tuple[Tensor, Tensor]:
        """As `Rope` does."""
        return as_type_of(q_tbnd, q_tbnd * self._factors), k_tbnd


def _positions(tokens: Sequence[Range]) -> Tensor:
    return torch.cat([torch.arange(*run, dtype=torch.float32) for run in tokens])


def frequencies(rotation: Rotation, dim: int) -> Tensor:
    """The angle by which each of dim / 2 pairs turns from a token to the next [dim / 2], by the rotation's rule."""
    theta, factor, length = rotation.theta, rotation.factor, rotation.original_positions
    plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).to(torch.float32) / dim))
    match rotation.rule:
        case "default":
            return plain
        case "linear":
            return plain / factor
        case "llama3":
            # Waves longer than length / low are stretched, those shorter than length / high are not; between them
            # the frequency moves evenly with the number of waves in the length.
            waves = length * plain / (2 * pi)
            share = ((waves - rotation.low) / (rotation.high - rotation.low)).clamp(0, 1)
            return plain * (share + (1 - share) / factor)
        case "yarn":

            def pair(waves: float) -> float:
                """The number of the pair that turns so many times in the length."""
                return dim * log(length / (waves * 2 * pi)) / (2 * log(theta))

            low, high = pair(rotation.fast), pair(rotation.slow)
            if rotation.truncates:
                low, high = floor(low), ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
            stretched = ramp.clamp(0, 1)
            return plain * (1 - stretched) + plain / factor * stretched
        case rule:
            raise AssertionError(f"{rule} is not read")


def attention_factor(rotation: Rotation) -> float:
    """The factor of cosines and sines, and so of queries and keys where they are rotated."""
    if rotation.rule != "yarn":
        return 1.0
    if rotation.attention_factor is not None:
        return rotation.attention_factor
    if rotation.mscale and rotation.mscale_all_dim:
        return yarn_scale(rotation, rotation.mscale) / yarn_scale(rotation, rotation.mscale_all_dim)
    return yarn_scale(rotation, 1.0)
