"""Causal attention of a rank's heads over the whole sequence.

Shapes: T tokens, B samples, n query heads, D head size.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hexiopt.problem.model import ModelSpec
from runtime.mapping.parts import Range, RankShard


class Attention(Protocol):
    """A way of attention, the same for every layer of a rank."""

    def __call__(self, q_tbnd: Tensor, k_tbnd: Tensor, v_tbnd: Tensor) -> Tensor:
        """What queries, keys and values give [T, B, n · D], their positions rotated in: all tokens of the rank's heads,
        or all heads of its tokens."""
        ...

    def tensors(self) -> list[Tensor]:
        """What lasts."""
        ...


def met(model: ModelSpec, heads: Range, kv_heads: Range) -> list[int]:
    """Which of `kv_heads`, counted from their first one, each of the query heads meets."""
    group = model.num_heads // model.num_kv_heads
    return [head // group - kv_heads[0] for head in range(*heads)]


class WholeAttention:
    """Attention where a rank has all tokens. A window shorter than the sequence is a mask [T, T], added to scores."""

    def __init__(
        self, model: ModelSpec, shard: RankShard, seq_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._meets = met(model, shard.heads, shard.kv_heads)
        count = shard.kv_heads[1] - shard.kv_heads[0]
        # Equally many for each: attention reads them in place. Otherwise they are copied, one for each query head.
        self._is_grouped = self._meets == [k for k in range(count) for _ in range(len(self._meets) // count)]
        self._mask: Tensor | None = None
        window = model.attention_window
        if window is not None and window < seq_len:
            back = torch.arange(seq_len, device=device)[:, None] - torch.arange(seq_len, device=device)
            hidden = (back < 0) | (back >= window)
            self._mask = torch.zeros(seq_len, seq_len, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)

    def __call__(self, q_tbnd: Tensor, k_tbnd: Tensor, v_tbnd: Tensor) -> Tensor:
        """All tokens, of the rank's heads."""
        if not self._meets:
            return q_tbnd.flatten(2)
        mask = self._mask
        grouped = self._is_grouped and (mask is None or not mask.is_cuda)  # CUDA's kernels with a mask know no groups
        if not grouped:
            k_tbnd, v_tbnd = k_tbnd[:, :, self._meets], v_tbnd[:, :, self._meets]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_tbnd, k_tbnd, v_tbnd))  # samples, heads, tokens, head size
        found = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        return found.permute(2, 0, 1, 3).flatten(2)

    def tensors(self) -> list[Tensor]:
        """The mask, if any."""
        return [] if self._mask is None else [self._mask]
