"""Annealing over arrangements of chains: which machines form which chains, in which order and how many pipelines wide.

The TP groups of every chain come from the dynamic program of `heuristics/chains.py`. So plans of quite different
structure, between which operators on partitions find only worse ones, are one move apart. Kirkpatrick, Gelatt and
Vecchi, Science 220 (1983).
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby, islice, permutations, product

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.problem.space import default_schedule
from solvers.columns.chain_column import ChainRecipe
from solvers.columns.machine_kinds import MachineKinds
from solvers.completion.completer import PlanCompleter
from solvers.core.operators import Lottery, Operator, OperatorTally
from solvers.core.partition import Partition, PipelineGroup
from solvers.core.search import Allowance, Search
from solvers.core.zero import LOCKSTEP
from solvers.frame.ranking import promising_first
from solvers.heuristics.annealing import Metropolis, anneal
from solvers.heuristics.chains import ChainBuilder, ChainTerms

Arrangement = tuple[ChainRecipe, ...]  # which together use every machine at most once
Run = tuple[int, int]  # a kind, and how many machines of it
_TEMPERATURES = Metropolis(0.02, 0.002)
_STARTS = 3  # arrangements that are annealed in turn
_LONE_MADE, _LONE_PRICED, _LONE = 300, 6, 2  # lone chains that are estimated, priced, and annealed
_ESTIMATING = 0.5  # most of the allowance for estimating them
_ANY_ORDER = 3  # kinds in a lone chain that are tried in any order
_SIZES = 2  # least micro-batch sizes that are tried: each takes tables of its own
_RANKS = (0, 1, 2)  # ways of the dynamic program
_WHOLE = 0.6  # chance that all like machines beside each other in a chain are moved


@dataclass(frozen=True, slots=True)
class PricedArrangement:
    arrangement: Arrangement
    partition: Partition
    energy: float  # the logarithm of the step time


class ArrangementSearch:
    """Anneals arrangements in one ZeRO stage, and offers what it prices to `run`."""

    def __init__(self, run: Search, completer: PlanCompleter, zero_stage: int, rng: random.Random) -> None:
        self.run, self.completer, self.zero_stage, self.rng = run, completer, zero_stage, rng
        self.problem, self.kinds = run.problem, MachineKinds(run.problem)
        self.sizes = self.problem.space.micro_batch_sizes(self.problem.workload.global_batch)
        self._chains = ChainBuilder(run.pricer, completer.splitters)
        self._schedule = default_schedule(self.problem.workload)
        self._lottery = Lottery(OPERATORS, self, self.problem, run.operators)
        self._known: dict[Arrangement, PricedArrangement | None] = {}

    def search(self, allowance: Allowance, most: int) -> list[Partition]:
        """The best partitions met within `allowance`, at most so many, best first."""
        if self.zero_stage >= LOCKSTEP or self.problem.space.num_stages is not None:
            return []
        shapes = [(width, self.sizes[0]) for width in self.kinds.widths]
        if self.completer.replicates:  # which need micro-batches of two samples
            shapes += [(1, size) for size in self.sizes[1:2]]
        best = sorted(self._starts(shapes, allowance), key=lambda one: one.energy)[:_STARTS]
        anneal(best, self._propose, self._near, _TEMPERATURES, allowance, self.rng)
        every = sorted(filter(None, self._known.values()), key=lambda one: one.energy)
        return list(dict.fromkeys(one.partition for one in every))[:most]

    def _starts(self, shapes: Sequence[tuple[int, int]], allowance: Allowance) -> Iterator[PricedArrangement]:
        """For each of `shapes`, which are width and micro-batch size, one chain through all machines: the better of
        slowest machines first and last; or, of single pipelines, the best through any machines.
        """
        order = tuple((kind, int(count)) for kind, count in enumerate(self.kinds.supply))
        for width, size in shapes:
            ways: Iterable[Arrangement] = ((ChainRecipe(order[::way], width, size),) for way in (1, -1))
            if width == 1:
                ways = islice(self._lone(size, allowance.part(_ESTIMATING)), _LONE_PRICED)
            priced = filter(None, (self._start(arrangement, allowance) for arrangement in ways))
            yield from sorted(priced, key=lambda one: one.energy)[: _LONE if width == 1 else 1]

    def _lone(self, size: int, allowance: Allowance) -> Iterator[Arrangement]:
        """One pipeline through some of the machines, the best estimates first: where gradients that cross a slow
        network take longer than more GPUs save, it is the best plan.
        """
        found: dict[Partition, Arrangement] = {}

        def each() -> Iterator[Partition]:
            for runs in islice(self._lone_orders(), _LONE_MADE):
                partition = self.partition(arrangement := (ChainRecipe(runs, 1, size),))
                if partition is not None and partition not in found:
                    found[partition] = arrangement
                    yield partition

        ranked = promising_first(self.completer, each(), self.run.budget.max_steps, lambda: bool(allowance))
        return map(found.__getitem__, ranked)

    def _lone_orders(self) -> Iterator[tuple[Run, ...]]:
        """The runs of chains through machines of one kind, of two, and so on, few kinds in any order: any number of
        each or, where these are too many, all of them, half as many, a quarter, and so on.
        """
        supply = [int(count) for count in self.kinds.supply]
        numbers = [[*range(1, count + 1)] for count in supply]
        if math.prod(count + 1 for count in supply) > _LONE_MADE:
            numbers = [[count >> k for k in reversed(range(count.bit_length()))] for count in supply]
        for num_kinds in range(1, len(supply) + 1):
            for kinds in combinations(range(len(supply)), num_kinds):
                for counts in product(*(numbers[kind] for kind in kinds)):
                    runs = tuple(zip(kinds, counts, strict=True))
                    yield from permutations(runs) if num_kinds <= _ANY_ORDER else (runs, runs[::-1])

    def _start(self, arrangement: Arrangement, allowance: Allowance) -> PricedArrangement | None:
        """The priced arrangement, in a step; None where none is left of `allowance`, or it is no plan."""
        if not (allowance and self.run.step()):
            return None
        with self.run.tallied("arrange_chains") as tally:
            tally.proposed += 1
            tally.valid += 1
            return self._priced(arrangement, math.inf, tally)

    def _propose(self, now: PricedArrangement, rng: random.Random) -> tuple[OperatorTally, Arrangement] | None:
        return self._lottery.draw(now.arrangement, rng)

    def _near(
        self, arrangement: Arrangement, now: PricedArrangement, limit: float, tally: OperatorTally
    ) -> PricedArrangement | None:
        if arrangement in self._known:
            tally.known += 1
            return self._known[arrangement]
        return self._priced(arrangement, limit, tally)

    def _priced(self, arrangement: Arrangement, limit: float, tally: OperatorTally) -> PricedArrangement | None:
        """None where it certainly exceeds the energy `limit`, or is no plan; the latter is remembered."""
        self._known[arrangement] = None
        partition = self.partition(arrangement)
        completed = partition and self.completer.allowed(partition) and self.completer.complete(partition)
        if not partition or not completed:
            tally.unfit += 1
            return None
        priced = self.completer.price(completed, math.exp(limit) if math.isfinite(limit) else math.inf)
        if priced is None:
            del self._known[arrangement]
            return None
        tally.priced += 1
        if not self.run.offer(priced.plan, priced.cost, (partition, ())).fits:
            return None
        found = self._known[arrangement] = PricedArrangement(arrangement, partition, math.log(priced.cost.step_time_s))
        return found

    def partition(self, arrangement: Arrangement) -> Partition | None:
        """The arrangement on machines; None where a chain does not hold all layers."""
        space, free = self.problem.space, [list(own) for own in self.kinds.machines]
        pipelines = sum(recipe.width for recipe in arrangement)
        groups: list[PipelineGroup] = []
        for recipe in arrangement:
            machines = []
            for kind, count in recipe.order:
                machines += free[kind][:count]
                del free[kind][:count]
            terms = ChainTerms(
                recipe.micro_batch_size,
                max(1, self.problem.workload.global_batch // pipelines // recipe.micro_batch_size),
                StateSharding(self.zero_stage, pipelines),
                self._schedule.plain(),
                None if space.uneven_tp else 1,
                self.completer.replicates,
            )
            group = self._chains.chain(machines, self.kinds.devices, recipe.width, terms, recipe.rank)
            if group is None:
                return None
            groups.append(group)
        return Partition(tuple(groups), self._schedule, self.zero_stage) if groups else None

    def idle(self, arrangement: Arrangement) -> list[Run]:
        """The machines that no chain uses."""
        used = [recipe.counts(len(self.kinds)) for recipe in arrangement]
        left = (int(n) - sum(own[kind] for own in used) for kind, n in enumerate(self.kinds.supply))
        return [(kind, n) for kind, n in enumerate(left) if n]


# The moves.


def _merged(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Like machines beside each other as one run."""
    by_kind = groupby((run for run in runs if run[1]), key=lambda run: run[0])
    return tuple((kind, sum(count for _, count in own)) for kind, own in by_kind)


