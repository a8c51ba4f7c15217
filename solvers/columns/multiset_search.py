"""Annealing over multisets of columns: which chains, how many of each, by what a step with them is predicted to take.

A move takes a few chains out and fills the machines that are then idle with others, the more likely the more they gain
per machine under the duals of a linear program. Kirkpatrick, Gelatt and Vecchi, Science 220 (1983).
"""

import math
import random
from collections.abc import Iterator

import numpy as np

from solvers.columns.machine_kinds import Floats
from solvers.columns.master import Chosen, ColumnMaster, Ints

_HOT = (0.002, 0.002, 0.006)  # first temperatures, drawn: relative worsenings
_COLD = 0.0002  # last temperature
_MOST_REMOVED = 4  # chains taken out in a move
_NOISE = 0.3  # of what a chain gains
_LONGER = (1.0, 1.0, 1.1, 1.3)  # of the longest sync among the chains kept: what the new ones may take
_RESTART = 1000  # moves without a new best, after which the best is gone back to


class MultisetSearch:
    """Anneals multisets of the columns of `master`; `duals` price a machine of each kind in sequences."""

    def __init__(self, master: ColumnMaster, duals: Floats, pipelines_s: float, rng: random.Random) -> None:
        self._master, self._rng = master, rng
        self._draw = np.random.default_rng(rng.randrange(1 << 30))
        self._usage = master.usage
        worth = master.values(np.arange(len(master.columns)), pipelines_s)
        cost = np.maximum(duals @ self._usage[: len(duals)], 1e-9)
        self._gain: Floats = np.log(np.maximum(worth / cost, 1e-9))
        self._alone_s = master.syncs_s(None)
        self._known: dict[bytes, float] = {}

    def anneal(self, start: Chosen, num_moves: int) -> Iterator[tuple[float, Chosen]]:
        """The best multisets met, from `start`: predicted seconds, and the chains, best first."""
        now = self._counts(start)
        now_s = self._predicted_s(now)
        best, best_s, since = now, now_s, 0
        hot = self._rng.choice(_HOT)
        met = {now.tobytes(): (now_s, now)}
        for move in range(num_moves):
            temperature = hot * (_COLD / hot) ** (move / num_moves)
            other = self._neighbour(now)
            other_s = self._predicted_s(other)
            since += 1
            if other_s < now_s or self._rng.random() < math.exp((now_s - other_s) / (now_s * temperature)):
                now, now_s = other, other_s
                met[now.tobytes()] = (now_s, now)
                if now_s < best_s:
                    best, best_s, since = now, now_s, 0
            if since > _RESTART:
                now, now_s, since = best, best_s, 0
        for seconds, counts in sorted(met.values(), key=lambda found: found[0]):
            yield seconds, self._chosen(counts)

    def _neighbour(self, now: Ints) -> Ints:
        rng, counts = self._rng, now.copy()
        for _ in range(rng.randint(1, _MOST_REMOVED)):
            used = np.flatnonzero(counts)
            if not used.size:
                break
            counts[used[rng.randrange(len(used))]] -= 1
        free = self._master.supply - self._usage @ counts
        gain = self._gain + self._draw.normal(0.0, _NOISE, len(counts))
        left = np.flatnonzero(counts)
        sync_s = (self._alone_s[left].max() if left.size else np.inf) * rng.choice(_LONGER)
        fits = np.flatnonzero((self._usage <= free[:, None]).all(axis=0) & (self._alone_s <= sync_s))
        fits = fits[np.argsort(-gain[fits])]
        while fits.size:
            usage = self._usage[:, fits[0]]
            copies = int((free[usage > 0] // usage[usage > 0]).min())
            counts[fits[0]] += copies
            free = free - copies * usage
            fits = fits[1:][(self._usage[:, fits[1:]] <= free[:, None]).all(axis=0)]
        return counts

    def _predicted_s(self, counts: Ints) -> float:
        key = counts.tobytes()
        if key not in self._known:
            at = np.flatnonzero(counts)
            self._known[key] = self._master.predicted_at_s(at, counts[at])
        return self._known[key]

    def _counts(self, chosen: Chosen) -> Ints:
        counts = np.zeros(len(self._master.columns), np.int64)
        at, copies = self._master.at(chosen)
        counts[at] = copies
        return counts

    def _chosen(self, counts: Ints) -> Chosen:
        return [(self._master.columns[i], int(counts[i])) for i in np.flatnonzero(counts).tolist()]
