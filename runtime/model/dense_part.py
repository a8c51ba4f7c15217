"""The MLP of a layer on one rank: its own columns of it."""

from torch import Tensor

from hexiopt.problem.kinds import Dense
from runtime.mapping.model_parts import MLP
from runtime.model.functions import activated, gated
from runtime.model.projections import Weights, columns, row
from runtime.model.tensor_parallel import RankTpGroup


class DensePart:
    """What a rank computes of an MLP with an `activation` of Hugging Face's name."""

    def __init__(self, part: Dense, activation: str, tp: RankTpGroup) -> None:
        self._gated, self._activation, self._tp = part.gated, activation, tp

    def __call__(self, own: Weights, x_tbh: Tensor, documents: Tensor | None, is_selective: bool) -> Tensor:
        """As a `PartCall`; it mixes no tokens."""
        if self._gated:
            gate, up = columns(own, self._tp, x_tbh, f"{MLP}.gate_proj", f"{MLP}.up_proj")
            inner = gated(self._activation, gate, up)
        else:
            (up,) = columns(own, self._tp, x_tbh, f"{MLP}.up_proj")
            inner = activated(self._activation, up)
        return row(own, self._tp, inner, f"{MLP}.down_proj")

    def tensors(self) -> list[Tensor]:
        """Nothing lasts."""
        return []
