"""The master program: how many chains of which column use the machines best.

A step takes about T + S: T until the last pipeline has ended, S for the gradient sync of the busiest interface or
uplink over all chains used. What a chain's sync takes depends on the others (`SharedSync`). For a fixed S and context,
the columns that sync within S form a linear program in a row a kind, and one an uplink, whose messages fill at most T:

    max Σ_c x_c · rate_c · max(0, T − fill_c)   subject to   Σ_c x_c · counts(c, k) ≤ machines(k) for every kind k.

T is the least at which that is the global batch; the optimum is convex in T, so Newton's method finds it. An integer
program rounds it.
"""

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from hexiopt.memo import Memo
from solvers.columns.chain_column import ChainColumn, ChainRecipe
from solvers.columns.machine_kinds import Floats
from solvers.columns.sync import SharedSync

_NEWTON = 10  # steps at most
_CONVERGED = 0.002  # relative change of T
_NODES = 500  # of a rounding, at most
_ROUNDED_GAP = 1e-3
_LONGER = 7  # T of the linear program, and up to 6 % more: the T for which roundings are tried
_HALVINGS = 3  # of what lies between the largest T that is too short and the least that is not
_SLACK = 1 + 1e-9
_WHOLE = 1e-6  # of a micro-batch, short of which it counts as processed

Ints = NDArray[np.int64]
Chosen = list[tuple[ChainColumn, int]]
Syncs = Memo[tuple[ChainColumn, SharedSync], float]  # seconds of the sync of a column


@dataclass(frozen=True, slots=True, eq=False)
class Relaxed:
    """An answer of the linear program: T + S is `total_s`; `duals` are sequences per machine of each kind.

    It is over the chains that can be used in `context`; without one, each syncs as among copies of its own.
    """

    total_s: float
    sync_s: float
    pipelines_s: float
    duals: Floats
    context: SharedSync | None = None


def rank(answer: Relaxed) -> tuple[float, float]:
    """The order of answers, best first."""
    return answer.total_s, answer.sync_s


def sync_of(key: tuple[ChainColumn, SharedSync]) -> float:
    """Seconds of the sync of a column in a context."""
    column, context = key
    return column.sync.seconds(context)


