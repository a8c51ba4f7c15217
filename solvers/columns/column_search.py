"""The search for many and irregular machines, by chains of whole machines as columns of a master program.

Short chains of one kind and a sweep of the sync S give a first plan; sketches of all chains, ranked by what they gain
under the duals, give more columns (Gilmore and Gomory, 1961), where uplinks are slow such as are cut at about the same
layers there (`splits.py`); each kind is left out once; then multisets of columns are annealed by predicted step time,
corrected by what pipelines of priced plans really take, with new columns near those in use in between. Which columns
are made says `column_maker.py`.
"""

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice
from statistics import fmean, pstdev

import numpy as np

from hexiopt.cost.executors.communicators import RESERVED_GROUPS
from hexiopt.problem.space import default_schedule
from solvers.columns.chain_column import ChainRecipe
from solvers.columns.column_maker import ColumnMaker, assumed_pipelines
from solvers.columns.master import Chosen, Relaxed, rank
from solvers.columns.multiset_search import MultisetSearch
from solvers.columns.programs import LONGER, PROGRAM, ROUNDING
from solvers.completion.completer import PlanCompleter
from solvers.core.interleaving import interleavings, plain_schedules
from solvers.core.partition import Partition
from solvers.core.search import Allowance, Search
from solvers.core.zero import LOCKSTEP, first_stage, plain_stages
from solvers.frame.solver import SearchSolver
from solvers.frame.starts import chain_partitions, short_chain_partitions
from solvers.heuristics.hill_climbing import HillClimber
from solvers.heuristics.local_search import Annealer

_FEWER = 3  # times fewer pipelines are assumed where no plan fits
_ASSUMPTIONS = 3
_PER_PROGRAM = 6  # sketches made exactly for each program
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
_WORTH_PRICING = 1.005  # of the best step time: multisets predicted beyond it are not priced
_WORTH_LEARNING = 1.01  # of the best step time: plans whose chains the programs then find others for
_KEPT = 200  # structures remembered as found
_NEAR = 0.5  # share of what a price says that a correction takes over
_HOT = (0.006, 0.006, 0.004, 0.002)  # temperatures of four rounds of annealing
_ENDS = (0.2, 0.4, 0.7, 1.0)
_RECREATE = 0.1
_GROUPS = 3 * RESERVED_GROUPS  # that sum gradients on a device, for which layers leave room

Found = tuple[float, int, Partition, tuple[ChainRecipe, ...]]  # seconds, number, partition, recipe of each group


