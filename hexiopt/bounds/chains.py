"""The cheapest chain of stages that takes one sequence of a micro-batch through the model, at given prices of devices.

A *chain* is the path of one sequence of a micro-batch through the stages of its pipeline. A TP group of t devices that
takes x sequences of each micro-batch charges each of them t / x devices, so that a pipeline's chains share its price,
however its stages are replicated. A chain satisfies the conditions of every schedule of its family in a step of T
seconds with M micro-batches (`BoundTerms`). With t_s the forward and backward time of stage s for a micro-batch, f_s
its forward time, and k_s the largest number of forwards that it runs ahead:

    one layer range:  (M − 1) · t_s − min(k_s, M − 1) · f_s + Σ t ≤ T
    several:          M · t_s − c_s − k_s · (its longest layer range's forward) + Σ c ≤ T,  c_s its shortest range

where Σ is the time that the first micro-batch takes through the pipeline and back. Every mix of recompute policies
takes at least the time of the fastest mix that fits the micro-batches in flight, with fractions of layers allowed.
Where stages may have any number of micro-batches in flight, each belongs to a class of numbers: it needs memory for the
least of a class, and runs as far ahead as the most allows.

Where backwards may be split, c_s, of one layer range or of the shortest, leaves out weight gradients, and recomputation
too; t_s has both. With e = 1 for the first stage:

    M · t_s − min(k_s, M − 1) · f_s + e · (Σ − c_s) ≤ T

Any other may end before the input backwards of those before it. Of these the forwards count: e is their least share.

A stage that waits for gradient sync (`columns.py`) ends that much before T: the first one as above, any other at least
M · t_s after the start of the step. Where sync runs beside the last backward, only what follows it counts.

Pairs (M, Σ) are covered by *boxes*. In a box, stages satisfy the conditions at its low ends; Σ ≤ its high end is priced
by a Lagrange multiplier, sought by cutting planes, or counted in discrete parts. A recursion over layers then gives a
lower bound on the price of every chain in the box.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from hexiopt.bounds.box_stages import SLACK, BoxArrays, Multipliers, Rows, Task
from hexiopt.bounds.kernel import CheapestChains, least_prices, least_prices_finely
from hexiopt.bounds.stages import StageTypes
from hexiopt.cores import usable_cores
from hexiopt.schedules.schedule import BoundTerms, Schedule, weakest_terms

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Classes of micro-batches in flight, where these are free: finer ones prove no more, and take as often as long.
_DEPTHS = ((1, 4), (5, 2**30))
_ALL_AHEAD = 1 << 40
_PARTS = 48  # of Σ, where the recursion tracks it


@dataclass(frozen=True, slots=True)
class ScheduleFamily:
    """Pipelines under one of `schedules`: the least and most layer ranges per stage, the least and most stages per
    pipeline, and the number of micro-batches of every pipeline under ZeRO-2 and 3, where it is the same for all (None
    under ZeRO-0 and 1). With `free_depth`, stages may have any number of micro-batches in flight."""

    schedules: tuple[Schedule, ...]
    least_ranges: int
    most_ranges: int
    least_stages: int
    most_stages: int
    micro_batches: int | None = None
    free_depth: bool = False

    @property
    def late(self) -> bool:
        """Whether the plan's ZeRO stage is 2 or 3."""
        return self.micro_batches is not None

    @property
    def is_interleaved(self) -> bool:
        """Whether stages have several layer ranges."""
        return self.most_ranges > 1

    @property
    def split(self) -> bool:
        """Whether backwards may be split."""
        return self.terms(0)[0].split

    def terms(self, after: int, num_stages: int = 1) -> tuple[BoundTerms, ...]:
        """The conditions, under every schedule of the family, of a stage followed by `after` stages in a pipeline of at
        least `num_stages`: of each class of depths where they are free, else one."""
        count = max(num_stages, self.least_stages, after + 1)
        terms = weakest_terms(self.schedules, after, count, self.least_ranges)
        if not self.free_depth:
            return (terms,)
        return tuple([BoundTerms(most - 1, least, least, split=terms.split) for least, most in _DEPTHS])


