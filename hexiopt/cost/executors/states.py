"""Model states of a stage on the fullest rank of a TP group: what is trained, what is frozen, and what the optimizer's
step moves."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import add, attrgetter, mul
from typing import NamedTuple

from hexiopt.problem.operators import HOLDERS, ParameterGroup, Shard, Split
from hexiopt.problem.parameters import Parameters

Layers = int | tuple[int, ...]
"""A number of layers, or the numbers of each kind."""


class ByUnit(NamedTuple):
    """An amount of the mean layer, of the embedding, and of the LM head, alone in its stage or beside the embedding,
    with which it shares a tied matrix; of a layer of each kind; and of that matrix, which counts with both."""

    layer: float
    embedding: float
    head: float
    head_beside: float
    layers: tuple[float, ...]
    tied: float

    @classmethod
    def of(cls, amounts: Iterable[tuple[ParameterGroup, float]], shares: Sequence[float]) -> "ByUnit":
        """The sums of `amounts` of groups of parameters, by who holds them; `shares` of layers are of each kind."""
        sums, layers = dict.fromkeys(HOLDERS, 0.0), [0.0] * len(shares)
        for group, amount in amounts:
            sums[group.holder] += amount * (shares[group.kind] if group.holder == "layer" else 1.0)
            layers[group.kind] += amount * (group.holder == "layer")
        embedding, head = sums["first"] + sums["ends"], sums["last"] + sums["ends"]
        return cls(sums["layer"], embedding, head, sums["last"], tuple(layers), sums["ends"])

    def times(self, layer: float, ends: float) -> "ByUnit":
        """The amounts, that of a layer times `layer`, the others times `ends`."""
        embedding, head, head_beside = self.embedding * ends, self.head * ends, self.head_beside * ends
        layers = tuple([amount * layer for amount in self.layers])
        return ByUnit(self.layer * layer, embedding, head, head_beside, layers, self.tied * ends)

    @property
    def units(self) -> tuple[float, float, float, float]:
        """The amounts of the mean layer, the embedding, and the head, alone and beside the embedding."""
        return self.layer, self.embedding, self.head, self.head_beside

    def plus(self, other: "ByUnit") -> "ByUnit":
        """The sums of amounts."""
        layers = tuple(map(add, self.layers, other.layers))
        layer, embedding, head, head_beside = map(add, self.units, other.units)
        return ByUnit(layer, embedding, head, head_beside, layers, self.tied + other.tied)

    def stage(self, num_layers: Layers, first: bool, last: bool) -> float:
        """The amount of a stage of so many mean layers, or of so many layers of each kind."""
        amount = sum(map(mul, num_layers, self.layers)) if isinstance(num_layers, tuple) else num_layers * self.layer
        if first:
            amount += self.embedding
        if last:
            amount += self.head_beside if first else self.head
        return amount

    def spread(self, num_layers: Layers, first: bool, last: bool, devices: float, tied_devices: float) -> float:
        """As `stage`, on one of the `devices` that share it, of a tied matrix on one of `tied_devices`."""
        tied = self.tied if first or last else 0.0
        return (self.stage(num_layers, first, last) - tied) / devices + tied / tied_devices


@dataclass(frozen=True, slots=True)
class RankStates:
    """Trained parameters and, in bytes, what is frozen, moments, and what an optimizer step moves; `vectors` are the
    trained norms and biases, `spread` the parameters whose states ZeRO divides by all devices that hold a copy of the
    stage. Fewer hold each expert where replicas share experts, so that these count as so many more."""

    params: ByUnit
    spread: ByUnit
    vectors: ByUnit
    frozen_bytes: ByUnit
    moment_bytes: ByUnit
    step_bytes: ByUnit

    @classmethod
    def of(
        cls, parameters: Parameters, shards: Sequence[Shard], replicas: int = 1, experts_alone: bool = False
    ) -> "RankStates":
        """The states on a rank that holds `shards` of layers [kinds], of experts alone or of all; ZeRO spreads those
        of experts over so many `replicas` fewer."""
        shares = parameters.model.weight_of_kinds

        def by_unit(split: Callable[[ParameterGroup], Split], of_experts: int = 1) -> ByUnit:
            rows = parameters.trained_groups
            amounts = [
                float(split(row).on(shards[row.kind])) * (of_experts if row.experts else not experts_alone)
                for row in rows
            ]
            return ByUnit.of(zip(rows, amounts, strict=True), shares)

        params = by_unit(attrgetter("split"))
        spread = by_unit(attrgetter("split"), replicas) if replicas > 1 else params
        layer, ends = parameters.workload.states, parameters.end_states
        frozen = [
            (row.group, row.bytes_on(shards[row.group.kind]) * (row.group.experts or not experts_alone))
            for row in parameters.frozen_groups
        ]
        return cls(
            params=params,
            spread=spread,
            vectors=by_unit(attrgetter("vectors")),
            frozen_bytes=ByUnit.of(frozen, shares),
            moment_bytes=spread.times(layer.moment, ends.moment),
            step_bytes=spread.times(layer.step_bytes, ends.step_bytes),
        )


def products_s(parameters: Parameters, gemm_s: Callable[[float], float]) -> float:
    """Seconds of the products of whole matrices that the optimizer makes for a layer; `gemm_s` of a product's FLOPs."""
    return sum(map(gemm_s, parameters.orthogonal_flops()))
