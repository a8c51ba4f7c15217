"""The most that one pipeline on exactly given devices can process within a time, over all choices of its stages."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hexiopt.memo import Memo
from hexiopt.plan.token_layout import Floats, Ints
from solvers.proof.joint import Lines, most_alone
from solvers.proof.kernels import LIMIT, NEVER_S, NO, YES
from solvers.proof.pipeline_search import Before, search_pipelines
from solvers.proof.sums import Caps, Most, StageBounds, least_rests, least_sums, raise_sums
from solvers.proof.tables import ProofTables, Surroundings
from solvers.proof.usages import Lattice

Bools = NDArray[np.bool_]
_CAPS = 1024  # caps to cache
_BISECTIONS = 16  # most of a micro-batch size, for all usages at once
_ROUNDS = 4  # rounds of deriving caps from sums and sums from caps
_LIMITS = 2  # searches of a usage and size that reach their limit, until no more is asked
_SAME = 1e-4  # relative increase of a sum that does not justify another round
RELAXED = 0  # operations: least sums only
TINY = 400_000  # of a search on behalf of many questions: some thousandths of a second
SHORT = 4_000_000  # of a speculative search: some hundredths of a second
WHOLE = 50_000_000  # about a quarter of a second
Stages = tuple[tuple[int, int], ...]  # (group, layers) of each stage
_MicroBatches = tuple[Surroundings, int, int]  # with their size and number
# Numbers of micro-batches known to be possible, and not known to be impossible, by size, of usages in surroundings.
Learned = dict[tuple[Surroundings, int], dict[int, list[int]]]


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


@dataclass(frozen=True, slots=True)
class LayersOn:
    """The `least` and the `most` layers of a pipeline on each machine [machines]; `most` is 0 where it has none."""

    least: Ints
    most: Ints

    def within(self, num_layers: int) -> "LayersOn | None":
        """As narrow as the number of all layers makes them; None where that is out of reach."""
        least = np.maximum(self.least, num_layers - (self.most.sum() - self.most))
        least = np.where(self.most > 0, least, 0)
        most = np.minimum(self.most, num_layers - (least.sum() - least))
        possible = (least <= most).all() and least.sum() <= num_layers <= most.sum()
        return LayersOn(least, most) if possible else None


class PipelineSearch:
    """Answers for one step time `limit_s` in seconds, cached by surroundings and usage.

    `keep_on` is called regularly and may raise to end a long search. `before` has answers for the same tables and a
    step time that was no shorter: what a pipeline cannot process in more time, it cannot process in less.
    """

    def __init__(
        self,
        tables: ProofTables,
        limit_s: float,
        keep_on: Callable[[], None] = lambda: None,
        before: "PipelineSearch | None" = None,
    ) -> None:
        self.tables, self.limit_s, self._keep_on = tables, limit_s, keep_on
        self.stage_bounds = StageBounds(tables, limit_s)
        assert before is None or before.limit_s >= limit_s
        self._caps_kept: Memo[tuple[*_MicroBatches, tuple[int, ...] | None], Caps] = Memo(
            lambda key: self.stage_bounds.caps(*key), _CAPS
        )
        self._layers_kept: Memo[_MicroBatches, Ints] = Memo(lambda key: self.stage_bounds.most_layers(*key), _CAPS)
        # By size, of each usage: what sums allow, and do not rule out.
        self._relaxed_between: dict[Surroundings, dict[int, tuple[Ints, Ints]]] = {}
        self._loosest = Surroundings(min(tables.most_stages, tables.batch))  # of several pipelines
        self._between: Learned = {}
        self._gave_up: dict[tuple[*_MicroBatches, int], int] = {}  # work of searches that reached their limit
        self._named: Memo[tuple[Surroundings, int], tuple[Surroundings, int]] = Memo(
            lambda key: tables.representative(*key), 50_000
        )
        self._most_before: dict[Surroundings, dict[int, Ints]] = {}
        if before is not None:
            self._most_before = before._most_before | {
                around: {size: high for size, (_, high) in own.items()}
                for around, own in before._relaxed_between.items()
            }
            for key, known in before._between.items():
                self._between[key] = {size: [0, high] for size, (_, high) in known.items()}

    @property
    def learned(self) -> Learned:
        """What searches have found, for a search of the same step time in another process."""
        return self._between

    def learn(self, learned: Learned) -> None:
        """Take note of what another search of the same step time has found."""
        for key, theirs in learned.items():
            for size, known in self._between.setdefault(key, theirs).items():
                known[0], known[1] = max(known[0], theirs[size][0]), min(known[1], theirs[size][1])

    # ---------------------------------------------------------------------- bounds of all usages

    def _relaxed(self, around: Surroundings, size: int, num_micro_batches: int, asked: Bools) -> Floats:
        """The least sums of pipelines on each usage [usages]; infinite also where none is `asked` for."""
        self._keep_on()
        needed = self.tables.usages.inside(asked)
        caps, tables = self._caps_kept[around, size, num_micro_batches, None], self.tables
        vectors = tables.usages.vectors
        most_on = self._layers_kept[around, size, num_micro_batches]
        most = np.minimum(most_on[np.arange(len(most_on)), vectors].sum(axis=1), tables.num_layers)
        bounds = self._most(around, size, num_micro_batches, vectors, np.zeros_like(most), most)
        whole_s = self._sums(tables.usages, needed, caps, around, size, bounds, 0.0)[1]
        raise_sums(
            vectors, tables.usages.strides, needed, tables.groups, caps,
            tables.messages[size].round_trip_s, tables.num_layers, self.limit_s, whole_s,
        )  # fmt: skip
        return whole_s

    def _sums(
        self, lattice: Lattice, needed: Bools, caps: Caps, around: Surroundings, size: int, most: Most, known_s: float
    ) -> tuple[Floats, Floats]:
        tables = self.tables
        vectors, strides = lattice.vectors, lattice.strides
        firsts = vectors.shape[1] if tables.tied_units else 1
        before_s = np.empty((firsts, len(vectors), tables.num_layers + 1, vectors.shape[1]))
        whole_s = np.empty(len(vectors))
        round_trip_s = tables.messages[size].round_trip_s
        least_sums(
            vectors, strides, needed, tables.groups, caps, round_trip_s, tables.tails[around].tied_s, most,
            tables.num_layers, self.limit_s, known_s, before_s, whole_s,
        )  # fmt: skip
        return before_s, whole_s

    def _most(
        self, around: Surroundings, size: int, num_micro_batches: int, vectors: Ints, least: Ints, most: Ints
    ) -> Most:
        """Layers are those given. Seconds, under 1F1B: of p stages the one with (M − 1) mod p behind it ends no earlier
        than M/p times the sum S of all stages and messages: the first micro-batch's way takes S, and then the cycle
        from the first stage to the last and back advances p micro-batches in S. So p (T − tail) ≥ M S. Likewise of the
        first p stages with ρ behind, whose sum is L: p (T − tail) ≥ (M − ρ) L. There are at most as many stages as
        devices.
        """
        tails, devices = self.tables.tails[around], vectors.sum(axis=1)
        if self.tables.all_forward_first:
            never_s = np.full(len(vectors), NEVER_S)
            return Most(devices[-1] - devices, least, most, never_s, never_s)
        tail_s = tails.shown * np.maximum(tails.local_s, tails.all_s) + tails.after_s
        rest_s = max(0.0, self.limit_s - float(tail_s[:, :, 1].min()))
        behind = devices[-1] - devices
        turns = num_micro_batches - behind
        before_s = np.where(turns > 0, devices * rest_s / np.maximum(turns, 1), NEVER_S)
        return Most(behind, least, most, before_s, devices * rest_s / num_micro_batches)

    def _layers(
        self, around: Surroundings, size: int, num_micro_batches: int, vectors: Ints, on: LayersOn
    ) -> tuple[Ints, Ints]:
        """The least and the most layers of the first stages of a pipeline that are on exactly each of `vectors`
        [usages, machines], of which the last is the usage of all of its stages. Every machine of a stage has a
        layer."""
        num_layers, known = self.tables.num_layers, self._layers_kept[around, size, num_micro_batches]

        def between(own: Ints, others: Ints) -> tuple[Ints, Ints]:
            most = np.minimum(known[np.arange(len(known)), own], on.most - (others > 0))
            least = np.where(others == 0, on.least, 1)
            return np.where(own > 0, least, 0).sum(axis=1), np.where(own > 0, most, 0).sum(axis=1)

        rest = vectors[-1] - vectors
        least, most = between(vectors, rest)
        least_after, most_after = between(rest, vectors)
        return np.maximum(least, num_layers - most_after), np.minimum(most, num_layers - least_after)

    def most_relaxed(
        self, around: Surroundings, looser: Surroundings | None = None, among: Bools | None = None
    ) -> dict[int, Ints]:
        """By micro-batch size, an upper bound of the micro-batches of a pipeline on each usage [usages], as low as it
        gets for those `among` which it is asked. Surroundings of which less is known, `looser`, save work."""
        tables = self.tables
        if around not in self._relaxed_between:
            start = [self._most_before.get(around), None if looser is None else self.most_relaxed(looser, among=among)]
            known = [own for own in start if own is not None]
            self._relaxed_between[around] = {
                size: (
                    np.zeros(tables.usages.size, np.int64),
                    np.min([np.full(tables.usages.size, tables.batch // size), *(own[size] for own in known)], axis=0),
                )
                for size in tables.sizes
            }
        found = {}
        for size, (low, high) in self._relaxed_between[around].items():
            found[size] = high
            for _ in range(_BISECTIONS):
                left = low < high if among is None else among & (low < high)
                if not left.any():  # fewer micro-batches never take longer; most usages ask about one number
                    break
                middle = int(np.bincount(((low + high + 1) // 2)[left]).argmax())
                left &= (low < middle) & (middle <= high)
                possible = self._relaxed(around, size, middle, left) < NEVER_S
                low[left & possible] = middle
                high[left & ~possible] = middle - 1
        return found

    def most_sequences(
        self, around: Surroundings, looser: Surroundings | None = None, among: Bools | None = None
    ) -> Ints:
        """The most sequences of a pipeline on each usage, by `most_relaxed`; none on the empty one."""
        relaxed = self.most_relaxed(around, looser, among)
        found: Ints = np.max([size * most for size, most in relaxed.items()], axis=0)
        found[0] = 0
        return found

    # ---------------------------------------------------------------------- one usage, exactly

    def find(
        self, around: Surroundings, usage: int, size: int, num_micro_batches: int, most_work: int, most: int = 1
    ) -> tuple[int, Ints]:
        """Whether a pipeline on exactly `usage` processes the stated number of micro-batches in time (YES, NO or
        LIMIT), and up to `most` such pipelines (with 1, the search ends at the first): group and layers of each stage,
        then −1 [pipelines, stages + 1, 2]."""
        tables, vector = self.tables, self.tables.usages.vectors[usage]
        self._keep_on()
        most_on = self._layers_kept[around, size, num_micro_batches][np.arange(len(vector)), vector]
        on = LayersOn(np.minimum(vector, 1), most_on).within(tables.num_layers)
        before = None if on is None else self._before(around, usage, size, num_micro_batches, on)
        found = np.zeros((most, tables.most_stages + 1, 2), np.int64)
        if on is None or before is None:
            return NO, found[:0]
        if most_work == RELAXED:
            return LIMIT, found[:0]
        answer, count = search_pipelines(
            vector, tables.usages.below(usage).strides, tables.groups,
            tables.seconds(around.holders, size, num_micro_batches), tables.tails[around], tables.messages[size],
            before, on.least, on.most, tables.num_layers, num_micro_batches, self.limit_s, most_work, found,
        )  # fmt: skip
        return int(answer), found[:count]

    def _before(
        self, around: Surroundings, usage: int, size: int, num_micro_batches: int, on: LayersOn
    ) -> Before | None:
        """The first stages of pipelines with so many layers on each machine; None where there is no pipeline. On the
        usages inside this one the caps are tighter; at the fixpoint the least sum satisfies all of
        them."""
        caps = self._caps_kept[around, size, num_micro_batches, tuple(np.where(on.most > 0, on.least, -1).tolist())]
        lattice, known_s = self.tables.usages.below(usage), 0.0
        every = np.ones(lattice.size, np.bool_)
        layers = self._layers(around, size, num_micro_batches, lattice.vectors, on)
        most = self._most(around, size, num_micro_batches, lattice.vectors, *layers)
        for _ in range(1 + _ROUNDS):
            before_s, whole_s = self._sums(lattice, every, caps, around, size, most, known_s)
            if whole_s[-1] >= NEVER_S:
                return None
            if whole_s[-1] <= known_s * (1 + _SAME):
                break
            known_s = float(whole_s[-1])
        rest_s = np.empty_like(before_s)
        least_rests(
            lattice.vectors, lattice.strides, self.tables.groups, caps,
            self.tables.messages[size].round_trip_s, most, self.tables.num_layers, self.limit_s, known_s,
            before_s, rest_s,
        )  # fmt: skip
        return Before(before_s, rest_s, caps.first_tail_s)

    def _known(self, around: Surroundings, usage: int) -> dict[int, list[int]]:
        key = self._named[around, usage]
        if key not in self._between:
            relaxed = self.most_relaxed(around if around.holders == 1 else self._loosest)
            self._between[key] = {size: [0, int(relaxed[size][usage])] for size in self.tables.sizes}
        return self._between[key]

    def _answer(self, around: Surroundings, usage: int, size: int, num_micro_batches: int, most_work: int) -> int:
        """As `find` of one pipeline; what reached a limit is not searched again with less work."""
        around, usage = self._named[around, usage]
        key = around, size, num_micro_batches, usage
        if self._gave_up.get(key, -1) >= most_work:
            return LIMIT
        answer, _ = self.find(around, usage, size, num_micro_batches, most_work)
        if answer == LIMIT:
            self._gave_up[key] = most_work
        return answer

    def lower(self, around: Surroundings, usage: int, sequences: int) -> None:
        """Take note of an upper bound on the sequences of a pipeline on a usage, known from looser surroundings."""
        for size, between in self._known(around, usage).items():
            between[1] = min(between[1], sequences // size)

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
                answer = self._answer(around, usage, size, asked[size], most_work)
                if answer != NO:
                    if answer == YES:
                        known[size][0] = asked[size]
                    return True
                known[size][1] = asked[size] - 1
        return False

    def exact_most(self, around: Surroundings, usage: int, most_work: int = WHOLE, least: int = 1) -> int:
        """The most sequences of a pipeline on a usage, or an upper bound where searches reach their limit. Fewer than
        `least` are of no interest: then some number below that is returned."""
        known = self._known(around, usage)
        best = max(least - 1, *(size * low for size, (low, _) in known.items()))
        for size, between in known.items():
            low = best // size
            asked, limits = low + 1, 0
            while asked <= between[1]:
                answer = self._answer(around, usage, size, asked, most_work)
                if answer == NO:
                    between[1] = asked - 1
                else:
                    low = asked
                    if answer == YES:
                        between[0], best = asked, asked * size
                    elif most_work != RELAXED:
                        limits += 1
                        if limits == _LIMITS:
                            break
                asked = (low + between[1]) // 2 + 1
        return self.most(around, usage)

    def all_pipelines(
        self, around: Surroundings, usage: int, least: int, most: int, most_work: int = WHOLE
    ) -> Lines | None:
        """All pipelines on a usage that may process `least` sequences, each with its most; None where the search
        reached its limit."""
        tables, known = self.tables, self._known(around, usage)
        found = list[tuple[int, int, Ints]]()  # index of the size, most micro-batches, stages
        for c, size in enumerate(tables.sizes):
            count = max(1, -(-least // size))
            if count > known[size][1]:
                continue
            answer, rows = self.find(around, usage, size, count, most_work, most)
            if answer == LIMIT:
                return None
            seconds = tables.seconds(around.holders, size, count)  # of more micro-batches under GPipe: no less
            for row in rows:
                own = most_alone(
                    tables.groups, seconds, tables.tails[around], tables.messages[size], row[:, 0], row[:, 1],
                    int(np.argmin(row[:, 0])), count, known[size][1], self.limit_s,
                )  # fmt: skip
                found.append((c, own, row))
        stages = np.array([row for _, _, row in found], np.int64).reshape(len(found), tables.most_stages + 1, 2)
        return Lines(
            np.array([np.argmin(row[:, 0]) for row in stages], np.int64),
            np.array([c for c, _, _ in found], np.int64),
            np.array([own for _, own, _ in found], np.int64),
            np.maximum(stages[:, :-1, 0], 0),
            stages[:, :-1, 1].copy(),
        )


def stages_of_line(lines: Lines, i: int) -> Stages:
    """The stages of pipeline i."""
    p = int(lines.num_stages[i])
    return tuple(zip(lines.groups[i, :p].tolist(), lines.layers[i, :p].tolist(), strict=True))
