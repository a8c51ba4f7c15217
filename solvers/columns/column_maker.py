"""Which columns to make: short chains of one kind, sketches that gain most under the duals of programs, chains cut at
about the same layers where they cross an uplink, and chains near those in use.

Columns, programs and roundings count as fractions of a step, fixed here, so that the clock steers nothing where steps
are limited.
"""

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np

from hexiopt.problem.problem import Problem
from solvers.columns.chain_column import ChainColumn, ChainRecipe
from solvers.columns.column_pool import ColumnPool
from solvers.columns.machine_kinds import MachineKinds
from solvers.columns.master import Chosen, Relaxed
from solvers.columns.nearby import near_recipe
from solvers.columns.programs import PROGRAM, ContextPrograms
from solvers.columns.sketches import ChainSketches, sketched
from solvers.columns.splits import best_splits
from solvers.completion.completer import PlanCompleter
from solvers.core.operators import OperatorTally
from solvers.core.partition import Partition, PipelineGroup
from solvers.core.search import Allowance, Search
from solvers.core.zero import LOCKSTEP

_UNITS = 20  # of work in a step: what a price takes; a program takes 3 of them, a rounding 10
_GPUS_A_PIPELINE = 16  # assumed at first
_COLUMN = 1  # unit that making a column takes
_LENGTHS = (1, 2, 3, 4)  # machines of the chains of one kind
_WORST_GAIN = -0.04  # relative: columns of almost no reduced cost are what rounding needs
_SPLITS = 6  # places to cut chains at uplinks, tried at first
_MUCH = 1.05  # times what programs take where each chain syncs as among copies of its own
_TRIES, _NEAR_MADE = 40, 8  # columns near those in use that are tried before an annealing, and made


