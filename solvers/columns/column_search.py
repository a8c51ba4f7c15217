"""The search for many and irregular machines, by chains of whole machines as columns of a master program.

Short chains of one kind and a sweep of the sync S give a first plan; sketches of all chains, ranked by what they gain
under the duals, give more columns (Gilmore and Gomory, 1961), where uplinks are slow such as are cut at about the same
layers there (`splits.py`); each kind is left out once; then multisets of columns are annealed by predicted step time,
corrected by what pipelines of priced plans really take, with new columns near those in use in between. Columns,
programs and roundings count as fractions of a step, fixed here, so that the clock steers nothing where steps are
limited.
"""

import math
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice, product
from statistics import fmean, pstdev

import numpy as np

from hexiopt.problem.space import default_schedule
from hexiopt.schedules.registry import INTERLEAVED
from solvers.columns.chain_column import ChainColumn, ChainRecipe, ColumnPool
from solvers.columns.machine_kinds import MachineKinds
from solvers.columns.master import Chosen, Relaxed, rank
from solvers.columns.multiset_search import MultisetSearch
from solvers.columns.nearby import near_recipe
from solvers.columns.programs import LONGER, PROGRAM, ROUNDING, ContextPrograms
from solvers.columns.sketches import ChainSketches, sketched
from solvers.columns.splits import best_splits
from solvers.completion.completer import PlanCompleter
from solvers.core.interleaving import may_interleave
from solvers.core.operators import OperatorTally
from solvers.core.partition import Partition, PipelineGroup
from solvers.core.search import Allowance, Search
from solvers.core.zero import LOCKSTEP, first_stage, plain_stages
from solvers.frame.starts import short_chain_partitions
from solvers.heuristics.local_search import Annealer

_UNITS = 20  # of work in a step: what a price takes; a program takes 3 of them, a rounding 10
_COLUMN = 1  # unit that making a column takes
_LENGTHS = (1, 2, 3, 4)  # machines of the chains of one kind
_GPUS_A_PIPELINE = 16  # assumed at first
_FEWER = 3  # times fewer pipelines are assumed where no plan fits
_ASSUMPTIONS = 3
_WORST_GAIN = -0.04  # relative: columns of almost no reduced cost are what rounding needs
_PER_PROGRAM = 6  # sketches made exactly for each program
_SPLITS = 6  # places to cut chains at uplinks, tried at first
_MUCH = 1.05  # times what programs take where each chain syncs as among copies of its own
_ALL_KINDS = 0.8  # of the share for columns, before kinds are left out
_PROMISING = 1.05  # of the best step time: programs without a kind beyond it are not rounded
_REPEATED = 3  # of the columns used as often as it goes, or once, those priced in a sweep
_REPEATED_ALONE = 60  # where the plan space allows nothing else
_DEALT = 12  # of the short chains of every mix
_STARTS = 3  # best plans that multisets are annealed from in turn
_MOVES = 2000  # of an annealing
_MOVES_A_UNIT = 4
_PRICED, _OTHERS = 4, 8  # of the multisets met in an annealing: the best, and others where predictions err
_NOISY = 0.015  # relative spread of predictions
_ERRORS = 40  # of predictions that are remembered
_TRIES, _NEAR_MADE = 40, 8  # columns near those in use that are tried before an annealing, and made
_WORTH_PRICING = 1.005  # of the best step time: multisets predicted beyond it are not priced
_WORTH_LEARNING = 1.01  # of the best step time: plans whose chains the programs then find others for
_KEPT = 200  # structures remembered as found
_NEAR = 0.5  # share of what a price says that a correction takes over
_HOT = (0.006, 0.006, 0.004, 0.002)  # temperatures of four rounds of annealing
_ENDS = (0.2, 0.4, 0.7, 1.0)
_RECREATE = 0.1

Found = tuple[float, int, Partition, tuple[ChainRecipe, ...]]  # seconds, number, partition, recipe of each group


