"""The most that one pipeline on exactly given devices can process within a time, over all choices of its stages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hexiopt.memo import Memo
from solvers.exact.proof.kernels import (
    LIMIT,
    NEVER_S,
    NO,
    YES,
    Caps,
    Messages,
    add_own_load,
    between_s,
    chain_ends,
    kind_of,
    least_sums,
    search_pipelines,
)
from solvers.exact.proof.tables import ProofTables, Surroundings
from solvers.exact.proof.usages import Lattice

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_RELAXED = 128  # tables of least sums to cache
_ROUNDS = 4  # rounds of deriving caps from sums and sums from caps
_SAME = 1e-4  # relative increase of a sum that does not justify another round
SHORT = 4_000_000  # operations of a speculative search: some hundredths of a second
WHOLE = 50_000_000  # about a quarter of a second
Stages = tuple[tuple[int, int], ...]  # (group, layers) of each stage


@dataclass(frozen=True, slots=True)
class FoundPipeline:
    """The stages of a pipeline, its micro-batch size in sequences, and the most micro-batches it may process in
    time."""

    size: int
    stages: Stages
    num_micro_batches: int

    @property
    def sequences(self) -> int:
        """Sequences that it processes."""
        return self.size * self.num_micro_batches


class PipelineSearch:
    """Answers for one step time `limit_s` in seconds, cached by surroundings and usage.

    `keep_on` is called regularly and may raise to end a long search.
    """

    def __init__(self, tables: ProofTables, limit_s: float, keep_on: Callable[[], None] = lambda: None) -> None:
        self.tables, self.limit_s, self._keep_on = tables, limit_s, keep_on
        self._relaxed = Memo(self._relax, _RELAXED)
        self._most_relaxed = Memo(self._bisect, _RELAXED)
        # Numbers of micro-batches known to be possible, and not known to be impossible, by size.
        self._between: dict[tuple[Surroundings, int], dict[int, list[int]]] = {}

    # ---------------------------------------------------------------------- bounds of all usages

    def _relax(self, key: tuple[Surroundings, int, int]) -> tuple[Caps, Floats, Floats]:
        self._keep_on()
        around, size, num_micro_batches = key
        caps = self._caps(around, size, num_micro_batches)
        before_s, whole_s = self._sums(self.tables.usages, caps, around, size, 0.0)
        return caps, before_s, whole_s

    def _sums(
        self, lattice: Lattice, caps: Caps, around: Surroundings, size: int, known_s: float
    ) -> tuple[Floats, Floats]:
        tables = self.tables
        vectors, strides = lattice.vectors, lattice.strides
        before_s = np.empty((len(vectors), tables.num_layers + 1, vectors.shape[1]))
        whole_s = np.empty(len(vectors))
        round_trip_s = tables.terms[around].messages[size].round_trip_s
        least_sums(
            vectors, strides, tables.groups, caps, round_trip_s, tables.num_layers, self.limit_s, known_s,
            before_s, whole_s,
        )  # fmt: skip
        return before_s, whole_s

    def _caps(self, around: Surroundings, size: int, num_micro_batches: int) -> Caps:
        tables = self.tables
        seconds, tails = tables.seconds(around.holders, size, num_micro_batches), tables.terms[around].tails
        tail_s = np.maximum(tails.local_s, tails.all_s) + tails.after_s
        first_tail_s = tail_s[1, :, 1].min()
        most, first = tables.most_stages, tables.all_forward_first

        def least(kind: int, behind: Sequence[int]) -> Floats:
            """The least that a stage adds to the sum, over all numbers of stages that may follow it."""
            found: Floats | None = None
            for r in behind:
                w = 0 if first else min(r, num_micro_batches - 1)
                both = seconds.both_s[kind, 0 if first else min(num_micro_batches, r + 1) - 1]
                fits = both < NEVER_S
                own = np.where(fits, (num_micro_batches - 1) * both - w * seconds.forward_s[kind], NEVER_S)
                found = own if found is None else np.minimum(found, own)
            assert found is not None
            return found

        inner = range(1, most) if most > 1 else [0]
        in_flight = 0 if first or most == 1 else min(num_micro_batches, 2) - 1
        return Caps(
            seconds.both_s[0, in_flight],
            least(0, inner) + first_tail_s,
            seconds.both_s[1, in_flight],
            least(1, inner) + tail_s[1],
            seconds.both_s[2, 0],
            least(2, [0]) + first_tail_s,
            seconds.both_s[3, 0],
            least(3, [0]) + tail_s[3],
        )

    def most_relaxed(self, around: Surroundings) -> dict[int, Ints]:
        """By micro-batch size, an upper bound of the micro-batches of a pipeline on each usage [usages]."""
        return self._most_relaxed[around]

    def _bisect(self, around: Surroundings) -> dict[int, Ints]:
        tables, found = self.tables, {}
        for size in tables.sizes:
            low = np.zeros(tables.usages.size, np.int64)
            high = np.full(tables.usages.size, tables.batch // size, np.int64)
            while (low < high).any():  # fewer micro-batches never take longer; most usages ask about one number
                middle = np.bincount(((low + high + 1) // 2)[low < high]).argmax()
                possible = self._relaxed[around, size, int(middle)][2] < NEVER_S
                low = np.where(possible, np.maximum(low, middle), low)
                high = np.where(possible, high, np.minimum(high, middle - 1))
            found[size] = low
        return found

    # ---------------------------------------------------------------------- one usage, exactly

    def find(
        self, around: Surroundings, usage: int, size: int, num_micro_batches: int, most_work: int, most: int = 1
    ) -> tuple[int, list[Stages]]:
        """Whether a pipeline on exactly `usage` processes the stated number of micro-batches in time (YES, NO or
        LIMIT), and up to `most` such pipelines (with 1, the search ends at the first)."""
        tables, vector = self.tables, self.tables.usages.vectors[usage]
        self._keep_on()
        caps, before_s, whole_s = self._relaxed[around, size, num_micro_batches]
        if whole_s[usage] >= NEVER_S:
            return NO, []
        strides = tables.usages.strides
        if vector.sum() >= 4:
            # On the usages inside this one the caps are tighter; at the fixpoint the least sum satisfies all of them.
            lattice, known_s = tables.usages.below(usage), float(whole_s[usage])
            strides = lattice.strides
            for _ in range(_ROUNDS):
                before_s, whole_s = self._sums(lattice, caps, around, size, known_s)
                if whole_s[-1] >= NEVER_S:
                    return NO, []
                if whole_s[-1] <= known_s * (1 + _SAME):
                    break
                known_s = float(whole_s[-1])
        found = np.zeros((most, tables.most_stages + 1, 2), np.int64)
        terms = tables.terms[around]
        answer, count = search_pipelines(
            vector, strides, tables.groups, tables.seconds(around.holders, size, num_micro_batches), terms.tails,
            terms.messages[size], before_s, tables.num_layers, num_micro_batches, self.limit_s, most_work, found,
        )  # fmt: skip
        return int(answer), [_stages(row) for row in found[:count].tolist()]

    def _known(self, around: Surroundings, usage: int) -> dict[int, list[int]]:
        key = around, usage
        if key not in self._between:
            relaxed = self.most_relaxed(around)
            self._between[key] = {size: [0, int(relaxed[size][usage])] for size in self.tables.sizes}
        return self._between[key]

    def most(self, around: Surroundings, usage: int) -> int:
        """The best known upper bound on the sequences of a pipeline on a usage."""
        return max(size * high for size, (_, high) in self._known(around, usage).items())

    def can_process(self, around: Surroundings, usage: int, sequences: int, most_work: int) -> bool:
        """Whether a pipeline on a usage may process that many sequences; True where the search reached its limit."""
        known = self._known(around, usage)
        asked = {size: max(1, -(-sequences // size)) for size in known}
        if any(known[size][0] >= asked[size] for size in known):
            return True
        for size, (_, high) in known.items():
            if high >= asked[size]:
                answer, _ = self.find(around, usage, size, asked[size], most_work)
                if answer != NO:
                    if answer == YES:
                        known[size][0] = asked[size]
                    return True
                known[size][1] = asked[size] - 1
        return False

    def exact_most(self, around: Surroundings, usage: int, most_work: int = WHOLE) -> int:
        """The most sequences of a pipeline on a usage, or an upper bound where searches reach their limit."""
        known = self._known(around, usage)
        best = max(size * low for size, (low, _) in known.items())
        for size, between in known.items():
            asked = between[1]
            while between[0] < between[1] and between[1] * size > best:
                answer, _ = self.find(around, usage, size, asked, most_work)
                if answer == LIMIT:
                    break
                between[answer != YES] = asked if answer == YES else asked - 1
                best = max(best, between[0] * size)
                asked = (max(between[0], best // size) + between[1] + 1) // 2
        return self.most(around, usage)

    def all_pipelines(
        self, around: Surroundings, usage: int, least: int, most: int, most_work: int = WHOLE
    ) -> list[FoundPipeline] | None:
        """All pipelines on a usage that may process `least` sequences, each with its most; None where the search
        reached its limit."""
        found = []
        for size in self.tables.sizes:
            num_micro_batches = max(1, -(-least // size))
            if num_micro_batches * size > self.tables.batch:
                continue
            answer, each = self.find(around, usage, size, num_micro_batches, most_work, most)
            if answer == LIMIT:
                return None
            found += [
                FoundPipeline(size, stages, self._most_of(around, size, stages, num_micro_batches)) for stages in each
            ]
        return found

    def _most_of(self, around: Surroundings, size: int, stages: Stages, least: int) -> int:
        """The most micro-batches with which a pipeline ends in time, given that `least` of them are possible."""
        count = least
        while (count + 1) * size <= self.tables.batch and self._fits(around, size, stages, count + 1):
            count += 1
        return count

    def _fits(self, around: Surroundings, size: int, stages: Stages, num_micro_batches: int) -> bool:
        tables = self.tables
        terms, seconds = tables.terms[around], tables.seconds(around.holders, size, num_micro_batches)
        messages, tails = terms.messages[size], terms.tails
        p = len(stages)
        groups, layers = np.array(stages, np.int64).T
        machines = tables.groups.machine[groups]
        kinds = np.array([kind_of(s, p, True) for s in range(p)])
        flights = (
            np.zeros(p, np.int64) if tables.all_forward_first else np.minimum(num_micro_batches, p - np.arange(p)) - 1
        )
        both_s, forward_s = seconds.both_s[kinds, flights, groups, layers], seconds.forward_s[kinds, groups, layers]
        if both_s.max() >= NEVER_S:
            return False
        ahead_s, back_s = chain_messages_s(messages, machines, groups)
        ends_s = np.zeros(p)
        chain_ends(
            tables.all_forward_first, forward_s, both_s - forward_s, ahead_s, back_s, p, num_micro_batches, ends_s
        )
        on = np.bincount(machines, layers + tails.units[kinds], len(tails.layer_s))
        tail_s = np.maximum(tails.local_s[kinds, groups, layers], (tails.layer_s * on)[machines])
        tail_s = np.maximum(tail_s, tails.all_s) + tails.after_s[kinds, groups, layers]
        return bool((ends_s + tail_s).max() <= self.limit_s)


def chain_messages_s(messages: Messages, machines: Ints, groups: Ints) -> tuple[Floats, Floats]:
    """Seconds of the messages of a chain ahead and back [stages − 1], which share interfaces with each other and
    `base`."""
    p, sent, received = len(machines), messages.base.copy(), messages.base.copy()
    add_own_load(machines, p, sent, received)

    def one_s(s: int, t: int) -> float:
        return float(between_s(messages, machines[s], machines[t], groups[s], groups[t], sent, received))

    ahead = [one_s(s, s + 1) for s in range(p - 1)]
    return np.array(ahead), np.array([one_s(s + 1, s) for s in range(p - 1)])


def _stages(row: list[list[int]]) -> Stages:
    return tuple((g, n) for g, n in row[: next(i for i, (g, _) in enumerate(row) if g < 0)])
