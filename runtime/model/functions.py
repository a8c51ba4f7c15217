"""Pieces of a decoder layer with backwards of their own, which keep no more for them than the memory model counts.

Autograd would keep every intermediate: of a norm three copies in float32, of a gated MLP the activated gate beside the
gate, of a product a contiguous copy of its input.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

_EXACT = (torch.float32, torch.float64)
_aten = torch.ops.aten
_Activation = tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]
_TANH: _Activation = (
    lambda x: functional.gelu(x, approximate="tanh"),
    lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"),
)
ACTIVATIONS: Mapping[str, _Activation] = {
    "silu": (functional.silu, lambda grad, x: _aten.silu_backward(grad, x)),
    "gelu": (functional.gelu, lambda grad, x: _aten.gelu_backward(grad, x)),
    "gelu_pytorch_tanh": _TANH,
    "gelu_new": _TANH,
    "relu2": (lambda x: functional.relu(x).square(), lambda grad, x: 2 * grad * functional.relu(x)),
}
"""By Hugging Face's names: a function, and the gradient of its input from that of its output and the input."""


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    if torch.compiler.is_compiling():
        return function.apply(*arguments)  # type: ignore[no-untyped-call]
    # Past a look for the wrappers of functorch in every argument, which takes as long as a small operation.
    return super(torch.autograd.Function, function).apply(*arguments)  # type: ignore[misc]


apply: Callable[..., Tensor] = _apply
"""The tensor that an autograd function makes of its arguments."""
apply_all: Callable[..., tuple[Tensor, ...]] = _apply
"""The tensors that it makes, of one that makes several."""


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums are kept: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


def exact(x: Tensor) -> Tensor:
    """In float32 or better. A conversion to the same type takes the host time too."""
    return x if x.dtype in _EXACT else x.float()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, is_unit: bool = False) -> Tensor:
    """Root mean square norm over the last dimension, in float32 or better. Keeps its input, and a scale a vector. A
    weight, if there is one, may have more dimensions, the last ones of x.

    With `is_unit` the factors of a vector are one plus the weight, in float32 or better, as in Gemma.
    """
    return apply(_RmsNorm, x, weight, eps, is_unit)


def rotate(cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """x · cos + swapped x · sin of both, where the halves of the last dimension are swapped. Keeps the tables alone."""
    q, k = apply_all(_Rotated, cos, sin, q, k)
    return q, k


def activate(activation: str, x: Tensor, up: Tensor | None = None) -> Tensor:
    """activation(x), times `up` if it is given, in whose type it then is. Keeps both, and nothing else."""
    return apply(_Activated, activation, x, up)


def clamped_gate(alpha: float, limit: float, gate: Tensor, up: Tensor) -> Tensor:
    """(up + 1) · gate · sigmoid(alpha · gate), with the gate at most `limit` and `up` within ±limit. Keeps both, and
    nothing else."""
    return apply(_ClampedGate, alpha, limit, gate, up)


def recompute(run: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """run(*inputs), of which only the inputs are kept: the backward runs it again. One of them must require a gradient,
    or nothing in `run` gets any."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    if torch.compiler.is_compiling():  # which cannot look into a backward that runs another one
        output: Tensor = checkpoint(run, *inputs, use_reentrant=False)
        return output
    return apply(_Recomputed, run, *inputs)


def as_type_of(x: Tensor, values: Tensor) -> Tensor:
    """`values` in the type of x."""
    return values if values.dtype == x.dtype else values.to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, is_unit: bool) -> Tensor:
        whole = exact(x)
        scale = whole.square().mean(-1, True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.is_unit = is_unit
        return rescale(x, scale, weight, is_unit)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, scale = ctx.saved_tensors
        normed, inner, of_weight = norm_gradients(grads[0], x, scale, weight, ctx.is_unit, ctx.needs_input_grad[1])
        of_x = inner.sub_(normed.mul_((inner * normed).mean(-1, True))).mul_(scale)
        return as_type_of(x, of_x), of_weight, None, None


def rescale(x: Tensor, scale: Tensor, weight: Tensor | None, is_unit: bool) -> Tensor:
    """x · scale · weight, or, with `is_unit`, · (1 + weight), in the type of x."""
    normed = exact(x) * scale
    if weight is None:
        return as_type_of(x, normed)
    return as_type_of(x, normed * (exact(weight) + 1)) if is_unit else weight * as_type_of(x, normed)


def norm_gradients(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor | None, is_unit: bool, is_trained: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of `rescale`: n = x · scale and the gradient g of n, both exact, and that of a weight that is trained.

    With scale = (mean(x²) + eps)^-1/2, whose own derivative is -x · scale³ over the width, the gradient of x is
    (g - n · mean(g · n)) · scale.
    """
    normed = exact(x) * scale
    if weight is None:
        return normed, grad.to(normed.dtype, copy=True), None
    of_weight = (grad * as_type_of(x, normed)).flatten(0, -1 - weight.ndim).sum(0) if is_trained else None
    return normed, exact(grad) * (exact(weight) + 1) if is_unit else exact(grad * weight), of_weight


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


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: str, x: Tensor, up: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, up)
        ctx.activation = activation
        function, _ = ACTIVATIONS[activation]
        return function(x) if up is None else function(as_type_of(up, x)) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor | None]:
        (x, up), (grad,) = ctx.saved_tensors, grads
        function, of_input = ACTIVATIONS[ctx.activation]
        if up is None:
            return None, of_input(grad, x), None
        wide = as_type_of(up, x)
        return None, as_type_of(x, of_input(grad * up, wide)), grad * function(wide)


class _ClampedGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, alpha: float, limit: float, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.alpha, ctx.limit = alpha, limit
        low = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * (low * torch.sigmoid(low * alpha))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor, Tensor]:
        (gate, up), (grad,) = ctx.saved_tensors, grads
        low = gate.clamp(max=ctx.limit)
        share = torch.sigmoid(low * ctx.alpha)
        of_product = grad * (up.clamp(-ctx.limit, ctx.limit) + 1)
        of_gate = _aten.sigmoid_backward(of_product * low, share).mul_(ctx.alpha).add_(of_product * share)
        of_up = (low * share).mul_(grad)
        return None, None, of_gate.masked_fill_(gate > ctx.limit, 0), of_up.masked_fill_(up.abs() > ctx.limit, 0)


class _Recomputed(torch.autograd.Function):
    """Chen et al., arXiv 1604.06174. Gradients of what `run` closes over come by its own, inner backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [x if x is None else x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.run(*inputs)
        torch.autograd.backward(output, grads[0])
        return None, *(x if x is None else x.grad for x in inputs)
