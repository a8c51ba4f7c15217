"""The attention of a layer on one rank: projections, norms of queries and keys, rotation, attention itself.

Grouped-query attention with any split of heads, or latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
Shapes: t tokens of the rank, T of all ranks of its TP group, B samples, n query heads, D their size, H hidden.
"""

import torch
from torch import Tensor

from hexiopt.problem.execution import Execution
from hexiopt.problem.kinds import Attention
from runtime.mapping.model_parts import ATTENTION
from runtime.mapping.parts import RankShard
from runtime.model.attention import AttentionCall
from runtime.model.cut_norms import CutWidth, cut_rms_norms
from runtime.model.functions import recompute, rms_norm
from runtime.model.projections import Weights, columns, row
from runtime.model.rope import QueryScale, Rope
from runtime.model.tensor_parallel import RankTpGroup

_LATENT_EPS = 1e-6  # of the norms of latent vectors, in transformers whatever the model's


class AttentionPart:
    """What a rank computes of the attention `part` of a layer, of which it holds `shard`: `attend` does its heads, or
    its tokens. Without a `rope` positions are not used; norms without weights come after it (Llama 4)."""

    def __init__(
        self,
        part: Attention,
        shard: RankShard,
        execution: Execution,
        norm_eps: float,
        tp: RankTpGroup,
        rope: Rope | QueryScale | None,
        attend: AttentionCall,
    ) -> None:
        self._part, self._execution, self._norm_eps = part, execution, norm_eps
        self._tp, self._rope, self.attend = tp, rope, attend
        shared = 0, shard.first_with(part.heads, part.kv_heads)
        counts = part.heads, part.kv_heads
        self._widths = [CutWidth(n * part.qk_dim, at * part.qk_dim) for n, at in zip(counts, shared, strict=True)]

    def __call__(self, weights: Weights, x_tbh: Tensor, documents: Tensor | None, is_selective: bool) -> Tensor:
        """As a `PartCall`."""
        gate: Tensor | None = None
        if self._part.kv_rank:
            q, k, v = self._of_latent(weights, x_tbh)
        else:
            q, k, v, gate = self._project(weights, x_tbh)
        operands = q, k, v, weights.get(f"{ATTENTION}.sinks"), documents
        values = recompute(self.attend, *operands) if is_selective else self.attend(*operands)
        if gate is not None:
            values = values * gate.sigmoid()
        return row(weights, self._tp, values, f"{ATTENTION}.o_proj")

    def _project(self, weights: Weights, x_tbh: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries, keys and values [T, B, n, D], and a gate [T, B, n · D] if there is one."""
        part, gate = self._part, None
        q, k, v = columns(weights, self._tp, x_tbh, *(f"{ATTENTION}.{name}_proj" for name in "qkv"))
        if part.qk_norm == "whole" and self._tp.group is not None:
            norm_weights = [weights[f"{ATTENTION}.{name}_norm.weight"] for name in "qk"]
            unit_norms = self._execution.unit_norms
            q, k = cut_rms_norms(self._tp, self._widths, self._norm_eps, unit_norms, (q, k), norm_weights)
        elif part.qk_norm == "whole":
            q, k = self._norm(weights, "q_norm", q), self._norm(weights, "k_norm", k)
        q, k, v = _heads(q, part.qk_dim * (1 + part.gated)), _heads(k, part.qk_dim), _heads(v, part.v_dim)
        if part.gated:
            q, gate = q.chunk(2, dim=-1)
            # A view of queries would keep their gates for the backward.
            q, gate = q.contiguous(), gate.flatten(2)
        if part.qk_norm == "head":
            q, k = self._norm(weights, "q_norm", q), self._norm(weights, "k_norm", k)
        if self._rope is not None:
            q, k = self._rope(q, k)
        if part.qk_norm == "plain":
            q, k = (rms_norm(x, None, self._norm_eps) for x in (q, k))
        return q, k, v, gate

    def _of_latent(self, weights: Weights, x_tbh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [T, B, n, D] from latent vectors, which every rank makes whole."""
        part, alone = self._part, self._tp.alone
        plain = part.qk_dim - part.rope_dim
        if part.q_rank:
            names = f"{ATTENTION}.q_a_proj", f"{ATTENTION}.kv_a_proj_with_mqa"
            latent_q, latent = columns(weights, self._tp, x_tbh, *names)
            latent_q = rms_norm(latent_q, weights[f"{ATTENTION}.q_a_layernorm.weight"], _LATENT_EPS)
            (q,) = columns(weights, alone, latent_q, f"{ATTENTION}.q_b_proj")
        else:
            q, latent = columns(weights, self._tp, x_tbh, f"{ATTENTION}.q_proj", f"{ATTENTION}.kv_a_proj_with_mqa")
        latent, shared = latent.split_with_sizes([part.kv_rank, part.rope_dim], dim=-1)
        latent = rms_norm(latent, weights[f"{ATTENTION}.kv_a_layernorm.weight"], _LATENT_EPS)
        (both,) = columns(weights, alone, latent, f"{ATTENTION}.kv_b_proj")
        k, v = _heads(both, plain + part.v_dim).split_with_sizes([plain, part.v_dim], dim=-1)
        q, q_turned = _heads(q, part.qk_dim).split_with_sizes([plain, part.rope_dim], dim=-1)
        k_turned = shared.unsqueeze(2)
        if self._rope is not None:
            q_turned, k_turned = self._rope(q_turned, k_turned)
        k = torch.cat([k, k_turned.expand(*k.shape[:3], -1)], dim=-1)
        # A view of values would keep what both were made of for the backward.
        return torch.cat([q, q_turned], dim=-1), k, v.contiguous()

    def _norm(self, weights: Weights, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, weights[f"{ATTENTION}.{name}.weight"], self._norm_eps, self._execution.unit_norms)


def _heads(x: Tensor, dim: int) -> Tensor:
    """[T, B, n · D] as [T, B, n, D]."""
    return x.view(*x.shape[:2], x.shape[-1] // dim, dim)