class ColumnMaster:
    """The program over some columns; `correction` has the factors by which pipelines of recipes take longer."""

    def __init__(
        self,
        columns: Sequence[ChainColumn],
        supply: Floats,
        global_batch: int,
        num_pipelines: int | None = None,
        correction: Mapping[ChainRecipe, float] | None = None,
        syncs_s: Syncs | None = None,
    ) -> None:
        known = correction or {}
        self.columns, self._batch = columns, global_batch
        # Rows: machines of each kind; a micro-batch for every pipeline; the number of pipelines, where it is fixed.
        self._fixed = num_pipelines is not None
        rows = [[*c.counts, c.samples, *([c.recipe.width] if self._fixed else [])] for c in columns]
        self.usage: Floats = np.array(rows, float).T
        self.supply: Floats = np.append(supply, [global_batch, *([] if num_pipelines is None else [num_pipelines])])
        self._num_kinds = len(supply)
        self._rate: Floats = np.array([c.rate / known.get(c.recipe, 1.0) for c in columns])
        self._fill_s: Floats = np.array([c.fill_s for c in columns])
        self._syncs_s = syncs_s or Memo(sync_of)
        self._of_context: dict[SharedSync | None, Floats] = {}
        self._sync_in: dict[SharedSync, dict[int, float]] = {}  # seconds by context and column
        self._sync_of_sets: dict[tuple[int, ...], float] = {}  # by the columns used
        self._index = {column.recipe: i for i, column in enumerate(columns)}
        self._samples: Floats = np.array([c.samples for c in columns], float)
        # Of each column: seconds until its first micro-batches end, and between these, and sequences of each.
        periods_s = self._samples / self._rate
        self._timing = list(zip(self._fill_s.tolist(), periods_s.tolist(), map(int, self._samples), strict=True))
        # Seconds that the messages of a sequence take each uplink.
        self._sequence_s: Floats = np.array([c.sync.sequence_s for c in columns], float).T.reshape(-1, len(columns))

    def relaxed(self, sync_s: float, context: SharedSync | None, start_s: float | None = None) -> Relaxed | None:
        """The linear program over the columns that sync within `sync_s`, from T = `start_s` where one is known."""
        own = self._within(sync_s, context)
        usage, rate, fill_s = self.usage[:, own], self._rate[own], self._fill_s[own]
        if not rate.size:
            return None
        if start_s is None:
            fastest = linprog(-rate, A_ub=usage, b_ub=self.supply, method="highs")
            if fastest.fun is None or fastest.fun >= 0.0:
                return None
            start_s = 1.1 * self._batch / -fastest.fun
        pipelines_s, uplink_s = start_s, self._sequence_s[:, own]
        for _ in range(_NEWTON):
            values = rate * np.maximum(0.0, pipelines_s - fill_s)
            rows = np.vstack([usage, values * uplink_s])
            most = np.append(self.supply, np.full(len(uplink_s), pipelines_s))
            answer = linprog(-values, A_ub=rows, b_ub=most, method="highs")
            if answer.x is None:
                return None
            duals: Floats = -answer.ineqlin.marginals
            busy = duals[len(self.supply) :]
            slope = float((answer.x * rate * (pipelines_s > fill_s) * (1.0 - busy @ uplink_s)).sum() + busy.sum())
            if slope <= 0.0:
                pipelines_s *= 2.0
                continue
            change = (self._batch + float(answer.fun or 0.0)) / slope
            pipelines_s = max(pipelines_s + change, 0.3 * pipelines_s)
            if abs(change) < _CONVERGED * pipelines_s:
                return Relaxed(sync_s + pipelines_s, sync_s, pipelines_s, duals[: self._num_kinds], context)
        return None

    def sweep(
        self, context: SharedSync | None, num_values: int, start_s: float | None = None, limit_s: float = math.inf
    ) -> list[Relaxed]:
        """The answers for so many values of S, spread over those of the columns, best first; T is about `start_s`.

        T grows as S falls: values of S are left out at which T + S must exceed `limit_s`.
        """
        syncs_s = self.syncs_s(context)
        values = np.unique(syncs_s[np.isfinite(syncs_s)])
        if not values.size:
            return []
        picked = values[np.unique(np.linspace(0, len(values) - 1, num_values).round().astype(int))]
        found: list[Relaxed] = []
        for sync_s in picked[picked <= limit_s][::-1].tolist():
            answer = self.relaxed(sync_s, context, found[-1].pipelines_s if found else start_s)
            if answer is not None:
                found.append(answer)
                if picked[0] + answer.pipelines_s > limit_s:
                    break
        return sorted(found, key=rank)

    def rounded(self, sync_s: float, context: SharedSync | None, pipelines_s: float) -> Chosen:
        """Whole numbers of columns that process the most sequences in `pipelines_s`, in whole micro-batches."""
        own = np.flatnonzero(self._within(sync_s, context))
        if not own.size:
            return []
        values = self.values(own, pipelines_s)
        least = np.full(len(self.supply), -np.inf)
        if self._fixed:
            least[-1] = self.supply[-1]
        rows = np.vstack([self.usage[:, own], values * self._sequence_s[:, own]])
        busy = np.full(len(self._sequence_s), 1.0)
        limits = LinearConstraint(rows, np.append(least, -np.inf * busy), np.append(self.supply, pipelines_s * busy))
        with _quiet():
            answer = milp(
                -values,
                constraints=limits,
                integrality=np.ones(len(own), np.int64),
                bounds=Bounds(0, np.inf),
                options={"node_limit": _NODES, "mip_rel_gap": _ROUNDED_GAP},
            )
        if answer.x is None:
            return []
        return [(self.columns[i], round(x)) for i, x in zip(own.tolist(), answer.x, strict=True) if round(x) > 0]

    def least_rounded(self, answer: Relaxed) -> Chosen:
        """The rounding near the program's answer whose pipelines process the batch soonest."""
        best: tuple[float, Chosen] = (math.inf, [])
        less_s = answer.pipelines_s
        for k in range(_LONGER + _HALVINGS):
            tried_s = less_s if k == 0 else 1.01 * less_s if math.isinf(best[0]) else (less_s + best[0]) / 2
            chosen = self.rounded(answer.sync_s, answer.context, tried_s)
            if chosen:
                best = min(best, (self.pipelines_s(chosen), chosen), key=lambda b: b[0])
            if not chosen or self.processed(chosen, tried_s) < self._batch:
                less_s = tried_s
        return best[1]

    def predicted_s(self, chosen: Chosen) -> float:
        """What a step with these chains takes, about: T + S; infinite without any."""
        return self.predicted_at_s(*self.at(chosen))

    def predicted_at_s(self, at: Ints, copies: Ints) -> float:
        """As `predicted_s`, of so many copies of the columns at these positions, which ascend."""
        if not at.size:
            return math.inf
        own, times = at.tolist(), copies.tolist()
        return self._pipelines_s(own, times) + self._sync_s(own, times)

    def pipelines_s(self, chosen: Chosen) -> float:
        """The least T in which chains process the batch, in whole micro-batches."""
        at, copies = self.at(chosen)
        return self._pipelines_s(at.tolist(), copies.tolist())

    def _pipelines_s(self, own: Sequence[int], times: Sequence[int]) -> float:
        """From the T of the linear program on, by the ends of micro-batches in turn."""
        columns = [(*self._timing[i], copies) for i, copies in zip(own, times, strict=True)]
        least_s = _soonest_s(columns, self._batch)
        left, sent, ends = self._batch, [0] * len(columns), list[tuple[float, int]]()
        for k, (fill_s, period_s, samples, copies) in enumerate(columns):
            sent[k] = max(0, math.floor((least_s - fill_s) / period_s + _WHOLE))
            left -= sent[k] * samples * copies
            ends.append((fill_s + (sent[k] + 1) * period_s, k))
        heapify(ends)
        while left > 0:
            least_s, k = ends[0]
            fill_s, period_s, samples, copies = columns[k]
            sent[k] += 1
            left -= samples * copies
            heapreplace(ends, (fill_s + (sent[k] + 1) * period_s, k))
        if self._sequence_s.size:
            sequences = [n * samples * copies for n, (_, _, samples, copies) in zip(sent, columns, strict=True)]
            least_s = max(least_s, float((self._sequence_s[:, own] @ sequences).max()))
        return least_s

    def _sync_s(self, own: Sequence[int], times: Sequence[int]) -> float:
        """What the busiest interface or uplink of chains takes to sync, or the busiest link inside a machine."""
        if sum(times) == 1:
            return self.columns[own[0]].sync.lone_s
        key = tuple(own)
        found = self._sync_of_sets.get(key)
        if found is None:
            context = SharedSync.of(self.columns[i].sync.alone for i in own)
            known = self._sync_in.setdefault(context, {})
            for i in own:
                if i not in known:
                    known[i] = self._syncs_s[self.columns[i], context]
            found = self._sync_of_sets[key] = max(known[i] for i in own)
        holders = sum(self.columns[i].recipe.width * copies for i, copies in zip(own, times, strict=True))
        return (1.0 - 1.0 / holders) * found  # of a ring, each holder sends what all but one need

    def processed(self, chosen: Chosen, pipelines_s: float) -> float:
        """Sequences that chains process in `pipelines_s` seconds, in whole micro-batches."""
        at, copies = self.at(chosen)
        return float(self.values(at, pipelines_s) @ copies)

    def syncs_s(self, context: SharedSync | None) -> Floats:
        """Seconds of the sync of each column; infinite where it cannot be used in `context`."""
        if context not in self._of_context:
            found = [self._syncs_s[c, c.sync.alone if context is None else context] for c in self.columns]
            self._of_context[context] = np.array(found)
        return self._of_context[context]

    def _within(self, sync_s: float, context: SharedSync | None) -> NDArray[np.bool_]:
        own: NDArray[np.bool_] = self.syncs_s(context) <= sync_s * _SLACK
        return own

    def at(self, chosen: Chosen) -> tuple[Ints, Ints]:
        """The positions of chains among the columns, ascending, and how many there are of each."""
        found = sorted((self._index[column.recipe], copies) for column, copies in chosen)
        at, copies = np.array(found, np.int64).reshape(-1, 2).T
        return at, copies

    def values(self, at: Ints, pipelines_s: float | Floats) -> Floats:
        """Sequences that the columns at these positions process in `pipelines_s`, in whole micro-batches."""
        samples, left_s = self._samples[at], np.maximum(0.0, pipelines_s - self._fill_s[at])
        result: Floats = samples * np.floor(left_s * self._rate[at] / samples + _WHOLE)
        return result


def _soonest_s(columns: Sequence[tuple[float, float, int, int]], batch: int) -> float:
    """The least T in which chains process the batch, in parts of micro-batches: each column has a fill, a period,
    samples and copies."""
    rate = filled = found_s = 0.0
    for fill_s, period_s, samples, copies in sorted(columns):
        if rate and fill_s >= found_s:
            break
        own = samples * copies / period_s
        rate, filled = rate + own, filled + own * fill_s
        found_s = (batch + filled) / rate
    return found_s


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep from stdout what HiGHS prints in spite of its options (`transformNewIntegerFeasibleSolution`)."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
