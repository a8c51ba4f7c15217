"""Products of a layer's hidden states with its matrices, by their names in the layer, with biases and adapters if any.

Shapes: t tokens of a rank, T of all ranks of its TP group, B samples, H hidden.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from runtime.mapping.adapters import DOWN, UP
from runtime.model.functions import activated
from runtime.model.tensor_parallel import AdapterMatrices, RankTpGroup

Weights = Mapping[str, nn.Parameter]


def columns(own: Weights, tp: RankTpGroup, x_tbh: Tensor, *names: str) -> tuple[Tensor, ...]:
    """Products of one's own tokens [t, B, H], with those of the other ranks [T, B, rows], where the output is cut."""
    weights, biases = [own[f"{name}.weight"] for name in names], [own.get(f"{name}.bias") for name in names]
    return tp.columns(x_tbh, weights, biases, [_adapter(own, name) for name in names])


def row(own: Weights, tp: RankTpGroup, x: Tensor, name: str) -> Tensor:
    """A product [t, B, H] whose input [T, B, columns] is cut: summed over ranks before the bias, which all hold."""
    summed, bias = tp.rows(x, own[f"{name}.weight"], _adapter(own, name)), own.get(f"{name}.bias")
    return summed if bias is None else summed + bias


def mlp(own: Weights, tp: RankTpGroup, x_tbh: Tensor, name: str, activation: str, *, is_gated: bool = True) -> Tensor:
    """What a rank's own columns of an MLP make, with an `activation` of Hugging Face's name [t, B, H]."""
    products = columns(own, tp, x_tbh, *[f"{name}.{matrix}_proj" for matrix in ("gate", "up")[not is_gated :]])
    return row(own, tp, activated(activation, *products), f"{name}.down_proj")


def _adapter(own: Weights, name: str) -> AdapterMatrices | None:
    down = own.get(f"{name}.{DOWN}.weight")
    return None if down is None else (down, own[f"{name}.{UP}.weight"])
