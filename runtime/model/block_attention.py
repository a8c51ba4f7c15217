"""Attention of a run of queries on a run of keys, a block of the whole, with what it takes to merge blocks.

A block's output is divided by the sum of its own keys' exponentials, whose logarithm (the *log-sum-exp*) comes with it:
outputs of several blocks are averaged with the weights exp(lse - merged lse). With the merged output and log-sum-exp,
the backward of FlashAttention-2 (Dao, arXiv 2307.08691, section 3.1) gives each block's exact share of the gradients.

Fused kernels of torch compute blocks that the mask leaves whole, and those on the diagonal; products in pieces compute
what a window cuts, and what no kernel is made for. Shapes: B samples, n heads, q queries, k keys, D head size; numbers
that are not of the inputs' type are of max(float32, it).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from hexiopt.plan.token_layout import Range
from runtime.device import has_flash_attention
from runtime.model.functions import exact

_aten = torch.ops.aten
_PIECE = 2**24  # scores held at a time


class Scores(NamedTuple):
    """How scores follow from products of queries and keys: times `scale` (None: 1 / sqrt D), and then, with a `cap`,
    cap · tanh(score / cap)."""

    scale: float | None = None
    cap: float | None = None


PLAIN = Scores()


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of queries and of keys that follow each other; the first query is `lead` tokens behind the first key.

    Query i sees key j where 0 <= lead + i - j, and less than `window`, if any.
    """

    queries: Range
    keys: Range
    lead: int
    window: int | None = None
    scores: Scores = PLAIN

    @property
    def is_empty(self) -> bool:
        """Whether no query sees any key."""
        first, end = self._back
        return end <= 0 or (self.window is not None and first >= self.window)

    @property
    def is_whole(self) -> bool:
        """Whether all queries see all keys."""
        first, end = self._back
        return first >= 0 and (self.window is None or end <= self.window)

    @property
    def is_causal(self) -> bool:
        """Whether query i sees the keys up to i."""
        length = self.queries[1] - self.queries[0]
        return (
            self.lead == 0 and length == self.keys[1] - self.keys[0] and (self.window is None or length <= self.window)
        )

    def scale_of(self, q: Tensor) -> float:
        """The factor of products with queries."""
        return 1 / sqrt(q.shape[-1]) if self.scores.scale is None else self.scores.scale

    @property
    def _back(self) -> Range:
        """By how many tokens queries are behind keys."""
        return self.lead - (self.keys[1] - self.keys[0]) + 1, self.lead + self.queries[1] - self.queries[0]

    def hidden(self, rows: Range, device: torch.device) -> Tensor:
        """Which keys `rows` of the block's queries do not see [q, k]."""
        queries = torch.arange(*rows, device=device)[:, None] + self.lead
        back = queries - torch.arange(self.keys[1] - self.keys[0], device=device)
        return back < 0 if self.window is None else (back < 0) | (back >= self.window)


