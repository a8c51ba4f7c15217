"""The layout problem: for given devices, layers and memory, find the sequence layout with the least stage time.

The three stages of HexiSeq (arXiv 2605.07569): groups (`grouping.py`), tokens of groups and ranks by capability
(`token_allocation.py`), and coordinate descent over tokens and heads. Beyond the paper, the second stage balances
causal work and respects memory, every recompute policy and both token orders are tried, and the descent first scales
whole GPU types, then groups and ranks. Every layout is priced as it would be in a plan.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np

from hexiopt.cost.pricer import PlanPricer
from hexiopt.memo import Memo
from solvers.sequence.grouping import Signatures, clusterings
from solvers.sequence.layout_evaluator import (
    RULES,
    EvaluatedLayout,
    LayoutEvaluator,
    LayoutFreedoms,
    LayoutRecipe,
    StageNeeds,
)

_PLAIN = (4, 10, None)  # clusterings tried at each effort
_VARIED = 2  # best clusterings whose orders, rules and policies are all tried
_RANKS = 48  # devices up to which ranks are scaled one by one
_STEPS = (1.3, 1.1, 1.03, 1.01)  # factors of the descent, from coarse to fine
_ROUNDS = 3  # most rounds with each factor
_WORTH = 1.0 - 1e-6  # of the best: what counts as better
_KEPT = 20_000  # layouts remembered, each with its stage


def _rank(one: EvaluatedLayout) -> tuple[float, float]:
    return one.rank


def _relabel(evaluated: EvaluatedLayout, devices: tuple[int, ...]) -> EvaluatedLayout:
    """The same layout on other devices with the same signature."""
    to = dict(zip(sorted(evaluated.layout.devices), devices, strict=True))
    groups = tuple(replace(group, devices=tuple(to[d] for d in group.devices)) for group in evaluated.layout.groups)
    recipe = replace(evaluated.recipe, groups=tuple(tuple(to[d] for d in group) for group in evaluated.recipe.groups))
    return replace(evaluated, layout=replace(evaluated.layout, groups=groups), recipe=recipe)


class LayoutSearch:
    """Searches layouts of one problem; stops once `should_continue` returns False."""

    def __init__(
        self, model: PlanPricer, should_continue: Callable[[], bool], freedoms: LayoutFreedoms | None = None
    ) -> None:
        self.model, self.problem = model, model.problem
        self.freedoms = freedoms or LayoutFreedoms()
        self.evaluator = LayoutEvaluator(model, self.freedoms)
        self._go_on = should_continue
        self._signatures = Signatures(model.problem)
        self._examples: dict[bytes, tuple[int, ...]] = {}
        self._best: Memo[tuple[tuple[int, ...], int, StageNeeds, int], EvaluatedLayout | None] = Memo(
            lambda key: self._search(*key), _KEPT
        )

    def best(self, devices: Sequence[int], size: int, need: StageNeeds, effort: int = 1) -> EvaluatedLayout | None:
        """The best layout over all of `devices` for micro-batches of `size` sequences.

        Where none fits, one that does not; None where none is legal. `effort` 0 tries only the plainest groups, 1 more
        groups and their variants, 2 all of them and a descent over GPU types, 3 also a descent over groups and ranks.
        """
        devices = tuple(sorted(devices))
        if len(devices) > self.problem.workload.seq_len:
            return None
        example = self._examples.setdefault(self._signatures.of(devices), devices)
        best = self._best[example, size, need, effort]
        return best if best is None or example == devices else _relabel(best, devices)

    def _search(self, devices: tuple[int, ...], size: int, need: StageNeeds, effort: int) -> EvaluatedLayout | None:
        rest = self._choose if effort < 3 else self.best
        best = rest(devices, size, need, min(effort, 2))
        if effort > 1 and best is not None and best.excess_bytes <= 0.0:
            best = self._descend(best, size, need, fine=effort > 2)
        return best

    # ---------------------------------------------------------------- stages I and II

    def _choose(self, devices: tuple[int, ...], size: int, need: StageNeeds, effort: int) -> EvaluatedLayout:
        ways = clusterings(self.problem, devices)[: _PLAIN[effort]]
        if not self.freedoms.groups:
            even = [groups for groups in ways if len({len(own) for own in groups}) == 1]
            ways = even or [tuple((d,) for d in devices)]
        order = self.freedoms.orders[0]
        tried: list[EvaluatedLayout] = []
        for groups in ways:
            if tried and not self._go_on():
                break
            # The policy that suits one clustering suits most.
            policies = self.model.policies() if not tried else (min(tried, key=_rank).policy,)
            tried.append(self.over_policies(LayoutRecipe(groups, order, "none"), size, need, policies))
        tried.sort(key=_rank)
        best = tried[0]
        for start in tried[: _VARIED * effort]:
            others = (replace(start.recipe, policy=p) for p in self.model.policies() if p != start.policy)
            for recipe in chain(self._variants(start.recipe), others):
                if not self._go_on():
                    return best
                best = min(best, self.evaluator.evaluate(recipe, size, need)[0], key=_rank)
        return best

    def over_policies(
        self, recipe: LayoutRecipe, size: int, need: StageNeeds, policies: Sequence[str] | None = None
    ) -> EvaluatedLayout:
        """The layout of a recipe under the best policy: once a balanced layout fits, policies with less memory only add
        time.
        """
        first, *leaner = policies or self.model.policies()
        best, repaired = self.evaluator.evaluate(replace(recipe, policy=first), size, need)
        for policy in leaner:
            if not repaired or not self._go_on():
                break
            found, repaired = self.evaluator.evaluate(replace(recipe, policy=policy), size, need)
            best = min(best, found, key=_rank)
        return best

    def _variants(self, recipe: LayoutRecipe) -> Iterator[LayoutRecipe]:
        """The recipe with other token orders, group orders, rules and head units."""
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

    def _descend(self, found: EvaluatedLayout, size: int, need: StageNeeds, *, fine: bool) -> EvaluatedLayout:
        """Coordinate descent over the factors of tokens and heads: by GPU type or, if `fine`, by group and rank."""
        for step in _STEPS:
            for _ in range(_ROUNDS):
                before = found
                for kind, places in self._coordinates(found.recipe, fine):
                    for factor in (step, 1.0 / step):
                        if not self._go_on():
                            return found
                        other, _ = self.evaluator.evaluate(found.recipe.scaled(kind, places, factor), size, need)
                        if other.seconds < found.seconds * _WORTH:
                            found = other
                            break
                if found is before:
                    break
        return found

    def _coordinates(self, recipe: LayoutRecipe, fine: bool) -> Iterator[tuple[str, list[int]]]:
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
