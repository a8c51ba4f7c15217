"""Whether any plan of a schedule takes a given time or less, on three levels; each is used only for what the previous
one leaves open. Levels A and B are bounds, level C prices plans.

A. *Packing.* N(u) is the most sequences that one pipeline on usage u can process in time. If no multiset of usages
   that fits on the machines has Σ N(u) ≥ batch, no plan of two or more pipelines is in time. Plans of one pipeline are
   searched separately.
B. *Partitions.* For each multiset that suffices, the pipelines have known `Surroundings`, which lower N.
C. *Combinations.* For the rest, all pipelines that can process enough are combined, timed together, and priced.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from solvers.core.search import Allowance, Search
from solvers.core.workers import in_parallel, num_processes
from solvers.exact.proof.combinations import Combinations
from solvers.exact.proof.kernels import LIMIT, NO
from solvers.exact.proof.partitions import Packings, Partition, surroundings
from solvers.exact.proof.pipelines import SHORT, WHOLE, FoundPipeline, PipelineSearch
from solvers.exact.proof.tables import ProofTables, Sharding, Surroundings

Ints = NDArray[np.int64]
ALONE = Surroundings(1)
_FAR = 1.15  # times the batch: where packings process that much, only partitions, which include sync, can refute them
_SINGLES = 2_000  # most single pipelines to price
_LISTED = 20_000  # most pipelines of a usage to combine
_COMBINED = 1_000_000  # combinations of a partition
_ROUNDING = 1 + 1e-9
_WORTH_A_PROCESS = 8  # partitions
Answer = Literal["none", "found", "open"]


class BudgetSpentError(Exception):
    """The search's budget ended inside a proof."""


