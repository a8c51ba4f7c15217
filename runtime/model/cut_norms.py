"""Root mean square norms of vectors of which a TP group cuts the width, as of all heads together (OLMo 2): ranks sum
the squares of what they have. Shapes: T tokens, B samples, w values of a rank."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runtime.model.functions import as_type_of, exact, norm_gradients, rescale
from runtime.model.tensor_parallel import RankTpGroup, all_reduce, together


class CutWidth(NamedTuple):
    """The values of vectors of all ranks, and the first of a rank's own that no rank before it has too: of key heads
    that several hold, one counts."""

    whole: int
    first: int


def cut_rms_norms(
    tp: RankTpGroup,
    widths: Sequence[CutWidth],
    eps: float,
    is_unit: bool,
    xs_tbw: Sequence[Tensor],
    weights_w: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """`rms_norm` of vectors and weights with these `widths`, by one sum over ranks. Keeps its inputs, and a scale a
    vector."""
    normed: tuple[Tensor, ...] = together(_CutRmsNorms, tp, widths, eps, is_unit, *xs_tbw, *weights_w)
    return normed


class _CutRmsNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tp: RankTpGroup, *others: Any) -> tuple[Tensor, ...]:
        widths, eps, is_unit, *operands = others
        xs, weights = operands[: len(widths)], operands[len(widths) :]
        counted = [exact(x)[..., width.first :] for x, width in zip(xs, widths, strict=True)]
        sums = all_reduce(torch.stack([x.square().sum(-1, True) for x in counted]), tp)
        scales = [(total / width.whole).add_(eps).rsqrt_() for total, width in zip(sums, widths, strict=True)]
        ctx.tp, ctx.widths, ctx.is_unit = tp, widths, is_unit
        ctx.save_for_backward(*xs, *weights, *scales)
        return tuple(rescale(*of, is_unit) for of in zip(xs, scales, weights, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Ranks with the same key head have parts of its gradient, which sum to that of `rms_norm`."""
        widths, count, saved = ctx.widths, len(ctx.widths), ctx.saved_tensors
        xs, weights, scales = (saved[k * count : (k + 1) * count] for k in range(3))
        is_trained = any(ctx.needs_input_grad[-count:])
        parts = [norm_gradients(*of, ctx.is_unit, is_trained) for of in zip(grads, xs, scales, weights, strict=True)]
        sums = all_reduce(torch.stack([(inner * normed).sum(-1, True) for normed, inner, _ in parts]), ctx.tp)
        of_xs = []
        for x, scale, width, total, (normed, inner, _) in zip(xs, scales, widths, sums, parts, strict=True):
            inner[..., width.first :] -= normed[..., width.first :] * (total / width.whole)
            of_xs.append(as_type_of(x, inner.mul_(scale)))
        return None, None, None, None, *of_xs, *(of_weight for *_, of_weight in parts)
