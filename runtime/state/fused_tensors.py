"""Tensors in Hugging Face's files that hold several of our parameters: projections and convolutions of recurrences, and
gate and up of an MLP. Their rows follow each other, or take turns by groups of heads."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from hexiopt.problem.kinds import Recurrent
from hexiopt.problem.model import ModelSpec
from runtime.mapping.model_parts import execution_of, layer_kinds, layer_prefix, whole_parts


@dataclass(frozen=True, slots=True)
class _Fusion:
    """A stored tensor of a layer, without `.weight` or `.bias`, and the parameters that it holds; `in_turns` by groups
    of the layer's recurrence."""

    name: str
    parameters: tuple[str, ...]
    in_turns: bool = False


def _of_recurrence(names: str) -> tuple[str, ...]:
    return tuple(f"recurrent.{name}" for name in names.split())


_MAMBA = (
    _Fusion("mamba.in_proj", _of_recurrence("z_proj v_proj k_proj q_proj step_proj")),
    _Fusion("mamba.conv1d", _of_recurrence("v_conv k_conv q_conv")),
)
_FUSIONS: Mapping[str, tuple[_Fusion, ...]] = MappingProxyType(
    {
        "bamba": _MAMBA,
        "granitemoehybrid": (*_MAMBA, _Fusion("shared_mlp.input_linear", ("mlp.gate_proj", "mlp.up_proj"))),
        "nemotron_h": tuple(_Fusion(one.name.replace("mamba", "mixer"), one.parameters) for one in _MAMBA),
        "qwen3_next": (
            _Fusion("linear_attn.in_proj_qkvz", _of_recurrence("q_proj k_proj v_proj z_proj"), in_turns=True),
            _Fusion("linear_attn.in_proj_ba", _of_recurrence("write_proj step_proj"), in_turns=True),
            _Fusion("linear_attn.conv1d", _of_recurrence("q_conv k_conv v_conv")),
        ),
    }
)


@dataclass(frozen=True, slots=True)
class FusedPiece:
    """Where a parameter is in the stored tensor `name` of `shape`: of each of `turns` equal runs of its rows, from
    `first` to `end`."""

    name: str
    shape: tuple[int, ...]
    turns: int
    first: int
    end: int

    def of(self, stored: Tensor) -> Tensor:
        """The parameter's rows, by turn [turns, rows, ...]: a view."""
        return stored.view(self.turns, -1, *self.shape[1:])[:, self.first : self.end]


def fused_pieces(model: ModelSpec) -> dict[str, FusedPiece]:
    """The places of all parameters that are stored together with others, by their names."""
    fusions = _FUSIONS.get(execution_of(model).type, ())
    shapes = {part.name: part.shape for part in whole_parts(model)} if fusions else {}
    pieces = dict[str, FusedPiece]()
    for layer, kind in enumerate(layer_kinds(model) if fusions else ()):
        at, groups = layer_prefix(layer), next((p.groups for p in kind.mixers if isinstance(p, Recurrent)), 1)
        for fusion in fusions:
            turns = groups if fusion.in_turns else 1
            for ending in (".weight", ".bias"):
                names = [f"{at}{name}{ending}" for name in fusion.parameters]
                if names[0] not in shapes:
                    continue
                rows, first = sum(shapes[name][0] for name in names), 0
                for name in names:
                    end = first + shapes[name][0] // turns
                    whole = (rows, *shapes[name][1:])
                    pieces[name] = FusedPiece(f"{at}{fusion.name}{ending}", whole, turns, first, end)
                    first = end
    return pieces


def joined(tensors: Iterable[tuple[str, Tensor]], pieces: Mapping[str, FusedPiece]) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters by our names, those that are stored together as one tensor by its name, once all have come."""
    coming: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    for name, values in tensors:
        piece = pieces.get(name)
        if piece is None:
            yield name, values
            continue
        if piece.name not in coming:
            coming[piece.name], missing[piece.name] = torch.empty(piece.shape, dtype=values.dtype), prod(piece.shape)
        piece.of(coming[piece.name]).copy_(values.reshape(piece.turns, -1, *piece.shape[1:]))
        missing[piece.name] -= values.numel()
        if not missing[piece.name]:
            yield piece.name, coming.pop(piece.name)