class Proof:
    """Answers questions about step times of plans of one schedule. A step of `run` is a usage or a combination
    examined. Plans found are offered to `run`."""

    def __init__(self, tables: ProofTables, run: Search) -> None:
        self._tables, self._run, self._allowed = tables, run, run.until()
        self._combinations = Combinations(tables, run)

    def answer(self, limit_s: float, allowed: Allowance) -> Answer:
        """`none`: no plan takes `limit_s` or less; `found`: one does and was offered; `open`: neither is known.

        Raises BudgetSpentError where `allowed` is spent.
        """
        self._allowed = allowed
        limit_s *= _ROUNDING
        search = PipelineSearch(self._tables, limit_s, self._keep_on)
        alone = self._one(search, limit_s)
        if alone != "none":
            return alone
        return self._several(search, limit_s)

    def _step(self) -> None:
        self._keep_on()
        if not self._run.step():
            raise BudgetSpentError

    def _keep_on(self) -> None:
        if not self._allowed:
            raise BudgetSpentError

    # ------------------------------------------------------------------------- plans of one pipeline

    def _one(self, search: PipelineSearch, limit_s: float) -> Answer:
        tables = self._tables
        relaxed = search.most_relaxed(ALONE)
        representative = tables.usages.representative
        for size in tables.sizes:
            if tables.batch % size:
                continue
            count = tables.batch // size
            for usage in np.flatnonzero(relaxed[size] >= count).tolist():
                if usage and usage == representative[usage]:
                    answer = self._single(search, usage, size, count, limit_s)
                    if answer != "none":
                        return answer
        return "none"

    def _single(self, search: PipelineSearch, usage: int, size: int, count: int, limit_s: float) -> Answer:
        for most in (1, _SINGLES):  # the first is nearly always valid, but tied embeddings and switches may forbid it
            self._step()
            answer, found = search.find(ALONE, usage, size, count, WHOLE, most)
            if answer == NO:
                return "none"
            for stages in found:
                for sharding in self._combinations.shardings(1):
                    if self._combinations.offer([FoundPipeline(size, stages, count)], sharding, limit_s) <= limit_s:
                        return "found"
        return "open" if answer == LIMIT else "none"

    # ------------------------------------------------------------------------- plans of several

    def _several(self, search: PipelineSearch, limit_s: float) -> Answer:
        tables = self._tables
        most_pipelines = min(tables.most_stages, tables.batch)
        if most_pipelines < 2:
            return "none"
        around = Surroundings(most_pipelines)
        relaxed = search.most_relaxed(around)
        sequences = np.max([size * most for size, most in relaxed.items()], axis=0)
        sequences[0] = 0
        exact = set[int]()  # representatives whose N is exact
        representative = tables.usages.representative
        while True:
            packings = Packings(tables, sequences)
            if packings.most < tables.batch:
                return "none"
            todo = {int(representative[w]) for w in packings.best()} - exact
            if not todo or packings.most > _FAR * tables.batch:
                break
            for usage in sorted(todo):
                self._step()
                most = search.exact_most(around, usage)
                same = representative == usage
                sequences[same] = np.minimum(sequences[same], most)
                exact.add(usage)
        return self._each(search, list(packings.partitions(self._keep_on)), sequences, limit_s)

    def _each(self, search: PipelineSearch, each: list[Partition], sequences: Ints, limit_s: float) -> Answer:
        """The answer for all partitions. Where they are many, a second process takes half of them, unless steps are
        counted: then the result must not depend on the cores."""
        if self._run.budget.max_steps is not None or len(each) < _WORTH_A_PROCESS or num_processes() < 2:
            return self._in_turn(search, each, sequences, limit_s)

        def theirs(run: Search) -> Answer:
            self._run, self._combinations = run, Combinations(self._tables, run)
            self._allowed = replace(self._allowed, search=run)
            try:
                return self._in_turn(search, each[1::2], sequences, limit_s)
            except BudgetSpentError:
                return "open"

        with in_parallel(self._run, theirs) as answer:
            mine = self._in_turn(search, each[::2], sequences, limit_s)
            if mine == "found":
                return mine
            [other] = answer()
        if other is None:
            raise BudgetSpentError
        return other if mine == "none" or other == "found" else mine

    def _in_turn(self, search: PipelineSearch, each: list[Partition], sequences: Ints, limit_s: float) -> Answer:
        left_open = False
        for parts in each:
            answer = self._partition(search, parts, sequences, limit_s)
            if answer == "found":
                return answer
            left_open = left_open or answer == "open"
        return "open" if left_open else "none"

    def _partition(self, search: PipelineSearch, parts: Partition, sequences: Ints, limit_s: float) -> Answer:
        answer: Answer = "none"
        hybrid = self._tables.problem.space.machine_sharding
        # With two pipelines, groups by machine shard states no wider than all holders, with the same rings.
        shardings: tuple[Sharding, ...] = ("all",) if len(parts) == 2 or not hybrid else ("all", "machine")
        for sharding in shardings:
            around = surroundings(self._tables, parts, sharding)
            if self._refuted(search, parts, around, sequences):
                continue
            own = self._combined(search, parts, around, sharding, limit_s)
            if own == "found":
                return own
            answer = own if own == "open" else answer
        return answer

    def _refuted(
        self, search: PipelineSearch, parts: Partition, around: Mapping[int, Surroundings], sequences: Ints
    ) -> bool:
        """Whether the pipelines of a partition process less than the batch, given each other's usages."""
        batch, vectors = self._tables.batch, self._tables.usages.vectors
        most = {w: min(int(sequences[w]), search.most(around[w], w)) for w in around}
        easiest = sorted(around, key=lambda w: (vectors[w].sum(), -parts.count(w)))
        for most_work in (SHORT, WHOLE):
            for w in easiest:
                others = sum(most[x] for x in parts if x != w)
                if others + most[w] * parts.count(w) < batch:
                    return True
                self._step()
                needed = -(-(batch - others) // parts.count(w))  # the least that each on this usage must process
                if not search.can_process(around[w], w, max(1, needed), most_work):
                    return True
        for w in easiest:
            self._step()
            most[w] = min(most[w], search.exact_most(around[w], w))
            if sum(most[x] for x in parts) < batch:
                return True
        return False

    def _combined(
        self,
        search: PipelineSearch,
        parts: Partition,
        around: Mapping[int, Surroundings],
        sharding: Sharding,
        limit_s: float,
    ) -> Answer:
        batch, make = self._tables.batch, self._combinations
        most = {w: search.most(around[w], w) for w in around}
        spare = sum(most[w] for w in parts) - batch
        lists = []
        for w in around:
            self._step()
            found = search.all_pipelines(around[w], w, most[w] - spare, _LISTED)
            if found is None:
                return "open"
            lists.append((found, parts.count(w)))
        if math.prod(math.comb(len(found) + count - 1, count) for found, count in lists) > _COMBINED:
            return "open"
        for number, chosen in enumerate(make.each(lists)):
            if number % 64 == 0:
                self._step()
            together = make.together(chosen, sharding == "machine", limit_s)
            if together is None:
                continue
            for zero in make.shardings(len(parts)):
                if len(parts) > 2 and zero.groups != sharding:
                    continue
                for split in make.splits(together):
                    if make.offer(split, zero, limit_s) <= limit_s:
                        return "found"
        return "none"
