"""Ragged all-to-all of an all-to-all group: its ranks' own tokens of all heads, for all its tokens of one's own heads.

As in DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509), with unequal shards and heads. Key-value heads that query
heads of several ranks read go to each of these; their gradients are summed at the owner of the token. Shapes: t own
tokens and T the group's, in the order of the sequence; B samples, N all heads and n own ones, D head size.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hexiopt.plan.token_layout import Range
from runtime.model.functions import apply_all, exact_dtype


class AllToAll:
    """What one rank exchanges in a group: `tokens` of each of its ranks, which are ascending; it is the one at `place`.

    Without a `group` the only rank has all. What travels has for each tensor the heads that each rank works on.
    """

    def __init__(
        self,
        tokens: Sequence[Sequence[Range]],
        place: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._lengths = [sum(end - first for first, end in runs) for runs in tokens]
        self._place, self._group = place, group
        held = torch.cat([torch.arange(*run) for runs in tokens for run in runs])
        order = held.argsort()
        # Rows of the ranks one after another, in the order of the sequence; and back again.
        self._sort = None if bool((held.diff() > 0).all()) else (order.to(device), order.argsort().to(device))

    def to_heads(self, heads: Sequence[Sequence[Range]], *own_tbnd: Tensor) -> tuple[Tensor, ...]:
        """Of each tensor [t, B, N, D], all tokens of one's own heads [T, B, n, D]. `heads` by tensor and rank."""
        return own_tbnd if self._group is None else apply_all(_Exchange, self, True, heads, *own_tbnd)

    def to_tokens(self, heads: Sequence[Range], values_tbnd: Tensor) -> Tensor:
        """One's own tokens of all heads [t, B, N, D], from all tokens of one's own heads [T, B, n, D]."""
        if self._group is None:
            return values_tbnd
        (tokens_tbnd,) = apply_all(_Exchange, self, False, [heads], values_tbnd)
        return tokens_tbnd

    def spread(self, heads: Sequence[Sequence[Range]], xs: Sequence[Tensor]) -> list[Tensor]:
        """From [t, B, N, D] to [T, B, n, D]."""
        parts = [[x[:, :, slice(*of[place])] for x, of in zip(xs, heads, strict=True)] for place in self._places]
        shapes = [[(length, *mine.shape[1:]) for mine in parts[self._place]] for length in self._lengths]
        came = self._swap(parts, shapes)
        whole = [torch.cat(column) for column in zip(*came, strict=True)]
        return whole if self._sort is None else [x[self._sort[0]] for x in whole]

    def collect(self, heads: Sequence[Sequence[Range]], xs: Sequence[Tensor]) -> list[Tensor]:
        """From [T, B, n, D] to [t, B, N, D], heads of several ranks summed."""
        if self._sort is not None:
            xs = [x[self._sort[1]] for x in xs]
        parts = list(zip(*(x.split_with_sizes(self._lengths) for x in xs), strict=True))
        length = self._lengths[self._place]
        shapes = [
            [(length, x.shape[1], of[place][1] - of[place][0], x.shape[3]) for x, of in zip(xs, heads, strict=True)]
            for place in self._places
        ]
        came = self._swap(parts, shapes)
        return [_join_heads([row[k] for row in came], of) for k, of in enumerate(heads)]

    @property
    def _places(self) -> range:
        return range(len(self._lengths))

    def _swap(
        self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
    ) -> list[list[Tensor]]:
        """Give each rank its tensors; from each come some of these shapes."""
        sent = torch.cat([part.reshape(-1) for row in parts for part in row])
        sizes = [[prod(shape) for shape in row] for row in shapes]
        came = sent.new_empty(sum(map(sum, sizes)))
        lengths = [sum(part.numel() for part in row) for row in parts]
        dist.all_to_all_single(came, sent, [sum(row) for row in sizes], lengths, group=self._group)
        flat = iter(came.split_with_sizes([size for row in sizes for size in row]))
        return [[next(flat).view(shape) for shape in row] for row in shapes]


def _join_heads(parts: Sequence[Tensor], heads: Sequence[Range]) -> Tensor:
    """Heads of several ranks side by side; summed where they are the same."""
    first = parts[0]
    num_heads = max(end for _, end in heads)
    shared = sum(end - low for low, end in heads) > num_heads
    dtype = exact_dtype(first.dtype) if shared else first.dtype
    whole = first.new_zeros(*first.shape[:2], num_heads, first.shape[3], dtype=dtype)
    for part, (low, end) in zip(parts, heads, strict=True):
        whole[:, :, low:end] += part
    return whole.to(first.dtype)


class _Exchange(torch.autograd.Function):
    """Its backward is the other way round."""

    @staticmethod
    def forward(
        ctx: Any, exchange: AllToAll, state_spreads: bool, heads: Sequence[Sequence[Range]], *xs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.state_spreads, ctx.heads = exchange, state_spreads, heads
        return tuple(exchange.spread(heads, xs) if state_spreads else exchange.collect(heads, xs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.exchange.collect if ctx.state_spreads else ctx.exchange.spread
        return None, None, None, *back(ctx.heads, grads)
