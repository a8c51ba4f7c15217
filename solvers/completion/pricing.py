"""Prices completed plans, after splitting the batch again by the priced times of the pipelines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hexiopt.cost.cells import with_degrees
from hexiopt.cost.cost import Cost, PipelineCost
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.solving import Pricer
from solvers.completion.batches import split_batch
from solvers.completion.depths import deepen
from solvers.completion.kinds import split_by_kind
from solvers.core.zero import LOCKSTEP

_WORTH = 0.002  # the batch is split again if the slowest pipeline exceeds the mean by this fraction


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """A plan and its cost."""

    plan: Plan
    cost: Cost


def price_plan(pricer: Pricer, plan: Plan, limit_s: float = math.inf) -> PricedPlan | None:
    """The priced `plan`, its batch split again by the priced times where that helps.

    None, without a full price, where it certainly exceeds `limit_s`: one pipeline alone does. Where the plan space
    leaves depth free, stages hold what the messages of the plan ask for, if that is better; where layers are of several
    kinds, likewise a split of them by what they take and hold.
    """
    stages, best = pricer.features.stages, None
    if stages is not None and len(pricer.problem.model.kinds) > 1:
        plan = with_degrees(plan, stages)
        split = split_by_kind(plan, stages)
        best = None if split is None else _price(pricer, split, limit_s)
    priced = _price(pricer, plan, limit_s)
    ranked = [each for each in (best, priced) if each is not None]
    return min(ranked, key=lambda each: (max(0.0, each.cost.excess_bytes), each.cost.objective), default=None)


def _price(pricer: Pricer, plan: Plan, limit_s: float) -> PricedPlan | None:
    """As `price_plan`, of the layers that `plan` has."""
    plan, priced = _with_batches(pricer, plan)
    deep = pricer.problem.space.depth and plan.schedule.takes_depths and plan.sharding.stage < LOCKSTEP
    if max(p.end_s for p in priced) > limit_s and not deep:
        return None
    best = PricedPlan(plan, pricer.price(plan, priced))
    stages = pricer.features.stages
    if not deep or stages is None or any(pipeline.depths for pipeline in plan.pipelines):
        return best
    whole = pricer.price(replace(plan, schedule=plan.schedule.whole())) if plan.schedule.splits else best.cost
    again = deepen(plan, priced, whole.pipelines, stages)
    if again is None:
        return best
    again, priced = _with_batches(pricer, again)
    cost = pricer.price(again, priced)
    return PricedPlan(again, cost) if cost.fits and cost.objective < best.cost.objective else best


def _with_batches(pricer: Pricer, plan: Plan) -> tuple[Plan, Sequence[PipelineCost]]:
    """`plan` and the costs of its pipelines, its batch split again by them where that helps."""
    priced = pricer.pipelines(plan)
    again = rebalanced(pricer.problem, plan, priced)
    if again is None:
        return plan, priced
    second = pricer.pipelines(again)
    better = max(p.end_s for p in second) < max(p.end_s for p in priced)
    return (again, second) if better else (plan, priced)


def rebalanced(problem: Problem, plan: Plan, priced: Sequence[PipelineCost]) -> Plan | None:
    """`plan` with its batch split by the priced times of its pipelines; None where nothing would change."""
    ends = [cost.end_s for cost in priced]
    fixed = not problem.space.uneven_batch or plan.sharding.stage >= LOCKSTEP
    if len(ends) < 2 or fixed or not plan.schedule.saturates:
        return None
    if max(ends) - sum(ends) / len(ends) < _WORTH * max(ends):
        return None
    fills, periods = [], []
    for pipeline, cost in zip(plan.pipelines, priced, strict=True):
        stages = [s.forward_s + s.backward_s for s in cost.stages]
        trips = [there + back for there, back in zip(cost.send_forward_s, cost.send_backward_s, strict=True)]
        fill = max(stages) + plan.schedule.fill_s(stages, trips, pipeline.num_chunks, max(stages))
        more = pipeline.num_micro_batches - 1
        period = max((cost.end_s - fill) / more if more else 0.0, max(stages))
        fills.append(cost.end_s - (more + 1) * period)
        periods.append(period)
    sizes = [pipeline.micro_batch_size for pipeline in plan.pipelines]
    multiples = [
        plan.schedule.micro_batch_multiple(len(pipeline.stages), pipeline.num_chunks) for pipeline in plan.pipelines
    ]
    counts = split_batch(fills, periods, sizes, problem.workload.global_batch, multiples=multiples)
    if counts is None or counts == [pipeline.num_micro_batches for pipeline in plan.pipelines]:
        return None
    pairs = zip(plan.pipelines, counts, strict=True)
    return replace(plan, pipelines=tuple(pipeline.with_micro_batches(count) for pipeline, count in pairs))
