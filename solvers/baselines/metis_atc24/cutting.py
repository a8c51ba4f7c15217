"""Cutting a sequence of ranks into device groups so that the slowest stage is fast, by dynamic programming.

For every number of stages at once and some times T of the slowest: going back from the last rank, `most[a][T][j]` is
how many layers j stages on the ranks from a on can take within T. A cut is good where that reaches the model's layers.
"""

import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from hexiopt.problem.problem import Problem
from solvers.baselines.metis_atc24.ranked_devices import StageGroup

_NO = -(1 << 30)  # layers of what cannot be
_COARSE, _FINE = 12, 16  # times of the slowest stage that are tried together: first to find it, then to be exact
_WIDEST = 8.0  # the longest of the first, over the shortest were all ranks always busy
_NEAR = 2.0  # the longest of the second, over the first that was good
_CUT_WITHIN = 3  # how many good ones of the second
_SAMPLES = 32  # random cuts within each, times the number of ranks

Cut = tuple[StageGroup, ...]


def cuts(
    problem: Problem,
    groups: list[list[StageGroup]],
    max_stages: int,
    rng: random.Random,
    longest_s: Callable[[int], float],
) -> Iterator[tuple[float, Cut]]:
    """Cuts of the ranks into each number of stages, whose slowest stage is about as fast as possible.

    `groups[a]` are the stages that may begin at rank a. Each cut comes with a time that its slowest stage does not
    exceed, which is at most `longest_s` of the number of stages.
    """
    num_layers, asked = problem.model.num_layers, problem.space.num_stages
    stages = [n for n in range(1, max_stages + 1) if asked in (None, n)]
    shortest_s = _shortest_s(groups, num_layers)
    if not stages or shortest_s == float("inf") or shortest_s > longest_s(min(stages)):
        return
    widest_s = _WIDEST * shortest_s + max(group.ends_s + group.waits_s for offered in groups for group in offered)
    limits = np.geomspace(shortest_s, widest_s, _COARSE)
    good = np.flatnonzero(_Table(groups, num_layers, max(stages), limits).good(stages))
    if len(good):
        fine = np.geomspace(limits[max(0, good[0] - 1)], _NEAR * limits[good[0]], _FINE)
        table = _Table(groups, num_layers, max(stages), fine[fine <= longest_s(min(stages))])
        for count in stages:
            yield from table.cuts(count, rng, longest_s(count))


def _shortest_s(groups: list[list[StageGroup]], num_layers: int) -> float:
    """Seconds of the slowest stage if every rank were as fast as in its best group."""
    rate = sum(
        max((1.0 / (g.layer_s * (g.end_rank - g.first_rank)) for g in offered), default=0.0) for offered in groups
    )
    return num_layers / rate if rate else float("inf")


class _Table:
    """`most[a][T][j]` of the file's head, for the times `limits`."""

    def __init__(
        self, groups: list[list[StageGroup]], num_layers: int, max_stages: int, limits: NDArray[np.float64]
    ) -> None:
        self.groups, self.num_layers, self.limits = groups, num_layers, limits
        self.most = np.full((len(groups) + 1, len(limits), max_stages + 1), _NO, np.int64)
        self.most[-1, :, 0] = 0
        self.ends = [np.array([group.end_rank for group in offered], np.int64) for offered in groups]
        self.taken = [self._within(offered, max_stages) for offered in groups]
        for a in range(len(groups) - 1, -1, -1):
            if groups[a]:
                after = self.most[self.ends[a]][:, :, :-1]
                self.most[a, :, 1:] = (self.taken[a][:, :, 1:] + after).max(axis=0)

    def good(self, stages: Sequence[int]) -> NDArray[np.bool_]:
        """Whether all layers fit some of these numbers of stages, for each limit."""
        enough: NDArray[np.bool_] = (self.most[0][:, list(stages)] >= self.num_layers).any(axis=1)
        return enough

    def _within(self, offered: list[StageGroup], max_stages: int) -> NDArray[np.int64]:
        """Layers that each group can take within each limit, by stages left [groups, limits, stages + 1]."""
        if not offered:
            return np.zeros((0, 0, 0), np.int64)
        layer_s, ends_s = np.array([g.layer_s for g in offered]), np.array([g.ends_s + g.waits_s for g in offered])
        fast = np.floor((self.limits[None, :] - ends_s[:, None]) / layer_s[:, None] + 1e-9).astype(np.int64)
        taken = np.minimum(fast[:, :, None], np.stack([g.max_layers[: max_stages + 1] for g in offered])[:, None, :])
        return np.where(taken > 0, np.minimum(taken, self.num_layers), _NO)

    def cuts(self, stages: int, rng: random.Random, longest_s: float) -> Iterator[tuple[float, Cut]]:
        """Cuts into `stages` groups within the shortest limits that allow one: that with most room, and random ones."""
        good = (self.most[0, :, stages] >= self.num_layers) & (self.limits <= longest_s)
        for limit in np.flatnonzero(good)[:_CUT_WITHIN]:
            samples = [None, *[rng] * max(1, _SAMPLES // len(self.groups))]
            for cut in dict.fromkeys(self._back(int(limit), stages, sample) for sample in samples):
                yield float(self.limits[limit]), cut

    def _back(self, limit: int, stages: int, rng: random.Random | None) -> Cut:
        at, cut, needed = 0, list[StageGroup](), self.num_layers
        for left in range(stages, 0, -1):
            offered = self.groups[at]
            taken = self.taken[at][:, limit, left]
            reach = taken + self.most[self.ends[at], limit, left - 1]
            chosen = int(np.argmax(reach)) if rng is None else rng.choice(np.flatnonzero(reach >= needed).tolist())
            cut.append(offered[chosen])
            needed -= int(taken[chosen])
            at = cut[-1].end_rank
        return tuple(cut)