class ColumnSearch:
    """The phases of the search for one ZeRO stage; offers what it prices to `run`."""

    def __init__(self, run: Search, completer: PlanCompleter, zero_stage: int, rng: random.Random) -> None:
        self.run, self.completer, self.rng, self.zero_stage = run, completer, rng, zero_stage
        self.problem, self.kinds = run.problem, MachineKinds(run.problem)
        self._schedule = default_schedule(self.problem.workload)
        self._sizes = self.problem.space.micro_batch_sizes(self.problem.workload.global_batch)
        # Pipelines of one structure must be one group.
        self._together = not self.problem.space.uneven_structure or zero_stage >= LOCKSTEP
        self._correction: dict[ChainRecipe, float] = {}
        self._tried: set[Partition] = set()
        self._found: list[Found] = []
        self._units = 0
        self._splits = False  # whether chains are made to be cut at the same layers
        self._errors: deque[float] = deque(maxlen=_ERRORS)  # logarithms of prices over predictions
        self._tally = OperatorTally()  # of the operator at work
        self._assume(max(1, len(self.problem.usable_devices) // _GPUS_A_PIPELINE))

    def best(self, most: int) -> list[Partition]:
        """The best partitions priced, best first."""
        return [partition for _, _, partition, _ in sorted(self._found, key=lambda f: f[:2])[:most]]

    def hear(self) -> None:
        """Price the best of another search, if it is better than all here."""
        heard = self.run.heard()
        if heard is not None:
            with self._operator("hear"):
                self.price(*heard)

    # ------------------------------------------------------------------------------ phases

    def generate(self, allowance: Allowance) -> None:
        """First plans, then columns and the master in turn. Past the budget until there is a plan, or no hope."""
        for again in range(_ASSUMPTIONS):
            self._one_kind(allowance)
            if not self._found or not self._programs.answers:
                free = np.full(len(self.kinds), 1e-9)
                self._make_best([Relaxed(math.inf, math.inf, 1e9, free)], allowance, 10 * _PER_PROGRAM)
                self._sweep(2, allowance)
            if self._found or self._pool.num_pipelines == 1 or again == _ASSUMPTIONS - 1:
                break
            self._assume(max(1, self._pool.num_pipelines // _FEWER))
        for partition in islice(short_chain_partitions(self.problem), _DEALT):
            if not self._continues(allowance):
                break
            with self._operator("deal_chains"):
                self.price(partition)
        if not self._programs.answers:
            return
        first = allowance.part(_ALL_KINDS)
        self._make_splits(first)
        for turn in count(1):
            if not first or not self._make_best(self._programs.wanted(), first, _PER_PROGRAM):
                break
            if turn % 3 == 2:
                self._sweep(2, first, near=True)
            else:
                self._solve_programs(near=True)
        self._sweep(6, first, near=True)
        self._without_a_kind()
        self._other_ways(allowance)

    def restricted_master(self, allowance: Allowance, elsewhere: float = 0.3) -> None:
        """Anneal multisets of columns from the best plans, a share `elsewhere` of them from other roundings, and make
        columns near those in use in between."""
        turn = 0
        while allowance and self._found and self._programs.answers:
            self.hear()
            ranked = sorted((found for found in self._found if found[3]), key=lambda f: f[:2])
            if not ranked:
                return
            recipes = ranked[min(len(ranked) - 1, turn % _STARTS)][3]
            if turn % 3 == 2 or self._programs.has_news:
                self._solve_programs(near=True)
                self._make_best(self._programs.wanted(), allowance, _PER_PROGRAM)
            else:
                self._make_near(recipes, allowance)
            start = self._chosen(recipes)
            if self.rng.random() < elsewhere:
                start = self._programs.rounded_anywhere(self.rng) or start
            with self._operator("anneal_chains"):
                self._anneal_chains(start, allowance)
            turn += 1

    def _anneal_chains(self, start: Chosen, allowance: Allowance) -> None:
        """Anneal multisets from `start`, and price those that may be better than the best plan, as predictions err: the
        best by prediction and, where predictions err by much, others at random."""
        answer = self.rng.choice(self._programs.answers[:5])
        search = MultisetSearch(self._programs.master(), answer.duals, answer.pipelines_s, self.rng)
        errors = list(self._errors) or [0.0]
        bias, spread = fmean(errors), pstdev(errors)
        limit_s = _WORTH_PRICING * self.run.best_s * math.exp(spread - bias)
        worth = [met for met in search.anneal(start, _MOVES) if met[0] <= limit_s]
        others = worth[_PRICED:] if spread > _NOISY else []
        for _, chosen in worth[:_PRICED] + self.rng.sample(others, min(len(others), _OTHERS)):
            if allowance:
                self._price_chosen(chosen)
        self._work(_MOVES // _MOVES_A_UNIT)

    def variants(self, most: int, allowance: Allowance) -> None:
        """The best partitions with stages reversed, in other ZeRO stages, and interleaved."""
        for partition in self.best(most):
            others = [partition.with_pipeline_groups(g.with_stages(g.stages[::-1]) for g in partition.pipeline_groups)]
            if partition.sharding < LOCKSTEP:
                others += [replace(partition, sharding=zero) for zero in plain_stages(self.problem)]
                if may_interleave(self.problem) and not partition.schedule.chunked:
                    others += [replace(partition, schedule=INTERLEAVED, chunks=chunks) for chunks in (2, 4)]
            for other in others:
                if not allowance:
                    return
                with self._operator("vary_plan"):
                    self.price(other)

    def anneal(self, allowance: Allowance) -> None:
        """The operators on partitions, from the best three and last from the best."""
        annealer = Annealer(self.run, self.completer, self.rng, _RECREATE)
        for turn, (hot, end) in enumerate(zip(_HOT, _ENDS, strict=True)):
            self.hear()
            pool = self.best(2)
            if not pool or not allowance:
                return
            start = pool[min(turn, len(pool) - 1)] if turn < 2 else pool[0]
            found = annealer.anneal(start, hot, allowance.up_to(end))
            seconds = math.exp(found.energy) if found.energy < math.log(1e30) else math.inf
            if math.isfinite(seconds):
                self._remember(seconds, found.partition, self._learnt(found.partition))

    def price(self, partition: Partition, recipes: Sequence[ChainRecipe] = ()) -> bool:
        """Price a partition, and learn what the pipelines of its recipes take. Whether it fits."""
        tally = self._tally
        tally.proposed += 1
        tally.valid += 1
        if partition in self._tried or not self.completer.allowed(partition):
            tally.known += partition in self._tried
            tally.unfit += partition not in self._tried
            return False
        self._tried.add(partition)
        self.run.step()
        completed = self.completer.complete(partition)
        priced = self.completer.price(completed) if completed else None
        if priced is None:
            tally.unfit += 1
            return False
        tally.priced += 1
        cost = self.run.offer(priced.plan, priced.cost, (partition, tuple(recipes)))
        if not cost.fits:
            return False
        tally.accepted += 1
        recipes = recipes or self._learnt(partition)
        if recipes and not self._together:
            chosen = self._chosen(recipes)  # may make columns, which the program then knows
            predicted_s = self._programs.master().predicted_s(chosen)
            self._errors.append(math.log(cost.step_time_s / predicted_s))
        self._remember(cost.step_time_s, partition, recipes)
        first = 0
        for recipe, group in zip(recipes, partition.pipeline_groups, strict=False):
            column = self._pool.make(recipe)
            own = range(first, first + group.width)
            first += group.width
            if column is None:
                continue
            last = max(own, key=lambda i: cost.pipelines[i].end_s)
            sequences = priced.plan.pipelines[last].num_sequences * recipe.width
            factor = max(0.8, cost.pipelines[last].end_s / (column.fill_s + sequences / column.rate))
            self._correction[recipe] = (1 - _NEAR) * self._correction.get(recipe, 1.0) + _NEAR * factor
        return True

    # ----------------------------------------------------------------------------- columns

    def _learnt(self, partition: Partition) -> tuple[ChainRecipe, ...]:
        """Make the chains of a partition that others found; their recipes, if all of it is such chains."""
        recipes = [self._pool.recipe_of(group) for group in partition.pipeline_groups]
        known = [recipe for recipe in recipes if recipe is not None and self._make(recipe) is not None]
        whole = len(known) == len(recipes) and partition.sharding == self.zero_stage
        return tuple(known) if whole else ()

    def _assume(self, num_pipelines: int) -> None:
        self._pool = ColumnPool(self.completer, self.kinds, self.zero_stage, num_pipelines)
        self._sketches: ChainSketches | None = sketched(self.completer, self.kinds, self._pool)
        self._correction.clear()
        self._programs = ContextPrograms(self.problem, self.kinds, self._pool, self._correction, self._work)

    def _one_kind(self, allowance: Allowance) -> None:
        """Short chains of one kind, of all widths, and what the master makes of them."""
        for length, (kind, most) in product(_LENGTHS, enumerate(self.kinds.supply)):
            gpus = self.kinds.num_gpus[kind]
            if length <= most and self._continues(allowance):
                with self._operator("make_short_chains"):
                    for width in reversed(dict.fromkeys((*self.kinds.widths, 2 * gpus))):
                        if width <= 2 * gpus and length * gpus // width <= 2 * self.problem.model.num_layers:
                            self._make(ChainRecipe(((kind, length),), width, self._sizes[0]))
        self._sweep(2, allowance)

    def _make_best(self, answers: Sequence[Relaxed], allowance: Allowance, most: int) -> int:
        """Make the sketches exactly that gain most under the duals of some programs; how many columns came of it."""
        sketches = self._sketches
        if sketches is None:
            return 0
        best, wanted = answers[0], list(answers)
        if math.isfinite(best.sync_s):  # a shorter sync leaves more time for the rest
            for share in (0.4, 0.6, 0.8):
                sync_s = share * best.sync_s
                left_s = best.total_s - sync_s
                duals = best.duals * left_s / best.pipelines_s
                wanted.append(replace(best, sync_s=sync_s, pipelines_s=left_s, duals=duals))
        made = 0
        for answer in wanted:
            drain_s = 0.0 if answer.context is None else answer.context.drain_s
            context = answer.context if self._splits else None
            able = sketches.within(1.05 * (answer.sync_s + drain_s), context) & ~sketches.done
            gain = np.where(able, sketches.gains(answer.pipelines_s, answer.duals), -1.0)
            for i in np.argsort(-gain, kind="stable")[:most].tolist():
                if gain[i] <= _WORST_GAIN or not self._continues(allowance):
                    break
                sketches.done[i] = True
                every = tuple(range(len(self.kinds)))
                made += self._make_sketch(sketches, i, (every, every[::-1]))
        return made

    def _make_sketch(self, sketches: ChainSketches, i: int, orders: Sequence[Sequence[int]]) -> int:
        """Make a sketch exactly, its kinds in each of some orders; how many columns came of it."""
        width, degrees = int(sketches.widths[i]), tuple(map(int, sketches.degrees[i]))
        parts = [tuple((k, int(sketches.counts[i, k])) for k in kinds if sketches.counts[i, k]) for kinds in orders]
        made = 0
        with self._operator("make_sketches"):
            for order in dict.fromkeys(parts):
                for own in (degrees, ()) if len(order) == 1 else (degrees,):
                    made += self._make(ChainRecipe(order, width, self._sizes[0], own)) is not None
        return made

    def _make_splits(self, allowance: Allowance) -> None:
        """Where sync across uplinks takes much, chains that are cut at about the same layers where they cross one, and
        programs for them."""
        hope, sketches = self._programs.hope, self._sketches
        if self._together or hope is None or sketches is None or len(self.kinds.places) < 2:
            return
        self._splits = self._programs.answers[0].total_s > _MUCH * hope[0].total_s
        if not self._splits:
            return
        self._work(PROGRAM * len(self.kinds.places))
        for split in best_splits(self.kinds, sketches, *hope, _SPLITS)[::-1]:
            if allowance:
                for i in split.sketches.tolist():
                    self._make_sketch(sketches, i, (split.kinds,))
                self._programs.expect(split.context)

    def _other_ways(self, allowance: Allowance) -> None:
        """Other micro-batch sizes and TP degrees for the columns in use."""
        for recipe in dict.fromkeys(r for found in sorted(self._found, key=lambda f: f[:2])[:4] for r in found[3]):
            for size, way in product(self._sizes[:3], (0, 1)):
                if allowance:
                    with self._operator("make_other_ways"):
                        self._make(replace(recipe, micro_batch_size=size))
                        self._make(replace(recipe, micro_batch_size=size, degrees=(), rank=way))
        if allowance:
            self._sweep(4, allowance, near=True)
            self.variants(2, allowance)

    def _make(self, recipe: ChainRecipe) -> ChainColumn | None:
        self._tally.proposed += 1
        self._tally.valid += 1
        self._tally.known += recipe in self._pool
        if recipe not in self._pool:
            self._work(_COLUMN)
            self._tally.unfit += self._pool.make(recipe) is None
        return self._pool.make(recipe)

    # ------------------------------------------------------------------------------ sweeps

    def _sweep(self, roundings: int, allowance: Allowance, *, near: bool = False) -> None:
        """Price the best roundings of programs over all values of S, or those `near` the best, and columns alone."""
        if not self._pool.columns:
            return
        if not self._together:
            self._solve_programs(near=near)
            master = self._programs.master()
            for answer in self._programs.answers[:roundings]:
                if self._continues(allowance):
                    with self._operator("round_program"):
                        self._work(ROUNDING)
                        self._price_chosen(master.least_rounded(answer))
        batch, supply = self.problem.workload.global_batch, self.kinds.supply
        ranked = []
        for column in self._pool.columns:
            most = min(batch // column.samples, *(int(s) // c for s, c in zip(supply, column.counts, strict=True) if c))
            for copies in {1, most} - {0}:
                sync_s = column.sync.lone_s if copies == 1 else column.sync.alone_s
                seconds = column.fill_s + batch / (copies * column.rate) + sync_s
                ranked.append((seconds, column.recipe, column, copies))
        for _, _, column, copies in sorted(ranked, key=lambda r: r[:2])[
            : _REPEATED_ALONE if self._together else _REPEATED
        ]:
            if self._continues(allowance):
                with self._operator("repeat_column"):
                    self._price_chosen([(column, copies)])

    def _solve_programs(self, *, near: bool) -> None:
        """The programs over all values of S, or over those `near` the best; what they hope for."""
        if near and self._programs.answers:
            self._programs.refine()
        else:
            self._programs.sweep()
        if self._programs.answers:
            self.run.hoped_s = self._programs.answers[0].total_s

    def _without_a_kind(self) -> None:
        """The best program with each kind left out, rounded once where it promises enough, so that a kind more never
        hurts, however small the budget."""
        if self._together or len(self.kinds) == 1:
            return
        answers = [one for kind in range(len(self.kinds)) if (one := self._programs.without(kind))]
        for master, answer in sorted(answers, key=lambda own: rank(own[1])):
            if answer.total_s <= _PROMISING * self.run.best_s and self.run.should_continue():
                with self._operator("leave_kind_out"):
                    self._work(PROGRAM)
                    self._price_chosen(master.rounded(answer.sync_s, answer.context, LONGER * answer.pipelines_s))

    def _make_near(self, recipes: Sequence[ChainRecipe], allowance: Allowance) -> None:
        """Columns near those in use: a machine more or less, or of another kind, wider or narrower, in other ways."""
        rng, used = self.rng, list(dict.fromkeys(recipes))
        made = 0
        for _ in range(_TRIES):
            if not allowance or made == _NEAR_MADE:
                return
            near = near_recipe(rng.choice(used), self.kinds, self._sizes[:2], rng)
            if near is not None and near not in self._pool:
                with self._operator("make_near"):
                    made += self._make(near) is not None

    # ------------------------------------------------------------------------------- plans

    def _price_chosen(self, chosen: Chosen) -> bool:
        """Lay columns onto machines, those of most machines first, and price the partition."""
        if not chosen:
            return False
        free = [list(own) for own in self.kinds.machines]
        groups: list[PipelineGroup] = []
        recipes: list[ChainRecipe] = []
        for column, copies in sorted(chosen, key=lambda item: (-sum(item[0].counts), item[0].recipe)):
            copied = []
            for _ in range(copies):
                machines = []
                for kind, number in column.recipe.order:
                    machines += free[kind][:number]
                    del free[kind][:number]
                group = self._pool.pipeline_group(column.recipe, machines)
                assert group is not None, "machines of a kind are interchangeable"
                copied.append(group)
            if self._together:
                stages = (sum(slots, ()) for slots in zip(*(group.stages for group in copied), strict=True))
                copied = [PipelineGroup(tuple(stages), column.recipe.micro_batch_size)]
            groups += copied
            recipes += [column.recipe] * len(copied)
        return self.price(Partition(tuple(groups), self._schedule, self.zero_stage), recipes)

    def _chosen(self, recipes: Sequence[ChainRecipe]) -> Chosen:
        return [(column, n) for recipe, n in Counter(recipes).items() if (column := self._pool.make(recipe))]

    def _remember(self, seconds: float, partition: Partition, recipes: Sequence[ChainRecipe]) -> None:
        if recipes and not self._together and seconds <= _WORTH_LEARNING * self.run.best_s:
            self._programs.learn(self._chosen(recipes))
        self._found.append((seconds, len(self._tried), partition, tuple(recipes)))
        if len(self._found) > 2 * _KEPT:
            self._found = sorted(self._found, key=lambda f: f[:2])[:_KEPT]

    @contextmanager
    def _operator(self, name: str) -> Iterator[None]:
        """A context in which columns that are made and partitions that are priced count for an operator."""
        with self.run.tallied(name) as self._tally:
            yield
        self._tally = OperatorTally()

    def _work(self, units: int) -> None:
        self._units += units
        for _ in range(self._units // _UNITS):
            self.run.step()
        self._units %= _UNITS

    def _continues(self, allowance: Allowance) -> bool:
        """Whether to go on: until `allowance` is spent, and past the time limit while there is no plan."""
        run = self.run
        return bool(allowance) or (run.plan is None and run.budget.max_steps is None and not run.stopped)


def column_stages(run: Search) -> tuple[int, ...]:
    """ZeRO stages of columns, the first choice first."""
    plain = plain_stages(run.problem)
    return tuple(sorted(plain, reverse=True)) or (first_stage(run.problem),)
