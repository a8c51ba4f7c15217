"""Pieces of a decoder layer with backwards of their own, which keep no more for them than the memory model counts.

Autograd would keep every intermediate: of a norm three copies in float32, of a gated MLP the activated gate beside the
gate, of a product a contiguous copy of its input.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """What an autograd function makes of its arguments: a tensor, or several."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, in float32 or better. Keeps its input, and a scale a vector."""
    found: Tensor = applied(_RmsNorm, x, weight, eps)
    return found


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up. Keeps both, and nothing else."""
    found: Tensor = applied(_GatedSilu, gate, up)
    return found


def recomputed(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """run(*inputs), of which only the inputs are kept: the backward runs it again."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    if torch.compiler.is_compiling():  # which cannot look into a backward that runs another one
        found: Tensor = checkpoint(run, *inputs, use_reentrant=False)
    else:
        found = applied(_Recomputed, run, *inputs)
    return found


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return weight * (exact * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.to(scale.dtype) * scale
        of_weight = (grads[0] * normed.to(x.dtype)).flatten(0, -2).sum(dim=0)
        inner = (grads[0] * weight).to(scale.dtype)
        # d(x·r)/dx with r = (mean(x²) + eps)^-1/2, whose own derivative is -x·r³ over the width.
        of_x = scale * (inner - normed * (inner * normed).mean(dim=-1, keepdim=True))
        return of_x.to(x.dtype), of_weight, None


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return of_gate, grads[0] * functional.silu(gate)


class _Recomputed(torch.autograd.Function):
    """Chen et al., arXiv 1604.06174. Gradients of what `run` closes over come by its own, inner backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            found = ctx.run(*inputs)
        torch.autograd.backward(found, grads[0])
        return None, *(x.grad for x in inputs)
