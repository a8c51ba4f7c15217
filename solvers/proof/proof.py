"""Whether any plan of a schedule takes a given time or less, on four levels; each is used only for what the previous
one leaves open. Levels A to C are bounds, level D prices plans.

A. *Packing.* N(u) is the most sequences that one pipeline on usage u can process in time. If no multiset of usages
   that fits on the machines has Σ N(u) ≥ batch, no plan of two or more pipelines is in time. Plans of one pipeline are
   searched separately.
B. *Cases.* Every partition is of one `Case`, whose surroundings lower N; then packings of its pipelines are asked.
C. *Partitions.* For each multiset that suffices, all surroundings of its pipelines are known.
D. *Combinations.* For the rest, all pipelines that can process enough are combined, timed together, and priced, with
   all names of equal devices that may be in time.

The single pipelines and partitions that A and B leave are *questions*, independent of each other. What a first effort
leaves open is asked again with more.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from hexiopt.plan.token_layout import Ints
from solvers.core.search import Allowance, Search
from solvers.core.turns import Turns
from solvers.core.workers import in_parallel, num_processes
from solvers.proof.combinations import COMBINE, Answer, Combinations
from solvers.proof.joint import Lines
from solvers.proof.kernels import LIMIT, NO
from solvers.proof.partitions import (
    Known,
    Packings,
    PackingTable,
    Partition,
    Question,
    Several,
    Single,
    case_surroundings,
    surroundings,
)
from solvers.proof.pipelines import RELAXED, SHORT, TINY, WHOLE, FoundPipeline, Learned, PipelineSearch
from solvers.proof.tables import ProofTables, Sharding, Surroundings
from solvers.proof.usages import Case, allowed, cases

ALONE = Surroundings(1)
_FAR = 1.15  # times the batch: where packings process that much, only partitions, which include sync, can refute them
_SINGLES = 2_000  # most single pipelines to price
_COMBINED = 2_000  # most combinations of families of a partition whose members are priced
_LISTED = 20_000  # most pipelines of a usage to combine
_MOST_LISTED = 300_000
_EFFORTS = (1, 8, 64, 512)  # factors of the limits, one after the other for what is left open
_FEW = 32  # partitions of a case that are asked one by one rather than made fewer
_OPERATIONS_PER_S = 50e6  # of a slow core, at least
_ROUNDING = 1 + 1e-9
_MANY_USAGES = 60  # where cases are worth a process
_WORTH_A_PROCESS = 8  # questions at the first effort


class BudgetSpentError(Exception):
    """The search's budget ended inside a proof."""


