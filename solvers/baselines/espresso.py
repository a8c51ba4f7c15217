"""`espresso`: Espresso (Zhou et al., IEEE INFOCOM 2025; released as github.com/Espresso111/Espresso).

Can express: any number of GPUs of each type (it is told what may be rented); one TP degree and one data-parallel
degree for the whole plan; stages of one GPU type each, in any order of types; layers by speed and memory; equal
batches; 1F1B (it runs on DeepSpeed); minimal money of a step under a deadline, or, for comparisons, minimal time.

Cannot: several GPU types in a stage, unequal degrees or batches, pipelines that differ. The released code recomputes
everything and asks the user for TP degree and number of micro-batches; here TP, micro-batch size, one recompute
policy and ZeRO-1 are chosen too.

Its search: a tree whose nodes say how many stages each GPU type gets, searched by least cost, pruned by cost, by the
deadline and by memory; at a leaf the stage placer orders the stages by the ratio of compute to memory and splits the
layers. Here (`espresso_search.py`) all allocations are bounded at once and visited in the same order, least bound
first, in small parts of the cluster before all of it, since it may rent less; the order by ratio is tried beside every
order in which types stand together, some in which machines do, and every order at all of a few stages; layers make the
slowest stage as fast as memory allows, and the best plans are improved layer by layer. The estimate is that of 1F1B
with messages and gradient sync.

Money: a GPU costs its share of its machine's `price_per_hour`, as the paper prices single GPUs.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial

from hexiopt.cost.model import CostModel
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import recompute_policies
from hexiopt.schedules.schedule import Schedule
from solvers.baselines.aligned import AlignedEstimates, aligned_plan, one_f_one_b, optimizer_sharding, unaligned
from solvers.baselines.areas import areas
from solvers.baselines.espresso_search import Choice, Made, Planner
from solvers.baselines.frame import Candidate
from solvers.baselines.renting import Renting, Worth
from solvers.core.search import Search

_SLACK = 1.3  # allocations whose bound is this much above the best estimate are left out
_HOPELESS = 2.0  # an allocation whose first placements are this much above the best estimate is left
_PROMISING = 1.1  # allocations within this of the best estimate are tried in more orders
_REFINED = 1.6  # first placements of an order within this of the best estimate get their layers refined
_TRIED = 4  # first placements of an order
_MOST = 2000  # placements estimated in an area


@dataclass(frozen=True)
class Espresso(Renting):
    """Allocations in the order of a bound, each with its orders of stages; area by area, from small ones."""

    name = "espresso"

    def candidates(self, search: Search, rng: random.Random) -> Iterator[Candidate]:
        """Placements until the bound of an allocation is clearly above the best estimate."""
        problem = search.problem
        schedule, sharding = one_f_one_b(problem), optimizer_sharding(problem)
        if schedule is None or sharding is None:
            return
        times, worth, best = AlignedEstimates(search.pricer), self.worth(problem), float("inf")
        for area in areas(problem):
            planner = Planner(times, sharding, worth, area)
            trial = _Trial(planner, schedule, best)
            for bound, choice, allocation in planner.allocations(search):
                if bound > _SLACK * trial.best or trial.count > _MOST or not search.go_on():
                    break
                trial.reached = float("inf")
                yield from trial.candidates(choice, planner.orders(choice, allocation))
                if trial.reached <= _PROMISING * trial.best:
                    yield from trial.candidates(choice, planner.machine_orders(choice, allocation))
            best = trial.best

    def in_space(self, problem: Problem, plan: Plan) -> str | None:
        """See the file's head."""
        broken = unaligned(plan)
        if broken is not None:
            return broken
        lines, gpu_of = plan.pipelines, problem.cluster.gpu_of
        if len({stage.tp for line in lines for stage in line.stages}) > 1:
            return "unequal TP degrees"
        if len({line.num_micro_batches for line in lines}) > 1:
            return "unequal batches"
        slots = zip(*(line.stages for line in lines), strict=True)
        if any(len({gpu_of(stage.devices[0]).name for stage in slot}) > 1 for slot in slots):
            return "a stage of several GPU types"
        return None

    def draw(self, problem: Problem, rng: random.Random) -> Plan | None:
        """Random degrees, types of stages and devices of them; layers by speed or at random."""
        schedule, sharding = one_f_one_b(problem), optimizer_sharding(problem)
        if schedule is None or sharding is None:
            return None
        planner = _drawing(problem, sharding)
        choices = list(planner.choices(recompute_policies(problem.workload)))
        if not choices:
            return None
        choice = rng.choice(choices)
        most = planner.most_stages(choice)
        stages = rng.randint(1, max(1, min(sum(most), problem.model.num_layers)))
        left = [k for k, n in enumerate(most) for _ in range(n)]
        if len(left) < stages:
            return None
        order = rng.sample(left, stages)
        if rng.random() < 0.5:
            order.sort()
        speed = {k: 1.0 / planner.layer_s(choice, k) for k in set(order)}
        weights = [speed[k] if rng.random() < 0.8 else rng.random() * max(speed.values()) for k in order]
        layers = [1] * stages
        for _ in range(problem.model.num_layers - stages):
            layers[max(range(stages), key=lambda s: weights[s] / layers[s])] += 1
        found = planner.placements(choice, order)
        if not found:
            return None
        slots = rng.choice(found)
        made = [choice.count] * choice.dp
        return aligned_plan(slots, layers, choice.policy, made, choice.size, schedule, sharding)


class _Trial:
    """Orders of stages tried in an area: how many placements, the best estimate of all, and of an allocation."""

    def __init__(self, planner: Planner, schedule: Schedule, best: float) -> None:
        self.planner, self.schedule, self.best = planner, schedule, best
        self.reached, self.count = float("inf"), 0

    def candidates(self, choice: Choice, orders: Iterable[tuple[int, ...]]) -> Iterator[Candidate]:
        """Placements of `orders`, until those of one are hopeless; promising ones with refined layers too."""
        for order in orders:
            least = float("inf")
            for k, made in enumerate(self.planner.made(choice, order)):
                if k >= _TRIED and least > _HOPELESS * self.best:
                    break
                estimate = self.planner.judged(made)
                least = min(least, estimate)
                yield self._candidate(made, estimate)
                if k < _TRIED and estimate <= _REFINED * self.best:
                    refined = self.planner.refined(made)
                    yield self._candidate(refined, self.planner.judged(refined))
            if least > _HOPELESS * self.best:
                break

    def _candidate(self, made: Made, estimate: float) -> Candidate:
        self.count += 1
        self.best, self.reached = min(self.best, estimate), min(self.reached, estimate)
        return _candidate(self.planner, made, estimate, self.schedule)


def _candidate(planner: Planner, made: Made, estimate: float, schedule: Schedule) -> Candidate:
    choice = made.choice
    deal = [choice.count] * choice.dp
    whole = (made.slots, made.layers, choice.policy, deal, choice.size, schedule, planner.sharding)
    return Candidate(estimate, partial(aligned_plan, *whole), near=partial(_near, planner, made, schedule))


def _near(planner: Planner, made: Made, schedule: Schedule) -> Iterator[Candidate]:
    for changed in planner.near(made):
        yield _candidate(planner, changed, planner.judged(changed), schedule)


@lru_cache(maxsize=1)
def _drawing(problem: Problem, sharding: int) -> Planner:
    """What random draws share."""
    everywhere = frozenset(problem.usable_by_machine)
    return Planner(AlignedEstimates(CostModel(problem)), sharding, Worth(), everywhere)
