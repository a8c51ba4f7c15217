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

_EXACT = (torch.float32, torch.float64)


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """What an autograd function makes of its arguments: a tensor, or several."""
    if torch.compiler.is_compiling():
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    # Past a look for the wrappers of functorch in every argument, which takes as long as a small operation.
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, in float32 or better. Keeps its input, and a scale a vector."""
    found: Tensor = applied(_RmsNorm, x, weight, eps)
    return found


def rotated(cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """x · cos + swapped x · sin of both, where the halves of the last dimension are swapped. Keeps the tables alone."""
    found: tuple[Tensor, Tensor] = applied(_Rotated, cos, sin, q, k)
    return found


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up. Keeps both, and nothing else."""
    found: Tensor = applied(_GatedSilu, gate, up)
    return found


def recomputed(run: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """run(*inputs), of which only the inputs are kept: the backward runs it again. One of them must require a gradient,
    or nothing in `run` gets any."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    if torch.compiler.is_compiling():  # which cannot look into a backward that runs another one
        found: Tensor = checkpoint(run, *inputs, use_reentrant=False)
    else:
        found = applied(_Recomputed, run, *inputs)
    return found


def _exact(x: Tensor) -> Tensor:
    """In float32 or better. A conversion to the same type takes the host time too."""
    return x if x.dtype in _EXACT else x.float()


def _as(x: Tensor, made: Tensor) -> Tensor:
    """In the type of x."""
    return made if made.dtype == x.dtype else made.to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = _exact(x)
        scale = exact.square().mean(-1, True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return weight * _as(x, exact * scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        (grad,) = grads
        normed = _exact(x) * scale
        of_weight = (grad * _as(x, normed)).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        inner = _exact(grad * weight)
        # d(x·r)/dx with r = (mean(x²) + eps)^-1/2, whose own derivative is -x·r³ over the width.
        of_x = inner.sub_(normed.mul_((inner * normed).mean(-1, True))).mul_(scale)
        return _as(x, of_x), of_weight, None


class _Rotated(torch.autograd.Function):
    """Its backward rotates the other way round."""

    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        half = cos.shape[-1] // 2
        return (q * cos).add_(q.roll(half, -1).mul_(sin)), (k * cos).add_(k.roll(half, -1).mul_(sin))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, Tensor]:
        cos, sin = ctx.saved_tensors
        half = cos.shape[-1] // 2
        of_q, of_k = ((grad * cos).add_((grad * sin).roll(half, -1)) for grad in grads)
        return None, None, of_q, of_k


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
