"""The MLP of a layer on one rank: its own columns of it."""

from torch import Tensor

from runtime.mapping.model_parts import MLP
from runtime.model.functions import gated_silu
from runtime.model.projections import Weights, columns, row
from runtime.model.tensor_parallel import RankTpGroup


class DensePart:
    """What a rank computes of an MLP."""

    def __init__(self, tp: RankTpGroup) -> None:
        self._tp = tp

    def __call__(self, own: Weights, x_tbh: Tensor, documents: Tensor | None, is_selective: bool) -> Tensor:
        """As a `PartCall`; it mixes no tokens."""
        inner = gated_silu(*columns(own, self._tp, x_tbh, f"{MLP}.gate_proj", f"{MLP}.up_proj"))
        return row(own, self._tp, inner, f"{MLP}.down_proj")

    def tensors(self) -> list[Tensor]:
        """Nothing lasts."""
        return []