def _with(arrangement: Arrangement, changed: dict[int, Sequence[ChainRecipe]]) -> Arrangement | None:
    """The arrangement with some chains replaced, those without machines left out, in a fixed order."""
    found = [new for at, recipe in enumerate(arrangement) for new in changed.get(at, (recipe,)) if new.order]
    return tuple(sorted(found)) or None


def _taken(arrangement: Arrangement, rng: random.Random) -> tuple[int, ChainRecipe, Run]:
    """All machines of a run, or some: the chain's number, the chain without them, and they."""
    at = rng.randrange(len(arrangement))
    runs = list(arrangement[at].order)
    r = rng.randrange(len(runs))
    kind, count = runs[r]
    moved = count if count == 1 or rng.random() < _WHOLE else rng.randrange(1, count)
    runs[r] = (kind, count - moved)
    return at, replace(arrangement[at], order=_merged(runs)), (kind, moved)


def _given(recipe: ChainRecipe, run: Run, rng: random.Random) -> ChainRecipe:
    """The chain with more machines anywhere."""
    runs = list(recipe.order)
    runs.insert(rng.randrange(len(runs) + 1), run)
    return replace(recipe, order=_merged(runs))


def move_machines(near: ArrangementSearch, arrangement: Arrangement, rng: random.Random) -> Arrangement | None:
    """Like machines move to another place in their chain, or to another chain."""
    giver, less, run = _taken(arrangement, rng)
    taker = rng.randrange(len(arrangement))
    if taker == giver:
        return _with(arrangement, {giver: (_given(less, run, rng),)})
    return _with(arrangement, {giver: (less,), taker: (_given(arrangement[taker], run, rng),)})


