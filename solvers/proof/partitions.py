"""The usages that the pipelines of a plan may have together: packings onto the machines, and each one's
surroundings."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from solvers.proof.cases import Case, case_of
from solvers.proof.kernels import pack
from solvers.proof.tables import ProofTables, Sharding, Surroundings

Ints = NDArray[np.int64]
Partition = tuple[int, ...]  # usages, ascending


class Packings:
    """The most sequences that several pipelines, up to `most_pipelines`, process together, given the most of one
    pipeline on each usage."""

    def __init__(self, tables: ProofTables, sequences: Ints, most_pipelines: int | None = None) -> None:
        self.tables, self.sequences = tables, sequences
        self.most_pipelines = min(tables.most_stages, tables.batch) if most_pipelines is None else most_pipelines
        self._best = pack(tables.usages.vectors, sequences, self.most_pipelines)

    @property
    def most(self) -> int:
        """The most sequences of two pipelines or more."""
        return max((self.most_of(k) for k in range(2, self.most_pipelines + 1)), default=0)

    def most_of(self, num_pipelines: int) -> int:
        """The most sequences of so many pipelines."""
        return int(self._best[num_pipelines, -1])

    def needed(self, usage: int, num_pipelines: int | None = None) -> int:
        """The least that a pipeline on a usage must process, if the others process the most that they can."""
        others = self._best[1:-1] if num_pipelines is None else self._best[num_pipelines - 1 : num_pipelines]
        return self.tables.batch - int(others[:, -1 - usage].max())

    def best(self, num_pipelines: int | None = None) -> Partition:
        """A partition that processes the most sequences."""
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

    def partitions(self, num_pipelines: int, case: Case, keep_on: Callable[[], None]) -> Iterator[Partition]:
        """All partitions of a case that process the batch, one representative for equal machines.

        `keep_on` is called repeatedly and may raise.
        """
        usages, batch, sequences = self.tables.usages, self.tables.batch, self.sequences
        order = np.flatnonzero(sequences >= 1)
        vectors, best = usages.vectors, self._best
        seen = set[tuple[tuple[int, ...], ...]]()

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
                name = usages.canonical(parts)
                if name not in seen:
                    seen.add(name)
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
        crossing = tuple(sum(int(alone[j] < 0 and used[j, m]) for j in others) for m in range(used.shape[1]))
        inside = tuple(sum(int(alone[j] == m) for j in others) for m in range(used.shape[1]))
        found[w] = Surroundings(
            len(parts),
            sharding,
            tuple(forced),
            least_machines,
            whole,
            crossing,
            inside if sharding == "machine" else (),
        )
    return found