class Proof:
    """Answers questions about step times of plans of one schedule. A step of `run` is a usage, a case or a plan
    examined. Plans found are offered to `run`."""

    def __init__(self, tables: ProofTables, run: Search, packings: type[Packings] = PackingTable) -> None:
        self._tables, self._run, self._allowed, self._effort = tables, run, run.until(), 1
        self._packings = packings
        self._known = list[Known]()  # by step time, the shortest last
        self._combinations = Combinations(tables, run)

    def answer(self, limit_s: float, allowed: Allowance) -> Answer:
        """`none`: no plan takes `limit_s` or less; `found`: one does and was offered; `open`: neither is known.

        Raises BudgetSpentError where `allowed` is spent.
        """
        self._allowed = allowed
        limit_s *= _ROUNDING
        known = self._of(limit_s)
        singles = known.open("single", self._singles)
        left = self._left_open(known, [(question, 0) for question in singles], limit_s, 1)
        if left is None:
            return "found"
        asked: list[tuple[Question, int]] = [(question, 1) for question in left]
        if self._packs(known.search) is not None:
            asked += [(question, 0) for question in known.open("several", self._partitions)]  # these take long to list
        left = self._left_open(known, asked, limit_s, len(_EFFORTS))
        return "found" if left is None else "open" if left else "none"

    def _of(self, limit_s: float) -> Known:
        """What is known of a step time, from the longer ones that were asked: neither a better plan found nor a weaker
        target starts the proof anew."""
        before = next((known for known in reversed(self._known) if known.search.limit_s >= limit_s), None)
        if before is not None and before.search.limit_s == limit_s:
            return before
        search = PipelineSearch(self._tables, limit_s, self._keep_on, None if before is None else before.search)
        found = Known(search, before)
        self._known = sorted([*self._known, found], key=lambda known: -known.search.limit_s)
        return found

    def _left_open(
        self, known: Known, questions: Sequence[tuple[Question, int]], limit_s: float, most: int
    ) -> list[Question] | None:
        """The questions, each with how many efforts it has had, that stay open after `most`; None where a plan was
        found."""

        def ask(number: int, efforts: int) -> Answer:
            self._effort = _EFFORTS[efforts]
            return self._ask(known.search, questions[number][0], limit_s)

        tried = [efforts for _, efforts in questions]
        least = 2 if any(tried) else _WORTH_A_PROCESS
        answers = self._shared(known.search, tried, most, ask, least)
        for (question, _), answer in zip(questions, answers, strict=True):
            if answer == "none":
                known.refute(question)
        if "found" in answers:
            return None
        if None in answers:
            raise BudgetSpentError
        return [question for (question, _), answer in zip(questions, answers, strict=True) if answer == "open"]

    @property
    def _processes(self) -> int:
        """Processes that share what is independent: one where steps are counted, as the result must not depend on the
        cores."""
        return 1 if self._run.budget.max_steps is not None else num_processes()

    def _shared(
        self, search: PipelineSearch, tried: Sequence[int], most: int, work: Callable[[int, int], Any], least: int
    ) -> list[Any]:
        """The last result of `work` on each number, given how often that was tried before, until it is not "open" or
        was tried so often; in all processes, or in one where there are fewer than `least`. All end at "found". None
        where the budget ended first."""
        count = min(self._processes, len(tried)) if len(tried) >= least else 1
        turns = Turns(tried, most, shared=count > 1)

        def done() -> dict[int, Any]:
            results = dict[int, Any]()
            with suppress(BudgetSpentError):
                while (turn := turns.take(self._keep_on)) is not None:
                    number, tries = turn
                    try:
                        result = work(number, tries)
                    except BaseException:
                        turns.close()  # nobody waits for it
                        raise
                    results[number] = result if result != "open" or tries + 1 == most else None
                    turns.give_back(number, done=result != "open")
                    if result == "found":
                        turns.close()
            return results

        def share(run: Search) -> tuple[dict[int, Any], Learned]:
            self._run, self._combinations = run, Combinations(self._tables, run)
            self._allowed = replace(self._allowed, search=run)
            return done(), search.learned

        with in_parallel(self._run, *[share] * (count - 1)) as answers:
            found = done()
            for own, learned in filter(None, [] if "found" in found.values() else answers()):
                found |= {number: result for number, result in own.items() if result is not None}
                search.learn(learned)
        return [found.get(number) for number in range(len(tried))]

    def _ask(self, search: PipelineSearch, question: Question, limit_s: float) -> Answer:
        if isinstance(question, Single):
            return self._single(search, question, limit_s)
        return self._several(search, question, limit_s)

    def _step(self) -> None:
        self._keep_on()
        if not self._run.step():
            raise BudgetSpentError

    def _work(self, most: int) -> int:
        """At most so many operations of one call, as many as there is time for: calls are not interrupted."""
        self._keep_on()
        if self._run.budget.max_steps is not None:
            return most
        return max(1, min(most, int(_OPERATIONS_PER_S * self._run.left_s())))

    def _keep_on(self) -> None:
        if not self._allowed:
            raise BudgetSpentError

    # ------------------------------------------------------------------------- plans of one pipeline

    def _singles(self, known: Known) -> list[Single]:
        tables, found = self._tables, list[Single]()
        relaxed = known.search.most_relaxed(ALONE)
        for size in tables.sizes:
            if tables.batch % size == 0:
                for usage in np.flatnonzero(relaxed[size] >= tables.batch // size).tolist():
                    if usage and usage == tables.usages.representative[usage]:
                        found.append(Single(usage, size))
        return found

    def _single(self, search: PipelineSearch, asked: Single, limit_s: float) -> Answer:
        size, count, unnamed = asked.size, self._tables.batch // asked.size, False
        # The first is nearly always valid, but tied embeddings and switches may forbid it.
        for most in (1, min(_SINGLES * self._effort, _MOST_LISTED)):
            self._step()
            answer, found = search.find(ALONE, asked.usage, size, count, self._work(WHOLE * self._effort), most)
            if answer == NO:
                return "none"
            for row in found.tolist():
                stages = tuple((g, n) for g, n in row[: [g for g, _ in row].index(-1)])
                for sharding in self._combinations.shardings(1):
                    offered = self._combinations.offer([FoundPipeline(size, stages, count)], sharding, limit_s)
                    if offered == "found":
                        return "found"
                    unnamed |= offered == "open"
        return "open" if answer == LIMIT or unnamed else "none"

    # ------------------------------------------------------------------------- plans of several

    def _packs(self, search: PipelineSearch) -> Ints | None:
        """The most sequences of each usage, whatever the other pipelines are; None where no packing of two pipelines or
        more processes the batch."""
        around = self._anything
        if around.holders < 2:
            return None
        sequences = search.most_sequences(around).copy()
        packed = self._packed(search, around, sequences, self._tables.usages.representative, None, SHORT)
        return None if packed is None else sequences

    @property
    def _anything(self) -> Surroundings:
        """Of several pipelines, whatever they are."""
        return Surroundings(min(self._tables.most_stages, self._tables.batch))

    def _partitions(self, known: Known) -> list[Several]:
        """What levels A and B leave, the most promising first."""
        tables, search, around = self._tables, known.search, self._anything
        sequences = self._packs(search)
        if sequences is None:
            return []
        left = [case for case in cases(tables.usages) if case not in known.cases]
        left.sort(key=lambda case: -allowed(case, tables.usages.vectors).sum())  # the longest first
        found = self._shared(
            search,
            [0] * len(left),
            1,
            lambda number, _: list(self._of_case(search, left[number], around, sequences)),
            1 if tables.usages.size >= _MANY_USAGES else sys.maxsize,
        )
        known.cases |= {case: own for case, own in zip(left, found, strict=True) if own is not None}
        if None in found:
            raise BudgetSpentError
        questions = [question for own in known.cases.values() for question in own]
        return sorted(questions, key=lambda question: -sum(question.most))

    def _packed(
        self, search: PipelineSearch, around: Surroundings, sequences: Ints, alike: Ints, num_pipelines: int | None,
        work: int,
    ) -> Packings | None:  # fmt: skip
        """The packings of pipelines in the same surroundings, whose `sequences` are lowered by searches of `work` as
        far as it decides something; None where no packing processes the batch. `alike` says which usage stands for each
        there."""
        tables, asked = self._tables, set[int]()
        while True:
            packings = self._packings(tables, sequences, num_pipelines)
            most = packings.most if num_pipelines is None else packings.most_of(num_pipelines)
            if most < tables.batch:
                return None
            todo = {int(alike[w]) for w in packings.best(num_pipelines)} - asked
            if not todo or most > _FAR * tables.batch:
                return packings
            for usage in sorted(todo):
                self._lower(search, around, sequences, alike, usage, packings.needed(usage, num_pipelines), work)
                asked.add(usage)

    def _lower(
        self, search: PipelineSearch, around: Surroundings, sequences: Ints, alike: Ints, usage: int, least: int,
        work: int,
    ) -> None:  # fmt: skip
        """Lower the `sequences` of a usage, and of those for which it stands, by searches of `work`."""
        self._step()
        search.lower(around, usage, int(sequences[usage]))
        most = search.exact_most(around, usage, work, max(1, least))
        sequences[alike == usage] = np.minimum(sequences[alike == usage], most)

    def _of_case(self, search: PipelineSearch, case: Case, around: Surroundings, sequences: Ints) -> Iterator[Several]:
        """The partitions of a case that may process the batch."""
        tables = self._tables
        own = np.where(allowed(case, tables.usages.vectors), sequences, 0)
        if self._packings(tables, own).most < tables.batch:
            return
        self._step()
        known = case_surroundings(case, around.holders, "any")
        own = np.minimum(own, search.most_sequences(known, around, own > 0))
        alike = tables.usages.representatives(case)
        packings = self._packed(search, known, own, alike, None, RELAXED)
        if packings is None:
            return
        for k in range(2, packings.most_pipelines + 1):
            if packings.most_of(k) < tables.batch:
                continue
            # With two pipelines, groups by machine shard states no wider than all holders, with the same rings.
            hybrid = k > 2 and tables.problem.space.machine_sharding
            shardings: tuple[Sharding, ...] = ("all", "machine") if hybrid else ("all",)
            for sharding in shardings:
                self._step()
                near = case_surroundings(case, k, sharding)
                most = np.minimum(own, search.most_sequences(near, known, own > 0))
                for work in (RELAXED, TINY):
                    packed = self._packed(search, near, most, alike, k, work)
                    if packed is None:
                        break
                    few = list(islice(packed.partitions(k, case, self._keep_on), _FEW))
                    if len(few) < _FEW:
                        break
                if packed is not None:
                    for parts in self._that_suffice(search, near, packed, alike, k, case):
                        yield Several(parts, sharding, tuple(most[list(parts)].tolist()))

    def _that_suffice(
        self, search: PipelineSearch, around: Surroundings, packed: Packings, alike: Ints, k: int, case: Case
    ) -> Iterable[Partition]:
        """The partitions of a case that process the batch when each of their usages is searched in the case's
        surroundings: once for all partitions with that usage, which are many times as many.

        `packed.sequences` falls meanwhile, and with it what `partitions` lists.
        """
        sequences, batch, devices = packed.sequences, self._tables.batch, self._tables.usages.vectors.sum(axis=1)
        left: Iterable[Partition] = packed.partitions(k, case, self._keep_on)
        for work in (TINY, SHORT):
            asked, several = set[int](), list[Partition]()
            for parts in left:
                for w in sorted(alike[list(parts)].tolist(), key=lambda w: devices[w]):  # few devices take less time
                    if w not in asked and sequences[list(parts)].sum() >= batch:
                        asked.add(w)
                        needed = self._packings(self._tables, sequences, k).needed(w, k)
                        self._lower(search, around, sequences, alike, w, needed, work)
                if sequences[list(parts)].sum() >= batch:
                    several.append(parts)
            left = [parts for parts in several if sequences[list(parts)].sum() >= batch]
        return left

    def _several(self, search: PipelineSearch, asked: Several, limit_s: float) -> Answer:
        around = surroundings(self._tables, asked.parts, asked.sharding)
        most = dict(zip(asked.parts, asked.most, strict=True))
        if self._refuted(search, asked.parts, around, most):
            return "none"
        return self._combined(search, asked, around, limit_s)

    def _refuted(
        self, search: PipelineSearch, parts: Partition, around: Mapping[int, Surroundings], known: Mapping[int, int]
    ) -> bool:
        """Whether the pipelines of a partition process less than the batch, given each other's usages."""
        batch, vectors = self._tables.batch, self._tables.usages.vectors
        for w in around:
            search.lower(around[w], w, known[w])
        most = {w: search.most(around[w], w) for w in around}
        easiest = sorted(around, key=lambda w: (vectors[w].sum(), -parts.count(w)))
        self._step()
        for work in (RELAXED, SHORT, self._work(WHOLE * self._effort)):
            for w in easiest:
                others = sum(most[x] for x in parts if x != w)
                if others + most[w] * parts.count(w) < batch:
                    return True
                needed = -(-(batch - others) // parts.count(w))  # the least that each on this usage must process
                if not search.can_process(around[w], w, max(1, needed), work):
                    return True
            for w in easiest:
                others = sum(most[x] for x in parts) - most[w]
                most[w] = min(most[w], search.exact_most(around[w], w, work, max(1, batch - others)))
                if sum(most[x] for x in parts) < batch:
                    return True
        return False

    def _combined(
        self, search: PipelineSearch, asked: Several, around: Mapping[int, Surroundings], limit_s: float
    ) -> Answer:
        make, parts, tables = self._combinations, asked.parts, self._tables
        known = dict(zip(parts, asked.most, strict=True))
        most = {w: min(known[w], search.most(around[w], w)) for w in around}
        listed = dict[int, Lines]()
        for w in sorted(around, key=lambda w: tables.usages.vectors[w].sum()):  # what they can process narrows the rest
            spare = sum(most[x] for x in parts) - tables.batch
            count = min(_LISTED * self._effort, _MOST_LISTED)
            found = search.all_pipelines(around[w], w, most[w] - spare, count, self._work(WHOLE * self._effort))
            if found is None:
                return "open"
            if not len(found.size):
                return "none"
            listed[w], most[w] = found, int((np.array(tables.sizes)[found.size] * found.num_micro_batches).max())
        lists = [(listed[w], parts.count(w)) for w in around]
        every = make.together(
            lists, asked.sharding == "machine", limit_s, self._work(COMBINE * self._effort), _COMBINED * self._effort
        )
        if every is None:
            return "open"
        answer: Answer = "none"
        for chosen in every:
            for zero in make.shardings(len(parts)):
                if len(parts) > 2 and zero.groups != asked.sharding:
                    continue
                for split in make.splits(chosen):
                    self._step()
                    offered = make.offer(split, zero, limit_s)
                    if offered == "found":
                        return "found"
                    answer = "open" if offered == "open" else answer
        return answer