class ColumnSearch:
    """The phases of the search for one ZeRO stage; offers what it prices to `run`."""

    def __init__(
        self, run: Search, completer: PlanCompleter, zero_stage: int, rng: random.Random, *, together: bool = False
    ) -> None:
        self.run, self.completer, self.rng, self.zero_stage = run, completer, rng, zero_stage
        self.problem, self.maker = run.problem, ColumnMaker(run, completer, zero_stage, together=together)
        self._schedule = default_schedule(self.problem.workload)
        self._tried: set[Partition] = set()
        self._found: list[Found] = []
        self._errors: deque[float] = deque(maxlen=_ERRORS)  # logarithms of prices over predictions

    def go_on(self, run: Search, rng: random.Random) -> None:
        """From now on search for `run`, with the columns made so far."""
        self.run = self.maker.run = run
        self.rng = rng

    def best(self, most: int) -> list[Partition]:
        """The best partitions priced, best first."""
        return [partition for _, _, partition, _ in sorted(self._found, key=lambda f: f[:2])[:most]]

    def hear(self) -> None:
        """Price the best of another search, if it is better than all here."""
        heard = self.run.heard()
        if heard is not None:
            with self.maker.operator("hear"):
                self.price(*heard)

    # ------------------------------------------------------------------------------ phases

    def generate(self, allowance: Allowance) -> None:
        """First plans, then columns and the master in turn. Past the budget until there is a plan, or no hope."""
        for again in range(_ASSUMPTIONS):
            self.maker.make_short(allowance)
            self._sweep(2, allowance)
            if not self._found or not self.maker.programs.answers:
                free = np.full(len(self.maker.kinds), 1e-9)
                self.maker.make_best([Relaxed(math.inf, math.inf, 1e9, free)], allowance, 10 * _PER_PROGRAM)
                self._sweep(2, allowance)
            if self._found or self.maker.pool.num_pipelines == 1 or again == _ASSUMPTIONS - 1:
                break
            self.maker.assume(max(1, self.maker.pool.num_pipelines // _FEWER))
        for partition in islice(short_chain_partitions(self.problem), _DEALT):
            if not self.maker.continues(allowance):
                break
            with self.maker.operator("deal_chains"):
                self.price(partition)
        if not self.maker.programs.answers:
            return
        first = allowance.part(_ALL_KINDS)
        self.maker.make_splits(first)
        for turn in count(1):
            if not first or not self.maker.make_best(self.maker.programs.wanted(), first, _PER_PROGRAM):
                break
            if turn % 3 == 2:
                self._sweep(2, first, near=True)
            else:
                self._solve_programs(near=True)
        self._sweep(6, first, near=True)
        self._without_a_kind()
        best = sorted(self._found, key=lambda f: f[:2])[:4]
        self.maker.make_other_ways((recipe for found in best for recipe in found[3]), allowance)
        if allowance:
            self._sweep(4, allowance, near=True)
            self.variants(2, allowance)

    def restricted_master(self, allowance: Allowance, elsewhere: float = 0.3) -> None:
        """Anneal multisets of columns from the best plans, a share `elsewhere` of them from other roundings, and make
        columns near those in use in between."""
        turn = 0
        while allowance and self._found and self.maker.programs.answers:
            self.hear()
            ranked = sorted((found for found in self._found if found[3]), key=lambda f: f[:2])
            if not ranked:
                return
            recipes = ranked[min(len(ranked) - 1, turn % _STARTS)][3]
            if turn % 3 == 2 or self.maker.programs.has_news:
                self._solve_programs(near=True)
                self.maker.make_best(self.maker.programs.wanted(), allowance, _PER_PROGRAM)
            else:
                self.maker.make_near(recipes, allowance, self.rng)
            start = self.maker.chosen(recipes)
            if self.rng.random() < elsewhere:
                start = self.maker.programs.rounded_anywhere(self.rng) or start
            with self.maker.operator("anneal_chains"):
                self._anneal_chains(start, allowance)
            turn += 1

    def _anneal_chains(self, start: Chosen, allowance: Allowance) -> None:
        """Anneal multisets from `start`, and price those that may be better than the best plan, as predictions err: the
        best by prediction and, where predictions err by much, others at random."""
        answer = self.rng.choice(self.maker.programs.answers[:5])
        search = MultisetSearch(self.maker.programs.master(), answer.duals, answer.pipelines_s, self.rng)
        errors = list(self._errors) or [0.0]
        bias, spread = fmean(errors), pstdev(errors)
        limit_s = _WORTH_PRICING * self.run.best_s * math.exp(spread - bias)
        worth = [met for met in search.anneal(start, _MOVES) if met[0] <= limit_s]
        others = worth[_PRICED:] if spread > _NOISY else []
        for _, chosen in worth[:_PRICED] + self.rng.sample(others, min(len(others), _OTHERS)):
            if allowance:
                self._price_chosen(chosen)
        self.maker.work(_MOVES // _MOVES_A_UNIT)

    def variants(self, most: int, allowance: Allowance) -> None:
        """The best partitions with stages reversed, in other ZeRO stages, and in other schedules."""
        for partition in self.best(most):
            others = [partition.with_pipeline_groups(g.with_stages(g.stages[::-1]) for g in partition.pipeline_groups)]
            if partition.sharding < LOCKSTEP:
                others += [replace(partition, sharding=zero) for zero in plain_stages(self.problem)]
                plain = (schedule for schedule in plain_schedules(self.problem) if schedule != partition.schedule)
                others += [replace(partition, schedule=schedule, chunks=1) for schedule in plain]
                variants = () if partition.schedule.chunked else interleavings(self.problem, (2, 4))
                others += [replace(partition, schedule=schedule, chunks=chunks) for schedule, chunks in variants]
            for other in others:
                if not allowance:
                    return
                with self.maker.operator("vary_plan"):
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
                self._remember(seconds, found.partition, self.maker.learnt(found.partition))

    def price(self, partition: Partition, recipes: Sequence[ChainRecipe] = ()) -> bool:
        """Price a partition, and learn what the pipelines of its recipes take. Whether it fits."""
        tally = self.maker.tally
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
        recipes = recipes or self.maker.learnt(partition)
        if recipes and not self.maker.together:
            chosen = self.maker.chosen(recipes)  # may make columns, which the program then knows
            predicted_s = self.maker.programs.master().predicted_s(chosen)
            self._errors.append(math.log(cost.step_time_s / predicted_s))
        self._remember(cost.step_time_s, partition, recipes)
        first = 0
        for recipe, group in zip(recipes, partition.pipeline_groups, strict=False):
            column = self.maker.pool.make(recipe)
            own = range(first, first + group.width)
            first += group.width
            if column is None:
                continue
            last = max(own, key=lambda i: cost.pipelines[i].end_s)
            sequences = priced.plan.pipelines[last].num_sequences * recipe.width
            factor = max(0.8, cost.pipelines[last].end_s / (column.fill_s + sequences / column.rate))
            self.maker.correction[recipe] = (1 - _NEAR) * self.maker.correction.get(recipe, 1.0) + _NEAR * factor
        return True

    # ------------------------------------------------------------------------------ sweeps

    def _sweep(self, roundings: int, allowance: Allowance, *, near: bool = False) -> None:
        """Price the best roundings of programs over all values of S, or those `near` the best, and columns alone."""
        if not self.maker.pool.columns:
            return
        if not self.maker.together:
            self._solve_programs(near=near)
            master = self.maker.programs.master()
            for answer in self.maker.programs.answers[:roundings]:
                if self.maker.continues(allowance):
                    with self.maker.operator("round_program"):
                        self.maker.work(ROUNDING)
                        self._price_chosen(master.least_rounded(answer))
        batch, supply = self.problem.workload.global_batch, self.maker.kinds.supply
        ranked = []
        for column in self.maker.pool.columns:
            most = min(batch // column.samples, *(int(s) // c for s, c in zip(supply, column.counts, strict=True) if c))
            for copies in {1, most} - {0}:
                sync_s = column.sync.lone_s if copies == 1 else column.sync.alone_s
                seconds = column.fill_s + batch / (copies * column.rate) + sync_s
                ranked.append((seconds, column.recipe, column, copies))
        for _, _, column, copies in sorted(ranked, key=lambda r: r[:2])[
            : _REPEATED_ALONE if self.maker.together else _REPEATED
        ]:
            if self.maker.continues(allowance):
                with self.maker.operator("repeat_column"):
                    self._price_chosen([(column, copies)])

    def _solve_programs(self, *, near: bool) -> None:
        """The programs over all values of S, or over those `near` the best; what they hope for."""
        if near and self.maker.programs.answers:
            self.maker.programs.refine()
        else:
            self.maker.programs.sweep()
        if self.maker.programs.answers:
            self.run.hoped_s = self.maker.programs.answers[0].total_s

    def _without_a_kind(self) -> None:
        """The best program with each kind left out, rounded once where it promises enough, so that a kind more never
        hurts, however small the budget."""
        if self.maker.together or len(self.maker.kinds) == 1:
            return
        answers = [one for kind in range(len(self.maker.kinds)) if (one := self.maker.programs.without(kind))]
        for master, answer in sorted(answers, key=lambda own: rank(own[1])):
            if answer.total_s <= _PROMISING * self.run.best_s and self.run.should_continue():
                with self.maker.operator("leave_kind_out"):
                    self.maker.work(PROGRAM)
                    self._price_chosen(master.rounded(answer.sync_s, answer.context, LONGER * answer.pipelines_s))

    # ------------------------------------------------------------------------------- plans

    def _price_chosen(self, chosen: Chosen) -> bool:
        """Lay columns onto machines and price the partition."""
        if not chosen:
            return False
        groups, recipes = self.maker.laid_out(chosen)
        return self.price(Partition(tuple(groups), self._schedule, self.zero_stage), recipes)

    def _remember(self, seconds: float, partition: Partition, recipes: Sequence[ChainRecipe]) -> None:
        if recipes and not self.maker.together and seconds <= _WORTH_LEARNING * self.run.best_s:
            self.maker.programs.learn(self.maker.chosen(recipes))
        self._found.append((seconds, len(self._tried), partition, tuple(recipes)))
        if len(self._found) > 2 * _KEPT:
            self._found = sorted(self._found, key=lambda f: f[:2])[:_KEPT]


def column_completer(run: Search, *, replicates: bool = True) -> PlanCompleter:
    """Completes partitions into chains of whole machines. Many pipelines that are cut differently sum gradients in more
    groups than every device has memory reserved for, which only the price of a plan says: layers leave room for them.
    """
    ours = run.our_model
    if ours is None or assumed_pipelines(run.problem) <= RESERVED_GROUPS:
        return PlanCompleter(run.pricer, replicates=replicates)
    return PlanCompleter(ours.with_room_for(_GROUPS), replicates=replicates)


def column_stages(run: Search) -> tuple[int, ...]:
    """ZeRO stages of columns, the first choice first."""
    plain = plain_stages(run.problem)
    return tuple(sorted(plain, reverse=True)) or (first_stage(run.problem),)


class ChainColumns(SearchSolver):
    """Chains of whole machines by a master program; then annealing and hill climbing of the best."""

    name = "columns"

    def search(self, run: Search, rng: random.Random) -> None:
        """All phases, then what else people would build where none of them gave a plan."""
        completer = column_completer(run)
        search = ColumnSearch(run, completer, column_stages(run)[0], rng)
        search.generate(run.until(0.3))
        search.restricted_master(run.until(0.6))
        search.variants(5, run.until(0.65))
        if run.plan is None:
            for partition in chain_partitions(run.problem):
                if run.plan is not None or not run.step():
                    break
                search.price(partition)
        search.anneal(run.until(0.93))
        HillClimber(run, completer, rng).finish(search.best(5))
