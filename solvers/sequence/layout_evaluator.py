"""Evaluates a layout recipe: allocates tokens and heads, repairs memory overflow, prices the stage with the cost
model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.executors.network_load import LinkTable
from hexiopt.cost.executors.sequence.stage import SequenceStage
from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.token_layout import Floats
from solvers.completion.allocation import proportional
from solvers.sequence.grouping import DeviceGroups
from solvers.sequence.stage_tables import RecomputeTable
from solvers.sequence.token_allocation import (
    RateTable,
    TokenAllocation,
    balanced_tokens,
    head_parts,
    starts_of,
)

RULES = ("balanced", "compute", "square_root", "equal")
_REPAIRS = 4  # attempts to bring an allocation within memory
_ROOM = 0.999  # of what fits by the linear estimate
_KEPT = 20_000  # allocations remembered before memory is given back
_KEPT_STAGES = 500  # and priced layouts


class StageNeeds(NamedTuple):
    """The requirements on a stage: `num_layers` layers with the embedding (`first`) or the output head (`last`), `held`
    micro-batches in flight, states sharded as `shards`, and `sharers` stages that use the interfaces of its machines.
    """

    num_layers: int
    first: bool
    last: bool
    held: int
    shards: StateSharding = StateSharding()
    sharers: int = 1


@dataclass(frozen=True)
class LayoutFreedoms:
    """Which parts of a layout may be uneven, and the token orders tried: all, except in ablations."""

    tokens: bool = True
    heads: bool = True
    groups: bool = True
    orders: tuple[str, ...] = ("zigzag", "contiguous")


@dataclass(frozen=True)
class LayoutRecipe:
    """How to build a layout: its groups, the rule that allocates tokens and heads, and factors of both [devices]."""

    groups: DeviceGroups
    order: str
    policy: str
    rule: str = "balanced"
    head_unit: int = 1
    token_factor: tuple[float, ...] = field(default=())
    head_factor: tuple[float, ...] = field(default=())

    def scaled(self, kind: str, places: Sequence[int], factor: float) -> "LayoutRecipe":
        """The recipe with the factors `kind` of some devices multiplied by `factor`."""
        count = sum(map(len, self.groups))
        values = list(getattr(self, kind) or (1.0,) * count)
        for place in places:
            values[place] *= factor
        if kind == "token_factor":
            return replace(self, token_factor=tuple(values))
        return replace(self, head_factor=tuple(values))


@dataclass(frozen=True)
class EvaluatedLayout:
    """A layout, the recompute policy with the least memory that it was built for, and the seconds of a micro-batch.

    Where memory does not suffice, the seconds are infinite and `excess_bytes` is missing on the fullest device.
    """

    layout: SequenceParallel
    policy: str
    seconds: float
    excess_bytes: float
    recipe: LayoutRecipe
    stage: SequenceStage  # of this layout, or of an equal one on other devices

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, smaller is better: the seconds and, where nothing fits, the missing bytes."""
        return self.seconds, self.excess_bytes


class LayoutEvaluator:
    """Judges recipes of one problem."""

    def __init__(self, model: PlanPricer, freedoms: LayoutFreedoms) -> None:
        self._model, self._problem, self._freedoms = model, model.problem, freedoms
        self._rates = RateTable(model)
        self._links = LinkTable(model.problem.cluster)
        self._stages: Memo[tuple[SequenceParallel, int, int], SequenceStage] = Memo(
            lambda key: self._stage(*key), _KEPT_STAGES
        )
        self._allocations = Memo(self._allocate, _KEPT)

    def evaluate(self, recipe: LayoutRecipe, size: int, need: StageNeeds) -> tuple[EvaluatedLayout, bool]:
        """The layout of a recipe, and whether it was changed to fit memory or does not fit."""
        made = self._allocations[recipe]
        policies = (recipe.policy,) * need.num_layers
        for repairs in range(_REPAIRS + 1):
            layout = made.layout()
            stage = self._stages[layout, size, need.sharers]
            parts = stage.memory.stage((policies,), need.first, need.last, (need.held,), need.shards)
            totals, limits = parts.sum(axis=0), stage.limit_bytes
            excess = float((totals - limits).max())
            states = parts[:4].sum(axis=0)
            caps = made.tokens * np.maximum(limits - states, 0.0) / (totals - states) * _ROOM
            if excess <= 0.0 or repairs == _REPAIRS or not self._freedoms.tokens:
                break
            total, whole = int(made.tokens.sum()), np.floor(caps)
            if whole.min() < 1 or whole.sum() < total:
                break
            tokens = proportional(made.tokens.astype(float), total, caps=caps)
            if (tokens == made.tokens).all():
                break
            made = made.with_tokens(tokens)
        seconds = float("inf")
        if excess <= 0.0 and not repairs:
            faster_policies = self._model.policies()[: self._model.policies().index(recipe.policy) + 1]
            seconds = float(self.recompute_table(stage, need, faster_policies, need.num_layers).seconds[-1])
        elif excess <= 0.0:
            seconds = sum(stage.stage_s(policies, need.first, need.last))
        return EvaluatedLayout(layout, recipe.policy, seconds, excess, recipe, stage), repairs > 0 or excess > 0.0

    def recompute_table(
        self, stage: SequenceStage, need: StageNeeds, policies: Sequence[str], most: int
    ) -> RecomputeTable:
        """The times of a layout with recomputation chosen layer by layer, for stages of 1 to `most` layers at this
        position.
        """

        def bytes_of(layers: tuple[str, ...]) -> Floats:
            found: Floats = stage.memory.stage((layers,), need.first, need.last, (need.held,), need.shards).sum(axis=0)
            return found

        beside_s = sum(stage.stage_s((), need.first, need.last))
        mixed = self._problem.space.recompute_per_stage
        return RecomputeTable(
            policies, lambda p: sum(stage.layer_s(p)), bytes_of, stage.limit_bytes, beside_s, most, mixed=mixed
        )

    def _stage(self, layout: SequenceParallel, size: int, sharers: int) -> SequenceStage:
        network, own = self._problem.cluster.network, list(layout.devices)
        used = np.concatenate([network.transmitters[own], network.receivers[own]]).tolist()
        contention = dict.fromkeys(used, sharers) if sharers > 1 else None
        return SequenceStage(self._problem, self._model.framework, layout, size, contention, self._links)

    def _allocate(self, recipe: LayoutRecipe) -> TokenAllocation:
        workload, spec, groups = self._problem.workload, self._problem.model, recipe.groups
        devices = list(chain.from_iterable(groups))
        rates, starts = self._rates.of(devices, recipe.policy), starts_of(groups)
        ones = np.ones(len(devices))
        head_weights = 1.0 / rates.pair_s if self._freedoms.heads else ones
        heads = head_parts(groups, _times(head_weights, recipe.head_factor), spec.num_heads, recipe.head_unit)
        weights: Floats = ones
        if self._freedoms.tokens and recipe.rule == "balanced":
            weights = balanced_tokens(starts, rates, heads, recipe.order, workload.seq_len)
        elif self._freedoms.tokens and recipe.rule != "equal":
            speed = 1.0 / rates.of_sequence_s(workload.seq_len, spec.num_heads)
            weights = speed if recipe.rule == "compute" else np.sqrt(speed)
        tokens = proportional(_times(weights, recipe.token_factor), workload.seq_len)
        return TokenAllocation(groups, tokens, heads, recipe.order)


def _times(values: Floats, factors: tuple[float, ...]) -> Floats:
    return values * np.array(factors) if factors else values
