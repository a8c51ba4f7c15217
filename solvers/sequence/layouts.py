"""The layout problem: given devices, layers and memory, the sequence layout of least forward and backward time.

The three stages of HexiSeq (arXiv 2605.07569): groups (`clustering.py`), tokens of the groups and ranks by capability
(`allotment.py`), and coordinate descent over tokens and heads. Beyond the paper, the second stage balances causal work
and keeps within memory, every recompute policy and both orders are tried, and the descent scales whole types of
GPUs first, then groups and ranks. Every layout considered is priced as a plan's would be.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from hexiopt.cost.memory import Shards
from hexiopt.cost.model import CostModel
from hexiopt.cost.sequence_stage import SequenceStage
from hexiopt.cost.wires import WiresKept
from hexiopt.plan import SequenceLayout
from hexiopt.sequence import Floats, Ints
from solvers.sequence.allotment import (
    Allotment,
    RateTable,
    balanced_tokens,
    filled,
    head_parts,
    starts_of,
    whole_parts,
)
from solvers.sequence.clustering import Groups, clusterings
from solvers.sequence.recompute import Mixtures
from solvers.sequence.signatures import Signatures

RULES = ("balanced", "compute", "square_root", "equal")
_PLAIN = (4, 10, None)  # clusterings tried at each effort
_VARIED = 2  # best clusterings whose orders, rules and policies are all tried
_REPAIRS = 4  # attempts to bring an allotment within memory
_ROOM = 0.999  # of what fits by the linear estimate
_RANKS = 48  # devices up to which ranks are scaled one by one
_STEPS = (1.3, 1.1, 1.03, 1.01)  # factors of the descent, from coarse to fine
_ROUNDS = 3  # most rounds with each factor
_WORTH = 1.0 - 1e-6  # of the best: what counts as better
_KEPT = 20_000  # layouts and allotments remembered before memory is given back
_KEPT_STAGES = 500  # and priced ones


class Need(NamedTuple):
    """What a stage must do: hold `num_layers` layers, with the embedding (`first`) or the head (`last`), `held`
    micro-batches in flight, its states spread as `shards`; `sharers` stages use the interfaces of its machines."""

    num_layers: int
    first: bool
    last: bool
    held: int
    shards: Shards = Shards()
    sharers: int = 1


@dataclass(frozen=True)
class Freedoms:
    """Which parts of a layout may be uneven, and the orders tried: all, but for ablations."""

    tokens: bool = True
    heads: bool = True
    groups: bool = True
    orders: tuple[str, ...] = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Recipe:
    """How to make a layout: its groups, how tokens and heads are allotted, and factors of both [devices]."""

    groups: Groups
    order: str
    policy: str
    rule: str = "balanced"
    head_unit: int = 1
    token_factor: tuple[float, ...] = field(default=())
    head_factor: tuple[float, ...] = field(default=())

    def scaled(self, kind: str, places: Sequence[int], factor: float) -> "Recipe":
        """The same with the factors `kind` of some devices times `factor`."""
        count = sum(map(len, self.groups))
        values = list(getattr(self, kind) or (1.0,) * count)
        for place in places:
            values[place] *= factor
        if kind == "token_factor":
            return replace(self, token_factor=tuple(values))
        return replace(self, head_factor=tuple(values))


@dataclass(frozen=True)
class Fitted:
    """A layout, the leanest recompute policy that it was made for, and the seconds of a micro-batch through its stage;
    or, where memory does not suffice, infinitely many, and the bytes missing on the fullest device."""

    layout: SequenceLayout
    policy: str
    seconds: float
    excess_bytes: float
    recipe: Recipe
    stage: SequenceStage  # of this layout, or of an equal one on other devices

    @property
    def rank(self) -> tuple[float, float]:
        """Less is better: time, and where nothing fits, what is missing."""
        return self.seconds, self.excess_bytes


def _rank(one: Fitted) -> tuple[float, float]:
    return one.rank


class LayoutSearch:
    """Searches layouts of one problem; `go_on` says whether there is time left."""

    def __init__(self, model: CostModel, go_on: Callable[[], bool], freedoms: Freedoms | None = None) -> None:
        self.model, self.problem = model, model.problem
        self.freedoms = freedoms or Freedoms()
        self._go_on = go_on
        self._rates = RateTable(model)
        self._wires = WiresKept(model.problem.cluster)
        self._signatures = Signatures(model.problem)
        self._examples: dict[bytes, tuple[int, ...]] = {}
        self._kept: dict[tuple[object, ...], Fitted | None] = {}
        self._stages: dict[tuple[SequenceLayout, int, int], SequenceStage] = {}
        self._allotments: dict[Recipe, Allotment] = {}

    def best(self, devices: Sequence[int], size: int, need: Need, effort: int = 1) -> Fitted | None:
        """The best layout of all of `devices` for micro-batches of `size` sequences; one that does not fit where none
        does, None where none is legal. `effort` 0 tries the plainest groups alone, 1 more of them and their variants, 2
        all, and descends over types, 3 over groups and ranks too."""
        devices = tuple(sorted(devices))
        if len(devices) > self.problem.workload.seq_len:
            return None
        alike = self._signatures.of(devices)
        example = self._examples.setdefault(alike, devices)
        if example != devices:
            found = self.best(example, size, need, effort)
            return None if found is None else self._moved(found, devices)
        key = (alike, size, need, effort)
        if key in self._kept:
            return self._kept[key]
        if len(self._kept) > _KEPT:
            self._kept.clear()
        rest = self._chosen if effort < 3 else self.best
        found = rest(devices, size, need, min(effort, 2))
        if effort > 1 and found is not None and found.excess_bytes <= 0.0:
            found = self._descended(found, size, need, fine=effort > 2)
        self._kept[key] = found
        return found

    def _moved(self, found: Fitted, devices: tuple[int, ...]) -> Fitted:
        """The same layout on other devices, of the same signature."""
        to = dict(zip(sorted(found.layout.devices), devices, strict=True))
        if all(a == b for a, b in to.items()):
            return found
        groups = tuple(replace(g, devices=tuple(to[d] for d in g.devices)) for g in found.layout.groups)
        recipe = replace(found.recipe, groups=tuple(tuple(to[d] for d in own) for own in found.recipe.groups))
        return replace(found, layout=replace(found.layout, groups=groups), recipe=recipe)

    # ---------------------------------------------------------------- stages I and II

    def _chosen(self, devices: tuple[int, ...], size: int, need: Need, effort: int) -> Fitted | None:
        ways = clusterings(self.problem, devices)[: _PLAIN[effort]]
        if not self.freedoms.groups:
            even = [groups for groups in ways if len({len(own) for own in groups}) == 1]
            ways = even or [tuple((d,) for d in devices)]
        order = self.freedoms.orders[0]
        tried: list[Fitted] = []
        for groups in ways:
            if tried and not self._go_on():
                break
            # The policy that suits one clustering suits most.
            policies = self.model.policies() if not tried else (min(tried, key=_rank).policy,)
            found = self.over_policies(Recipe(groups, order, "none"), size, need, policies)
            if found is not None:
                tried.append(found)
        tried.sort(key=_rank)
        best = tried[0] if tried else None
        for start in tried[: _VARIED * effort]:
            for recipe in chain(self._variants(start.recipe), self._other_policies(start.recipe)):
                if not self._go_on():
                    return best
                found = self.judged(recipe, size, need)
                if found is not None and (best is None or found.rank < best.rank):
                    best = found
        return best

    def over_policies(
        self, recipe: Recipe, size: int, need: Need, policies: Sequence[str] | None = None
    ) -> Fitted | None:
        """The best policy: once a layout fits as it is best balanced, leaner policies only add time."""
        best: Fitted | None = None
        for policy in policies or self.model.policies():
            if best is not None and not self._go_on():
                break
            found, repaired = self._judged(replace(recipe, policy=policy), size, need)
            if found is not None and (best is None or found.rank < best.rank):
                best = found
            if found is not None and not repaired:
                break
        return best

    def _other_policies(self, recipe: Recipe) -> Iterator[Recipe]:
        return (replace(recipe, policy=policy) for policy in self.model.policies() if policy != recipe.policy)

    def _variants(self, recipe: Recipe) -> Iterator[Recipe]:
        """Other orders, of the groups too, other rules and units."""
        spec = self.problem.model
        turned = tuple(reversed(recipe.groups))
        units = {1, spec.num_heads // spec.num_kv_heads} if self.freedoms.heads else {1}
        for order in self.freedoms.orders:
            for groups in (recipe.groups, turned)[: 1 + (order == "contiguous" and len(turned) > 1)]:
                for unit in sorted(units):
                    for rule in RULES[:3] if order == recipe.order else RULES[:1]:
                        changed = replace(recipe, groups=groups, order=order, rule=rule, head_unit=unit)
                        if changed != recipe:
                            yield changed

    # ---------------------------------------------------------------- stage III

    def _descended(self, found: Fitted, size: int, need: Need, *, fine: bool) -> Fitted:
        """Coordinate descent over factors of tokens and heads: of types of GPUs, or if `fine` of groups and ranks."""
        for step in _STEPS:
            for _ in range(_ROUNDS):
                before = found
                for kind, places in self._coordinates(found.recipe, fine):
                    for factor in (step, 1.0 / step):
                        if not self._go_on():
                            return found
                        other = self.judged(found.recipe.scaled(kind, places, factor), size, need)
                        if other is not None and other.seconds < found.seconds * _WORTH:
                            found = other
                            break
                if found is before:
                    break
        return found

    def _coordinates(self, recipe: Recipe, fine: bool) -> Iterator[tuple[str, list[int]]]:
        devices = [d for own in recipe.groups for d in own]
        kinds = ["token_factor"] * self.freedoms.tokens + ["head_factor"] * self.freedoms.heads
        if fine:
            ends = np.cumsum([len(own) for own in recipe.groups]).tolist()
            groups = [list(range(a, b)) for a, b in pairwise([0, *ends]) if b - a > 1]
            parts = [*groups, *([k] for k in range(len(devices)))] if len(devices) <= _RANKS else []
        else:
            names = [self.problem.cluster.gpu_of(d).name for d in devices]
            parts = [[k for k, name in enumerate(names) if name == one] for one in dict.fromkeys(names)]
        for part in parts:
            if len(part) < len(devices):
                for kind in kinds:
                    yield kind, part

    # ---------------------------------------------------------------- what a layout is worth

    def judged(self, recipe: Recipe, size: int, need: Need) -> Fitted | None:
        """The layout of a recipe, brought within memory if that goes; None where it is not legal."""
        return self._judged(recipe, size, need)[0]

    def _judged(self, recipe: Recipe, size: int, need: Need) -> tuple[Fitted | None, bool]:
        """And whether it had to be changed for memory."""
        made = self._allotted(recipe)
        policies = (recipe.policy,) * need.num_layers
        for repairs in range(_REPAIRS + 1):
            layout = made.layout()
            stage = self._stage(layout, size, need.sharers)
            parts = stage.memory.stage((policies,), need.first, need.last, (need.held,), need.shards)
            totals, limits = parts.sum(axis=0), stage.limit_bytes
            excess = float((totals - limits).max())
            states = parts[:4].sum(axis=0)
            caps = made.tokens * np.maximum(limits - states, 0.0) / (totals - states) * _ROOM
            if excess <= 0.0 or repairs == _REPAIRS or not self.freedoms.tokens:
                break
            tokens = filled(made.tokens.astype(float), int(made.tokens.sum()), caps)
            if tokens is None or (tokens == made.tokens).all():
                break
            made = made.with_tokens(tokens)
        seconds = float("inf")
        if excess <= 0.0 and not repairs:
            richer = self.model.policies()[: self.model.policies().index(recipe.policy) + 1]
            seconds = float(self.mixtures(stage, need, richer, need.num_layers).seconds[-1])
        elif excess <= 0.0:
            seconds = sum(stage.stage_s(policies, need.first, need.last))
        return Fitted(layout, recipe.policy, seconds, excess, recipe, stage), repairs > 0 or excess > 0.0

    def mixtures(self, stage: SequenceStage, need: Need, policies: Sequence[str], most: int) -> Mixtures:
        """What a layout takes with recompute layer by layer, of stages of 1 to `most` layers at the place of `need`."""

        def bytes_of(layers: tuple[str, ...]) -> Floats:
            found: Floats = stage.memory.stage((layers,), need.first, need.last, (need.held,), need.shards).sum(axis=0)
            return found

        beside_s = sum(stage.stage_s((), need.first, need.last))
        mixed = self.problem.space.recompute_per_stage
        return Mixtures(
            policies, lambda p: sum(stage.layer_s(p)), bytes_of, stage.limit_bytes, beside_s, most, mixed=mixed
        )

    def _stage(self, layout: SequenceLayout, size: int, sharers: int) -> SequenceStage:
        key = (layout, size, sharers)
        found = self._stages.get(key)
        if found is None:
            if len(self._stages) >= _KEPT_STAGES:
                self._stages.clear()
            network, own = self.problem.cluster.network, list(layout.devices)
            used = np.concatenate([network.transmitters[own], network.receivers[own]]).tolist()
            crowd = dict.fromkeys(used, sharers) if sharers > 1 else None
            found = SequenceStage(self.problem, self.model.framework, layout, size, crowd, self._wires)
            self._stages[key] = found
        return found

    def _allotted(self, recipe: Recipe) -> Allotment:
        found = self._allotments.get(recipe)
        if found is None:
            if len(self._allotments) >= _KEPT:
                self._allotments.clear()
            found = self._allotments[recipe] = self._allot(recipe)
        return found

    def _allot(self, recipe: Recipe) -> Allotment:
        workload, spec, groups = self.problem.workload, self.problem.model, recipe.groups
        devices = list(chain.from_iterable(groups))
        rates, starts = self._rates.of(devices, recipe.policy), starts_of(groups)
        ones = np.ones(len(devices))
        head_weights = 1.0 / rates.pair_s if self.freedoms.heads else ones
        heads = head_parts(groups, _times(head_weights, recipe.head_factor), spec.num_heads, recipe.head_unit)
        weights: Floats = ones
        if self.freedoms.tokens and recipe.rule == "balanced":
            weights = balanced_tokens(starts, rates, heads, recipe.order, workload.seq_len)
        elif self.freedoms.tokens and recipe.rule != "equal":
            speed = 1.0 / rates.of_sequence_s(workload.seq_len, spec.num_heads)
            weights = speed if recipe.rule == "compute" else np.sqrt(speed)
        tokens: Ints = whole_parts(_times(weights, recipe.token_factor), workload.seq_len)
        return Allotment(groups, tokens, heads, recipe.order)


def _times(values: Floats, factors: tuple[float, ...]) -> Floats:
    return values * np.array(factors) if factors else values
