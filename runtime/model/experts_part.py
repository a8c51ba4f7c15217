"""Experts of a layer on one rank: whole ones, to which the ranks of a cell bring the tokens that they choose.

Tokens are routed where they are between attention and MLP: of a TP group each rank has its own, and projects them to
the experts' width and back where that is not the model's. Shared columns, which all tokens take, are cut over the TP
group as those of an MLP. Shapes: t own tokens of B samples, N of all, H hidden, L the experts' width; R rows, which are
copies of tokens, ordered by expert; n experts of the rank, F columns of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hexiopt.problem.execution import Execution
from hexiopt.problem.kinds import Experts
from runtime.mapping.model_parts import (
    BALANCE,
    INWARD,
    LATENT_INWARD,
    LATENT_OUTWARD,
    OUTWARD,
    ROUTER,
    SHARED,
    SHARED_GATE,
)
from runtime.model.functions import activate, apply, clamped_gate
from runtime.model.projections import Weights, columns, mlp
from runtime.model.router import ExpertLoads, SequenceBalance, choose, router_logits
from runtime.model.tensor_parallel import LateProducts, RankTpGroup
from runtime.saved import count_saved


class ExpertRows(NamedTuple):
    """Where the rows of each of a rank's experts are: how many there are, and on the device where they end [n]."""

    counts: Sequence[int]
    ends: Tensor


