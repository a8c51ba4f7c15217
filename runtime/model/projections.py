"""Products of a layer's hidden states with its matrices, by their names in the layer, with biases and adapters if any.

Shapes: t tokens of a rank, T of all ranks of its TP group, B samples, H hidden.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from runtime.mapping.adapters import DOWN, UP
from runtime.model.functions import activate
from runtime.model.tensor_parallel import AdapterMatrices, RankTpGroup

Weights = Mapping[str, nn.Parameter]


def columns(weights: Weights, tp: RankTpGroup, x_tbh: Tensor, *names: str) -> tuple[Tensor, ...]:
    """Products of one's own tokens [t, B, H], with those of the other ranks [T, B, rows], where the output is cut."""
    matrices, biases = [weights[f"{name}.weight"] for name in names], [weights.get(f"{name}.bias") for name in names]
    return tp.columns(x_tbh, matrices, biases, [_adapter(weights, name) for name in names])


def row(weights: Weights, tp: RankTpGroup, x: Tensor, name: str) -> Tensor:
    """A product [t, B, H] whose input [T, B, columns] is cut: summed over ranks before the bias, which all hold."""
    summed, bias = tp.rows(x, weights[f"{name}.weight"], _adapter(weights, name)), weights.get(f"{name}.bias")
    return summed if bias is None else summed + bias


def mlp(
    weights: Weights, tp: RankTpGroup, x_tbh: Tensor, name: str, activation: str, *, is_gated: bool = True
) -> Tensor:
    """What a rank's own columns of an MLP make, with an `activation` of Hugging Face's name [t, B, H]."""
    products = columns(weights, tp, x_tbh, *[f"{name}.{matrix}_proj" for matrix in ("gate", "up")[not is_gated :]])
    return row(weights, tp, activate(activation, *products), f"{name}.down_proj")


def _adapter(weights: Weights, name: str) -> AdapterMatrices | None:
    down = weights.get(f"{name}.{DOWN}.weight")
    return None if down is None else (down, weights[f"{name}.{UP}.weight"])
