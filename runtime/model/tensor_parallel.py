"""Collectives of a tensor-parallel group inside autograd, with sequence-parallel norms.

Between attention and MLP every rank has its own tokens of all samples (Korthikanti et al., arXiv 2205.05198, section
4.2.2): *gather* brings all tokens to every rank, *scatter* sums what the ranks made of all tokens and leaves each its
own. Each is the other's backward. A product of gathered tokens keeps the rank's own alone, and its backward gathers
again. Hidden states are [tokens, samples, hidden] (TBH): tokens come first, so that ranks' tokens follow each other in
memory. Parts may be unequal; then they travel padded to the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from runtime.mapping.parts import Range
from runtime.memory import saved_as
from runtime.model.functions import applied


@dataclass(frozen=True, eq=False)
class RankTpGroup:
    """A rank's TP group: `tokens` of every rank. Without a `group` there is one rank, which needs no other."""

    rank: int
    tokens: tuple[Range, ...]
    group: dist.ProcessGroup | None = None

    @property
    def own(self) -> Range:
        """The rank's tokens."""
        return self.tokens[self.rank]

    def columns(self, x_tbh: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Products of all ranks' tokens [T, B, H], of which one's own are given [t, B, H], with matrices cut in rows of
        their weights."""
        found: tuple[Tensor, ...] = applied(_Products, x_tbh, self, *weights, *biases)
        return found

    def rows(self, x_tbn: Tensor, weight: Tensor) -> Tensor:
        """The product with a matrix cut in columns of its weight, summed over ranks: one's own tokens [t, B, H]."""
        (found,) = applied(_Products, x_tbn, None, weight, None)
        return self.scatter(found)

    def scatter(self, x_tbh: Tensor) -> Tensor:
        """The ranks' sum [T, B, H], of which each keeps its own tokens [t, B, H]."""
        found: Tensor = x_tbh if self.group is None else applied(_Scatter, x_tbh, self)
        return found

    def loss(self, logits_tbv: Tensor, labels_tb: Tensor, rows: Range) -> Tensor:
        """Sum of the cross entropies of all labels, from logits of the rank's own `rows` of the vocabulary."""
        with saved_as("logits", beside=logits_tbv):
            found: Tensor = applied(_CrossEntropy, logits_tbv, labels_tb, rows, self.group)
        return found


def _lengths(tokens: Sequence[Range]) -> list[int]:
    return [end - start for start, end in tokens]


def _all_gather(x: Tensor, tp: RankTpGroup) -> Tensor:
    lengths = _lengths(tp.tokens)
    longest = max(lengths)
    padded = x if len(x) == longest else torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])])
    whole = x.new_empty(longest * len(lengths), *x.shape[1:])
    dist.all_gather_single(whole, padded.contiguous(), group=tp.group)
    if min(lengths) == longest:
        return whole
    return torch.cat([whole[k * longest : k * longest + n] for k, n in enumerate(lengths)])


def _reduce_scatter(x: Tensor, tp: RankTpGroup) -> Tensor:
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


class _Products(torch.autograd.Function):
    """Of one input with several matrices, each with its bias or None; gathered before, if there is a `tp` to do it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: RankTpGroup | None, *weights_and_biases: Tensor | None) -> tuple[Tensor, ...]:
        count = len(weights_and_biases) // 2
        weights, biases = weights_and_biases[:count], weights_and_biases[count:]
        ctx.tp = None if tp is None or tp.group is None else tp
        ctx.biased = [bias is not None for bias in biases]
        ctx.save_for_backward(x)
        ctx.weights = weights  # parameters, which last, or come back for the backward
        whole = x if ctx.tp is None else _all_gather(x, ctx.tp)
        return tuple(
            functional.linear(whole, weight, bias)  # type: ignore[arg-type]
            for weight, bias in zip(weights, biases, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weights = ctx.saved_tensors, ctx.weights
        whole = x if ctx.tp is None else _all_gather(x, ctx.tp)
        flat = [grad.flatten(0, 1) for grad in grads]
        of_weights = [grad.T @ whole.flatten(0, 1) for grad in flat]
        of_biases = [grad.sum(dim=0) if biased else None for grad, biased in zip(flat, ctx.biased, strict=True)]
        of_x = flat[0] @ weights[0]
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            of_x.addmm_(grad, weight)
        of_x = of_x.view(whole.shape)
        return of_x if ctx.tp is None else _reduce_scatter(of_x, ctx.tp), None, *of_weights, *of_biases


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: RankTpGroup) -> Tensor:
        ctx.tp = tp
        return _reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grads[0], ctx.tp), None


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy over a vocabulary whose rows lie on several ranks: only maxima and sums are exchanged."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rows: Range, group: dist.ProcessGroup | None) -> Tensor:
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        most = scores.amax(dim=-1) if scores.shape[-1] else scores.new_full(labels.shape, -torch.inf)
        if group is not None:
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        scores -= most.unsqueeze(-1)
        mine = (labels >= rows[0]) & (labels < rows[1])
        row = (labels - rows[0]).masked_fill_(~mine, -1)
        target = scores.new_zeros(labels.shape)
        if scores.shape[-1]:
            target = scores.gather(-1, row.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill_(~mine, 0.0)
        powers = scores.exp_()
        sums = torch.stack([powers.sum(dim=-1), target])
        if group is not None:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(powers.div_(sums[0].unsqueeze(-1)), row)
        ctx.dtype = logits.dtype
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        found, row = ctx.saved_tensors  # the shares become the gradient in their place: there is one backward
        if found.shape[-1]:
            mine = (row >= 0).unsqueeze(-1).to(found.dtype)
            found.scatter_add_(-1, row.clamp(min=0).unsqueeze(-1), -mine)
        return found.mul_(grads[0]).to(ctx.dtype), None, None, None
