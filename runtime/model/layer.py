"""Decoder layers on one rank: norms and residual sums around what their parts compute.

What a part computes is a `PartCall`, made once for all layers that have it (`runtime/model/part_calls.py`). Shapes: t
tokens of the rank, B samples, H hidden.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hexiopt.problem.kinds import LayerKind, Part
from hexiopt.problem.model import ModelSpec
from runtime.mapping.model_parts import MLP, execution_of, layer_prefix, sublayers
from runtime.model.functions import recompute, rms_norm
from runtime.model.projections import Weights, mlp
from runtime.model.tensor_parallel import RankTpGroup


class PartCall(Protocol):
    """What a rank computes of a part, the same for every layer that has it."""

    def __call__(self, weights: Weights, x_tbh: Tensor, documents: Tensor | None, is_selective: bool) -> Tensor:
        """What the part makes of normed hidden states of the rank's own tokens, with the layer's `weights`.

        No token sees beyond its own one of the `documents`, which parts that mix tokens are given, if any. With
        `is_selective` the backward recomputes what selective recompute leaves out.
        """
        ...


def no_part(weights: Weights, x_tbh: Tensor, documents: Tensor | None, is_selective: bool) -> Tensor:
    """A part of which a rank that hosts experts alone has nothing: what it makes of no tokens is none."""
    return x_tbh


@dataclass(frozen=True)
class DensePart:
    """What a rank computes of an MLP with an `activation` of Hugging Face's name."""

    is_gated: bool
    activation: str
    tp: RankTpGroup

    def __call__(self, weights: Weights, x_tbh: Tensor, documents: Tensor | None, is_selective: bool) -> Tensor:
        """As a `PartCall`; it mixes no tokens."""
        return mlp(weights, self.tp, x_tbh, MLP, self.activation, is_gated=self.is_gated)


class SublayerCall(NamedTuple):
    """A sublayer: what its parts compute, and the names of the norms of what they read and of what they make,
    if any."""

    parts: tuple[PartCall, ...]
    norm: str | None
    output_norm: str | None


@dataclass(frozen=True, eq=False)
class LayerCall:
    """What all layers of a kind and a recompute policy have in common on a rank beside their weights: one graph,
    compiled once, serves them all."""

    sublayers: tuple[SublayerCall, ...]
    norm_eps: float
    unit_norms: bool
    residual_scale: float
    is_selective: bool

    @classmethod
    def of(cls, model: ModelSpec, kind: LayerKind, parts: Mapping[Part, PartCall], policy: str) -> "LayerCall":
        """That of layers of a kind, of whose `parts` a rank computes so much."""
        execution = execution_of(model)
        calls = tuple(
            SublayerCall(tuple(parts[part] for part in of_kind), norm, output_norm)
            for of_kind, norm, output_norm in sublayers(kind, execution)
        )
        return cls(calls, model.norm_eps, execution.unit_norms, execution.residual_scale, policy == "selective")

    def apply_norm(self, weights: Weights, name: str | None, x_tbh: Tensor) -> Tensor:
        """What the norm of that name makes, if there is one."""
        return x_tbh if name is None else rms_norm(x_tbh, weights[f"{name}.weight"], self.norm_eps, self.unit_norms)


LayerRun = Callable[..., Tensor]
_MOST_GRAPHS = 256  # one of each kind of layers, policy, and with and without a backward; torch stops at 8


def layer_run(weights: Weights, call: LayerCall, x_tbh: Tensor, *documents: Tensor) -> Tensor:
    """A layer, of `weights` by their names in it; `documents` of each part that mixes tokens, or none."""
    number = 0
    for parts, norm, output_norm in call.sublayers:
        normed = call.apply_norm(weights, norm, x_tbh)
        for part in parts:
            of_part = documents[number] if number < len(documents) else None
            output = call.apply_norm(weights, output_norm, part(weights, normed, of_part, call.is_selective))
            x_tbh = x_tbh + (output if call.residual_scale == 1.0 else output * call.residual_scale)
            number += 1
    return x_tbh


def hosted_layer_run(weights: Weights, call: LayerCall, x_tbh: Tensor, *documents: Tensor) -> Tensor:
    """A layer on a rank that hosts experts alone: without tokens and norms, it takes part in the exchanges."""
    for sublayer in call.sublayers:
        for part in sublayer.parts:
            x_tbh = x_tbh + part(weights, x_tbh, None, False)
    return x_tbh


def compiled_layer_run(tp: RankTpGroup) -> LayerRun:
    """`layer_run`, compiled for the shapes that it meets: whole, or, of a `tp` group, what is between collectives."""
    run: LayerRun = torch.compile(layer_run, fullgraph=tp.group is None, dynamic=False)
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS  # imported by the line above
    return run


class Layers:
    """Decoder layers on one rank, one or several that are recomputed together: what they compute with which of the
    rank's parameters. Compiled, those with full recompute are compiled twice, without their backward and with it."""

    def __init__(
        self,
        first: int,
        kinds: Sequence[LayerKind],
        calls: Mapping[tuple[LayerKind, str], LayerCall],
        policy: str,
        weights: Weights,
        run: LayerRun,
    ) -> None:
        self._mixers, self._runs = [kind.mixers for kind in kinds], []
        for number, kind in enumerate(kinds, first):
            at = layer_prefix(number)
            mine = {name.removeprefix(at): weight for name, weight in weights.items() if name.startswith(at)}
            self._runs.append(partial(run, mine, calls[kind, policy]))
        self._is_full = policy == "full"

    def __call__(self, x_tbh: Tensor, documents: Mapping[Part, Tensor] | None = None) -> Tensor:
        """Hidden states after the layers, from those before them: the rank's own tokens. `documents` as each part that
        mixes tokens takes them."""
        of_mixers = () if documents is None else [documents[part] for parts in self._mixers for part in parts]
        return recompute(self._run, x_tbh, *of_mixers) if self._is_full else self._run(x_tbh, *of_mixers)

    def _run(self, x_tbh: Tensor, *documents: Tensor) -> Tensor:
        left = iter(documents)
        for run, mixers in zip(self._runs, self._mixers, strict=True):
            x_tbh = run(x_tbh, *islice(left, len(mixers)))
        return x_tbh