def widen_or_narrow(near: ArrangementSearch, arrangement: Arrangement, rng: random.Random) -> Arrangement | None:
    """A chain of the next greater or smaller width."""
    at, widths = rng.randrange(len(arrangement)), near.kinds.widths
    k = widths.index(arrangement[at].width) + rng.choice((-1, 1))
    return _with(arrangement, {at: (replace(arrangement[at], width=widths[k]),)}) if 0 <= k < len(widths) else None


def cut_chain(near: ArrangementSearch, arrangement: Arrangement, rng: random.Random) -> Arrangement | None:
    """A chain becomes two: its first and its last machines, or half of each run."""
    at = rng.randrange(len(arrangement))
    runs = arrangement[at].order
    machines = [kind for kind, count in runs for _ in range(count)]
    if len(machines) < 2 or not near.problem.space.uneven_structure:
        return None
    end = rng.randrange(1, len(machines))
    parts = [[(kind, 1) for kind in own] for own in (machines[:end], machines[end:])]
    if rng.random() < 0.5:
        parts = [[(kind, (count + more) // 2) for kind, count in runs] for more in (1, 0)]
    return _with(arrangement, {at: [replace(arrangement[at], order=_merged(own)) for own in parts]})


def join_chains(near: ArrangementSearch, arrangement: Arrangement, rng: random.Random) -> Arrangement | None:
    """Two chains become one."""
    if len(arrangement) < 2:
        return None
    a, b = rng.sample(range(len(arrangement)), 2)
    order = _merged(arrangement[a].order + arrangement[b].order)
    return _with(arrangement, {a: (replace(arrangement[a], order=order),), b: ()})


def use_or_leave(near: ArrangementSearch, arrangement: Arrangement, rng: random.Random) -> Arrangement | None:
    """Idle machines join a chain, or some become idle."""
    idle = near.idle(arrangement)
    if not idle or rng.random() < 0.3:
        at, less, _ = _taken(arrangement, rng)
        return _with(arrangement, {at: (less,)})
    at = rng.randrange(len(arrangement))
    return _with(arrangement, {at: (_given(arrangement[at], rng.choice(idle), rng),)})


def resize(near: ArrangementSearch, arrangement: Arrangement, rng: random.Random) -> Arrangement | None:
    """Micro-batches of twice or half the size in all chains."""
    size = int(arrangement[0].micro_batch_size * rng.choice((0.5, 2.0)))
    return tuple(replace(own, micro_batch_size=size) for own in arrangement) if size in near.sizes[:_SIZES] else None


def other_way(near: ArrangementSearch, arrangement: Arrangement, rng: random.Random) -> Arrangement | None:
    """A chain in another way of the dynamic program."""
    at = rng.randrange(len(arrangement))
    return _with(arrangement, {at: (replace(arrangement[at], rank=rng.choice(_RANKS)),)})


ArrangementOperator = Operator[ArrangementSearch, Arrangement, Arrangement]
OPERATORS: tuple[ArrangementOperator, ...] = (
    Operator("move_machines", 5, move_machines),
    Operator("widen_or_narrow", 2, widen_or_narrow),
    Operator("cut_chain", 2, cut_chain),
    Operator("join_chains", 1, join_chains),
    Operator("use_or_leave", 1, use_or_leave),
    Operator("resize", 1, resize),
    Operator("other_way", 1, other_way),
)
