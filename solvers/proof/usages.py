"""Usages: the number of devices that a pipeline takes of each machine; and cases: how the pipelines of a plan use the
machines. Equal devices and machines are not told apart."""

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hexiopt.memo import Memo
from hexiopt.plan.token_layout import Ints


class Lattice:
    """All vectors from none to `most` devices of each machine, numbered: `vectors` [usages, machines].

    Number v denotes `vectors[v]`. The number of a vector is its product with `strides`, so numbers add and subtract
    like vectors.
    """

    def __init__(self, most: Sequence[int]) -> None:
        self.most: Ints = np.array(most, np.int64)
        sizes = self.most + 1
        self.strides: Ints = np.concatenate(([1], np.cumprod(sizes)[:-1])).astype(np.int64)
        self.vectors: Ints = (np.arange(math.prod(sizes.tolist()))[:, None] // self.strides) % sizes

    @property
    def size(self) -> int:
        """Usages, the empty one included."""
        return len(self.vectors)

    def inside(self, usages: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """All usages inside the marked ones, themselves included [usages]."""
        marked = usages.reshape(tuple(self.most[::-1] + 1))  # the first machine's number varies fastest
        for axis in range(marked.ndim):
            marked = np.flip(np.logical_or.accumulate(np.flip(marked, axis), axis), axis)
        found: NDArray[np.bool_] = marked.reshape(-1)
        return found

    def number(self, vector: Sequence[int]) -> int:
        """The number of a usage."""
        return int(np.dot(vector, self.strides))


class Usages(Lattice):
    """The usages of a whole problem, whose machines m and n are interchangeable if `kinds[m] == kinds[n]`."""

    def __init__(self, most: Sequence[int], kinds: Sequence[Hashable]) -> None:
        super().__init__(most)
        alike: dict[Hashable, list[int]] = {}
        for m, kind in enumerate(kinds):
            alike.setdefault((kind, most[m]), []).append(m)
        self.alike = [tuple(machines) for machines in alike.values()]
        self._below: Memo[tuple[int, ...], Lattice] = Memo(Lattice, 4096)
        self.representative = self.representatives((0,) * len(most))

    def representatives(self, uses: Sequence[int]) -> Ints:
        """The usage that stands for each where machines are interchangeable if also their `uses` are equal."""
        vectors = self.vectors.copy()
        for machines in self.alike:
            for use in {uses[m] for m in machines}:
                own = [m for m in machines if uses[m] == use]
                vectors[:, own] = -np.sort(-vectors[:, own], axis=1)
        found: Ints = vectors @ self.strides
        return found

    def below(self, usage: int) -> Lattice:
        """The lattice of the usages inside `usage`, with its own numbers."""
        return self._below[tuple(self.vectors[usage].tolist())]

    def canonical(self, parts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """A canonical form, equal for partitions that differ only in the names of equal machines."""
        rows = [self.vectors[w].tolist() for w in parts]
        found = []
        for named in itertools.product(*map(itertools.permutations, self.alike)):
            source = list(range(len(self.most)))
            for machines, others in zip(self.alike, named, strict=True):
                for m, other in zip(machines, others, strict=True):
                    source[m] = other
            found.append(tuple(sorted(tuple(row[m] for m in source) for row in rows)))
        return min(found)


class Use(IntEnum):
    """How the pipelines of a partition use a machine."""

    NONE = 0  # none uses it
    ALL = 1
    SOME = 2  # some use it, and some do not
    WHOLE = 3  # as SOME, and one of them is wholly in it


Case = tuple[Use, ...]  # by machine; every partition is of one case


def case_of(vectors: Ints) -> Case:
    """The case of pipelines with the usages `vectors` [pipelines, machines]."""
    used = vectors > 0
    alone = used & (used.sum(axis=1) == 1)[:, None]
    found = np.where(used.any(axis=0), np.where(alone.any(axis=0), Use.WHOLE, Use.SOME), Use.NONE)
    return tuple(map(Use, np.where(used.all(axis=0), Use.ALL, found).tolist()))


def cases(usages: Usages) -> Iterator[Case]:
    """All cases, one representative for equal machines."""
    for case in itertools.product(Use, repeat=len(usages.most)):
        if any(case) and all(case[m] <= case[n] for alike in usages.alike for m, n in itertools.pairwise(alike)):
            yield case


def allowed(case: Case, vectors: Ints) -> NDArray[np.bool_]:
    """Which of the usages `vectors` [usages, machines] a pipeline may have in a partition of a case."""
    used = vectors > 0
    found = np.ones(len(vectors), np.bool_)
    for m, use in enumerate(case):
        if use in (Use.ALL, Use.NONE):
            found &= used[:, m] == (use is Use.ALL)
        elif use is Use.SOME:
            found &= ~(used[:, m] & (used.sum(axis=1) == 1))
    return found
