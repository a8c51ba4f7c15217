"""Collectives of a tensor-parallel group inside autograd, with sequence-parallel norms.

Between attention and MLP every rank has its own tokens of all samples (Korthikanti et al., arXiv 2205.05198, section
4.2.2): *gather* brings all tokens to every rank, *scatter* sums what the ranks made of all tokens and leaves each its
own. Each is the other's backward. Hidden states are [tokens, samples, hidden] (TBH): tokens come first, so that ranks'
tokens follow each other in memory. Parts may be unequal; then they travel padded to the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.parts import Range


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """A rank's TP group: `tokens` of every rank. Without a `group` the only rank has all."""

    rank: int
    tokens: tuple[Range, ...]
    group: dist.ProcessGroup | None = None

    @property
    def own(self) -> Range:
        """The rank's tokens."""
        return self.tokens[self.rank]

    def gather(self, x_tbh: Tensor) -> Tensor:
        """All ranks' tokens [T, B, H], from one's own [t, B, H]."""
        return x_tbh if self.group is None else _applied(_Gather, x_tbh, self)

    def scatter(self, x_tbh: Tensor) -> Tensor:
        """The ranks' sum [T, B, H], of which each keeps its own tokens [t, B, H]."""
        return x_tbh if self.group is None else _applied(_Scatter, x_tbh, self)

    def loss(self, logits_tbv: Tensor, labels_tb: Tensor, rows: Range) -> Tensor:
        """Sum of the cross entropies of all labels, from logits of the rank's own `rows` of the vocabulary."""
        return _applied(_CrossEntropy, logits_tbv, labels_tb, rows, self.group)


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    found: Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return found


def _lengths(tokens: Sequence[Range]) -> list[int]:
    return [end - start for start, end in tokens]


def _all_gather(x: Tensor, tp: TensorParallel) -> Tensor:
    lengths = _lengths(tp.tokens)
    longest = max(lengths)
    padded = x if len(x) == longest else torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])])
    whole = x.new_empty(longest * len(lengths), *x.shape[1:])
    dist.all_gather_single(whole, padded.contiguous(), group=tp.group)
    if min(lengths) == longest:
        return whole
    return torch.cat([whole[k * longest : k * longest + n] for k, n in enumerate(lengths)])


def _reduce_scatter(x: Tensor, tp: TensorParallel) -> Tensor:
    lengths = _lengths(tp.tokens)
    longest = max(lengths)
    if min(lengths) < longest:
        whole = x.new_zeros(longest * len(lengths), *x.shape[1:])
        for k, (start, end) in enumerate(tp.tokens):
            whole[k * longest : k * longest + end - start] = x[start:end]
    else:
        whole = x.contiguous()
    own = x.new_empty(longest, *x.shape[1:])
    dist.reduce_scatter_single(own, whole, group=tp.group)
    return own[: lengths[tp.rank]]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return _all_gather(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grads[0], ctx.tp), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return _reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grads[0], ctx.tp), None


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy over a vocabulary whose rows lie on several ranks: only maxima and sums are exchanged."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rows: Range, group: dist.ProcessGroup | None) -> Tensor:
        exact = torch.promote_types(logits.dtype, torch.float32)
        scores = logits.to(exact)
        most = scores.amax(dim=-1) if scores.shape[-1] else scores.new_full(labels.shape, -torch.inf)
        if group is not None:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        scores = scores - most.unsqueeze(-1)
        powers = scores.exp()
        mine = (labels >= rows[0]) & (labels < rows[1])
        row = (labels - rows[0]).masked_fill(~mine, 0)
        target = scores.new_zeros(labels.shape)
        if scores.shape[-1]:
            target = scores.gather(-1, row.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
        sums = torch.stack([powers.sum(dim=-1), target])
        if group is not None:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(powers / sums[0].unsqueeze(-1), row, mine)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        shares, row, mine = ctx.saved_tensors
        found = shares.clone()
        if found.shape[-1]:
            found.scatter_add_(-1, row.unsqueeze(-1), -mine.unsqueeze(-1).to(found.dtype))
        return (found * grads[0]).to(ctx.dtype), None, None, None
