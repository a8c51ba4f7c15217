"""Cases: partitions whose pipelines use the machines alike, and what is known of the surroundings of each pipeline."""

import itertools
from collections.abc import Iterator
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from solvers.proof.tables import Sharding, Surroundings
from solvers.proof.usages import Usages

Ints = NDArray[np.int64]


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


def case_surroundings(case: Case, holders: int, sharding: Sharding, pipelines: int) -> Surroundings:
    """What surrounds every pipeline of a partition of at least `pipelines` pipelines, of a case; states are held by at
    most `holders`. If all use two machines or more, each sends messages through all of these."""
    forced = tuple(use in (Use.SOME, Use.WHOLE) for use in case)
    across = case.count(Use.ALL) > 1
    return Surroundings(
        holders,
        sharding,
        forced,
        2,
        tuple(m for m, use in enumerate(case) if use is Use.WHOLE),
        tuple((pipelines - 1) * (across and use is Use.ALL) for use in case),
        (0,) * len(case) if sharding == "machine" else (),
    )
