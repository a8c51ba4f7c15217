"""Which pipelines a plan may have together: packings of usages onto the machines, what surrounds each pipeline of such
a partition, and the questions that packings leave to a proof."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hexiopt.plan.token_layout import Ints
from solvers.proof.kernels import pack
from solvers.proof.pipelines import PipelineSearch
from solvers.proof.tables import ProofTables, Sharding, Surroundings
from solvers.proof.usages import Case, Use, case_of

Partition = tuple[int, ...]  # usages, ascending
Kind = Literal["single", "several"]  # of questions


class Packings(ABC):
    """The most sequences that several pipelines, up to `most_pipelines`, process together, given the most of one
    pipeline on each usage (`sequences`, which may fall later)."""

    def __init__(self, tables: ProofTables, sequences: Ints, most_pipelines: int | None = None) -> None:
        self.tables, self.sequences = tables, sequences
        self.most_pipelines = min(tables.most_stages, tables.batch) if most_pipelines is None else most_pipelines

    @property
    def most(self) -> int:
        """The most sequences of two pipelines or more."""
        return max((self.most_of(k) for k in range(2, self.most_pipelines + 1)), default=0)

    @abstractmethod
    def most_of(self, num_pipelines: int) -> int:
        """The most sequences of so many pipelines; negative where they do not fit."""

    @abstractmethod
    def needed(self, usage: int, num_pipelines: int | None = None) -> int:
        """The least that a pipeline on a usage must process, if the others process the most that they can."""

    @abstractmethod
    def best(self, num_pipelines: int | None = None) -> Partition:
        """A partition that processes the most sequences."""

    @abstractmethod
    def every(self, num_pipelines: int, case: Case, keep_on: Callable[[], None]) -> Iterator[Partition]:
        """All partitions of a case that process the batch. `keep_on` is called repeatedly and may raise."""

    def partitions(self, num_pipelines: int, case: Case, keep_on: Callable[[], None]) -> Iterator[Partition]:
        """As `every`, one representative for equal machines."""
        seen = set[tuple[tuple[int, ...], ...]]()
        for parts in self.every(num_pipelines, case, keep_on):
            name = self.tables.usages.canonical(parts)
            if name not in seen:
                seen.add(name)
                yield parts


class PackingTable(Packings):
    """By dynamic programming over all usages."""

    def __init__(self, tables: ProofTables, sequences: Ints, most_pipelines: int | None = None) -> None:
        super().__init__(tables, sequences, most_pipelines)
        self._best = pack(tables.usages.vectors, sequences, self.most_pipelines)

    def most_of(self, num_pipelines: int) -> int:
        """As of `Packings`."""
        return int(self._best[num_pipelines, -1])

    def needed(self, usage: int, num_pipelines: int | None = None) -> int:
        """As of `Packings`."""
        others = self._best[1:-1] if num_pipelines is None else self._best[num_pipelines - 1 : num_pipelines]
        return self.tables.batch - int(others[:, -1 - usage].max())

    def best(self, num_pipelines: int | None = None) -> Partition:
        """As of `Packings`."""
        vectors = self.tables.usages.vectors
        k = 2 + int(self._best[2:, -1].argmax()) if num_pipelines is None else num_pipelines
        v, parts = len(vectors) - 1, list[int]()
        while k:
            inside = (vectors <= vectors[v]).all(axis=1) & (self.sequences >= 1)
            inside[0] = False
            fitting = np.flatnonzero(inside)
            w = int(fitting[np.argmax(self._best[k - 1, v - fitting] + self.sequences[fitting] == self._best[k, v])])
            parts.append(w)
            k, v = k - 1, v - w
        return tuple(sorted(parts))

    def every(self, num_pipelines: int, case: Case, keep_on: Callable[[], None]) -> Iterator[Partition]:
        """As of `Packings`."""
        usages, batch, sequences = self.tables.usages, self.tables.batch, self.sequences
        order = np.flatnonzero(sequences >= 1)
        vectors, best = usages.vectors, self._best

        def extended(start: int, left: int, total: int, parts: Partition) -> Iterator[Partition]:
            keep_on()
            missing = num_pipelines - len(parts)
            if missing == 0:
                yield parts
                return
            own = order[start:]
            own = own[(vectors[own] <= vectors[left]).all(axis=1)]
            enough = total + sequences[own] + np.maximum(best[missing - 1, left - own], -batch) >= batch
            for w in own[enough].tolist():
                at = int(np.searchsorted(order, w))
                yield from extended(at, left - w, total + int(sequences[w]), (*parts, w))

        for parts in extended(0, usages.size - 1, 0, ()):
            if case_of(usages.vectors[list(parts)]) == case:
                yield parts


def surroundings(tables: ProofTables, parts: Partition, sharding: Sharding) -> dict[int, Surroundings]:
    """The surroundings of a pipeline of each usage, given the other pipelines of a partition."""
    used: NDArray[np.bool_] = np.greater(tables.usages.vectors[list(parts)], 0)  # [pipelines, machines]
    forced = [bool(column.any() and not column.all()) for column in used.T]
    alone = [int(np.flatnonzero(row)[0]) if row.sum() == 1 else -1 for row in used]  # the only machine of a pipeline
    whole = tuple(sorted({m for m in alone if m >= 0 and forced[m]}))
    least_machines = tables.least_machines(parts)
    found = {}
    for i, w in enumerate(parts):
        if w in found:
            continue
        others = [j for j in range(len(parts)) if j != i]
        inside = tuple(sum(int(alone[j] == m) for j in others) for m in range(used.shape[1]))
        found[w] = Surroundings(
            len(parts),
            sharding,
            tuple(forced),
            least_machines,
            whole,
            inside if sharding == "machine" else (),
        )
    return found


def case_surroundings(case: Case, holders: int, sharding: Sharding) -> Surroundings:
    """What surrounds every pipeline of a partition of a case; states are held by at
    most `holders`."""
    forced = tuple(use in (Use.SOME, Use.WHOLE) for use in case)
    return Surroundings(
        holders,
        sharding,
        forced,
        2,
        tuple(m for m, use in enumerate(case) if use is Use.WHOLE),
        (0,) * len(case) if sharding == "machine" else (),
    )


@dataclass(frozen=True, slots=True)
class Single:
    """Whether a plan of one pipeline on a usage, of micro-batches of `size`, is in time."""

    usage: int
    size: int


@dataclass(frozen=True, slots=True)
class Several:
    """Whether a plan of a partition is in time, given the sharding groups and an upper bound on the sequences of each
    pipeline."""

    parts: Partition
    sharding: Sharding
    most: tuple[int, ...]


Question = Single | Several


def _named(question: Question) -> Single | tuple[Partition, Sharding]:
    """What is asked, whatever is known of it."""
    return question if isinstance(question, Single) else (question.parts, question.sharding)


class Known:
    """What is known of one step time: the single pipelines, and the `refuted` ones of the questions `listed` by kind.
    Partitions are listed case by case, and those of the `cases` listed so far are kept.

    No plan in time T means none in less, and so for single pipelines and partitions. So `before`, of a time that was no
    shorter, is where this one begins.
    """

    def __init__(self, search: PipelineSearch, before: "Known | None") -> None:
        self.search = search
        self.refuted: set[Single | tuple[Partition, Sharding]] = set() if before is None else before.refuted.copy()
        self.listed: dict[Kind, list[Question]] = {} if before is None else before.listed.copy()
        self.cases: dict[Case, list[Several]] = {} if before is None else before.cases.copy()

    def refute(self, question: Question) -> None:
        """Take note that a question is answered with no."""
        self.refuted.add(_named(question))

    def open(self, kind: Kind, questions: "Callable[[Known], Sequence[Question]]") -> list[Question]:
        """The questions of a kind that are not refuted; `questions` lists them where no longer time has."""
        if kind not in self.listed:
            self.listed[kind] = list(questions(self))
        self.listed[kind] = [question for question in self.listed[kind] if _named(question) not in self.refuted]
        return self.listed[kind]
