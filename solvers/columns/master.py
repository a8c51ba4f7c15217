"""The master program: how many chains of which column use the machines best.

A step takes about T + S: T until the last pipeline has ended, S for the gradient sync of the busiest interface or
uplink over all chains used. For a fixed S, the columns that sync within it form a linear program in a row a kind:

    max Σ_c x_c · rate_c · max(0, T − fill_c)   subject to   Σ_c x_c · counts(c, k) ≤ machines(k) for every kind k.

T is the least at which that is the global batch; the optimum is convex in T, so Newton's method finds it (as in
`heuristics/shape_program.py`). An integer program rounds it.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from solvers.columns.chain_column import ChainColumn, ChainRecipe
from solvers.columns.machine_kinds import Floats

_NEWTON = 10  # steps at most
_CONVERGED = 0.002  # relative change of T
_NODES = 500  # of a rounding, at most
_ROUNDED_GAP = 1e-3
_LONGER = 7  # T of the linear program, and up to 6 % more: the T for which roundings are tried
_SLACK = 1 + 1e-9

Ints = NDArray[np.int64]
Chosen = list[tuple[ChainColumn, int]]


@dataclass(frozen=True, slots=True)
class Relaxed:
    """An answer of the linear program: T + S is `total_s`; `duals` are sequences per machine of each kind."""

    total_s: float
    sync_s: float
    pipelines_s: float
    duals: Floats


class ColumnMaster:
    """The program over some columns; `correction` has the factors by which pipelines of recipes take longer."""

    def __init__(
        self,
        columns: Sequence[ChainColumn],
        supply: Floats,
        global_batch: int,
        num_pipelines: int | None = None,
        correction: Mapping[ChainRecipe, float] | None = None,
    ) -> None:
        known = correction or {}
        self.columns, self._batch = columns, global_batch
        # Rows: machines of each kind; a micro-batch for every pipeline; the number of pipelines, where it is fixed.
        self._fixed = num_pipelines is not None
        rows = [[*c.counts, c.samples, *([c.recipe.width] if self._fixed else [])] for c in columns]
        self._usage: Floats = np.array(rows, float).T
        self.supply: Floats = np.append(supply, [global_batch, *([] if num_pipelines is None else [num_pipelines])])
        self._num_kinds = len(supply)
        self._rate: Floats = np.array([c.rate / known.get(c.recipe, 1.0) for c in columns])
        self._fill_s: Floats = np.array([c.fill_s for c in columns])
        self._sync_s: Floats = np.array([c.sync_s for c in columns])
        self._samples: Floats = np.array([c.samples for c in columns], float)

    def relaxed(self, sync_s: float, start_s: float | None = None) -> Relaxed | None:
        """The linear program over the columns that sync within `sync_s`, from T = `start_s` where one is known."""
        own = self._sync_s <= sync_s * _SLACK
        usage, rate, fill_s = self._usage[:, own], self._rate[own], self._fill_s[own]
        if not rate.size:
            return None
        if start_s is None:
            fastest = linprog(-rate, A_ub=usage, b_ub=self.supply, method="highs")
            if fastest.fun is None or fastest.fun >= 0.0:
                return None
            start_s = 1.1 * self._batch / -fastest.fun
        pipelines_s = start_s
        for _ in range(_NEWTON):
            answer = linprog(
                -rate * np.maximum(0.0, pipelines_s - fill_s), A_ub=usage, b_ub=self.supply, method="highs"
            )
            if answer.x is None:
                return None
            slope = float((answer.x * rate * (pipelines_s > fill_s)).sum())
            if slope <= 0.0:
                pipelines_s *= 2.0
                continue
            change = (self._batch + float(answer.fun or 0.0)) / slope
            pipelines_s = max(pipelines_s + change, 0.3 * pipelines_s)
            if abs(change) < _CONVERGED * pipelines_s:
                duals = -answer.ineqlin.marginals[: self._num_kinds]
                return Relaxed(sync_s + pipelines_s, sync_s, pipelines_s, duals)
        return None

    def sweep(self, num_values: int) -> list[Relaxed]:
        """The answers for so many values of S, spread over those of the columns, best first."""
        values = np.unique(self._sync_s)
        picked = np.unique(np.linspace(0, len(values) - 1, num_values).round().astype(int))
        found = [answer for s in values[picked].tolist() if (answer := self.relaxed(s)) is not None]
        return sorted(found, key=lambda answer: (answer.total_s, answer.sync_s))

    def rounded(
        self,
        sync_s: float,
        pipelines_s: float,
        noise: Callable[[int], Floats] | None = None,
        supply: Floats | None = None,
    ) -> Chosen:
        """Whole numbers of columns that process the most sequences in `pipelines_s`, in whole micro-batches.

        `noise(n)` has factors on the n values, for other roundings than the best; `supply` replaces the right sides.
        """
        own = np.flatnonzero(self._sync_s <= sync_s * _SLACK)
        if not own.size:
            return []
        values = self._sequences(own, pipelines_s)
        if noise is not None:
            values = values * noise(len(own))
        most = self.supply if supply is None else supply
        least = np.full(len(most), -np.inf)
        if self._fixed:
            least[-1] = most[-1]
        with _quiet():
            answer = milp(
                -values,
                constraints=LinearConstraint(self._usage[:, own], least, most),
                integrality=np.ones(len(own), np.int64),
                bounds=Bounds(0, np.inf),
                options={"node_limit": _NODES, "mip_rel_gap": _ROUNDED_GAP},
            )
        if answer.x is None:
            return []
        return [(self.columns[i], round(x)) for i, x in zip(own.tolist(), answer.x, strict=True) if round(x) > 0]

    def least_rounded(self, answer: Relaxed, supply: Floats | None = None) -> Chosen:
        """The rounding of the least T from that of `answer` that processes the batch, else the one of the largest."""
        chosen: Chosen = []
        for k in range(_LONGER):
            pipelines_s = answer.pipelines_s * (1.0 + 0.01 * k)
            chosen = self.rounded(answer.sync_s, pipelines_s, supply=supply)
            if self.processed(chosen, pipelines_s) >= self._batch:
                break
        return chosen

    def processed(self, chosen: Chosen, pipelines_s: float) -> float:
        """Sequences that chains process in `pipelines_s` seconds, in whole micro-batches."""
        index = {column.recipe: i for i, column in enumerate(self.columns)}
        at = np.array([index[column.recipe] for column, _ in chosen], np.int64)
        return float(self._sequences(at, pipelines_s) @ np.array([n for _, n in chosen], float)) if chosen else 0.0

    def _sequences(self, at: Ints, pipelines_s: float) -> Floats:
        samples, left_s = self._samples[at], np.maximum(0.0, pipelines_s - self._fill_s[at])
        result: Floats = samples * np.floor(left_s * self._rate[at] / samples + 1e-6)
        return result


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
