"""Simulated annealing over partitions, started from rule-based ones, under any pricer.

Kirkpatrick, Gelatt and Vecchi, Science 220 (1983). The energy is the logarithm of the step time. Partitions that cannot
be completed have an energy that grows with the number of layers that do not fit, so that the search can climb into
feasibility.
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import sharding_stages
from solvers.completion.completer import PlanCompleter
from solvers.core.interleaving import plain_schedules
from solvers.core.operators import OperatorTally
from solvers.core.partition import DoesNotFit, Partition, PipelineGroup, partition_of
from solvers.core.search import Allowance, Search
from solvers.core.zero import LOCKSTEP, plain_stages, sharding_groups
from solvers.frame.solver import SearchSolver
from solvers.frame.starts import (
    chain_partitions,
    first_choice,
    kinds,
    lockstep_partitions,
    single_pipeline_partitions,
    symmetric,
    whole_grids,
)
from solvers.heuristics.annealing import Metropolis, anneal
from solvers.heuristics.hill_climbing import HillClimber
from solvers.heuristics.operators.table import PartitionProposals
from solvers.heuristics.ranking import in_turns, promising_first

_HOT, _COLD = 0.01, 0.0005  # temperatures: an accepted worsening of 1 % and of 0.05 %
_MISFIT = 100.0  # energy of a partition that no plan follows, far above any step time's logarithm
_FORBIDDEN = 200.0  # energy of a partition that the plan space forbids
_POOLS = (48, 16, 5, 2)  # partitions annealed in each round of equal time
_HOPELESS = 0.3  # starts whose pipelines alone take e^0.3 times the best step are dropped
_STARTS = 0.4  # most of the budget for pricing starts
_RANKING = 0.6  # most of that for estimating them
_SCHEDULED, _SHARDED = 16, 6  # best starts that are tried in every schedule, and then in every sharding
_SETTLING = 0.5  # most of what is then left of the budget for that
_POLISHED = 3  # starts that are hill-climbed first
_POLISHING = 0.05  # most of the budget for that
_ANNEALING = 0.9  # of the budget: annealing ends here, the rest is hill climbing
_TRUST = 0.8  # exponent that damps a neighbour's factor of price over estimate
_KEPT = 50_000  # partitions remembered
_ANYWAY = 0.05  # share of partitions priced although their estimate speaks against it


@dataclass(frozen=True, slots=True)
class EvaluatedPartition:
    """A partition, its energy, and the factor by which its price exceeds its estimate."""

    partition: Partition
    energy: float
    factor: float = 1.0


class Annealer:
    """Anneals partitions of one search."""

    def __init__(self, search: Search, completer: PlanCompleter, rng: random.Random) -> None:
        self.search, self.completer, self.rng = search, completer, rng
        self._proposals = PartitionProposals(search.problem, search.operators, replicates=completer.replicates)
        self._seen: dict[Partition, EvaluatedPartition] = {}

    def evaluate(
        self, partition: Partition, limit: float = math.inf, factor: float = 1.0, tally: OperatorTally | None = None
    ) -> EvaluatedPartition | None:
        """The energy of a partition: the logarithm of the step time, or a value beyond `_MISFIT` where it cannot be
        completed.

        None where the energy certainly, or very probably, exceeds `limit`: the price is assumed to exceed the estimate
        by `factor`, as a neighbour's did. Some partitions are priced all the same.
        """
        tally = tally or OperatorTally()
        found = self._seen.get(partition)
        if found is not None:
            tally.known += 1
            return found
        found = self._evaluate_anew(partition, limit, factor, tally)
        if found is not None:
            if len(self._seen) > _KEPT:
                self._seen.clear()
            self._seen[partition] = found
        return found

    def _evaluate_anew(
        self, partition: Partition, limit: float, factor: float, tally: OperatorTally
    ) -> EvaluatedPartition | None:
        distance = self.completer.distance(partition)
        if distance:
            tally.unfit += 1
            return EvaluatedPartition(partition, _FORBIDDEN + math.log(distance))
        completed = self.completer.complete(partition)
        if isinstance(completed, DoesNotFit):
            tally.unfit += 1
            return EvaluatedPartition(partition, _MISFIT + math.log(completed.missing))
        limit_s = math.exp(limit) if limit < _MISFIT / 2 else math.inf
        if completed.estimate_s * factor**_TRUST > limit_s and self.rng.random() > _ANYWAY:
            return None
        priced = self.completer.price(completed, limit_s)
        if priced is None:
            return None
        tally.priced += 1
        cost = self.search.offer(priced.plan, priced.cost)
        energy = math.log(cost.step_time_s)
        return EvaluatedPartition(
            partition,
            energy if cost.fits else _MISFIT - 1.0 + energy / 1e3,
            max(1.0, cost.step_time_s / completed.estimate_s),
        )

    def anneal(self, start: Partition, allowance: Allowance) -> EvaluatedPartition:
        """The best partition met from `start`."""
        [best] = anneal(
            [self._known(start)],
            lambda now, rng: self._proposals.draw(now.partition, rng),
            lambda partition, now, limit, tally: self.evaluate(partition, limit, now.factor, tally),
            Metropolis(_HOT, _COLD),
            allowance,
            self.rng,
        )
        return best

    def best_schedule(self, start: Partition, allowance: Allowance) -> EvaluatedPartition:
        """`start` in its best schedule that is not interleaved: the one that starts are priced in suits some badly, and
        a draw finds it and the layers for it late.
        """
        best = self._known(start)
        if max(len(group.stages) for group in start.pipeline_groups) > 1:
            for schedule in plain_schedules(self.search.problem):
                best = self._better(replace(start, schedule=schedule, chunks=1), best, allowance)
        return best

    def best_sharding(self, start: Partition, allowance: Allowance) -> EvaluatedPartition:
        """`start` with its best ZeRO stage and sharding groups, which are drawn late too."""
        problem, best = self.search.problem, self._known(start)
        for stage in sharding_stages(problem.workload):
            if stage < LOCKSTEP or len(start.pipeline_groups) == 1:
                for groups in sharding_groups(problem, stage):
                    best = self._better(replace(start, sharding=stage, groups=groups), best, allowance)
        return best

    def _known(self, start: Partition) -> EvaluatedPartition:
        found = self.evaluate(start)
        assert found is not None, "without a limit everything is evaluated"
        return found

    def _better(self, other: Partition, best: EvaluatedPartition, allowance: Allowance) -> EvaluatedPartition:
        if other in self._seen or not allowance or not self.search.step():
            return best
        found = self.evaluate(other)
        return found if found is not None and found.energy < best.energy else best


def rule_based(problem: Problem, completer: PlanCompleter) -> Iterator[Partition]:
    """Rule-based partitions: symmetric grids, over all machines and a separate one for every kind, chains, and
    replicas."""
    grids = in_turns(own_grids(problem, completer), whole_grids(problem))
    yield from in_turns(grids, without_grids(problem, completer))


def without_grids(problem: Problem, completer: PlanCompleter) -> Iterator[Partition]:
    """Chains and replicas."""
    yield from in_turns(
        chain_partitions(problem),
        lockstep_partitions(problem),
        single_pipeline_partitions(problem, completer.replicates),
    )


def own_grids(problem: Problem, completer: PlanCompleter) -> Iterator[Partition]:
    """The best symmetric grid of each machine kind for its share of the batch, side by side, at several micro-batch
    sizes."""
    for sharding in plain_stages(problem):
        for size in problem.space.micro_batch_sizes(problem.workload.global_batch)[:3]:
            chosen = []
            for members in kinds(problem):
                best: tuple[float, PipelineGroup] | None = None
                for pipeline_group in symmetric(problem, members):
                    sized = PipelineGroup(pipeline_group.stages, size)
                    rate = completer.rate(first_choice(problem, (sized,)), StateSharding(sharding, sized.width))
                    if rate > 0.0 and (best is None or rate > best[0]):
                        best = (rate, sized)
                if best is not None:
                    chosen.append(best[1])
            if chosen:
                base = first_choice(problem, tuple(chosen))
                yield from (replace(base, sharding=sharding, groups=way) for way in sharding_groups(problem, sharding))


def known_partitions(search: Search) -> Iterator[Partition]:
    """That of the plan from which the search begins, if there is one."""
    partition = partition_of(search.start) if search.start is not None else None
    if partition is not None:
        yield partition


def improve(
    climber: HillClimber,
    starts: Iterable[Partition],
    more: Iterable[Partition],
    allowance: Allowance,
) -> list[Partition]:
    """Price `starts`, in turns with those of `more` that promise most; try the best in every schedule and sharding,
    hill-climb the first few, then anneal the best in rounds with ever fewer partitions and more time each.

    Starts are priced past `allowance` where only time is limited and there is no plan. Returns the resulting
    partitions, best first. Successive halving (Jamieson and Talwalkar, 2016): a start soon shows whether it leads
    anywhere.
    """
    search = climber.search
    annealer = Annealer(search, climber.completer, climber.rng)
    pool: list[tuple[float, int, Partition]] = []
    least, for_starts = math.inf, allowance.part(_STARTS)
    ranking = for_starts.part(_RANKING)
    ranked = promising_first(climber.completer, more, search.budget.max_steps, lambda: bool(ranking))
    for number, start in enumerate(chain(known_partitions(search), in_turns(starts, ranked))):
        if not (for_starts and search.step()) and not _continues_without_plan(search):
            break
        found = annealer.evaluate(start, least + _HOPELESS)
        if found is not None:
            least = min(least, found.energy)
            pool.append((found.energy, number, start))
    settling = allowance.part(_SETTLING)
    for settled, count in (annealer.best_schedule, _SCHEDULED), (annealer.best_sharding, _SHARDED):
        pool.sort(key=lambda item: item[:2])
        # Of starts with equal prices, the first: most likely the others have equal devices in another order.
        different = [at for at, (energy, *_) in enumerate(pool) if not at or energy != pool[at - 1][0]]
        for at in different[:count]:
            found = settled(pool[at][2], settling)
            pool[at] = (found.energy, pool[at][1], found.partition)
    pool.sort(key=lambda item: item[:2])
    polishing = search.until(min(allowance.end, search.spent + _POLISHING))
    climber.begin([partition for _, _, partition in pool[:_POLISHED]], polishing)
    rounds = allowance.rest()
    left_out: list[tuple[float, int, Partition]] = []
    for turn, size in enumerate(_POOLS):
        pool.sort(key=lambda item: item[:2])
        left_out += pool[size:]
        del pool[size:]
        for k, (energy, number, start) in enumerate(pool):
            found = annealer.anneal(start, rounds.up_to((turn + (k + 1) / len(pool)) / len(_POOLS)))
            if found.energy < energy:
                if turn == 0:  # with other layers, the start itself may lead elsewhere
                    left_out.append(pool[k])
                pool[k] = (found.energy, number, found.partition)
    return [partition for _, _, partition in sorted(pool + left_out, key=lambda item: item[:2])]


def _continues_without_plan(search: Search) -> bool:
    return search.plan is None and search.budget.max_steps is None and not search.stopped


def search_partitions(run: Search, rng: random.Random, starts: Iterable[Partition], allowance: Allowance) -> None:
    """Anneal `starts` and rule-based partitions, then hill-climb, until `allowance` is spent."""
    completer = PlanCompleter(run.pricer)
    climber = HillClimber(run, completer, rng)
    ranked = improve(climber, starts, rule_based(run.problem, completer), allowance.part(_ANNEALING))
    climber.finish(ranked, allowance.rest())


class LocalSearch(SearchSolver):
    """Simulated annealing and hill climbing from rule-based partitions.

    Rule-based partitions are annealed and the best plan hill-climbed; a step is one partition or
    move.
    """

    name = "local_search"

    def search(self, run: Search, rng: random.Random) -> None:
        """Anneal, then hill-climb."""
        search_partitions(run, rng, (), run.until())
