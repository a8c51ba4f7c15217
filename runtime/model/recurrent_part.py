"""The recurrence of a layer on one rank: its own heads of it, over all tokens.

Shapes: t tokens of the rank, T of all ranks of its TP group, B samples, h heads of the rank, V the width of a head.
"""

from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from hexiopt.problem.execution import Execution
from hexiopt.problem.kinds import Recurrent
from runtime.mapping.model_parts import RECURRENT, recurrent_projections
from runtime.mapping.parts import RankShard
from runtime.model.functions import activate, exact, recompute, rms_norm
from runtime.model.projections import Weights, columns, row
from runtime.model.scans import causal_convolution, delta_scan, mamba_scan
from runtime.model.tensor_parallel import RankTpGroup


class RecurrentPart:
    """What a rank computes of the recurrence `part` of a layer. Between projections its inputs alone are kept, and the
    backward computes the rest again."""

    def __init__(
        self, part: Recurrent, shard: RankShard, execution: Execution, norm_eps: float, tp: RankTpGroup
    ) -> None:
        self._part, self._execution, self._norm_eps, self._tp = part, execution, norm_eps, tp
        self._meets = shard.meets(part.heads, part.groups)
        self._groups = [shard.groups(part.heads, part.groups)[0] + group for group in self._meets]
        ends = [sum(group < number for group in self._groups) for number in range(part.groups + 1)]
        self._spans = list(pairwise(ends))  # of the rank's heads, those of each group
        self._cuts_norms = part.norm and not part.delta and shard.cuts(part.heads, part.groups)
        self._names = [name for name, *_ in recurrent_projections(part)]

    def __call__(self, weights: Weights, x_tbh: Tensor, documents: Tensor | None, is_selective: bool) -> Tensor:
        """As a `PartCall`."""
        names = [f"{RECURRENT}.{name}_in" for name in self._names]
        inputs = columns(weights, self._tp, x_tbh, *names)
        return row(weights, self._tp, recompute(partial(self._mix, weights), *inputs), f"{RECURRENT}.out_proj")

    def _mix(self, weights: Weights, *inputs: Tensor) -> Tensor:
        """[T, B, h · V] of the projections by name [T, B, ...]."""
        part = self._part
        if not self._meets:
            return self._join_norms(weights, inputs[0]) if self._cuts_norms else inputs[0]
        of_name = {name: x.transpose(0, 1) for name, x in zip(self._names, inputs, strict=True)}
        values, keys, queries = (self._convolve(weights, name, of_name[name]) for name in ("v", "k", "q"))
        v = _heads(values, part.value_dim)
        k, q = (_heads(x, part.key_dim)[:, :, self._meets] for x in (keys, queries))
        steps = functional.softplus(exact(of_name["step"]) + exact(weights[f"{RECURRENT}.dt_bias"]))
        decays = -exact(weights[f"{RECURRENT}.A_log"]).exp()
        gate = of_name["z"].view(v.shape)
        if part.delta:
            outputs = delta_scan(part.chunk, v, exact(of_name["write"]).sigmoid(), steps * decays, k, q)
            outputs = activate("silu", gate, self._norm(weights, outputs))
        else:
            steps = steps.clamp(*self._execution.step_limits)
            outputs = mamba_scan(part.chunk, v, steps, decays, k, q)
            outputs = outputs + exact(v) * weights[f"{RECURRENT}.D"].unsqueeze(-1)
            outputs = activate("silu", gate, outputs)
            if part.norm:
                outputs = self._norm(weights, outputs)
        return outputs.to(inputs[0].dtype).flatten(2).transpose(0, 1)

    def _join_norms(self, weights: Weights, none_tb: Tensor) -> Tensor:
        """What a rank without heads makes, which takes part in the sums of norms."""
        heads = _heads(none_tb.transpose(0, 1), self._part.value_dim)
        return self._norm(weights, heads).to(none_tb.dtype).flatten(2).transpose(0, 1)

    def _convolve(self, weights: Weights, name: str, x_btc: Tensor) -> Tensor:
        at = f"{RECURRENT}.{name}_conv"
        return causal_convolution(x_btc, weights[f"{at}.weight"], weights.get(f"{at}.bias"))

    def _norm(self, weights: Weights, x_bthv: Tensor) -> Tensor:
        """Root mean square norm of the values of a head with the delta rule, else of those of a group together."""
        part, eps, weight = self._part, self._norm_eps, weights[f"{RECURRENT}.norm.weight"]
        width = part.value_dim * (1 if part.delta else part.heads // part.groups)
        if not self._cuts_norms:
            # Of the delta rule every head has the same weights.
            of_groups = weight if len(weight) == width else weight.view(-1, width)
            return rms_norm(x_bthv.reshape(*x_bthv.shape[:2], -1, width), of_groups, eps).view(x_bthv.shape)
        x = exact(x_bthv)
        of_heads = x.square().sum(-1)
        squares = [of_heads[:, :, first:end].sum(-1) for first, end in self._spans]
        sums = self._tp.sum_over_ranks(torch.stack(squares, -1))
        normed = x * (sums[:, :, self._groups].unsqueeze(-1) / width + eps).rsqrt()
        return normed * exact(weight).view(-1, x.shape[-1])


def _heads(x: Tensor, dim: int) -> Tensor:
    """[B, T, h · D] as [B, T, h, D]."""
    return x.view(*x.shape[:2], x.shape[-1] // dim, dim)
