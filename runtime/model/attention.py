"""Causal attention of a rank's heads over the whole sequence, or within the documents that it is made of.

Shapes: T tokens, B samples, n query heads, D head size. Borders of documents are those among all tokens of the samples,
laid one sample after another: int32, from 0 to B · T.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from hexiopt.problem.kinds import Attention
from runtime.device import fused_attention, has_flash_attention
from runtime.mapping.parts import RankShard
from runtime.model.block_attention import PLAIN, Block, Scores, attend, attend_backward, blocks, sink_gradient
from runtime.model.functions import apply


class AttentionCall(Protocol):
    """A way of attention, the same for every layer of a rank that has it."""

    def __call__(
        self,
        q_tbnd: Tensor,
        k_tbnd: Tensor,
        v_tbnd: Tensor,
        sinks: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """What queries, keys and values give [T, B, n · D], their positions rotated in: all tokens of the rank's heads,
        or all heads of its tokens. `sinks` [n] are scores beside those of the keys. No token sees beyond its own one of
        the `documents`, if any."""
        ...

    def documents(self, borders: Tensor, num_samples: int) -> Tensor:
        """What `__call__` takes of documents with these borders."""
        ...


class WholeAttention:
    """Attention where a rank has all tokens, which sees back as far as its window. `like` has the type and device of
    its inputs.

    Fused attention of a GPU that has it is asked for by name (`fused_attention`); a window and documents take the
    kernel of flash attention for sequences of any lengths. Elsewhere torch chooses, and a window shorter than the
    sequence is a mask [T, T], added to scores; documents are one for each sample. Chunks are sequences of their own.
    """

    def __init__(self, part: Attention, shard: RankShard, seq_len: int, like: Tensor, scores: Scores = PLAIN) -> None:
        first, end = shard.groups(part.heads, part.kv_heads)
        self._meets, count = shard.meets(part.heads, part.kv_heads), end - first
        # Equally many for each: attention reads them in place. Otherwise they are copied, one for each query head.
        is_grouped = self._meets == [k for k in range(count) for _ in range(len(self._meets) // count)]
        window = part.window if part.window is not None and part.window < seq_len else None
        self._window = None if part.chunked else window
        self._chunk = window if part.chunked else None
        is_even = self._chunk is None or seq_len % self._chunk == 0
        # What no kernel of torch computes: sinks, capped scores, and values of another width than keys without a copy.
        self._is_plain = not part.sinks and scores.cap is None and part.v_dim == part.qk_dim
        self._blocks = blocks([(0, seq_len)], [(0, seq_len)], self._window, scores, self._chunk)
        self._scale = scores.scale
        self._has_flash = self._is_plain and has_flash_attention(like.device, like.dtype, part.qk_dim)
        self._like = like
        self._seq_len, self._is_grouped = seq_len, is_grouped
        self._is_cut = self._window is not None or not is_even
        self._is_in_blocks = not self._is_plain or not (is_even or self._has_flash)
        self._mask: Tensor | None = None
        if self._window is not None and self._is_plain and not self._has_flash:
            self._mask = self._score_bias(self._visible_mask())

    def __call__(
        self,
        q_tbnd: Tensor,
        k_tbnd: Tensor,
        v_tbnd: Tensor,
        sinks: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """All tokens, of the rank's heads."""
        if not self._meets:
            return q_tbnd.flatten(2)
        if self._is_in_blocks and documents is None:
            return apply(_BlockAttention, self._blocks, self._meets, q_tbnd, k_tbnd, v_tbnd, sinks).flatten(2)
        mask = None if self._has_flash else self._mask if documents is None else documents
        # Kernels of GPUs with a mask know no groups.
        is_grouped = self._is_grouped and (mask is None or mask.is_cpu)
        if not is_grouped:
            k_tbnd, v_tbnd = k_tbnd[:, :, self._meets], v_tbnd[:, :, self._meets]
        if self._has_flash and (self._is_cut or documents is not None):
            return self._of_any_lengths(q_tbnd, k_tbnd, v_tbnd, documents)
        if self._chunk is not None and documents is None:
            return self._of_chunks(self._chunk, (q_tbnd, k_tbnd, v_tbnd), is_grouped)
        return self._attend((q_tbnd, k_tbnd, v_tbnd), mask, is_grouped)

    def _attend(self, qkv_tbnd: Sequence[Tensor], mask: Tensor | None, is_grouped: bool) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in qkv_tbnd)  # samples, heads, tokens, head size
        with fused_attention(q.device, q.dtype, q.shape[-1]):
            values = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped, scale=self._scale
            )
        return values.permute(2, 0, 1, 3).flatten(2)

    def _of_chunks(self, chunk: int, qkv_tbnd: Sequence[Tensor], is_grouped: bool) -> Tensor:
        """Each chunk is a sample, whose heads are those of all samples: views."""
        num_tokens, num_samples = qkv_tbnd[0].shape[:2]
        rows = [x.flatten(1, 2) for x in qkv_tbnd]
        of_chunks = [x.view(-1, chunk, *x.shape[1:]).transpose(0, 1) for x in rows]
        values = self._attend(of_chunks, None, is_grouped)
        return values.transpose(0, 1).reshape(num_tokens, num_samples, -1)

    def _of_any_lengths(self, q_tbnd: Tensor, k_tbnd: Tensor, v_tbnd: Tensor, borders: Tensor | None) -> Tensor:
        """Samples one after another: each of their documents, chunks, or each sample, is a sequence of its own."""
        num_tokens, num_samples = q_tbnd.shape[:2]
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q_tbnd, k_tbnd, v_tbnd))
        if borders is None:
            borders = self._borders(num_samples)
        # How many tokens before (-1: all) and after its own each one sees.
        back, grouped = (-1 if self._window is None else self._window - 1, 0), self._is_grouped
        values = varlen_attn(
            q, k, v, borders, borders, num_tokens, num_tokens, window_size=back, enable_gqa=grouped, scale=self._scale
        )
        assert isinstance(values, Tensor)
        return values.view(num_samples, num_tokens, -1).transpose(0, 1)

    def documents(self, borders: Tensor, num_samples: int) -> Tensor:
        """For flash attention the borders themselves, with those of chunks, else a mask [B, 1, T, T]."""
        if self._has_flash:
            from torch._dynamo import maybe_mark_dynamic  # only here, as importing it takes seconds

            if self._chunk is not None:
                borders = torch.cat([borders, self._borders(num_samples)]).sort().values
            maybe_mark_dynamic(borders, 0)  # one compiled graph for any number of documents
            return borders
        tokens = torch.arange(num_samples * self._seq_len, dtype=borders.dtype, device=borders.device)
        of_token = torch.searchsorted(borders, tokens, right=True).view(num_samples, self._seq_len)
        return self._score_bias((of_token[:, None, :, None] == of_token[:, None, None, :]) & self._visible_mask())

    def _borders(self, num_samples: int) -> Tensor:
        """Where chunks begin, or whole samples, and the end."""
        device, end = self._like.device, num_samples * self._seq_len
        starts = torch.arange(0, self._seq_len, self._chunk or self._seq_len, dtype=torch.int32, device=device)
        samples = torch.arange(0, end + 1, self._seq_len, dtype=torch.int32, device=device)
        return (samples[:, None] + starts).flatten()[: len(starts) * num_samples + 1]

    def _visible_mask(self) -> Tensor:
        """Which keys a query sees in a document without end [T, T]."""
        at = torch.arange(self._seq_len, device=self._like.device)
        back = at[:, None] - at
        if self._chunk is not None:
            return (back >= 0) & (back <= at[:, None] % self._chunk)
        return back >= 0 if self._window is None else (back >= 0) & (back < self._window)

    def _score_bias(self, seen: Tensor) -> Tensor:
        """As what is added to scores."""
        return self._like.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)