def blocks(
    queries: Sequence[Range],
    keys: Sequence[Range],
    window: int | None = None,
    scores: Scores = PLAIN,
    chunk: int | None = None,
) -> list[Block]:
    """The blocks of runs of tokens in which any query sees any key; rows count from the first token of all runs. With
    a `chunk` tokens see those of their own one alone.

    Those on the diagonal come first: they give every query that has one a finite log-sum-exp.
    """
    visible = []
    for first, q_rows in _rows(queries, chunk):
        for other, k_rows in _rows(keys, chunk):
            block = Block(q_rows, k_rows, first - other, window, scores)
            if not block.is_empty and (chunk is None or first // chunk == other // chunk):
                visible.append(block)
    return sorted(visible, key=lambda block: block.lead != 0)


def _rows(runs: Sequence[Range], chunk: int | None) -> Iterator[tuple[int, Range]]:
    """The first token of each run, which is cut where chunks end, and its rows."""
    at = 0
    for first, end in runs:
        cuts = [] if chunk is None else range((first // chunk + 1) * chunk, end, chunk)
        for start, stop in pairwise([first, *cuts, end]):
            yield start, (at + start - first, at + stop - first)
        at += end - first


def attend(block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The block's output [B, n, q, D] and log-sum-exp [B, n, q], of its queries [B, n, q, D], keys and values."""
    if not _is_fused(block, q, v):
        return _attend(block, q, k, v)
    fused = (
        _aten._scaled_dot_product_flash_attention if q.is_cuda else _aten._scaled_dot_product_flash_attention_for_cpu
    )
    out_lse: tuple[Tensor, Tensor] = fused(q, k, v, 0.0, not block.is_whole, scale=block.scores.scale)[:2]
    return out_lse


def attend_backward(
    block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's share of the gradients of its queries, keys and values; `out` and `lse` are merged of all blocks."""
    if not _is_fused(block, q, v):
        return _attend_backward(block, grad, q, k, v, out, lse)
    causal = not block.is_whole
    gradients: tuple[Tensor, Tensor, Tensor]
    lse = lse.contiguous()
    if q.is_cuda:
        # Lengths of sequences of unequal length, and seeds of a dropout: there are neither.
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)
        rest = (None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused)
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, *rest, scale=block.scores.scale
        )
    else:
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=block.scores.scale
        )
    return gradients


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Add a block to what other blocks of the same queries have made: `out` and `lse` change in their places.

    At least one of the two has seen a key for every query.
    """
    both = torch.logaddexp(lse, other_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1)).addcmul_(other, (other_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


def sink_gradient(sinks: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The gradient of scores [n] beside those of the keys, whose values are zero; `lse` is merged with them."""
    shares = (sinks.to(lse.dtype)[:, None] - lse).exp_()
    return -(shares * (grad * out).sum(-1)).sum((0, 2)).to(sinks.dtype)


def _is_fused(block: Block, q: Tensor, v: Tensor) -> bool:
    if not (block.is_whole or block.is_causal) or block.scores.cap is not None or v.shape[-1] != q.shape[-1]:
        return False
    return not q.is_cuda or has_flash_attention(q.device, q.dtype, q.shape[-1])


def _pieces(q: Tensor, k: Tensor) -> Iterator[Range]:
    """Rows of queries whose scores are held at a time."""
    step = max(1, _PIECE // (q.shape[0] * q.shape[1] * k.shape[2]))
    for first in range(0, q.shape[2], step):
        yield first, min(first + step, q.shape[2])


def _scores(block: Block, rows: Range, q: Tensor, k: Tensor) -> Tensor:
    scores = q[:, :, slice(*rows)].to(k.dtype) @ k.mT * block.scale_of(q)
    if block.scores.cap is not None:
        scores = scores.div_(block.scores.cap).tanh_().mul_(block.scores.cap)
    return scores if block.is_whole else scores.masked_fill_(block.hidden(rows, q.device), -torch.inf)


def _attend(block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    k, v = exact(k), exact(v)
    out, lse = k.new_empty(*q.shape[:-1], v.shape[-1]), k.new_empty(q.shape[:-1])
    for rows in _pieces(q, k):
        scores, at = _scores(block, rows, q, k), slice(*rows)
        lse[:, :, at] = scores.logsumexp(dim=-1)
        out[:, :, at] = scores.softmax(dim=-1).nan_to_num_(0.0) @ v  # a query may see no key
    return out, lse


def _attend_backward(
    block: Block, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    k, v = exact(k), exact(v)
    grad = grad.to(k.dtype)
    delta = (grad * out).sum(dim=-1, keepdim=True)
    of_q, of_k, of_v = k.new_empty(q.shape), torch.zeros_like(k), torch.zeros_like(v)
    for rows in _pieces(q, k):
        at = slice(*rows)
        scores = _scores(block, rows, q, k)
        shares = (scores - lse[:, :, at, None]).exp_()
        of_v += shares.mT @ grad[:, :, at]
        of_scores = (grad[:, :, at] @ v.mT).sub_(delta[:, :, at]).mul_(shares).mul_(block.scale_of(q))
        if block.scores.cap is not None:  # of hidden keys nothing is shared
            of_scores.mul_(1 - scores.masked_fill_(scores.isinf(), 0.0).div_(block.scores.cap).square_())
        of_q[:, :, at] = of_scores @ k
        of_k += of_scores.mT @ q[:, :, at].to(k.dtype)
    return of_q, of_k, of_v