def assumed_pipelines(problem: Problem) -> int:
    """How many pipelines are assumed to share states and batch at first."""
    return max(1, len(problem.usable_devices) // _GPUS_A_PIPELINE)


class ColumnMaker:
    """Makes the columns of one ZeRO stage for `run`, and has the programs over them.

    With `together`, as where the plan space says so, all pipelines are one group. `correction` has the factors by which
    pipelines of recipes take longer than their columns say. `tally` is that of the operator at work.
    """

    def __init__(self, run: Search, completer: PlanCompleter, zero_stage: int, *, together: bool) -> None:
        self.run, self.problem, self.kinds = run, run.problem, MachineKinds(run.problem)
        self.together = together or not self.problem.space.uneven_structure or zero_stage >= LOCKSTEP
        self.correction: dict[ChainRecipe, float] = {}
        self.tally = OperatorTally()
        self._completer, self._zero_stage = completer, zero_stage
        self._sizes = self.problem.space.micro_batch_sizes(self.problem.workload.global_batch)
        self._units = 0
        self._splits = False  # whether chains are made to be cut at the same layers
        self.assume(assumed_pipelines(self.problem))

    def assume(self, num_pipelines: int) -> None:
        """Begin anew, with columns of which so many pipelines share states and batch."""
        self.pool = ColumnPool(self._completer, self.kinds, self._zero_stage, num_pipelines)
        self._sketches: ChainSketches | None = sketched(self._completer, self.kinds, self.pool.shards)
        self.correction.clear()
        self.programs = ContextPrograms(self.problem, self.kinds, self.pool.columns, self.correction, self.work)

    def make(self, recipe: ChainRecipe) -> ChainColumn | None:
        """The column of a recipe, counted for the operator at work; None where the pool has none."""
        self.tally.proposed += 1
        self.tally.valid += 1
        self.tally.known += recipe in self.pool
        if recipe not in self.pool:
            self.work(_COLUMN)
            self.tally.unfit += self.pool.make(recipe) is None
        return self.pool.make(recipe)

    def learnt(self, partition: Partition) -> tuple[ChainRecipe, ...]:
        """Make the chains of a partition that others found; their recipes, if all of it is such chains."""
        recipes = [self.pool.recipe_of(group) for group in partition.pipeline_groups]
        known = [recipe for recipe in recipes if recipe is not None and self.make(recipe) is not None]
        whole = len(known) == len(recipes) and partition.sharding == self._zero_stage
        return tuple(known) if whole else ()

    def make_short(self, allowance: Allowance) -> None:
        """Short chains of one kind, of all widths."""
        for length, (kind, most) in product(_LENGTHS, enumerate(self.kinds.supply)):
            gpus = self.kinds.num_gpus[kind]
            if length <= most and self.continues(allowance):
                with self.operator("make_short_chains"):
                    for width in reversed(dict.fromkeys((*self.kinds.widths, 2 * gpus))):
                        if width <= 2 * gpus and length * gpus // width <= 2 * self.problem.model.num_layers:
                            self.make(ChainRecipe(((kind, length),), width, self._sizes[0]))

    def make_best(self, answers: Sequence[Relaxed], allowance: Allowance, most: int) -> int:
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
                if gain[i] <= _WORST_GAIN or not self.continues(allowance):
                    break
                sketches.done[i] = True
                every = tuple(range(len(self.kinds)))
                made += self._make_sketch(sketches, i, (every, every[::-1]))
        return made

    def make_splits(self, allowance: Allowance) -> None:
        """Where sync across uplinks takes much, chains that are cut at about the same layers where they cross one, and
        programs for them."""
        hope, sketches = self.programs.hope, self._sketches
        if self.together or hope is None or sketches is None or len(self.kinds.places) < 2:
            return
        self._splits = self.programs.answers[0].total_s > _MUCH * hope[0].total_s
        if not self._splits:
            return
        self.work(PROGRAM * len(self.kinds.places))
        for split in best_splits(self.kinds, sketches, *hope, _SPLITS)[::-1]:
            if allowance:
                for i in split.sketches.tolist():
                    self._make_sketch(sketches, i, (split.kinds,))
                self.programs.expect(split.context)

    def _make_sketch(self, sketches: ChainSketches, i: int, orders: Sequence[Sequence[int]]) -> int:
        """Make a sketch exactly, its kinds in each of some orders; how many columns came of it."""
        width, degrees = int(sketches.widths[i]), tuple(map(int, sketches.degrees[i]))
        parts = [tuple((k, int(sketches.counts[i, k])) for k in kinds if sketches.counts[i, k]) for kinds in orders]
        made = 0
        with self.operator("make_sketches"):
            for order in dict.fromkeys(parts):
                for own in (degrees, ()) if len(order) == 1 else (degrees,):
                    made += self.make(ChainRecipe(order, width, self._sizes[0], own)) is not None
        return made

    def make_near(self, recipes: Sequence[ChainRecipe], allowance: Allowance, rng: random.Random) -> None:
        """Columns near those in use: a machine more or less, or of another kind, wider or narrower, in other ways."""
        used, made = list(dict.fromkeys(recipes)), 0
        for _ in range(_TRIES):
            if not allowance or made == _NEAR_MADE:
                return
            near = near_recipe(rng.choice(used), self.kinds, self._sizes[:2], rng)
            if near is not None and near not in self.pool:
                with self.operator("make_near"):
                    made += self.make(near) is not None

    def make_other_ways(self, recipes: Iterable[ChainRecipe], allowance: Allowance) -> None:
        """Other micro-batch sizes and TP degrees for the columns in use."""
        for recipe in dict.fromkeys(recipes):
            for size, way in product(self._sizes[:3], (0, 1)):
                if allowance:
                    with self.operator("make_other_ways"):
                        self.make(replace(recipe, micro_batch_size=size))
                        self.make(replace(recipe, micro_batch_size=size, degrees=(), rank=way))

    def chosen(self, recipes: Sequence[ChainRecipe]) -> Chosen:
        """The columns of some recipes, and how often each is used."""
        return [(column, n) for recipe, n in Counter(recipes).items() if (column := self.pool.make(recipe))]

    def laid_out(self, chosen: Chosen) -> tuple[list[PipelineGroup], list[ChainRecipe]]:
        """Columns on machines, those of most machines first; the recipe of each pipeline group."""
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
                group = self.pool.pipeline_group(column.recipe, machines)
                assert group is not None, "machines of a kind are interchangeable"
                copied.append(group)
            if self.together:
                stages = (sum(slots, ()) for slots in zip(*(group.stages for group in copied), strict=True))
                copied = [PipelineGroup(tuple(stages), column.recipe.micro_batch_size)]
            groups += copied
            recipes += [column.recipe] * len(copied)
        return groups, recipes

    @contextmanager
    def operator(self, name: str) -> Iterator[None]:
        """A context in which columns that are made and partitions that are priced count for an operator."""
        with self.run.tallied(name) as self.tally:
            yield
        self.tally = OperatorTally()

    def work(self, units: int) -> None:
        """Count units of work, as steps of the search."""
        self._units += units
        for _ in range(self._units // _UNITS):
            self.run.step()
        self._units %= _UNITS

    def continues(self, allowance: Allowance) -> bool:
        """Whether to go on: until `allowance` is spent, and past the time limit while there is no plan."""
        run = self.run
        return bool(allowance) or (run.plan is None and run.budget.max_steps is None and not run.stopped)
