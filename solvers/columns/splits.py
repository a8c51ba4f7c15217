"""Contexts in which all chains run from one place to another and are cut at about the same layers, so that few layers
have holders on both sides of an uplink.

Programs learn contexts from what they choose, and choose no chains that only pay together; so these come first.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np
from scipy.optimize import linprog

from solvers.columns.machine_kinds import MachineKinds
from solvers.columns.master import Ints, Relaxed
from solvers.columns.sketches import ChainSketches
from solvers.columns.sync import SharedSync

_CUTS = 5  # for each two places: where the layers begin that either may hold
_MOST = 60  # sketches of a program


@dataclass(frozen=True, slots=True)
class Split:
    """A context, the kinds in the order in which its chains run through them, and sketches that make the best use of
    the machines in it, which process so many sequences."""

    context: SharedSync
    kinds: tuple[int, ...]
    sketches: Ints
    sequences: float


def best_splits(
    kinds: MachineKinds, sketches: ChainSketches, hope: Relaxed, base: SharedSync, most: int
) -> list[Split]:
    """The best for the sync and the time of `hope`; the rings of chains are those of `base`."""
    found = []
    for order, sides in _sides(kinds, sketches, hope.sync_s):
        context = replace(base, drain_s=0.0).with_sides(sides)
        unused = np.array([k not in order for k in range(len(kinds))])
        able = sketches.within(hope.sync_s, context) & ~(sketches.counts[:, unused] > 0).any(axis=1)
        rows = np.flatnonzero(able)
        gain = sketches.gains(hope.pipelines_s, hope.duals)[rows]
        rows = rows[np.argsort(-gain, kind="stable")[:_MOST]]
        if not rows.size:
            continue
        worth = sketches.rate[rows] * np.maximum(0.0, hope.pipelines_s - sketches.fill_s[rows])
        answer = linprog(-worth, A_ub=sketches.counts[rows].T, b_ub=kinds.supply, method="highs")
        if answer.x is not None:
            found.append(Split(context, order, rows[answer.x > 1e-6], float(worth @ answer.x)))
    return sorted(found, key=lambda split: -split.sequences)[:most]


def _sides(
    kinds: MachineKinds, sketches: ChainSketches, sync_s: float
) -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Of each way: the kinds in order, and the layers inside and outside of each uplink, of which those cross that sync
    in time."""
    num_layers = sketches.num_layers
    for first, second in permutations(kinds.places, 2):
        each_s = max(s for a, b, s in zip(first, second, sketches.layer_s.tolist(), strict=True) if a != b)
        either = int(sync_s / each_s)
        if either >= num_layers:
            continue
        order = tuple(k for place in (first, second) for k in range(len(kinds)) if kinds.place_of(k) == place)
        for begin in sorted({round(cut * (num_layers - either) / (_CUTS - 1)) for cut in range(_CUTS)}):
            before, after = (1 << begin + either) - 1, (1 << num_layers) - (1 << begin)
            inside = tuple(before * a | after * b for a, b in zip(first, second, strict=True))
            outside = tuple(before * (not a) | after * (not b) for a, b in zip(first, second, strict=True))
            yield order, (inside, outside)
