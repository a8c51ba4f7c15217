"""A configuration linear program over chains of stages: the most sequences that a cluster processes in T seconds.

    max Σ M_c · x_c   over all chains c, x ≥ 0, subject to the supply

of devices, of machines' interfaces for gradients, and of layers (`columns.py` has the rows). A plan whose step takes T
seconds gives a solution: each pipeline's chains, one for each sequence of its micro-batches. So if the optimum is below
the global batch, every step takes longer than T. Only weak duality is used: for any prices of the supply, with α the
largest ratio of micro-batches to price of any chain, no plan processes more than α times the value of the cluster at
these prices (Farley, 1990). `Chains.least_price` bounds α from above, by branch and bound over boxes.

The chains found become columns of a restricted program, whose duals are the next prices (Gilmore and Gomory, 1961).
Under ZeRO-2 and 3 all pipelines have equally many micro-batches, a divisor of the batch: each divisor has a program of
its own, and the lowest bound of all programs counts. A program charges no activations to interfaces, and may mix what
plans cannot: fractions of pipelines, and layers that are whole in one machine for some sequences and in another machine
for others. So it is loose on slow networks, and begins with the bound of `interfaces.py`, which counts both.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from hexiopt.bounds.box_stages import Multipliers
from hexiopt.bounds.chains import Boxes, Chain, Chains, ScheduleFamily
from hexiopt.bounds.columns import BoundColumns
from hexiopt.bounds.interfaces import InterfaceBound
from hexiopt.bounds.stages import OutOfTimeError, StageTypes
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import sharding_stages

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
_WEIGHTS = (0.0, 0.35, 1.0, 2.5)  # multipliers of Σ to try, as shares of the relevant price
_LEARNT = (0.05, 2)  # relative size of the smallest box; rounds of halving: of the search for columns,
_CERTAIN = (0.002, 16)  # and of a proof
_PASSES = 4  # over the stages of a box, for better multipliers
_COARSELY = 9  # rounds with multipliers of Σ before it is tracked; half as many where there are few boxes
_GAIN = 1.0005  # least excess of a chain's value over its price
_STRIDE = 1.2  # most by which a step is lengthened at once while columns are few
_STALE = 4e-3  # share of the step time that new chains must gain for the search to continue
_FIRST = 0.75  # share of the remaining time for ZeRO-0 and 1; the rest is for ZeRO-2 and 3
_LEARNING = 0.5  # share of the time for columns; the rest is for the proof
_TOLERANCE = 5e-4  # of the step time
_EASY = 0.2  # share of the way from the proven bound to the current optimum at which a first proof is tried
_LACKING = 1.01  # multiple of their price that chains process, above which other prices are needed
_LATER = 10  # rounds of halving before a step is shortened
_SHORTER = 1.2  # share of such an excess by which a step is shortened
_BY_M = 2.0  # relative width in micro-batches, in that in Σ, from which on a box is halved along micro-batches
_TOGETHER = 64  # boxes between two readings of the clock
_RANGES = (*((v, v) for v in range(2, 9)), (9, 2**30))  # classes of layer ranges per stage, when interleaved,
_STAGES = (*((p, p) for p in range(2, 21)), (21, 24), (25, 30), (31, 2**30))  # and of stages


def chain_bound(
    model: PlanPricer, lower_s: float, deadline_s: float, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, dict[int, float] | None]:
    """A lower bound on the step time in seconds, raised from `lower_s` (which must hold) as far as time allows, and the
    share of each machine in the value of the cluster at the prices of a program that prove it; None where none does.

    It stays `lower_s` where plans may have a schedule for which the conditions of `chains.py` are not proved.
    `deadline_s` is a time of `clock`.
    """
    proved = all(schedule.is_bounded for schedule in model.problem.schedules)
    if not proved or clock() >= deadline_s:
        return lower_s, None
    try:
        types, kinds = StageTypes(model, lambda: clock() < deadline_s), dict[int | None, list[ScheduleFamily]]()
    except OutOfTimeError:
        return lower_s, None
    for shape in families_of(model.problem):
        kinds.setdefault(shape.micro_batches, []).append(shape)
    # The pipelines of a plan are of one kind, so the lowest bound of all kinds holds: raise the lowest up to the next.
    programs = [ChainProgram(types, shapes, clock) for shapes in kinds.values()]
    bounds_s = [InterfaceBound(model, micro_batches).seconds(lower_s) for micro_batches in kinds]
    prices, stuck = BoundColumns(types).first_prices, False
    while (now_s := clock()) < deadline_s:
        level_s = min(bounds_s) * (1 + _TOLERANCE)
        low = [k for k, bound_s in enumerate(bounds_s) if bound_s <= level_s]
        next_s = min((bound_s for bound_s in bounds_s if bound_s > level_s), default=inf)
        share = 1.0 if stuck or len(programs) == 1 else _FIRST if next_s == inf else 1.0 / len(low)
        which, until_s = low[0], now_s + share * (deadline_s - now_s)
        found_s, prices = programs[which].raise_bound(bounds_s[which], next_s, until_s, prices)
        if found_s <= bounds_s[which] and share == 1.0:
            break
        stuck, bounds_s[which] = found_s <= bounds_s[which], found_s
    lowest = min(range(len(programs)), key=bounds_s.__getitem__)
    return bounds_s[lowest], programs[lowest].machine_shares()


def families_of(problem: Problem) -> list[ScheduleFamily]:
    """All schedule families of a problem's pipelines, each with its own conditions."""
    allowed, sharding = problem.schedules, sharding_stages(problem.workload)
    chunked, lockstep = (tuple(s for s in allowed if getattr(s, word)) for word in ("chunked", "lockstep"))
    num_layers, batch = problem.model.num_layers, problem.workload.global_batch
    families: list[ScheduleFamily] = []
    if any(stage < 2 for stage in sharding):
        families.append(ScheduleFamily(allowed, 1, 1, 1, num_layers, free_depth=problem.space.depth))
        max_chunks = problem.space.max_chunks if chunked else 1
    else:
        max_chunks = 1  # under ZeRO-2 and 3, stages have one range
    if lockstep and any(stage >= 2 for stage in sharding):
        families += [ScheduleFamily(lockstep, 1, 1, 1, num_layers, m) for m in range(1, batch + 1) if batch % m == 0]
    for least, most in _RANGES:
        for few, many in _STAGES:
            if least <= max_chunks and least * few <= num_layers:
                ranges = least, min(most, max_chunks)
                families.append(ScheduleFamily(chunked, *ranges, few, min(many, num_layers // least)))
    return families


class ChainProgram:
    """The program over all chains of some schedule families, which have the same `micro_batches`."""

    def __init__(self, types: StageTypes, shapes: Sequence[ScheduleFamily], clock: Callable[[], float]) -> None:
        self.types, self._batch, self._clock = types, types.global_batch, clock
        self._shapes, self._doubtful = list(shapes), set[ScheduleFamily]()
        self._chains: dict[ScheduleFamily, Chains] = {}
        self._columns = BoundColumns(types, shapes[0].micro_batches)
        self._prices = self._columns.first_prices
        self._proof: Multipliers | None = None  # the prices that prove the highest bound so far
        self._share, self._centre = _EASY, list[Multipliers]()  # of the next proof: how far to go, former prices
        self._later = _LATER
        self._searched = False  # for columns, which are searched only once
        self._began_s = self._until_s = clock()

    def machine_shares(self) -> dict[int, float] | None:
        """The share of each machine in the value of the cluster and its layers, at the prices that prove the bound."""
        return None if self._proof is None else self._columns.machine_shares(self._proof)

    def raise_bound(
        self, lower_s: float, enough_s: float, until_s: float, prices: Multipliers
    ) -> tuple[float, Multipliers]:
        """A lower bound in seconds on the step time of the families' plans, and the prices of the last attempt.

        It is at least `lower_s`, which must hold; a bound above `enough_s` is of no use. `until_s` is a time of the
        clock, `prices` are the initial ones.
        """
        self._began_s, self._until_s, self._prices = self._clock(), until_s, prices
        return self._raise_bound_s(lower_s, enough_s), self._prices

    def _raise_bound_s(self, lower_s: float, enough_s: float) -> float:
        if enough_s < inf and self._suffices(lower_s, enough_s):
            return enough_s
        step_s = most_s = self._search_columns(lower_s, enough_s)
        # One proof at a time, since the lowest bound of all programs counts.
        proven_s = lower_s
        while self._on_time() and step_s - proven_s > _TOLERANCE * step_s:
            tried_s, known = proven_s + self._share * (step_s - proven_s), len(self._columns)
            points = [self._prices, self._columns.most(tried_s)[1], *self._centre]
            self._centre = [self._columns.mean_prices(points)]
            self._prices = self._centre[0]
            if (found_s := self._refute(tried_s, proven_s)) > proven_s:
                self._share = 0.5 if found_s == tried_s else self._share
                return found_s
            if len(self._columns) == known:
                if self._later < _CERTAIN[1]:
                    self._later += _LATER
                else:
                    self._share /= 2
                if self._share * (step_s - proven_s) < _TOLERANCE * step_s:
                    break
            most_s = step_s
            step_s, self._prices = self._longest(proven_s, most_s)
        return proven_s

    def _search_columns(self, lower_s: float, enough_s: float) -> float:
        """Search for columns, the first time only. Returns about the longest step in seconds in which they cannot
        process the batch; `_prices` become those that prove it."""
        if self._searched:
            step_s, self._prices = self._longest(lower_s, enough_s)
            return step_s
        step_s, most_s = min(1.1 * lower_s, enough_s), enough_s
        # Interleaved families are many and seldom better: the proof asks them, at prices that are nearly right.
        learned = [shape for shape in self._shapes if not shape.is_interleaved] or list(self._shapes)
        promising, done = learned, False
        while self._on_time(_LEARNING) and not done:
            gained = [shape for shape in promising if self._on_time(_LEARNING) and self._learn(step_s, shape)]
            reach_s = _STRIDE * step_s
            step_s, self._prices = self._longest(lower_s, min(most_s, reach_s))
            # Families without new chains are tried again when the others have none left.
            stale = not gained or most_s * (1 - _STALE) < step_s < reach_s
            done = stale and len(promising) == len(learned)
            promising = learned if stale else gained
            most_s = step_s if step_s < reach_s else most_s
        self._searched = True
        return step_s

    def _suffices(self, lower_s: float, enough_s: float) -> bool:
        """Whether no plan has a step of `enough_s`, tried with the prices of other families."""
        while self._on_time():
            known = len(self._columns)
            if self._refute(enough_s, enough_s) == enough_s:
                return True
            if len(self._columns) == known:
                break
            step_s, self._prices = self._longest(lower_s, enough_s)
            if step_s < enough_s:
                break
        return False

    def _on_time(self, share: float = 1.0) -> bool:
        return self._clock() < self._began_s + share * (self._until_s - self._began_s)

    def _longest(self, lower_s: float, most_s: float) -> tuple[float, Multipliers]:
        """The longest step in which the columns found so far cannot process the batch, and prices that prove it."""
        high_s = min(2.0 * lower_s, most_s)
        most, prices = self._columns.most(high_s)
        if most < self._batch:
            return high_s, prices
        # The optimum is near that of fewer columns: step down from there in growing steps, then bisect.
        low_s, width = high_s, 4 * _TOLERANCE
        while most >= self._batch and low_s > lower_s:
            high_s, low_s = low_s, max(lower_s, low_s * (1 - width))
            width *= 2
            most, prices = self._columns.most(low_s)
        while high_s - low_s > _TOLERANCE * high_s:
            middle_s = 0.5 * (low_s + high_s)
            most, duals = self._columns.most(middle_s)
            if most < self._batch:
                low_s, prices = middle_s, duals
            else:
                high_s = middle_s
        return low_s, prices

    def _refute(self, step_s: float, floor_s: float) -> float:
        """A step time of `step_s` seconds or less that no plan of the families reaches, as the prices prove; 0 where
        they prove none of `floor_s` or more, and there may be more columns."""
        doubtful, self._doubtful = self._doubtful, set()
        self._shapes.sort(key=lambda shape: shape not in doubtful)
        for shape in self._shapes:
            if self._doubtful and doubtful and shape not in doubtful:
                break  # other prices are needed; those of this attempt need not be tried on all families
            refuted_s = self._refute_family(step_s, floor_s, shape)
            if refuted_s:
                step_s = refuted_s
                continue
            self._doubtful.add(shape)
            if not self._on_time():
                return 0.0
        if self._doubtful:
            return 0.0
        self._proof = self._prices
        return step_s

    def _refute_family(self, step_s: float, floor_s: float, shape: ScheduleFamily) -> float:
        """As `_refute`, of one family. A box refuted at a step stays so at shorter ones, so that a step is shortened
        rather than boxes made ever smaller."""
        # strictly below the batch
        enough = (1 - 1e-9) * self._batch / self._columns.worth(self._prices)
        smallest, rounds = _CERTAIN
        boxes = self._first_boxes(step_s, shape)
        for number in range(rounds):
            finely = number > _COARSELY or (number > _COARSELY // 2 and len(boxes) <= _TOGETHER)
            ratio, chains = self._evaluate(step_s, shape, boxes, enough, finely)
            lacking = self._columns.add(chains, self._prices, step_s, _GAIN) > _LACKING * enough
            excess = float(ratio.max(initial=0.0)) / enough
            if excess <= 1.0:
                return step_s
            if lacking or not self._on_time():
                return 0.0
            halved, narrow = self._halve(boxes, ratio > enough, step_s, smallest)
            if excess <= _LACKING and (number >= self._later or not len(halved)):
                step_s /= 1 + _SHORTER * (excess - 1)
                if step_s < floor_s:
                    return 0.0
            boxes = halved.concatenate(boxes.take(narrow))
        return 0.0

    def _learn(self, step_s: float, shape: ScheduleFamily) -> bool:
        """Add chains of `shape` whose value exceeds their price; returns whether there were any."""
        smallest, rounds = _LEARNT
        boxes, gained = self._first_boxes(step_s, shape), False
        for _ in range(rounds):
            ratio, chains = self._evaluate(step_s, shape, boxes, 1.0, passes=1)
            gained |= self._columns.add(chains, self._prices, step_s, _GAIN) > 0.0
            boxes, _ = self._halve(boxes, ratio > _GAIN, step_s, smallest)
            if not len(boxes) or not self._on_time(_LEARNING):
                break
        return gained

    def _first_boxes(self, step_s: float, shape: ScheduleFamily) -> Boxes:
        fewest = shape.least_stages if shape.is_interleaved else 1
        if fewest > self._batch:
            return Boxes.grid(np.zeros(0), np.zeros(0))
        if shape.micro_batches is None:
            micro_batches_at = np.unique(np.round(np.geomspace(fewest, self._batch, 6 if shape.is_interleaved else 13)))
        else:
            micro_batches_at = np.array([float(shape.micro_batches)])
        least_s = 0.5 * self.types.num_layers * float(self.types.layer_s.min()) / shape.most_ranges
        first_s = min(max(least_s, 0.004 * step_s), 0.5 * step_s)
        ends_s = np.geomspace(first_s, step_s, 5 if shape.is_interleaved else 9)
        return Boxes.grid(micro_batches_at, np.concatenate([[0.0], ends_s]))

    def _evaluate(
        self,
        step_s: float,
        shape: ScheduleFamily,
        boxes: Boxes,
        target: float,
        finely: bool = False,
        passes: int = _PASSES,
    ) -> tuple[Floats, list[tuple[Chain, float]]]:
        """Micro-batches over the least price for each box; and chains, with the box's least micro-batches, where that
        ratio is above `target`. `finely` uses both recursions over chains, of which the better counts."""
        ratio, chains = np.full(len(boxes), inf), []
        if shape.is_interleaved and shape.least_stages == shape.most_stages:
            # the number of micro-batches is a multiple of that of the stages
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
            least, cheap = self._chains[shape].least_price(self._prices, step_s, some, wanted, weights, passes)
            if finely:  # multipliers lose to convexification, parts to the rounding of many stages
                other, more = self._chains[shape].least_price(self._prices, step_s, some, wanted, None)
                least, cheap = np.maximum(least, other), cheap + more
            any_m = np.isfinite(least) & (some.high_m >= some.low_m)
            ratio[at] = np.where(any_m, some.high_m / np.maximum(least, 1e-300), 0.0)
            chains += [(chain, float(some.low_m[k])) for chain, k in cheap]
        return ratio, chains

    @staticmethod
    def _halve(boxes: Boxes, chosen: Bools, step_s: float, smallest: float) -> tuple[Boxes, Bools]:
        """The `chosen` boxes halved along their wider side, and which of them are too narrow for that [boxes]."""
        wide_m, wide_s = (boxes.high_m - boxes.low_m) / boxes.high_m, (boxes.high_s - boxes.low_s) / step_s
        wide = (wide_m > smallest) | (wide_s > smallest)
        by_m = (wide_m >= _BY_M * wide_s) & (boxes.high_m > boxes.low_m)
        go = chosen & wide
        return boxes.take(go).halves(by_m[go]), chosen & ~wide
