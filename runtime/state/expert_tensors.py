"""How the files of Hugging Face hold the experts of a layer, which are one parameter here: as tensors of each expert,
or stacked and transposed, with the columns of gate and up in turns (gpt-oss).

Shapes of parameters: [experts, rows, columns], of biases [experts, rows].
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from runtime.mapping.model_parts import INWARD, OUTWARD
from runtime.mapping.parts import ParameterPart

_STACKED = ("gpt_oss",)
_USUAL = ("gate_proj", "up_proj", "down_proj")
_MATRICES: Mapping[str, tuple[str, str, str]] = {"mixtral": ("w1", "w3", "w2")}
"""What files call gate, up and down."""
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """A tensor of `shape` in a file, whose `columns` hold `rows` of a parameter: of one `expert`, or of all (None),
    perhaps transposed. The same one may hold further rows in other columns."""

    name: str
    shape: tuple[int, ...]
    expert: int | None
    rows: slice
    columns: slice
    is_transposed: bool = False

    def rows_of(self, values: Tensor) -> Tensor:
        """Of the tensor, or of some experts of it, the rows of the parameter: a view."""
        rows = values[..., self.columns]
        return rows.mT if self.is_transposed else rows

    def place_in(self, parameter: Tensor, first: int = 0) -> Tensor:
        """Where these rows are in a parameter whose experts begin at `first`: a view."""
        return parameter[:, self.rows] if self.expert is None else parameter[self.expert - first, self.rows]


def expert_tensors(part: ParameterPart, model_type: str, stored_name: str) -> list[ExpertTensor]:
    """The tensors that hold a parameter which files of that type would call `stored_name`, those of equal names one
    after another; empty where it is not one of experts."""
    is_inward = part.name.removesuffix("_bias").endswith(INWARD)
    if not is_inward and not part.name.removesuffix("_bias").endswith(OUTWARD):
        return []
    count, rows, *columns = part.shape
    halves = [slice(0, rows // 2), slice(rows // 2, rows)] if is_inward else [_ALL]
    if model_type in _STACKED:
        turns = [slice(0, None, 2), slice(1, None, 2)] if is_inward else [_ALL]
        shape, is_transposed = (count, *columns, rows), bool(columns)
        return [
            ExpertTensor(stored_name, shape, None, half, turn, is_transposed)
            for half, turn in zip(halves, turns, strict=True)
        ]
    gate, up, down = _MATRICES.get(model_type, _USUAL)
    layer = stored_name.rpartition(".")[0]
    ending = "bias" if part.name.endswith("_bias") else "weight"
    shape = (rows // len(halves), *columns)
    return [
        ExpertTensor(f"{layer}.{expert}.{name}.{ending}", shape, expert, half, _ALL)
        for expert in range(count)
        for name, half in zip((gate, up) if is_inward else (down,), halves, strict=True)
    ]


def read_experts(part: ParameterPart, tensors: Sequence[ExpertTensor], read: Callable[[str, slice], Tensor]) -> Tensor:
    """The values of a range of experts, where `read` gives a range of the first dimension of a stored tensor."""
    values: Tensor | None = None
    for tensor in tensors:
        if tensor.expert is None:
            rows = tensor.rows_of(read(tensor.name, slice(part.start, part.end)))
        elif part.start <= tensor.expert < part.end:
            rows = tensor.rows_of(read(tensor.name, _ALL))
        else:
            continue
        values = torch.empty(part.local_shape, dtype=rows.dtype) if values is None else values
        tensor.place_in(values, part.start).copy_(rows)
    return torch.empty(part.local_shape) if values is None else values


def stored_experts(parameter: Tensor, tensors: Sequence[ExpertTensor]) -> Iterator[tuple[str, Tensor]]:
    """The stored tensors of a whole parameter, by name."""
    for name, of_name in groupby(tensors, lambda tensor: tensor.name):
        pieces = list(of_name)
        values = parameter.new_empty(pieces[0].shape)
        for piece in pieces:
            piece.rows_of(values).copy_(piece.place_in(parameter))
        yield name, values
