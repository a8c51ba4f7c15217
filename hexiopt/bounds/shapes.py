"""A configuration linear program over chains of stages: the most sequences that a cluster processes in T seconds.

    max Σ M_c · x_c   subject to   Σ devices(c, k) · x_c ≤ supply(k) for every machine kind k,   x ≥ 0

over all chains c. A plan whose step takes T seconds gives a solution: each pipeline's chains, one for each sequence of
its micro-batches. So if the optimum is below the global batch, every step takes longer than T. Only weak duality is
used: with any prices y of devices, and α the largest ratio of micro-batches to price of any chain, no plan processes
more than α · Σ y · supply (Farley, 1990). `chains.least_price` bounds α from above, by branch and bound over boxes.

Chains that come out are columns of a restricted program, whose duals are the next prices (Gilmore and Gomory, 1961).
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from hexiopt.bounds.chains import Boxes, Chain, Shape, least_price, micro_batches
from hexiopt.bounds.stages import StageTypes
from hexiopt.cost.model import CostModel
from hexiopt.space import schedules, sharding_stages

Floats = NDArray[np.float64]
_WEIGHTS = (0.0, 0.35, 1.0, 2.5)  # multipliers of Σ tried, as shares of the price that matters
_EFFORTS = ((0.05, 2), (0.02, 5), (0.008, 8))  # smallest box, in shares; rounds of halving
_CERTAIN = (0.002, 16)
_GAIN = 1.0005  # by what a chain must earn more than it costs
_FIRST = 0.6  # share of the time for the first of several ZeRO stages
_LEARNING = 0.65  # share of the time for columns; the rest is for certainty
_TOLERANCE = 5e-4  # of the step time
_TOGETHER = 24  # boxes that fit a processor's cache with all stage types
_RANGES = ((2, 2), (3, 3), (4, 5), (6, 2**30))  # classes of layer ranges a stage, and of stages, when interleaved
_STAGES = (*((p, p) for p in range(2, 11)), (11, 12), (13, 15), (16, 20), (21, 30), (31, 2**30))


def shape_bound_s(model: CostModel, lower_s: float, deadline_s: float) -> float:
    """A step time that no plan beats, from `lower_s` (which must hold) upwards as far as time allows.

    The least over ZeRO stages; 1 needs less memory than 0 and here no more time, so that it stands for both.
    `deadline_s` is of `time.perf_counter`.
    """
    workload, space = model.problem.workload, model.problem.space
    stages, allowed = sharding_stages(workload), schedules(workload)
    shapes = shapes_of(space.max_chunks if "interleaved" in allowed else 1, model.problem.model.num_layers)
    families = [(max(low), shapes)] if (low := [stage for stage in stages if stage <= 1]) else []
    if set(allowed) - {"interleaved"}:
        families += [(stage, shapes[:1]) for stage in stages if stage >= 2]
    bound_s = inf
    for left, (sharding, chosen) in zip(range(len(families), 0, -1), families, strict=True):
        now_s = time.perf_counter()
        if now_s >= deadline_s:
            return lower_s
        # The first one decides most; what it leaves is for showing that the others are no faster.
        until_s = now_s + (deadline_s - now_s) * (_FIRST if left == len(families) > 1 else 1.0 / left)
        bound_s = min(bound_s, ShapeProgram(model, sharding, chosen, until_s).raised(lower_s, bound_s))
        if bound_s <= lower_s:
            return lower_s
    return bound_s


def shapes_of(max_chunks: int, num_layers: int) -> list[Shape]:
    """All shapes of pipelines, in classes that share their conditions."""
    found = [Shape(1, 1, 1, num_layers)]
    for least, most in _RANGES:
        for few, many in _STAGES:
            if least <= max_chunks and least * few <= num_layers:
                found.append(Shape(least, min(most, max_chunks), few, min(many, num_layers // least)))
    return found


class ShapeProgram:
    """The program of one ZeRO stage; `deadline_s` is of `time.perf_counter`."""

    def __init__(self, model: CostModel, sharding: int, shapes: Sequence[Shape], deadline_s: float) -> None:
        self.types = StageTypes(model, sharding)
        self._shapes, self._doubtful = list(shapes), set[Shape]()
        self._deadline_s, self._began_s = deadline_s, time.perf_counter()
        self._columns: dict[tuple[object, ...], tuple[Chain, Floats]] = {}
        self._batch = self.types.global_batch
        # So low that many chains earn more.
        self._first_prices: Floats = np.full(len(self.types.supply), 0.5 * self._batch / self.types.supply.sum())

    def raised(self, lower_s: float, enough_s: float = inf) -> float:
        """A bound at least `lower_s`, which must hold; no higher than `enough_s`."""
        prices, step_s = self._first_prices, 1.1 * lower_s
        promising, level = list(self._shapes), 0
        while self._on_time(_LEARNING) and level < len(_EFFORTS):
            gained = [
                shape
                for shape in promising
                if self._on_time(_LEARNING) and self._learn(prices, step_s, shape, *_EFFORTS[level])
            ]
            # Shapes that gave nothing are asked again when no other gives anything.
            level += not gained and len(promising) == len(self._shapes)
            promising = gained or list(self._shapes)
            step_s, prices = self._longest(lower_s, enough_s)
        less = _TOLERANCE
        while self._on_time():
            tried_s, known = step_s * (1 - less), len(self._columns)
            if tried_s <= lower_s:
                break
            if self._refutes(tried_s):
                return tried_s
            if len(self._columns) == known:
                less *= 2
            step_s, _ = self._longest(lower_s, enough_s)
        return lower_s

    def _on_time(self, share: float = 1.0) -> bool:
        return time.perf_counter() < self._began_s + share * (self._deadline_s - self._began_s)

    def _longest(self, lower_s: float, enough_s: float) -> tuple[float, Floats]:
        """The longest step in which the columns so far do not process the batch, and prices that show it."""
        low_s, high_s = lower_s, min(2.0 * lower_s, enough_s)
        most, prices = self._restricted(high_s)
        if most < self._batch:
            return high_s, prices
        _, prices = self._restricted(low_s)
        while high_s - low_s > _TOLERANCE * high_s:
            middle_s = 0.5 * (low_s + high_s)
            most, found = self._restricted(middle_s)
            if most < self._batch:
                low_s, prices = middle_s, found
            else:
                high_s = middle_s
        return low_s, prices

    def _restricted(self, step_s: float) -> tuple[float, Floats]:
        """Most sequences in `step_s` with the columns so far, and the prices that show it."""
        most = np.array([micro_batches(self.types, chain, step_s) for chain, _ in self._columns.values()], float)
        usage = np.array([used for _, used in self._columns.values()]).reshape(-1, len(self.types.supply))
        if not len(most) or most.max() <= 0.0:
            return 0.0, self._first_prices
        program = linprog(-most, A_ub=usage.T, b_ub=self.types.supply, method="highs")
        assert program.fun is not None, "no chains at all is always possible"
        # A kind without a price would let its chains cost nothing; a trace of one keeps ratios finite.
        least = 1e-6 * self._batch / self.types.supply.sum()
        return -float(program.fun), np.maximum(-program.ineqlin.marginals, least)

    def _refutes(self, step_s: float) -> bool:
        """Whether the duals of the columns so far show that no plan has a step of `step_s` seconds.

        If not, there may be more columns.
        """
        _, prices = self._restricted(step_s)
        # Below the batch, not just at it.
        enough = (1 - 1e-9) * self._batch / float(prices @ self.types.supply)
        smallest, rounds = _CERTAIN
        self._shapes.sort(key=lambda shape: shape not in self._doubtful)
        for shape in self._shapes:
            boxes = self._first_boxes(step_s, shape)
            for _ in range(rounds):
                ratio, chains = self._evaluate(prices, step_s, shape, boxes, enough)
                boxes, narrow = self._halved(boxes, ratio > enough, step_s, smallest)
                if narrow or self._add(chains, prices, step_s) or not self._on_time():
                    self._doubtful.add(shape)
                    return False
                if not len(boxes):
                    break
            if len(boxes):
                self._doubtful.add(shape)
                return False
        return True

    def _learn(self, prices: Floats, step_s: float, shape: Shape, smallest: float, rounds: int) -> bool:
        """Add chains of `shape` that earn more than they cost; whether there were any."""
        boxes, gained = self._first_boxes(step_s, shape), False
        for _ in range(rounds):
            ratio, chains = self._evaluate(prices, step_s, shape, boxes, 1.0)
            gained |= self._add(chains, prices, step_s)
            boxes, _ = self._halved(boxes, ratio > _GAIN, step_s, smallest)
            if not len(boxes) or not self._on_time(_LEARNING):
                break
        return gained

    def _add(self, chains: Sequence[Chain], prices: Floats, step_s: float) -> bool:
        """Keep new chains that earn more than they cost; whether there were any."""
        known = len(self._columns)
        for chain in chains:
            key = (chain.shape.interleaved, *(stage[:2] for stage in chain.stages))
            usage = self._usage(chain)
            if key not in self._columns and micro_batches(self.types, chain, step_s) > _GAIN * float(usage @ prices):
                self._columns[key] = (chain, usage)
        return len(self._columns) > known

    def _usage(self, chain: Chain) -> Floats:
        """Devices of each kind that a chain takes."""
        which = np.array([stage[0] for stage in chain.stages])
        usage: Floats = np.zeros(len(self.types.supply))
        np.add.at(usage, self.types.kind[which], self.types.devices[which])
        return usage

    def _first_boxes(self, step_s: float, shape: Shape) -> Boxes:
        fewest = shape.least_stages if shape.interleaved else 1
        if fewest > self._batch:
            return Boxes.grid(np.zeros(0), np.zeros(1))
        micro_batches_at = np.unique(np.round(np.geomspace(fewest, self._batch, 6 if shape.interleaved else 13)))
        least_s = 0.5 * self.types.num_layers * float(self.types.layer_s.min()) / shape.most_ranges
        first_s = min(max(least_s, 0.004 * step_s), 0.5 * step_s)
        ends_s = np.geomspace(first_s, step_s, 5 if shape.interleaved else 9)
        return Boxes.grid(micro_batches_at, np.concatenate([[0.0], ends_s]))

    def _evaluate(
        self, prices: Floats, step_s: float, shape: Shape, boxes: Boxes, target: float
    ) -> tuple[Floats, list[Chain]]:
        """Micro-batches over the least price, for each box; and the chains of boxes where that is above `target`."""
        ratio, chains = np.full(len(boxes), inf), []
        if shape.interleaved and shape.least_stages == shape.most_stages:
            # Micro-batches are a multiple of the stages.
            boxes = replace(boxes, high_m=boxes.high_m - boxes.high_m % shape.least_stages)
        # Boxes of many micro-batches know fewer stage types, so they go together.
        for at in np.array_split(np.argsort(boxes.low_m, kind="stable"), -(-len(boxes) // _TOGETHER)):
            if not self._on_time():
                break
            some = boxes.take(at)
            wanted = some.high_m / target
            weights = np.array(_WEIGHTS)[:, None] * wanted / some.high_s
            least, found = least_price(self.types, prices, step_s, shape, some, weights, wanted)
            any_m = np.isfinite(least) & (some.high_m >= some.low_m)
            ratio[at] = np.where(any_m, some.high_m / np.maximum(least, 1e-300), 0.0)
            chains += found
        return ratio, chains

    @staticmethod
    def _halved(boxes: Boxes, chosen: NDArray[np.bool_], step_s: float, smallest: float) -> tuple[Boxes, bool]:
        """The `chosen` boxes cut in two where they are wider, and whether some were too narrow to cut."""
        wide_m, wide_s = (boxes.high_m - boxes.low_m) / boxes.high_m, (boxes.high_s - boxes.low_s) / step_s
        wide = (wide_m > smallest) | (wide_s > smallest)
        by_m = (wide_m >= 3.0 * wide_s) & (boxes.high_m > boxes.low_m)
        go = chosen & wide
        return boxes.take(go).halves(by_m[go]), bool((chosen & ~wide).any())