class _BlockAttention(torch.autograd.Function):
    """Attention [T, B, n, D] of blocks, each token in one, with products in pieces, of which no scores are kept;
    `meets` are the key-value heads that query heads meet. A sink is one more key, whose value is zero."""

    @staticmethod
    def forward(
        ctx: Any, cover: list[Block], meets: list[int], q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> Tensor:
        # As the projection that follows reads it: it saves the same storage.
        out, lses = q.new_empty(*q.shape[:3], v.shape[3]), []
        for block in cover:
            queries, keys, values = (x[slice(*block.queries)].permute(1, 2, 0, 3) for x in (q, k, v))
            block_out, lse = attend(block, queries, keys[:, meets], values[:, meets])
            if sinks is not None:
                whole = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
                block_out, lse = block_out * (lse - whole).exp_().unsqueeze(-1), whole
            out[slice(*block.queries)].copy_(block_out.permute(2, 0, 1, 3))
            lses.append(lse)
        ctx.cover, ctx.meets = cover, meets
        ctx.save_for_backward(q, k, v, sinks, out, torch.cat(lses, -1))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out_tbnd, lse = ctx.saved_tensors
        of_qkv = [torch.empty_like(x) for x in (q, k, v)]
        of_sinks = None if sinks is None else torch.zeros_like(sinks)
        for block in ctx.cover:
            at = slice(*block.queries)
            queries, keys, values, out, grad = (x[at].permute(1, 2, 0, 3) for x in (q, k, v, out_tbnd, grads[0]))
            operands = grad.contiguous(), queries, keys[:, ctx.meets], values[:, ctx.meets], out, lse[..., at]
            of_q, *of_both = attend_backward(block, *operands)
            sums = [of_x.new_zeros(x.shape) for of_x, x in zip(of_both, (keys, values), strict=True)]
            for whole, of_x in zip(sums, of_both, strict=True):
                for head, kv_head in enumerate(ctx.meets):
                    whole[:, kv_head] += of_x[:, head]
            for whole, of_x in zip(of_qkv, (of_q, *sums), strict=True):
                whole[at].copy_(of_x.permute(2, 0, 1, 3))
            if of_sinks is not None:
                of_sinks += sink_gradient(sinks, grad, out, lse[..., at])
        return None, None, *of_qkv, of_sinks