class TokenExchange(Protocol):
    """A way to bring copies of tokens to experts, and what those make of them back."""

    def __call__(
        self,
        x_nl: Tensor,
        experts_nk: Tensor,
        weights_nk: Tensor,
        run: Callable[[Tensor, ExpertRows], Tensor],
        meanwhile: Callable[[], Tensor] | None = None,
        *,
        scales_input: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The weighted sums over each token's experts [N, L], of which `run` computes the rank's own [R, L]; and what
        is computed `meanwhile`. With `scales_input` what experts read is weighted instead."""
        ...


@dataclass(frozen=True, eq=False)
class ExpertsPart:
    """What a rank computes of the experts `part` of a layer, with an `activation` of Hugging Face's name. `loads` count
    choices where biases balance them; a rank that `hosts` experts alone has no tokens, and no router."""

    part: Experts
    execution: Execution
    activation: str
    exchange: TokenExchange
    tp: RankTpGroup
    balance: SequenceBalance | None = None
    loads: ExpertLoads | None = None
    hosts: bool = False

    def __call__(self, weights: Weights, x_tbh: Tensor, documents: Tensor | None, is_selective: bool) -> Tensor:
        """As a `PartCall`; it mixes no tokens."""
        run, width = partial(self._run, weights), self.part.width(x_tbh.shape[-1])
        exchange = partial(self.exchange, scales_input=self.part.scales_input)
        if self.hosts:
            none = torch.empty(0, self.part.top_k, dtype=torch.int64, device=x_tbh.device)
            return exchange(x_tbh.view(0, width), none, none.to(x_tbh.dtype), run)[0].view_as(x_tbh)
        flat = x_tbh.flatten(0, 1)
        logits = router_logits(flat, weights[f"{ROUTER}.weight"], weights.get(f"{ROUTER}.bias"))
        bias = weights.get(BALANCE)
        assert self.execution.router is not None
        choice = choose(logits, self.execution.router, self.part.top_k, bias)
        if self.loads is not None and bias is not None:
            self.loads.add(bias, choice.experts)
        meanwhile = partial(self._run_shared, weights, x_tbh) if self.part.shared else None
        rows = self._project(weights, x_tbh, LATENT_INWARD).flatten(0, 1)
        sums, shared = exchange(rows, choice.experts, choice.weights.to(x_tbh.dtype), run, meanwhile)
        outer = self._project(weights, sums.view(*x_tbh.shape[:2], width), LATENT_OUTWARD)
        outer = outer if shared is None else outer + shared
        return outer if self.balance is None else self.balance.attach_loss(outer, choice)

    def _project(self, weights: Weights, x: Tensor, name: str) -> Tensor:
        """Own tokens [t, B, ...] to the experts' width, or back, where it is another."""
        return columns(weights, self.tp.alone, x, name)[0] if self.part.latent else x

    def _run_shared(self, weights: Weights, x_tbh: Tensor) -> Tensor:
        outer = mlp(weights, self.tp, x_tbh, SHARED, self.activation, is_gated=self.part.gated)
        return outer * functional.linear(x_tbh, weights[SHARED_GATE]).sigmoid() if self.part.shared_gate else outer

    def _run(self, weights: Weights, rows: Tensor, of: ExpertRows) -> Tensor:
        late = self.tp.late
        inner = self._activate(grouped_product(rows, weights[INWARD], weights.get(f"{INWARD}_bias"), of, late))
        return grouped_product(inner, weights[OUTWARD], weights.get(f"{OUTWARD}_bias"), of, late)

    def _activate(self, inner: Tensor) -> Tensor:
        if not self.part.gated:
            return activate(self.activation, inner)
        (gate, up), alpha, limit = inner.chunk(2, -1), self.execution.gate_alpha, self.execution.gate_limit
        return activate(self.activation, gate, up) if alpha is None else clamped_gate(alpha, limit, gate, up)


# ------------------------------------------------------------------ grouped products


def grouped_product(
    rows: Tensor, weight: Tensor, bias: Tensor | None, of: ExpertRows, late: LateProducts | None = None
) -> Tensor:
    """The rows [R, in] of each expert times its own matrix [n, out, in], transposed, plus its bias [n, out], if any."""
    return apply(_GroupedProduct, rows, weight, bias, of, late)


_ALIGNED_BYTES = 16  # of the beginning and the strides of what torch's grouped product takes
_GROUPED = (torch.bfloat16, torch.float16, torch.float32)


def _is_grouped(weight: Tensor) -> bool:
    """Whether torch has one kernel for all experts. On a GPU it has one for bf16; of other types it would loop, as is
    done here, but wait for the device to know where rows end."""
    if not weight.is_cpu and weight.dtype != torch.bfloat16:
        return False
    aligned = all(width * weight.itemsize % _ALIGNED_BYTES == 0 for width in weight.shape[1:])
    return weight.dtype in _GROUPED and aligned and weight.data_ptr() % _ALIGNED_BYTES == 0


def _times(rows: Tensor, weight: Tensor, of: ExpertRows) -> Tensor:
    """[R, a] times [n, a, b]."""
    if _is_grouped(weight):
        return functional.grouped_mm(rows.contiguous(), weight, offs=of.ends)
    return torch.cat([some.mm(matrix) for some, matrix in zip(rows.split_with_sizes(of.counts), weight, strict=True)])


def _of_weight(grad: Tensor, rows: Tensor, like: Tensor, of: ExpertRows) -> Tensor:
    """[n, out, in] of [R, out] and [R, in]."""
    if _is_grouped(like):
        return functional.grouped_mm(grad.contiguous().t(), rows.contiguous(), offs=of.ends)
    pairs = zip(grad.split_with_sizes(of.counts), rows.split_with_sizes(of.counts), strict=True)
    return torch.stack([mine.t().mm(some) for mine, some in pairs])


class _GroupedProduct(torch.autograd.Function):
    """Its backward may put the gradients of the weight off, as those of other products of a layer. Frozen matrices need
    no gradient, and no rows for it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *others: Any) -> Tensor:
        weight, bias, of, late = others
        is_trained = weight.requires_grad
        ctx.of, ctx.late, ctx.has_bias = of, late, is_trained and bias is not None
        ctx.weight = weight if late is not None else None
        ctx.save_for_backward(rows if is_trained else None, weight)
        products = _times(rows, weight.mT, of)
        if bias is not None:
            counts = of.ends.diff(prepend=of.ends.new_zeros(1))
            products += bias.repeat_interleave(counts, 0, output_size=len(rows))
        return products

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        (grad,) = grads
        of_rows, of_weight = _times(grad, weight, ctx.of), None
        if rows is None:
            return of_rows, None, None, None, None
        if ctx.late is not None and ctx.late.takes(ctx.weight):
            add = partial(_add_product, rows, grad, ctx.weight, ctx.of, count_saved(rows, grad))
            ctx.late.put(ctx.weight, add)
        else:
            of_weight = _of_weight(grad, rows, weight, ctx.of)
        of_bias = torch.stack([mine.sum(0) for mine in grad.split_with_sizes(ctx.of.counts)]) if ctx.has_bias else None
        return of_rows, of_weight, of_bias, None, None


def _add_product(rows: Tensor, grad: Tensor, weight: Tensor, of: ExpertRows, held: Sequence[Any]) -> None:
    """Add to the gradient of `weight`. `held` counts what that needs."""
    gradient = _of_weight(grad, rows, weight, of)
    weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
