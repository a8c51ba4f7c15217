"""Collectives of a tensor-parallel group inside autograd, with sequence-parallel norms.

Between attention and MLP every rank has its own tokens of all samples (Korthikanti et al., arXiv 2205.05198, section
4.2.2): *gather* brings all tokens to every rank, *scatter* sums what the ranks made of all tokens and leaves each its
own. Each is the other's backward. A product of gathered tokens keeps the rank's own alone, and its backward gathers
again. Hidden states are [tokens, samples, hidden] (TBH): tokens come first, so that ranks' tokens follow each other in
memory. Parts may be unequal; then they travel padded to the longest.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from runtime.mapping.parts import Range
from runtime.model.functions import apply, apply_all
from runtime.network import gathered_products, scattered_product
from runtime.saved import count_saved

AdapterMatrices = tuple[Tensor, Tensor]
"""A [rank, inputs] and B [outputs, rank] of a low-rank adapter (Hu et al., arXiv 2106.09685): beside a matrix W, a
product with x becomes W x + scale · B (A x)."""


class LateProducts:
    """What a rank's backwards put off: for micro-batches and layers, what computes gradients of the layers' weights."""

    def __init__(self) -> None:
        self._layer_of: Mapping[int, int] = {}  # of the weights that are put off now, by their identity
        self._micro_batch = 0
        self._todo: dict[tuple[int, int], list[Callable[[], None]]] = defaultdict(list)

    @contextmanager
    def puts_off(self, micro_batch: int, weights: Mapping[int, Iterable[Tensor]]) -> Iterator[None]:
        """The backward of a micro-batch, in here, puts the gradients of `weights`, by layer, off."""
        self._micro_batch = micro_batch
        self._layer_of = {id(weight): layer for layer, matrices in weights.items() for weight in matrices}
        try:
            yield
        finally:
            self._layer_of = {}

    def takes(self, weight: Tensor) -> bool:
        """Whether the gradient of a weight is put off."""
        return id(weight) in self._layer_of

    def put(self, weight: Tensor, compute: Callable[[], None]) -> None:
        """Put off what computes the gradient of a weight, and of others of its layer."""
        self._todo[self._micro_batch, self._layer_of[id(weight)]].append(compute)

    def run(self, micro_batch: int, layer: int) -> None:
        """Compute the gradients of a layer's weights, in the order in which they were put off, and add them."""
        with torch.no_grad():
            for compute in self._todo.pop((micro_batch, layer), ()):
                compute()


@dataclass(frozen=True, eq=False)
class RankTpGroup:
    """A rank's TP group: `tokens` of every rank. Without a `group` there is one rank, which needs no other. Where
    backwards are split, `late` has what they put off. Products with adapters have the same `adapter_scale`. With
    `is_async` products are computed beside the collectives that they wait for, where ranks have equally many tokens."""

    rank: int
    tokens: tuple[Range, ...]
    group: dist.ProcessGroup | None = None
    late: LateProducts | None = None
    adapter_scale: float = 0.0
    is_async: bool = False

    @property
    def fused_group(self) -> dist.ProcessGroup | None:
        """The group, where products are fused with its collectives."""
        return self.group if self.is_async and len({end - start for start, end in self.tokens}) == 1 else None

    @property
    def alone(self) -> "RankTpGroup":
        """The rank without the others: for products of what it has of all tokens."""
        return replace(self, group=None)

    def columns(
        self,
        x_tbh: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        adapters: Sequence[AdapterMatrices | None] = (),
    ) -> tuple[Tensor, ...]:
        """Products of all ranks' tokens [T, B, H], of which one's own are given [t, B, H], with matrices cut in rows of
        their weights, and with their adapters, if any, whose B is cut likewise."""
        arguments = self._arguments(weights, biases, adapters)
        if self.group is None:
            return apply_all(_Products, x_tbh, None, *arguments)
        products: tuple[Tensor, ...] = together(_Products, x_tbh, self, *arguments)
        return products

    def rows(self, x_tbn: Tensor, weight: Tensor, adapter: AdapterMatrices | None = None) -> Tensor:
        """The product with a matrix cut in columns of its weight, and with its adapter, if any, whose A is cut
        likewise, summed over ranks: one's own tokens [t, B, H]."""
        if self.fused_group is not None and adapter is None:
            summed: Tensor = together(_SummedProduct, x_tbn, weight, self)
            return summed
        (product,) = apply_all(_Products, x_tbn, None, *self._arguments([weight], [None], [adapter]))
        return self.scatter(product)

    def _arguments(
        self,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        adapters: Sequence[AdapterMatrices | None],
    ) -> tuple[Any, ...]:
        """What `_Products` takes after what it communicates with. All matrices of a model are trained, or none."""
        downs, ups = ([None if pair is None else pair[k] for pair in adapters or [None] * len(weights)] for k in (0, 1))
        return self.late, weights[0].requires_grad, self.adapter_scale, *weights, *biases, *downs, *ups

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The ranks' sum, of which each makes something of its own: so are its gradients."""
        total: Tensor = x if self.group is None else together(_Summed, x, self)
        return total

    def scatter(self, x_tbh: Tensor) -> Tensor:
        """The ranks' sum [T, B, H], of which each keeps its own tokens [t, B, H]."""
        share: Tensor = x_tbh if self.group is None else together(_Scatter, x_tbh, self)
        return share


