"""The usages that the pipelines of a plan may have together: packings onto the machines, and each one's
surroundings."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from solvers.exact.proof.kernels import pack
from solvers.exact.proof.tables import ProofTables, Sharding, Surroundings

Ints = NDArray[np.int64]
Partition = tuple[int, ...]  # usages, ascending


class Packings:
    """The most sequences that several pipelines process together, given the most of one pipeline on each usage."""

    def __init__(self, tables: ProofTables, sequences: Ints) -> None:
        self.tables, self.sequences = tables, sequences
        self.most_pipelines = min(tables.most_stages, tables.batch)
        self._best = pack(tables.usages.vectors, sequences, self.most_pipelines)

    @property
    def most(self) -> int:
        """The most sequences of two pipelines or more."""
        return int(self._best[2:, -1].max(initial=0))

    def best(self) -> Partition:
        """A partition that processes the most sequences."""
        vectors = self.tables.usages.vectors
        k, v, parts = 2 + int(self._best[2:, -1].argmax()), len(vectors) - 1, list[int]()
        while k:
            inside = (vectors <= vectors[v]).all(axis=1) & (self.sequences >= 1)
            inside[0] = False
            fitting = np.flatnonzero(inside)
            w = int(fitting[np.argmax(self._best[k - 1, v - fitting] + self.sequences[fitting] == self._best[k, v])])
            parts.append(w)
            k, v = k - 1, v - w
        return tuple(sorted(parts))

    def partitions(self, keep_on: Callable[[], None]) -> Iterator[Partition]:
        """All partitions of two pipelines or more that process the batch, one representative for equal machines.

        `keep_on` is called repeatedly and may raise.
        """
        usages, batch = self.tables.usages, self.tables.batch
        order = [w for w in range(1, usages.size) if self.sequences[w] >= 1]
        vectors, best = usages.vectors, self._best
        most_of_up_to = np.maximum.accumulate(np.maximum(best, 0), axis=0)
        seen = set[tuple[tuple[int, ...], ...]]()

        def extended(start: int, left: int, total: int, parts: Partition) -> Iterator[Partition]:
            if len(parts) >= 2 and total >= batch:
                yield parts
            if len(parts) == self.most_pipelines:
                return
            for at in range(start, len(order)):
                w = order[at]
                keep_on()
                if (vectors[left] >= vectors[w]).all():
                    more = int(most_of_up_to[self.most_pipelines - len(parts) - 1, left - w])
                    if total + self.sequences[w] + more >= batch:
                        yield from extended(at, left - w, total + int(self.sequences[w]), (*parts, w))

        for parts in extended(0, usages.size - 1, 0, ()):
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
