"""Which experts a token goes to, how much each of them counts, and what balances their loads.

Shapes: N tokens of a rank, or t tokens of B samples; E experts, of which each token goes to k.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from hexiopt.problem.execution import OF_CHOSEN, SOFTMAX, RouterRule
from runtime.model.functions import apply, exact


class RouterChoice(NamedTuple):
    """The `experts` of each token [N, k], their `weights` [N, k], and the `shares` of all experts, summing to one [N,
    E], of which a loss makes loads even. Experts are in the order of their scores, the lower number first of equals."""

    experts: Tensor
    weights: Tensor
    shares: Tensor


def choose(logits_ne: Tensor, rule: RouterRule, top_k: int, bias_e: Tensor | None = None) -> RouterChoice:
    """The experts of tokens with these logits, whatever the plan: of equal scores, those of lower numbers."""
    if rule.scores == OF_CHOSEN:
        experts = _top(logits_ne.detach(), top_k)
        weights, shares = logits_ne.gather(1, experts).softmax(-1), logits_ne.softmax(-1)
    else:
        scores = logits_ne.softmax(-1) if rule.scores == SOFTMAX else logits_ne.sigmoid()
        if bias_e is None and rule.num_groups == 1:
            wanted = logits_ne.detach()  # scores of unequal ones may round to the same
        else:
            wanted = scores.detach() if bias_e is None else scores.detach() + bias_e.detach()
        experts = _top(wanted if rule.num_groups == 1 else _limit_groups(wanted, rule), top_k)
        weights = scores.gather(1, experts)
        shares = scores if rule.scores == SOFTMAX else scores / (scores.sum(-1, keepdim=True) + _TINY)
        if rule.is_normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return RouterChoice(experts, weights if rule.scale == 1.0 else weights * rule.scale, shares)


_TINY = 1e-20  # where all scores are 0


def _top(scores: Tensor, count: int) -> Tensor:
    # Of its own, as the choices are kept: a view would keep the order of all.
    return scores.sort(stable=True, dim=-1, descending=True).indices[:, :count].contiguous()


def _limit_groups(wanted: Tensor, rule: RouterRule) -> Tensor:
    """Scores of experts, -inf of those in groups that are not chosen from."""
    by_group = wanted.view(len(wanted), rule.num_groups, -1)
    best = by_group.topk(min(2, by_group.shape[-1]), -1).values.sum(-1)
    eligible = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _top(best, rule.top_groups), True)
    return by_group.masked_fill(~eligible.unsqueeze(-1), -torch.inf).flatten(1)


def loads(experts: Tensor, count: int) -> Tensor:
    """How many of the choices [..., c] go to each of `count` experts [..., count]: whole numbers, in any order."""
    zeros = experts.new_zeros(*experts.shape[:-1], count)
    return zeros.scatter_add_(-1, experts, torch.ones_like(experts))


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias in float32 or better, as choices hang on small differences. Keeps weight, and x for a gradient
    of it, as they are."""
    return apply(_ExactProduct, x, weight, bias)


class _ExactProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        ctx.dtype, ctx.has_bias = x.dtype, bias is not None
        return functional.linear(exact(x), exact(weight), None if bias is None else exact(bias))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        of_x = grad.mm(weight.to(grad.dtype)).to(ctx.dtype)
        if x is None:
            return of_x, None, None
        of_bias = grad.sum(0).to(weight.dtype) if ctx.has_bias else None
        return of_x, grad.t().mm(x.to(grad.dtype)).to(weight.dtype), of_bias


# ------------------------------------------------------------------ balance


@dataclass(frozen=True, eq=False)
class SequenceBalance:
    """The balance loss of sequences of `seq_len` tokens (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20): of one
    sequence E/k · Σ of each expert's share of the choices times its mean share of the scores, times `weight`. It knows
    no other sequence, so that no plan changes it. `group` are the ranks that share the tokens of a sequence."""

    weight: float
    seq_len: int
    group: dist.ProcessGroup | None

    def attach_loss(self, x_tbh: Tensor, choice: RouterChoice) -> Tensor:
        """x, through which the gradient of the loss comes: the loss itself is in no sum. What is given of the rank's
        own tokens makes its part of the mean shares; choices are counted over all."""
        (num_tokens, num_samples), (count, top_k) = x_tbh.shape[:2], (choice.shares.shape[1], choice.experts.shape[1])
        of_samples = choice.experts.view(num_tokens, num_samples, top_k).transpose(0, 1).flatten(1)
        chosen = loads(of_samples, count)
        if self.group is not None:
            dist.all_reduce(chosen, group=self.group)
        shares = choice.shares.view(num_tokens, num_samples, count).sum(0)
        scale = count / (top_k * self.seq_len**2)
        return apply(_WithLoss, x_tbh, (chosen * shares).sum() * (scale * self.weight))


class _WithLoss(torch.autograd.Function):
    """x, unchanged; its backward is also that of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones_like(ctx.like)


class ExpertLoads:
    """The choices that a rank's tokens make in a step, by the biases that balance them: whole numbers, so that their
    sum over ranks is the same in any order."""

    def __init__(self, names: Mapping[str, Tensor]) -> None:
        self._name_of = {id(bias): name for name, bias in names.items()}
        self._of = {
            name: torch.zeros(bias.shape, dtype=torch.int64, device=bias.device) for name, bias in names.items()
        }

    def add(self, bias: Tensor, experts: Tensor) -> None:
        """Count the choices of a forward that has a backward: one that runs again counts once."""
        if torch.is_grad_enabled():
            counted = self._of[self._name_of[id(bias)]]
            counted += loads(experts.flatten(), len(counted))

    def take(self) -> dict[str, Tensor]:
        """All since the last call, by name."""
        counts = {name: counted.clone() for name, counted in self._of.items()}
        for counted in self._of.values():
            counted.zero_()
        return counts