@torch.compiler.disable  # type: ignore[untyped-decorator]
def together(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Apply what communicates, outside of compiled graphs: those of ranks with unequal shapes are unlike, and would
    order, or repeat, their collectives differently."""
    return apply(function, *arguments)


def gather(x: Tensor, tp: RankTpGroup) -> Tensor:
    """All tokens [T, ...], of which each rank gives its own."""
    return _gathering(x, tp)()


def scatter(x: Tensor, tp: RankTpGroup) -> Tensor:
    """The rank's own tokens of the ranks' sum of [T, ...]."""
    return _scattering(x, tp)()


def _gathering(x: Tensor, tp: RankTpGroup) -> Callable[[], Tensor]:
    """Begins to gather; what it returns waits for the end."""
    lengths = [end - start for start, end in tp.tokens]
    longest = max(lengths)
    padded = x if len(x) == longest else torch.cat([x, x.new_zeros(longest - len(x), *x.shape[1:])])
    whole = x.new_empty(longest * len(lengths), *x.shape[1:])
    sent = [padded.contiguous()]  # kept until the end
    work = dist.all_gather_single(whole, sent[0], group=tp.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        del sent[:]
        if min(lengths) == longest:
            return whole
        return torch.cat([whole[k * longest : k * longest + n] for k, n in enumerate(lengths)])

    return finish


def _scattering(x: Tensor, tp: RankTpGroup) -> Callable[[], Tensor]:
    """Begins to sum and scatter; what it returns waits for the end."""
    lengths = [end - start for start, end in tp.tokens]
    longest = max(lengths)
    if min(lengths) < longest:
        whole = x.new_zeros(longest * len(lengths), *x.shape[1:])
        for k, (start, end) in enumerate(tp.tokens):
            whole[k * longest : k * longest + end - start] = x[start:end]
    else:
        whole = x.contiguous()
    share, sent = x.new_empty(longest, *x.shape[1:]), [whole]  # kept until the end
    work = dist.reduce_scatter_single(share, sent[0], group=tp.group, async_op=True)

    def finish() -> Tensor:
        work.wait()
        del sent[:]
        return share[: lengths[tp.rank]]

    return finish


class _Products(torch.autograd.Function):
    """Of one input with several matrices, each with its bias and its adapter, or None; gathered before, if there is a
    `tp` to do it. Frozen matrices need no gradient, and no input for it.

    `others` are `tp`, what takes gradients of weights that are put off, or None, whether matrices are trained, the
    scale of adapters, weights, biases, and both matrices of adapters. They have no parameters of their own, because
    torch 2.13 compiles a forward that has as many parameters as there are arguments as if it took no `ctx`, where there
    is no backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
        tp, late, is_trained, scale, *operands = others
        count = len(operands) // 4
        weights, biases, downs, ups = (operands[k * count : (k + 1) * count] for k in range(4))
        ctx.tp = None if tp is None or tp.group is None else tp
        ctx.biased = [is_trained and bias is not None for bias in biases]
        ctx.late, ctx.matrices = late, [*weights, *downs] if late is not None else []
        ctx.is_trained, ctx.scale = is_trained, scale
        adapted = [k for k, down in enumerate(downs) if down is not None]
        first = [downs[k].to(x.dtype) for k in adapted]
        outputs = _multiply(x, ctx.tp, [*weights, *first], [*biases, *[None] * len(first)])
        products = outputs[:count]
        inners: list[Tensor | None] = [None] * count
        for k, inner in zip(adapted, outputs[count:], strict=True):
            inners[k] = inner.mul_(scale)
            products[k].flatten(0, 1).addmm_(inner.flatten(0, 1), ups[k].to(x.dtype).t())
        reads = is_trained or any(down is not None for down in downs)
        ctx.save_for_backward(x if reads else None, *weights, *downs, *ups, *inners)
        return tuple(products)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        count = len(grads)
        weights, downs, ups, inners = (saved[k * count : (k + 1) * count] for k in range(4))
        late = ctx.late if x is not None and ctx.late is not None and ctx.late.takes(ctx.matrices[0]) else None
        # What travels does so beside the products that do not need it.
        gathering = None if ctx.tp is None or late is not None or x is None else _gathering(x, ctx.tp)
        flat = [grad.flatten(0, 1) for grad in grads]
        of_x = flat[0].mm(weights[0])
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            of_x.addmm_(grad, weight)
        of_inners: list[Tensor | None] = [None] * count
        of_ups: list[Tensor | None] = [None] * count
        for k, (grad, down, up, inner) in enumerate(zip(flat, downs, ups, inners, strict=True)):
            if down is not None:
                of_inner = of_inners[k] = grad.mm(up.to(grad.dtype)).mul_(ctx.scale)
                of_x.addmm_(of_inner, down.to(grad.dtype))
                of_ups[k] = grad.t().mm(inner.flatten(0, 1)).to(up.dtype)
        of_x = of_x.view(*grads[0].shape[:2], of_x.shape[-1])
        scattering = None if ctx.tp is None else _scattering(of_x, ctx.tp)
        # Of the products with x: matrices, then the first ones of adapters.
        makers = [*(flat if ctx.is_trained else [None] * count), *of_inners]
        of_matrices: list[Tensor | None] = [None] * len(makers)
        if late is not None:
            pairs = [(grad, matrix) for grad, matrix in zip(makers, ctx.matrices, strict=True) if grad is not None]
            held = count_saved(x, *(grad for grad, _ in pairs))
            late.put(ctx.matrices[0], partial(_add_products, x, ctx.tp, pairs, held))
        elif x is not None:
            whole = (x if gathering is None else gathering()).flatten(0, 1)
            of_matrices = [
                None if grad is None else grad.t().mm(whole).to(matrix.dtype)
                for grad, matrix in zip(makers, [*weights, *downs], strict=True)
            ]
        of_biases = [grad.sum(dim=0) if biased else None for grad, biased in zip(flat, ctx.biased, strict=True)]
        of_x = of_x if scattering is None else scattering()
        return of_x, None, None, None, None, *of_matrices[:count], *of_biases, *of_matrices[count:], *of_ups


def _multiply(
    x: Tensor, tp: RankTpGroup | None, matrices: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """The products with matrices, and their biases, of all tokens; if there is a `tp`, x has one's own alone."""
    if tp is None or tp.fused_group is None:
        whole = x if tp is None else gather(x, tp)
        return [functional.linear(whole, matrix, bias) for matrix, bias in zip(matrices, biases, strict=True)]
    _, products = gathered_products(x, [matrix.t() for matrix in matrices], tp.fused_group)
    return [product if bias is None else product + bias for product, bias in zip(products, biases, strict=True)]


class _SummedProduct(torch.autograd.Function):
    """The product with a matrix cut in columns of its weight, fused with its sum over ranks, and its backward with what
    it gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: RankTpGroup) -> Tensor:
        assert tp.fused_group is not None
        ctx.tp, ctx.weight = tp, weight
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return scattered_product(x, weight.t(), tp.fused_group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        whole, (of_x,) = gathered_products(grads[0], [weight], ctx.tp.fused_group, returns_whole=x is not None)
        if x is None or whole is None:
            return of_x, None, None
        grad, late = whole.flatten(0, 1), ctx.tp.late
        if late is None or not late.takes(ctx.weight):
            return of_x, grad.t().mm(x.flatten(0, 1)), None
        held = count_saved(x, grad)
        late.put(ctx.weight, partial(_add_products, x, None, [(grad, ctx.weight)], held))
        return of_x, None, None


def _add_products(
    x: Tensor, tp: RankTpGroup | None, pairs: Sequence[tuple[Tensor, Tensor]], held: Sequence[Any]
) -> None:
    """Add to the gradients of matrices what the gradients of their products with one input, [tokens, rows], make.
    `held` counts what that needs."""
    whole = (x if tp is None else gather(x, tp)).flatten(0, 1)
    for grad, matrix in pairs:
        if matrix.grad is None:
            matrix.grad = grad.t().mm(whole).to(matrix.dtype)
        elif matrix.dtype == grad.dtype:
            matrix.grad.addmm_(grad.t(), whole)
        else:
            matrix.grad += grad.t().mm(whole)


def all_reduce(x: Tensor, tp: RankTpGroup) -> Tensor:
    """The ranks' sum of x, which it may overwrite."""
    whole = x.contiguous()
    dist.all_reduce(whole, group=tp.group)
    return whole


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: RankTpGroup) -> Tensor:
        ctx.tp = tp
        return all_reduce(x.clone(), tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0].clone(), ctx.tp), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: RankTpGroup) -> Tensor:
        ctx.tp = tp
        return scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather(grads[0], ctx.tp), None
