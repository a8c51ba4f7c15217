"""The attention of a layer on one rank: projections, norms of queries and keys, rotation, attention itself.

Grouped-query attention with any split of heads. Shapes: t tokens of the rank, T of all ranks of its TP group, B
samples, n query heads, D their size, H hidden.
"""

from torch import Tensor

from hexiopt.problem.kinds import Attention
from runtime.mapping.model_parts import ATTENTION
from runtime.model.attention import AttentionCall
from runtime.model.functions import recomputed, rms_norm
from runtime.model.projections import Weights, columns, row
from runtime.model.rope import Rope
from runtime.model.tensor_parallel import RankTpGroup


class AttentionPart:
    """What a rank computes of the attention `part` of a layer: `attend` does its heads, or its tokens."""

    def __init__(self, part: Attention, norm_eps: float, tp: RankTpGroup, rope: Rope, attend: AttentionCall) -> None:
        self._part, self._norm_eps, self._tp, self._rope, self.attend = part, norm_eps, tp, rope, attend

    def __call__(self, own: Weights, x_tbh: Tensor, documents: Tensor | None, is_selective: bool) -> Tensor:
        """As a `PartCall`."""
        part, names = self._part, (f"{ATTENTION}.{name}_proj" for name in "qkv")
        q, k, v = (
            x.view(*x.shape[:2], x.shape[-1] // dim, dim)
            for x, dim in zip(
                columns(own, self._tp, x_tbh, *names), (part.qk_dim, part.qk_dim, part.v_dim), strict=True
            )
        )
        if part.qk_norm != "none":
            q = rms_norm(q, own[f"{ATTENTION}.q_norm.weight"], self._norm_eps)
            k = rms_norm(k, own[f"{ATTENTION}.k_norm.weight"], self._norm_eps)
        q, k = self._rope(q, k)
        given = (q, k, v) if documents is None else (q, k, v, documents)
        values = recomputed(self.attend, *given) if is_selective else self.attend(*given)
        return row(own, self._tp, values, f"{ATTENTION}.o_proj")

    def tensors(self) -> list[Tensor]:
        """What lasts."""
        return self._rope.tensors() + self.attend.tensors()