@dataclass(frozen=True, slots=True)
class Boxes:
    """Micro-batches from `low_m` to `high_m`, and Σ from `low_s` to `high_s` in seconds; arrays of one length."""

    low_m: Floats
    high_m: Floats
    low_s: Floats
    high_s: Floats

    @classmethod
    def grid(cls, micro_batches: Floats, seconds: Floats) -> "Boxes":
        """All pairs of intervals between neighbours: whole `micro_batches` ascending, `seconds` ascending."""
        lows = np.concatenate([micro_batches[:1], micro_batches[:-1] + 1])
        rows = [(*m, *s) for m, s in product(zip(lows, micro_batches, strict=True), pairwise(seconds))]
        return cls(*np.array(rows, float).reshape(-1, 4).T)

    def __len__(self) -> int:
        return len(self.low_m)

    def take(self, where: NDArray[np.bool_] | Ints) -> "Boxes":
        """Some of the boxes."""
        return Boxes(self.low_m[where], self.high_m[where], self.low_s[where], self.high_s[where])

    def concatenate(self, others: "Boxes") -> "Boxes":
        """These boxes, then `others`."""
        return Boxes(*(np.concatenate(both) for both in zip(astuple(self), astuple(others), strict=True)))

    def halves(self, by_m: NDArray[np.bool_]) -> "Boxes":
        """Every box halved, along micro-batches where `by_m`, else along Σ."""
        a, b = self.take(by_m), self.take(~by_m)
        m, s = np.floor((a.low_m + a.high_m) / 2), (b.low_s + b.high_s) / 2
        return Boxes(
            np.concatenate([a.low_m, m + 1, b.low_m, b.low_m]),
            np.concatenate([m, a.high_m, b.high_m, b.high_m]),
            np.concatenate([a.low_s, a.low_s, b.low_s, s]),
            np.concatenate([a.high_s, a.high_s, s, b.high_s]),
        )


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages from the last to the first: stage type, layers, forward and backward seconds, forward ones, and the
    largest number of forwards that each runs ahead (`BoundTerms`), all of shape [stages]."""

    types: Ints
    layers: Ints
    seconds: Floats
    forward_s: Floats
    ahead: Ints
    shape: ScheduleFamily


class Chains:
    """The cheapest chains of one schedule family."""

    def __init__(self, types: StageTypes, shape: ScheduleFamily) -> None:
        self.types, self.shape = types, shape
        by_class = list(zip(*[shape.terms(after) for after in range(shape.most_stages)], strict=True))
        terms = by_class[0]
        # Interleaved pipelines have at least as many micro-batches as stages.
        fewest = [max(shape.least_stages, after + 1) if shape.is_interleaved else 1 for after in range(len(terms))]
        few = many = np.concatenate([self._seconds_behind(row) for row in by_class], axis=1)
        enough = np.zeros(len(terms), np.int64)
        if not shape.free_depth:  # else no stage has more in flight than there are micro-batches
            few = self._seconds_behind([term.with_micro_batches(n) for term, n in zip(terms, fewest, strict=True)])
            enough = np.array([term.in_flight + term.first_again for term in terms])
        nested = not shape.is_interleaved and all(
            not b.first_again and a.in_flight <= b.in_flight and a.last_in_flight <= b.last_in_flight <= b.in_flight
            for a, b in pairwise(terms)
        )
        self._numbers = types.numbers(shape.late)
        numbers = np.tile(self._numbers, len(by_class))  # every type once for each class of depths
        ahead = np.array([[self._forwards_ahead(term) for term in row] for row in by_class])
        ahead = ahead.repeat(len(self._numbers), axis=0).T
        self._rows = Rows(
            types.kind[numbers],
            types.devices[numbers],
            types.share[numbers],
            types.lockstep[numbers],
            types.inner_s[numbers],
            np.ascontiguousarray(types.forward_s[shape.least_ranges, shape.most_ranges][numbers]),
            types.layer_s[numbers],
            types.late_s[numbers],
            types.head_forward_s[numbers],
            types.head_s[numbers],
            many,
            few,
            enough,
            np.ascontiguousarray(ahead),
            shape.split,
            types.forward_share if shape.split else 1.0,
            nested,
            types.shown,
        )

    def _forwards_ahead(self, terms: BoundTerms) -> int:
        """Of several layer ranges that are not alike, none is known to be the shortest: whatever happens beside a
        stage's own work is not counted."""
        return _ALL_AHEAD if self.shape.is_interleaved and self.types.several_kinds else terms.forwards_ahead

    def _seconds_behind(self, terms: Sequence[BoundTerms]) -> Floats:
        shape = self.shape
        # Every other stage has a layer in each range.
        most_layers = self.types.num_layers - shape.least_ranges * (shape.least_stages - 1)
        return self.types.seconds_behind(shape.late, terms, shape.least_ranges, shape.most_ranges, most_layers)

    def least_price(
        self, prices: Multipliers, step_s: float, boxes: Boxes, wanted: Floats, weights: Floats | None, passes: int = 1
    ) -> tuple[Floats, list[tuple[Chain, int]]]:
        """A lower bound on the price of the chains in each box [boxes], infinite where it is not under `wanted`; and
        chains that are under it, with the box of each. A chain of m micro-batches counts with its price times the most
        micro-batches of the box / m.

        Each row of `weights` ≥ 0 [weights, boxes] prices a second of Σ; the row with the best bound counts, and better
        ones are sought in up to `passes` passes. Without weights the recursion tracks Σ itself, which takes longer.
        """
        shape, count = self.shape, len(boxes)
        cheapest = CheapestChains(
            np.empty(count), np.empty(count, np.int64), np.empty((count, shape.most_stages, 2), np.int64)
        )
        ends = (shape.least_ranges, shape.most_ranges, shape.least_stages, shape.most_stages)
        task = Task(step_s * SLACK, float(self.types.global_batch), ends, self._rows, prices)
        # Boxes are dealt to cores in turn, since neighbours take about equally long.
        cores = usable_cores()
        turns = np.argsort(np.arange(count) % cores, kind="stable")

        def fill(first: int, end: int) -> None:
            at, part = turns[first:end], cheapest.some(slice(first, end))
            box_arrays = BoxArrays(boxes.low_m[at], boxes.high_m[at], boxes.low_s[at], boxes.high_s[at], wanted[at])
            if weights is None:
                least_prices_finely(task, box_arrays, _PARTS, part)
            else:
                least_prices(task, box_arrays, np.ascontiguousarray(weights[:, at]), passes, part)

        cuts = np.linspace(0, count, min(cores, count) + 1).astype(int).tolist()
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(fill, cuts[:-1], cuts[1:]))
        least, counts, stages = cheapest.some(np.argsort(turns))
        return least, [(self._chain(stages[k, : counts[k]]), int(k)) for k in np.flatnonzero(least < wanted)]

    def _chain(self, stages: Ints) -> Chain:
        """The chain of (stage type, layers) pairs, with the times of many micro-batches."""
        shape, (rows, n) = self.shape, stages.T
        classes, rows = np.divmod(rows, len(self._numbers))
        terms = [shape.terms(after, len(rows))[which] for after, which in enumerate(classes.tolist())]
        stages_and_terms = zip(enumerate(terms), rows, n, strict=True)
        ranges = shape.least_ranges, shape.most_ranges
        seconds = [
            self.types.seconds(shape.late, after, term, *ranges)[r, k] for (after, term), r, k in stages_and_terms
        ]
        ahead = np.array([self._forwards_ahead(term) for term in terms])
        numbers = self._numbers[rows]
        forward_s = self.types.forward_s[ranges][numbers, n]
        return Chain(numbers, n.copy(), np.array(seconds), forward_s, ahead, shape)
