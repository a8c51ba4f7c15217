"""Causal attention of a rank's heads over the whole sequence.

Shapes: T tokens, B samples, n query heads, D head size.
"""

from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from hexiopt.problem.model import ModelSpec
from runtime.device import has_flash_attention
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
    """Attention where a rank has all tokens, which sees back as far as the model's window.

    Flash attention of a GPU that has it is asked for by name, so that nothing slower runs unseen; a window takes its
    kernel for sequences of any lengths. Elsewhere torch chooses, and a window shorter than the sequence is a mask
    [T, T], added to scores.
    """

    def __init__(
        self, model: ModelSpec, shard: RankShard, seq_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._meets = met(model, shard.heads, shard.kv_heads)
        count = shard.kv_heads[1] - shard.kv_heads[0]
        # Equally many for each: attention reads them in place. Otherwise they are copied, one for each query head.
        is_grouped = self._meets == [k for k in range(count) for _ in range(len(self._meets) // count)]
        window = model.attention_window
        self._window = window if window is not None and window < seq_len else None
        self._has_flash = has_flash_attention(device, dtype, model.head_dim)
        self._mask: Tensor | None = None
        if self._window is not None and not self._has_flash:
            back = torch.arange(seq_len, device=device)[:, None] - torch.arange(seq_len, device=device)
            hidden = (back < 0) | (back >= self._window)
            self._mask = torch.zeros(seq_len, seq_len, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
            is_grouped = is_grouped and device.type == "cpu"  # kernels of GPUs with a mask know no groups
        self._is_grouped = is_grouped

    def __call__(self, q_tbnd: Tensor, k_tbnd: Tensor, v_tbnd: Tensor) -> Tensor:
        """All tokens, of the rank's heads."""
        if not self._meets:
            return q_tbnd.flatten(2)
        if not self._is_grouped:
            k_tbnd, v_tbnd = k_tbnd[:, :, self._meets], v_tbnd[:, :, self._meets]
        if self._window is not None and self._has_flash:
            return self._windowed(q_tbnd, k_tbnd, v_tbnd, self._window)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q_tbnd, k_tbnd, v_tbnd))  # samples, heads, tokens, head size
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self._has_flash else nullcontext():
            found = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=self._mask, is_causal=self._mask is None, enable_gqa=self._is_grouped
            )
        return found.permute(2, 0, 1, 3).flatten(2)

    def _windowed(self, q_tbnd: Tensor, k_tbnd: Tensor, v_tbnd: Tensor, window: int) -> Tensor:
        """Samples one after another, each a sequence of its own."""
        num_tokens, num_samples = q_tbnd.shape[:2]
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q_tbnd, k_tbnd, v_tbnd))
        ends = num_tokens * torch.arange(num_samples + 1, dtype=torch.int32, device=q.device)
        back = (window - 1, 0)  # how many tokens before and after its own each one sees
        found = varlen_attn(q, k, v, ends, ends, num_tokens, num_tokens, window_size=back, enable_gqa=self._is_grouped)
        assert isinstance(found, Tensor)
        return found.view(num_samples, num_tokens, -1).transpose(0, 1)

    def tensors(self) -> list[Tensor]:
        """The mask, if any."""
        return [] if self._mask is None else [self._mask]
