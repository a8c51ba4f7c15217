"""The cross entropy of a last stage, over a vocabulary whose rows lie on several ranks: only maxima and sums travel.

Shapes: T tokens, t a rank's own of them, B samples, H hidden, V rows of the vocabulary on the rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from runtime.mapping.parts import Range
from runtime.model.functions import apply, exact_dtype
from runtime.model.tensor_parallel import RankTpGroup, gather, scatter
from runtime.saved import label_saved


@dataclass(frozen=True, slots=True)
class Logits:
    """How logits follow from products with the head: times `scale`, and then, with a `cap`, cap · tanh(logit / cap)."""

    scale: float = 1.0
    cap: float | None = None

    def of(self, products: Tensor) -> Tensor:
        """The logits."""
        logits = products if self.scale == 1.0 else products * self.scale
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap

    def gradient(self, of_logits: Tensor, logits: Tensor | None) -> Tensor:
        """The gradient of the products, in the place of that of the logits, which only a cap needs."""
        if self.cap is not None:
            assert logits is not None
            of_logits = of_logits.mul_(1 - (logits / self.cap).square_())
        return of_logits if self.scale == 1.0 else of_logits.mul_(self.scale)


def cross_entropy(logits_tbv: Tensor, labels_tb: Tensor, rows: Range, group: dist.ProcessGroup | None) -> Tensor:
    """Sum of the cross entropies of all labels, from logits of the rank's own `rows` of the vocabulary."""
    with label_saved("logits", transient_bytes=logits_tbv.nbytes):
        return apply(_CrossEntropy, logits_tbv, labels_tb, rows, group)


def chunked_cross_entropy(
    x_tbh: Tensor,
    weight_vh: Tensor,
    labels_tb: Tensor,
    rows: Range,
    tp: RankTpGroup,
    chunk_tokens: int,
    kind: Logits = Logits(),
) -> Tensor:
    """The same from normed hidden states of the rank's own tokens [t, B, H], with logits of `chunk_tokens` at a time.

    The forward makes the gradients too and keeps them instead of probabilities, as `F.linear_cross_entropy` of torch
    does, which knows no ranks. Those of a weight that is trained are summed over chunks in its own precision.
    """
    logits = min(chunk_tokens, labels_tb.numel()) * len(weight_vh)
    transient_bytes = logits * (2 * weight_vh.itemsize + exact_dtype(weight_vh.dtype).itemsize)
    with label_saved("logits", transient_bytes):
        return apply(
            _ChunkedCrossEntropy, x_tbh, weight_vh, labels_tb, rows, tp, chunk_tokens, kind, weight_vh.requires_grad
        )


def _probabilities(
    logits: Tensor, labels: Tensor, rows: Range, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of cross entropies; the probabilities of the rank's rows; each label's row among them, or -1."""
    scores = logits.to(exact_dtype(logits.dtype), copy=True)
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
    return (sums[0].log() - sums[1]).sum(), powers.div_(sums[0].unsqueeze(-1)), row


def _of_logits(probabilities: Tensor, row: Tensor) -> Tensor:
    """The gradient of the logits, in the place of the probabilities: there is one backward."""
    if probabilities.shape[-1]:
        mine = (row >= 0).unsqueeze(-1).to(probabilities.dtype)
        probabilities.scatter_add_(-1, row.clamp(min=0).unsqueeze(-1), -mine)
    return probabilities


def _of_chunk(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Range,
    group: dist.ProcessGroup | None,
    kind: Logits,
    of_x: Tensor,
    of_w: Tensor | None,
) -> Tensor:
    """The sum of a chunk's cross entropies; its gradients go into `of_x`, and are added to `of_w`, if any. A function,
    so that none of its logits is left when those of the next chunk are made."""
    logits = kind.of(functional.linear(x, weight))
    lost, probabilities, row = _probabilities(logits, labels, rows, group)
    capped = None if kind.cap is None else logits
    del logits  # before others of their size are made
    of_logits = kind.gradient(_of_logits(probabilities, row), capped).to(x.dtype)
    torch.mm(of_logits, weight, out=of_x)
    if of_w is not None:
        of_w.addmm_(of_logits.T, x)
    return lost


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, rows: Range, group: dist.ProcessGroup | None) -> Tensor:
        loss, probabilities, row = _probabilities(logits, labels, rows, group)
        ctx.save_for_backward(probabilities, row)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _of_logits(*ctx.saved_tensors).mul_(grads[0]).to(ctx.dtype), None, None, None


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, rows: Range, *others: Any) -> Tensor:
        tp, chunk_tokens, kind, is_trained = others
        whole = x if tp.group is None else gather(x, tp)
        of_whole = torch.empty_like(whole, memory_format=torch.contiguous_format)
        of_weight, loss = torch.zeros_like(weight) if is_trained else None, x.new_zeros((), dtype=exact_dtype(x.dtype))
        read, into, wanted = whole.flatten(0, 1), of_whole.flatten(0, 1), labels.flatten()
        for first in range(0, len(read), chunk_tokens):
            some = slice(first, first + chunk_tokens)
            loss += _of_chunk(read[some], weight, wanted[some], rows, tp.group, kind, into[some], of_weight)
        ctx.save_for_backward(of_whole if tp.group is None else scatter(of_whole, tp), of_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight = ctx.saved_tensors  # scaled in their place: there is one backward
        of_weight = None if of_weight is None else of_weight.mul_(grads[0])
        return of_x.mul_(grads[0]), of_weight, None, None, None, None, None, None
