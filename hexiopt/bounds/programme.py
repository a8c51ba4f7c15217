"""A configuration linear program over chains of stages: the most sequences that a cluster processes in T seconds.

    max Σ M_c · x_c   over all chains c, x ≥ 0, which together use no more than there is

of devices, of machines' interfaces for gradients, and of layers (`columns.py` has the rows). A plan whose step takes T
seconds gives a solution: each pipeline's chains, one for each sequence of its micro-batches. So if the optimum is below
the global batch, every step takes longer than T. Only weak duality is used: with any prices of what there is, and α the
largest ratio of micro-batches to price of any chain, no plan processes more than α times the worth of the cluster at
these prices (Farley, 1990). `Chains.least_price` bounds α from above, by branch and bound over boxes.

Chains that come out are columns of a restricted program, whose duals are the next prices (Gilmore and Gomory, 1961).
Under ZeRO-2 and 3 all pipelines have as many micro-batches, a divisor of the batch: each has a program of its own, and
the lowest bound of all programs counts. Activations are not charged to interfaces, and a program may mix what plans
cannot: fractions of pipelines, layers that are whole in one machine for some sequences and in another for others. So
the bound is loose on slow networks.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from hexiopt.bounds.chains import Boxes, Chain, Chains, ScheduleFamily
from hexiopt.bounds.columns import BoundColumns
from hexiopt.bounds.kernel import Multipliers
from hexiopt.bounds.stages import StageTypes
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import schedules, sharding_stages

Floats = NDArray[np.float64]
_WEIGHTS = (0.0, 0.35, 1.0, 2.5)  # multipliers of Σ tried, as shares of the price that matters
_EFFORTS = ((0.05, 2), (0.02, 5), (0.008, 8))  # smallest box, in shares; rounds of halving
_CERTAIN = (0.002, 16)
_COARSELY = 4  # rounds before multipliers of Σ do not do
_GAIN = 1.0005  # by what a chain must earn more than it costs
_STALE = 1e-3  # of the step time, that new chains must gain to look for more like them
_FIRST = 0.75  # share of the time left for plans of ZeRO-0 and 1; the rest is for the others
_LEARNING = 0.5  # share of the time for columns; the rest is for certainty
_TOLERANCE = 5e-4  # of the step time
_LOOSE = 0.6  # share of the way from the optimum so far down to what is known, where certainty is tried first
_TOGETHER = 64  # boxes between two looks at the clock
_RANGES = (*((v, v) for v in range(2, 9)), (9, 2**30))  # classes of layer ranges a stage, when interleaved,
_STAGES = (*((p, p) for p in range(2, 21)), (21, 24), (25, 30), (31, 2**30))  # and of stages


def chain_bound_s(model: PlanPricer, lower_s: float, deadline_s: float) -> float:
    """A step time that no plan beats, from `lower_s` (which must hold) upwards as far as time allows. It stays there
    where plans may have a schedule for which the conditions of `chains.py` are not proved.

    `deadline_s` is of `time.perf_counter`.
    """
    proved = all(schedule.bounded for schedule in schedules(model.problem.workload))
    if not proved or time.perf_counter() >= deadline_s:
        return lower_s
    types, kinds = StageTypes(model), dict[int | None, list[ScheduleFamily]]()
    for shape in families_of(model.problem):
        kinds.setdefault(shape.micro_batches, []).append(shape)
    # A plan has shapes of one kind, so that what holds for all kinds holds: raise the lowest ones, up to the next.
    programs = [ChainProgram(types, shapes) for shapes in kinds.values()]
    bounds_s, prices, stuck = [lower_s] * len(programs), BoundColumns(types).first_prices, False
    while (now_s := time.perf_counter()) < deadline_s:
        level_s = min(bounds_s) * (1 + _TOLERANCE)
        low = [k for k, bound_s in enumerate(bounds_s) if bound_s <= level_s]
        next_s = min((bound_s for bound_s in bounds_s if bound_s > level_s), default=inf)
        share = 1.0 if stuck or len(programs) == 1 else _FIRST if next_s == inf else 1.0 / len(low)
        which, until_s = low[0], now_s + share * (deadline_s - now_s)
        found_s, prices = programs[which].raised(bounds_s[which], next_s, until_s, prices)
        if found_s <= bounds_s[which] and share == 1.0:
            break
        stuck, bounds_s[which] = found_s <= bounds_s[which], found_s
    return min(bounds_s)


def families_of(problem: Problem) -> list[ScheduleFamily]:
    """All shapes of a problem's pipelines, in classes that share their conditions."""
    allowed, sharding = schedules(problem.workload), sharding_stages(problem.workload)
    chunked, lockstep = (tuple(s for s in allowed if getattr(s, word)) for word in ("chunked", "lockstep"))
    num_layers, batch = problem.model.num_layers, problem.workload.global_batch
    found: list[ScheduleFamily] = []
    if any(stage < 2 for stage in sharding):
        found.append(ScheduleFamily(allowed, 1, 1, 1, num_layers))
        max_chunks = problem.space.max_chunks if chunked else 1
    else:
        max_chunks = 1  # from ZeRO-2 on, stages have one range
    if lockstep and any(stage >= 2 for stage in sharding):
        found += [ScheduleFamily(lockstep, 1, 1, 1, num_layers, m) for m in range(1, batch + 1) if batch % m == 0]
    for least, most in _RANGES:
        for few, many in _STAGES:
            if least <= max_chunks and least * few <= num_layers:
                ranges = least, min(most, max_chunks)
                found.append(ScheduleFamily(chunked, *ranges, few, min(many, num_layers // least)))
    return found


class ChainProgram:
    """The program over all chains of some shapes, which agree in `micro_batches`."""

    def __init__(self, types: StageTypes, shapes: Sequence[ScheduleFamily]) -> None:
        self.types, self._batch = types, types.global_batch
        self._shapes, self._doubtful = list(shapes), set[ScheduleFamily]()
        self._chains: dict[ScheduleFamily, Chains] = {}
        self._columns = BoundColumns(types, shapes[0].micro_batches)
        self._prices = self._columns.first_prices
        self._searched = False  # for columns, which is done once
        self._began_s = self._until_s = time.perf_counter()

    def raised(self, lower_s: float, enough_s: float, until_s: float, prices: Multipliers) -> tuple[float, Multipliers]:
        """A step time that no plan of the shapes beats, in seconds, and the prices of the last attempt.

        It is at least `lower_s`, which must hold; `enough_s` is the most of use. `until_s` is of `time.perf_counter`,
        `prices` are those to begin with.
        """
        self._began_s, self._until_s, self._prices = time.perf_counter(), until_s, prices
        return self._raised_s(lower_s, enough_s), self._prices

    def _raised_s(self, lower_s: float, enough_s: float) -> float:
        if enough_s < inf and self._suffices(lower_s, enough_s):
            return enough_s
        step_s = most_s = self._learned(lower_s, enough_s)
        # First something that surely holds, then ever closer to the program's optimum: from it down by a share.
        proven_s, proven, tried = lower_s, 1.0, _LOOSE
        while self._on_time() and (step_s - lower_s) * (proven - tried) > _TOLERANCE * step_s:
            tried_s, known = step_s - tried * (step_s - lower_s), len(self._columns)
            if self._refutes(tried_s):
                proven_s, proven, tried = tried_s, tried, tried / 2
            elif len(self._columns) > known:
                most_s = step_s
                step_s, self._prices = self._longest(proven_s, most_s)
                proven = (step_s - proven_s) / max(step_s - lower_s, 1e-9 * step_s)
                tried = min(tried, proven / 2)
            else:
                tried = (tried + proven) / 2
        return proven_s

    def _learned(self, lower_s: float, enough_s: float) -> float:
        """Look for columns, the first time: about the bound that they allow, with its prices."""
        if self._searched:
            step_s, self._prices = self._longest(lower_s, enough_s)
            return step_s
        step_s, most_s = min(1.1 * lower_s, enough_s), enough_s
        promising, level = list(self._shapes), 0
        while self._on_time(_LEARNING) and level < len(_EFFORTS):
            gained = [
                shape
                for shape in promising
                if self._on_time(_LEARNING) and self._learn(step_s, shape, *_EFFORTS[level])
            ]
            step_s, self._prices = self._longest(lower_s, most_s)
            # Shapes that gave nothing are asked again when the others give no more.
            stale = not gained or step_s > most_s * (1 - _STALE)
            level += stale and len(promising) == len(self._shapes)
            promising = list(self._shapes) if stale else gained
            most_s = step_s
        self._searched = True
        return step_s

    def _suffices(self, lower_s: float, enough_s: float) -> bool:
        """Whether no plan has a step of `enough_s`, if the prices of other shapes are nearly right for these too."""
        while self._on_time():
            known = len(self._columns)
            if self._refutes(enough_s):
                return True
            if len(self._columns) == known:
                break
            step_s, self._prices = self._longest(lower_s, enough_s)
            if step_s < enough_s:
                break
        return False

    def _on_time(self, share: float = 1.0) -> bool:
        return time.perf_counter() < self._began_s + share * (self._until_s - self._began_s)

    def _longest(self, lower_s: float, most_s: float) -> tuple[float, Multipliers]:
        """The longest step in which the columns so far do not process the batch, and prices that show it."""
        high_s = min(2.0 * lower_s, most_s)
        most, prices = self._columns.most(high_s)
        if most < self._batch:
            return high_s, prices
        # The optimum is near the one of fewer columns: look down from there in growing steps, then halve.
        low_s, width = high_s, 4 * _TOLERANCE
        while most >= self._batch and low_s > lower_s:
            high_s, low_s = low_s, max(lower_s, low_s * (1 - width))
            width *= 2
            most, prices = self._columns.most(low_s)
        while high_s - low_s > _TOLERANCE * high_s:
            middle_s = 0.5 * (low_s + high_s)
            most, found = self._columns.most(middle_s)
            if most < self._batch:
                low_s, prices = middle_s, found
            else:
                high_s = middle_s
        return low_s, prices

    def _refutes(self, step_s: float) -> bool:
        """Whether the prices show that no plan of the shapes has a step of `step_s` seconds. If not, there may be more
        columns."""
        # Below the batch, not just at it.
        enough = (1 - 1e-9) * self._batch / self._columns.worth(self._prices)
        smallest, rounds = _CERTAIN
        self._shapes.sort(key=lambda shape: shape not in self._doubtful)
        self._doubtful.clear()
        for shape in self._shapes:
            boxes, added = self._first_boxes(step_s, shape), False
            for number in range(rounds):
                ratio, found = self._evaluate(step_s, shape, boxes, enough, number > _COARSELY)
                boxes, narrow = self._halved(boxes, ratio > enough, step_s, smallest)
                added = self._columns.add(found, self._prices, step_s, _GAIN)
                if narrow or added or not len(boxes) or not self._on_time():
                    break
            if narrow or added or len(boxes):
                self._doubtful.add(shape)
                if not added or not self._on_time():
                    return False
        return not self._doubtful

    def _learn(self, step_s: float, shape: ScheduleFamily, smallest: float, rounds: int) -> bool:
        """Add chains of `shape` that earn more than they cost; whether there were any."""
        boxes, gained = self._first_boxes(step_s, shape), False
        for _ in range(rounds):
            ratio, found = self._evaluate(step_s, shape, boxes, 1.0)
            gained |= self._columns.add(found, self._prices, step_s, _GAIN)
            boxes, _ = self._halved(boxes, ratio > _GAIN, step_s, smallest)
            if not len(boxes) or not self._on_time(_LEARNING):
                break
        return gained

    def _first_boxes(self, step_s: float, shape: ScheduleFamily) -> Boxes:
        fewest = shape.least_stages if shape.interleaved else 1
        if fewest > self._batch:
            return Boxes.grid(np.zeros(0), np.zeros(0))
        if shape.micro_batches is None:
            micro_batches_at = np.unique(np.round(np.geomspace(fewest, self._batch, 6 if shape.interleaved else 13)))
        else:
            micro_batches_at = np.array([float(shape.micro_batches)])
        least_s = 0.5 * self.types.num_layers * float(self.types.layer_s.min()) / shape.most_ranges
        first_s = min(max(least_s, 0.004 * step_s), 0.5 * step_s)
        ends_s = np.geomspace(first_s, step_s, 5 if shape.interleaved else 9)
        return Boxes.grid(micro_batches_at, np.concatenate([[0.0], ends_s]))

    def _evaluate(
        self, step_s: float, shape: ScheduleFamily, boxes: Boxes, target: float, finely: bool = False
    ) -> tuple[Floats, list[tuple[Chain, float]]]:
        """Micro-batches over the least price, for each box; and chains, with the box's least micro-batches, where that
        is above `target`. `finely` by both recursions over chains, of which the better counts."""
        ratio, chains = np.full(len(boxes), inf), []
        if shape.interleaved and shape.least_stages == shape.most_stages:
            # Micro-batches are a multiple of the stages.
            boxes = replace(boxes, high_m=boxes.high_m - boxes.high_m % shape.least_stages)
        if shape not in self._chains:
            self._chains[shape] = Chains(self.types, shape)
        for first in range(0, len(boxes), _TOGETHER):
            if not self._on_time():
                break
            at = np.arange(first, min(first + _TOGETHER, len(boxes)))
            some = boxes.take(at)
            wanted = some.high_m / target
            weights = np.array(_WEIGHTS)[:, None] * wanted / some.high_s
            least, found = self._chains[shape].least_price(self._prices, step_s, some, wanted, weights)
            if finely:  # multipliers miss what is between, parts what rounding takes from many stages
                other, more = self._chains[shape].least_price(self._prices, step_s, some, wanted, None)
                least, found = np.maximum(least, other), found + more
            any_m = np.isfinite(least) & (some.high_m >= some.low_m)
            ratio[at] = np.where(any_m, some.high_m / np.maximum(least, 1e-300), 0.0)
            chains += [(chain, float(some.low_m[k])) for chain, k in found]
        return ratio, chains

    @staticmethod
    def _halved(boxes: Boxes, chosen: NDArray[np.bool_], step_s: float, smallest: float) -> tuple[Boxes, bool]:
        """The `chosen` boxes cut in two where they are wider, and whether some were too narrow to cut."""
        wide_m, wide_s = (boxes.high_m - boxes.low_m) / boxes.high_m, (boxes.high_s - boxes.low_s) / step_s
        wide = (wide_m > smallest) | (wide_s > smallest)
        by_m = (wide_m >= 3.0 * wide_s) & (boxes.high_m > boxes.low_m)
        go = chosen & wide
        return boxes.take(go).halves(by_m[go]), bool((chosen & ~wide).any())
