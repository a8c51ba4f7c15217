"""Model states of a stage on the fullest rank of a TP group: what is trained, what is frozen, and what the optimizer's
step moves."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hexiopt.problem.model import largest_shard
from hexiopt.problem.operators import HOLDERS, Holder
from hexiopt.problem.parameters import Parameters


class ByUnit(NamedTuple):
    """An amount of a layer, of the embedding, and of the LM head, alone in its stage or beside the embedding, with
    which it shares a tied matrix."""

    layer: float
    embedding: float
    head: float
    head_beside: float

    @classmethod
    def of(cls, amounts: Iterable[tuple[Holder, float]]) -> "ByUnit":
        """The sums of `amounts` of groups of parameters, by who holds them."""
        sums = dict.fromkeys(HOLDERS, 0.0)
        for holder, amount in amounts:
            sums[holder] += amount
        return cls(sums["layer"], sums["first"] + sums["ends"], sums["last"] + sums["ends"], sums["last"])

    def times(self, layer: float, ends: float) -> "ByUnit":
        """The amounts, that of a layer times `layer`, the others times `ends`."""
        return ByUnit(self.layer * layer, *[amount * ends for amount in self[1:]])

    def stage(self, num_layers: int, first: bool, last: bool) -> float:
        """The amount of a stage."""
        amount = num_layers * self.layer
        if first:
            amount += self.embedding
        if last:
            amount += self.head_beside if first else self.head
        return amount


@dataclass(frozen=True, slots=True)
class RankStates:
    """Trained parameters and, in bytes, what is frozen, moments, and what an optimizer step moves; `vectors` are the
    trained norms and biases."""

    params: ByUnit
    vectors: ByUnit
    frozen_bytes: ByUnit
    moment_bytes: ByUnit
    step_bytes: ByUnit

    @classmethod
    def of(cls, parameters: Parameters, tp: int) -> "RankStates":
        """The states on the fullest rank of a TP group of `tp` devices."""
        shard = largest_shard(parameters.model, tp)
        params = ByUnit.of((group.holder, float(group.split.on(shard))) for group in parameters.trained_groups)
        layer, ends = parameters.workload.states, parameters.end_states
        return cls(
            params=params,
            vectors=ByUnit.of((group.holder, float(group.vectors.on(shard))) for group in parameters.trained_groups),
            frozen_bytes=ByUnit.of((row.group.holder, row.bytes_on(shard)) for row in parameters.frozen_groups),
            moment_bytes=params.times(layer.moment, ends.moment),
            step_bytes=params.times(layer.step_bytes, ends.step_bytes),
        )


def products_s(parameters: Parameters, gemm_s: Callable[[float], float]) -> float:
    """Seconds of the products of whole matrices that the optimizer makes for a layer; `gemm_s` of a product's FLOPs."""
    return sum(map(gemm_s, parameters.orthogonal_flops()))
