"""From shapes to good plans: rule-based shapes first, better layouts for the best of them, then annealing.

In joint planning every stage of every pipeline uses tensor parallelism or a sequence layout, whichever is faster there.
Stages may then span machines and GPU types, and the best plan without layouts is one of the starts.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.plan import Plan, Sharding
from hexiopt.problem.space import sharding_stages
from solvers.completion.pricing import price_plan
from solvers.core.operators import OperatorTally
from solvers.core.search import Search
from solvers.core.zero import LOCKSTEP, sharding_groups
from solvers.heuristics.annealing import Metropolis, anneal
from solvers.sequence.estimates import SequenceEstimates
from solvers.sequence.layout_evaluator import LayoutFreedoms
from solvers.sequence.layout_search import LayoutSearch
from solvers.sequence.plan_builder import PlanBuilder
from solvers.sequence.shapes import SequenceShape, ShapeProposals, with_sharding, zero_stages
from solvers.sequence.starts import EstimatedShape, SequenceStarts

_ESTIMATING = 0.25  # of the budget: the estimates end here at the latest
_QUICK = 0.5  # and here the plain layouts of the shapes with the best estimates
_MOST = 20_000  # estimates kept
_VARIETY = 0.02  # relative penalty of every further shape with the same numbers of stages
_TRUST = 1.12  # estimates beyond this much of the best price are not built; rings in a machine take 10 % less
_FIRST = ((1, 6),)  # effort of layouts, and how many of the best shapes get it: before moves
_LAST = ((1, 3), (2, 2), (3, 1))  # and after
_PATIENCE = 40  # shapes built without improvement before the rest is skipped
_ANNEALED = 3  # shapes annealed in turns
_HOPELESS, _ANYWAY = 1.05, 0.05  # worse neighbours by this factor are built with this chance
_MOVING = 0.85  # of the budget; the rest refines
_HOT, _COLD = 0.02, 0.001  # temperatures: an accepted worsening of 2 % and of 0.1 %


@dataclass(frozen=True, slots=True)
class PlannedShape:
    """A shape, its plan and its step time."""

    shape: SequenceShape
    plan: Plan
    step_s: float

    @property
    def energy(self) -> float:
        """The logarithm of the step time."""
        return math.log(self.step_s)


class SequencePlanner:
    """Builds and prices the plans of one search."""

    def __init__(self, search: Search, freedoms: LayoutFreedoms | None = None, *, tensor: bool = False) -> None:
        self.search, self.problem = search, search.problem
        self.model = search.our_model or PlanPricer(search.problem)
        layouts = LayoutSearch(self.model, search.should_continue, freedoms)
        ways = (False, True) if tensor else (False,)
        self._builders = {option: PlanBuilder(self.model, layouts, tensor=option) for option in ways}
        allowed = sharding_stages(self.problem.workload)
        # With and without lockstep, the ZeRO stage that leaves most memory free.
        most = {zero >= LOCKSTEP: zero for zero in sorted(allowed)}  # the few shapes in lockstep first
        late_first = sorted(most.items(), reverse=True)
        self._estimates = {
            (late, option): SequenceEstimates(self.model, zero, tensor=option)
            for late, zero in late_first
            for option in ways
        }
        self._whole = search.until(1.0)
        self._tried: dict[tuple[SequenceShape, int], PlannedShape | None] = {}

    def plan_shape(self, shape: SequenceShape, effort: int) -> PlannedShape | None:
        """The plan of a shape, offered to the search; None where none fits."""
        self.search.step()
        return self._plan_shape(shape, effort, OperatorTally())

    def _plan_shape(self, shape: SequenceShape, effort: int, tally: OperatorTally) -> PlannedShape | None:
        key = (shape, effort)
        if key in self._tried:
            tally.known += 1
            return self._tried[key]
        made = [self._plan_by(shape, effort, option) for option in self._builders]
        fitting = [one for one in made if one is not None]
        best = self._tried[key] = min(fitting, key=lambda one: one.step_s) if fitting else None
        if best is None:
            tally.unfit += 1
        else:
            tally.priced += 1
        return best

    def _plan_by(self, shape: SequenceShape, effort: int, tensor: bool) -> PlannedShape | None:
        """The plan of a shape by one of the builders."""
        if tensor and shape.zero >= LOCKSTEP and len(shape.pipelines) > 1:
            return None  # pipelines in lockstep have all layouts or all tensor parallelism; the latter is for others
        plan = self._builders[tensor].build(shape, effort)
        if plan is None or check(self.problem, plan):  # a layout may use a freedom that the plan space lacks
            return None
        priced = price_plan(self.search.pricer, plan)
        assert priced is not None, "no limit was given"
        self.search.offer(priced.plan, priced.cost)
        return PlannedShape(shape, priced.plan, priced.cost.step_time_s) if priced.cost.fits else None

    def sequence_starts(self) -> list[PlannedShape]:
        """The best rule-based shapes with their plans, best first, plain layouts before better ones."""
        search = self.search
        ranked: list[EstimatedShape] = []
        for k, estimates in enumerate(self._estimates.values(), start=1):
            share = _ESTIMATING * k / len(self._estimates)
            ranked += SequenceStarts(self.problem, estimates).rank(partial(bool, self._whole.up_to(share)))
        kinds: dict[tuple[int, ...], int] = {}
        rounds: list[tuple[float, EstimatedShape]] = []
        for estimated in sorted(ranked, key=lambda estimated: estimated.step_s)[:_MOST]:
            kind = estimated.kind
            kinds[kind] = kinds.get(kind, -1) + 1
            rounds.append((estimated.step_s * (1.0 + _VARIETY * kinds[kind]), estimated))
        found: list[PlannedShape] = []
        quick, waited = self._whole.up_to(_QUICK), 0
        for _, estimated in sorted(rounds, key=lambda item: item[0]):
            if found and (not quick or waited > _PATIENCE):
                break
            if not search.should_continue():
                break
            if estimated.step_s > _TRUST * search.best_s:
                continue
            best_s = search.best_s
            made = self.plan_shape(estimated.shape(), 0)
            waited = 0 if search.best_s < best_s else waited + 1
            if made is not None:
                found.append(made)
        return self.refine(found, _FIRST)

    def refine(self, found: Iterable[PlannedShape], efforts: Sequence[tuple[int, int]]) -> list[PlannedShape]:
        """The plans after rebuilding, for each (effort, count) of `efforts`, the best `count` of them; best first."""
        pool = sorted(found, key=lambda one: one.step_s)
        for effort, count in efforts:
            better = [self.plan_shape(one.shape, effort) for one in pool[:count] if self.search.should_continue()]
            best: dict[SequenceShape, PlannedShape] = {}
            for one in sorted([*(one for one in better if one is not None), *pool], key=lambda one: one.step_s):
                best.setdefault(one.shape, one)
            pool = list(best.values())
        return pool

    def _may_pay(self, shape: SequenceShape, now: SequenceShape) -> bool:
        """Whether the estimate of a shape is not much worse than that of the current one."""
        seconds, now_s = (
            min(self._estimates[one.zero >= LOCKSTEP, option].shape_s(one) for option in self._builders)
            for one in (shape, now)
        )
        return seconds <= _HOPELESS * now_s

    def best_sharding(self, one: PlannedShape) -> PlannedShape:
        """The same plan with its best sharding."""
        best = one
        for zero in zero_stages(self.problem, one.shape):
            for groups in sharding_groups(self.problem, zero):
                if not self.search.should_continue():
                    return best
                shape, sharding = replace(one.shape, zero=zero, groups=groups), Sharding(zero, groups)
                if sharding.broken_rule(one.plan.pipelines, one.plan.schedule):  # such as unequal batches in lockstep
                    other = self.plan_shape(shape, 1)
                    best = min((best, other or best), key=lambda known: known.step_s)
                    continue
                plan = replace(one.plan, sharding=sharding)
                self.search.step()
                cost: Cost = self.search.offer(plan)
                if cost.fits and cost.step_time_s < best.step_s:
                    best = PlannedShape(shape, plan, cost.step_time_s)
        return best

    def anneal_shapes(self, pool: Sequence[PlannedShape], rng: random.Random) -> None:
        """Anneal from the best shapes of `pool` (best first) in turn until the budget is spent; then refine the
        results.
        """
        proposals = ShapeProposals(self.problem, self.search.operators)

        def propose(now: PlannedShape, rng: random.Random) -> tuple[OperatorTally, SequenceShape] | None:
            found = proposals.draw(now.shape, rng)
            if found is None or not (self._may_pay(found[1], now.shape) or rng.random() < _ANYWAY):
                return None
            return found

        def evaluate(
            shape: SequenceShape, now: PlannedShape, limit: float, tally: OperatorTally
        ) -> PlannedShape | None:
            return self._plan_shape(shape, 1, tally)

        moving = self._whole.up_to(_MOVING)
        bests = anneal(pool[:_ANNEALED], propose, evaluate, Metropolis(_HOT, _COLD), moving, rng)
        self.refine(bests, _LAST)


def search_shapes(planner: SequencePlanner, pool: list[PlannedShape], rng: random.Random) -> None:
    """Improve a pool of plans, best first, until the budget is spent."""
    if pool:
        planner.best_sharding(pool[0])
        planner.anneal_shapes(pool, rng)


def plan_jointly(search: Search, rng: random.Random) -> None:
    """Search layouts and tensor parallelism jointly until the budget is spent, starting also from the search's best
    plan.
    """
    planner = SequencePlanner(search, tensor=True)
    found = search.plan
    pool = planner.sequence_starts()
    if found is not None and search.should_continue():
        shape = with_sharding(search.problem, shape_of(found))
        known = None if shape is None else planner.plan_shape(shape, 1)
        if known is not None:
            pool = sorted([known, *pool], key=lambda one: one.step_s)
    search_shapes(planner, pool, rng)


def shape_of(plan: Plan) -> SequenceShape:
    """The shape of a plan; the replicas of a stage are merged into one."""
    pipelines = tuple(tuple(tuple(sorted(stage.devices)) for stage in pipeline.stages) for pipeline in plan.pipelines)
    zero = plan.sharding.stage
    groups = plan.sharding.groups if isinstance(plan.sharding.groups, str) else "all"
    return SequenceShape(
        pipelines, max(pipeline.micro_batch_size for pipeline in plan.pipelines), zero, groups if zero else "all"
    )
