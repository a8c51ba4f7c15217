"""`espresso`: Espresso (Zhou et al., IEEE INFOCOM 2025; released as github.com/Espresso111/Espresso).

Can express: any number of GPUs of each type (it is told what may be rented); one TP degree and one data-parallel
degree for the whole plan; stages of one GPU type each, in any order of types; layers by speed and memory; equal
batches; 1F1B (it runs on DeepSpeed); minimal money of a step under a deadline, or, for comparisons, minimal time.

Cannot: several GPU types in a stage, unequal degrees or batches, pipelines that differ. The released code recomputes
everything and asks the user for TP degree and number of micro-batches; here TP, micro-batch size, one recompute
policy and ZeRO-1 are chosen too.

Its search: a tree whose nodes say how many stages each GPU type gets, searched by least cost, pruned by cost, by the
deadline and by memory; at a leaf the stage placer orders the stages by the ratio of compute to memory and splits the
layers. Here (`planner.py`) all allocations are bounded at once and visited in the same order, least bound
first, in small parts of the cluster before all of it, since it may rent less; the order by ratio is tried beside every
order in which types stand together, some in which machines do, and every order at all of a few stages; layers make the
slowest stage as fast as memory allows, and the best plans are improved layer by layer. The estimate is that of 1F1B
with messages and gradient sync.

Money: a GPU costs its share of its machine's `price_per_hour`, as the paper prices single GPUs.
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from hexiopt.plan.plan import Sharding
from hexiopt.schedules.schedule import Schedule
from solvers.baselines._estimates import GridEstimates
from solvers.baselines._frame import BestEstimate, PlanCandidate, SearchLimits, best_first
from solvers.baselines._grids import areas
from solvers.baselines._money import MoneyBaseline
from solvers.baselines._plans import aligned_plan, one_f_one_b
from solvers.baselines.espresso.planner import EspressoAllocation, EspressoPlacement, EspressoPlanner
from solvers.core.search import Search

_HOPELESS = 2.0  # an allocation whose first placements are this much above the best estimate is left
_PROMISING = 1.1  # allocations within this of the best estimate are tried in more orders
_REFINED = 1.6  # first placements of an order within this of the best estimate get their layers refined
_TRIED = 4  # first placements of an order


@dataclass(frozen=True)
class Espresso(MoneyBaseline):
    """Espresso (INFOCOM 2025): stages of one GPU type each, for least money or time.

    Opens allocations in the order of a lower bound, area by area from the smallest, and places their stages.
    """

    name = "espresso"
    limits = SearchLimits(slack=1.3, max_candidates=4000)  # in each area

    def candidates(self, run: Search, rng: random.Random) -> Iterator[PlanCandidate]:
        """The placements of all allocations whose bound is not clearly above the best estimate."""
        problem = run.problem
        schedule = one_f_one_b(problem)
        if schedule is None:
            return
        times, objective, best = GridEstimates(run.pricer), self.objective_of(problem), BestEstimate()
        for area in areas(problem):
            planner, best = EspressoPlanner(times, objective, area), BestEstimate(best.seconds)
            expand = partial(_placements, planner, schedule, best)
            yield from best_first(run, planner.allocations(run), expand, self.limits, best)


def _placements(
    planner: EspressoPlanner, schedule: Schedule, best: BestEstimate, allocation: EspressoAllocation
) -> Iterator[PlanCandidate]:
    """The placements of an allocation; if one is promising, also those of orders of machines."""
    least = math.inf
    for candidate in _in_orders(planner, schedule, best, allocation, planner.orders(allocation)):
        least = min(least, candidate.estimate_s)
        yield candidate
    if least <= _PROMISING * best.seconds:
        yield from _in_orders(planner, schedule, best, allocation, planner.machine_orders(allocation))


def _in_orders(
    planner: EspressoPlanner,
    schedule: Schedule,
    best: BestEstimate,
    allocation: EspressoAllocation,
    orders: Iterable[tuple[int, ...]],
) -> Iterator[PlanCandidate]:
    """The placements of `orders`, until all of one order are hopeless; promising ones also with refined layers."""
    for order in orders:
        least = math.inf
        for k, placement in enumerate(planner.placements(allocation.choice, order)):
            if k >= _TRIED and least > _HOPELESS * best.seconds:
                break
            candidate = _candidate(planner, schedule, placement)
            least = min(least, candidate.estimate_s)
            yield candidate
            if k < _TRIED and candidate.estimate_s <= _REFINED * best.seconds:
                yield _candidate(planner, schedule, planner.refine(placement))
        if least > _HOPELESS * best.seconds:
            break


def _candidate(planner: EspressoPlanner, schedule: Schedule, placement: EspressoPlacement) -> PlanCandidate:
    choice = placement.choice
    each = choice.policy, choice.count, choice.size, schedule, Sharding(choice.sharding)
    whole = (placement.grid.stages, placement.layers, *each)
    neighbours = partial(_neighbours, planner, schedule, placement)
    return PlanCandidate(planner.evaluate(placement), partial(aligned_plan, *whole), neighbours=neighbours)


def _neighbours(planner: EspressoPlanner, schedule: Schedule, placement: EspressoPlacement) -> Iterator[PlanCandidate]:
    return (_candidate(planner, schedule, changed) for changed in planner.neighbours(placement))
