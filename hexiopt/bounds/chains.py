"""The cheapest chain of stages that takes one sequence of a micro-batch through the model, devices at given prices.

Follow one sequence of a micro-batch through the stages of its pipeline: a *chain*. A TP group of t devices that takes
x sequences of each micro-batch charges each of them t / x devices, so that a pipeline's chains share its price, however
its stages are replicated. A chain obeys what every schedule does in a step of T seconds with M micro-batches. With t_s
the forward and backward of stage s for a micro-batch, f_s its forward, r the stages after it:

    1F1B and GPipe:  (M − 1) · t_s − min(r, M − 1) · f_s + Σ t ≤ T
    interleaved:     M · t_s − c_s − 2 r · (its longest layer range's forward) + Σ c ≤ T,  c_s its shortest range

because until the first micro-batch has come back from the stages after it, a stage runs at most r + 1 forwards (2 r + 1
of a range beyond those that come before the last range), and Σ is what that journey takes elsewhere (the order of
operations of Narayanan et al., arXiv 2104.04473, section 2.2). Each policy mix takes at least the time of the fastest
one that fits the micro-batches in flight, fractions of layers allowed.

Pairs (M, Σ) lie in *boxes*. In a box, stages obey the conditions at its low ends; Σ ≤ its high end is priced by a
multiplier (Lagrange), so a recursion over layers gives a price that no chain of the box undercuts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product
from math import floor

import numpy as np
from numpy.typing import NDArray

from hexiopt.bounds.stages import StageTypes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_SLACK = 1 + 1e-9  # rounding may only make a chain more feasible


@dataclass(frozen=True, slots=True)
class Shape:
    """How many layer ranges a stage has and how many stages a pipeline has, both from least to most."""

    least_ranges: int
    most_ranges: int
    least_stages: int
    most_stages: int

    @property
    def interleaved(self) -> bool:
        """Whether stages have several layer ranges."""
        return self.most_ranges > 1


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
        each = [(*m, *s) for m, s in product(zip(lows, micro_batches, strict=True), pairwise(seconds))]
        return cls(*np.array(each, float).reshape(-1, 4).T)

    def __len__(self) -> int:
        return len(self.low_m)

    def take(self, where: NDArray[np.bool_] | Ints) -> "Boxes":
        """Some of the boxes."""
        return Boxes(self.low_m[where], self.high_m[where], self.low_s[where], self.high_s[where])

    def halves(self, by_m: NDArray[np.bool_]) -> "Boxes":
        """Every box cut in two, along micro-batches where `by_m`, else along Σ."""
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
    """Stages from the last to the first: (stage type, layers, forward and backward seconds)."""

    stages: tuple[tuple[int, int, float], ...]
    shape: Shape


def least_price(
    types: StageTypes, prices: Floats, step_s: float, shape: Shape, boxes: Boxes, weights: Floats, wanted: Floats
) -> tuple[Floats, list[Chain]]:
    """What a chain costs at least in each box [boxes], infinite where there is none; and chains under `wanted`.

    `prices` are per device of each kind; each row of `weights` ≥ 0 [weights, boxes] prices a second of Σ, the best
    row counts.
    """
    layers, size = types.num_layers, weights.shape
    price = prices[types.kind] * types.devices
    cost = np.full((layers + 1, *size), np.inf)  # of the stages so far, by layers covered
    cost[0] = 0.0
    best, stages = np.full(size, np.inf), np.zeros(size, np.int64)
    history: list[tuple[Ints, Ints]] = []
    for after in range(shape.most_stages):
        stage, chosen = _cheapest_stages(types, price, step_s, shape, boxes, weights, after)
        total, taken = np.full(cost.shape, np.inf), np.zeros(cost.shape, np.int64)
        for n in range(1, len(stage)):
            candidate = cost[: layers + 1 - n] + stage[n] if after else stage[n][None]
            target = total[n:] if after else total[n : n + 1]
            better = candidate < target
            np.copyto(target, candidate, where=better)
            np.copyto(taken[n : n + len(target)], n, where=better)
        cost = total
        history.append((taken, chosen))
        if after + 1 >= shape.least_stages:
            stages = np.where(cost[layers] < best, after + 1, stages)
            best = np.minimum(best, cost[layers])
        if not np.isfinite(cost[:layers]).any():
            break
    value = best - weights * boxes.high_s
    row = value.argmax(axis=0)
    least = value[row, np.arange(len(boxes))]
    found = [
        Chain(tuple(_stages(types, shape, history, int(stages[row[x], x]), int(row[x]), x)), shape)
        for x in np.flatnonzero(least < wanted).tolist()
    ]
    return least, found


def _cheapest_stages(
    types: StageTypes, price: Floats, step_s: float, shape: Shape, boxes: Boxes, weights: Floats, after: int
) -> tuple[Floats, Ints]:
    """Price and type of the cheapest stage of n layers with `after` stages behind it [layers fitting, *weights]."""
    m, stages, fewest = boxes.low_m, max(shape.least_stages, after + 1), float(boxes.low_m.min())
    if shape.interleaved:
        many, few = (
            types.interleaved_s(after, stages, shape.least_ranges, shape.most_ranges, x) for x in (True, False)
        )
        are_few = m < 2 * stages
    else:
        many, few = types.seconds(after, after + 1), types.seconds(after, 1)
        are_few = m < after + 1
    useful = np.flatnonzero(
        (few[:, shape.least_ranges] * fewest <= step_s * _SLACK) & (types.share * fewest <= types.global_batch)
    )
    top = int(np.flatnonzero((few[useful] * fewest <= step_s * _SLACK).any(axis=0)).max(initial=0))
    cheapest, chosen = np.full((top + 1, *weights.shape), np.inf), np.zeros((top + 1, *weights.shape), np.int64)
    if not top:
        return cheapest, chosen
    n = np.arange(top + 1)[:, None, None]  # arrays are [n, types, boxes]
    head_s = types.head_forward_s[useful][:, None] if not after else 0.0
    forward_s, layer_s = types.forward_s[useful][:, None], types.layer_s[useful][:, None]
    own = price[useful][:, None]
    within = few[useful, : top + 1].T[:, :, None], many[useful, : top + 1].T[:, :, None]
    with np.errstate(invalid="ignore"):
        t = within[1] if not are_few.any() else np.where(are_few, *within)
        if shape.interleaved:
            longest, shortest = -(-n // shape.least_ranges), n // shape.most_ranges
            journey = shortest * layer_s
            # Where forwards count negatively, a slower link than the best would not make it worse: not used.
            sure = m * n >= 2 * after * longest + shortest
            busy = np.where(sure, m * t - journey - 2 * after * (longest * forward_s + head_s) + boxes.low_s, 0.0)
        else:
            journey = t
            busy = (m - 1) * t - np.minimum(after, m - 1) * (n * forward_s + head_s) + boxes.low_s
        fits = (np.maximum(busy, m * t) <= step_s * _SLACK) & (journey <= boxes.high_s * _SLACK)
        fits &= (types.share[useful][:, None] * m <= types.global_batch) & (n >= shape.least_ranges)
        base = np.where(fits, own, np.inf)
        for row, weight in enumerate(weights):
            value = base + weight * journey if weight.any() else base
            where = value.argmin(axis=1)
            cheapest[:, row] = np.take_along_axis(value, where[:, None], axis=1)[:, 0]
            chosen[:, row] = useful[where]
    return np.where(np.isnan(cheapest), np.inf, cheapest), chosen


def _stages(
    types: StageTypes, shape: Shape, history: list[tuple[Ints, Ints]], count: int, weight: int, box: int
) -> Iterator[tuple[int, int, float]]:
    """The stages of the best chain of `count` stages in a box under a weight, the last stage first."""
    left, found = types.num_layers, []
    for after in range(count - 1, -1, -1):
        n = int(history[after][0][left, weight, box])
        found.append((int(history[after][1][n, weight, box]), n, after))
        left -= n
    for which, n, after in reversed(found):
        if shape.interleaved:
            t = types.interleaved_s(after, count, shape.least_ranges, shape.most_ranges, True)
        else:
            t = types.seconds(after, after + 1)
        yield which, n, float(t[which, n])


def micro_batches(types: StageTypes, chain: Chain, step_s: float) -> int:
    """The most micro-batches with which `chain` obeys its conditions in `step_s` seconds."""
    which = np.array([stage[0] for stage in chain.stages])
    n = np.array([stage[1] for stage in chain.stages])
    t = np.array([stage[2] for stage in chain.stages])
    if not np.isfinite(t).all():
        return 0  # it needs more memory than a few micro-batches showed
    after = np.arange(len(which))
    head_s = np.where(after == 0, types.head_forward_s[which], 0.0)
    forward_s = types.forward_s[which]
    if chain.shape.interleaved:
        journey = (n // chain.shape.most_ranges) * types.layer_s[which]
        ahead = 2 * after * (-(-n // chain.shape.least_ranges) * forward_s + head_s)
        most = (step_s - journey.sum() + journey + ahead) / t
    else:
        most = (step_s - t.sum() + after * (n * forward_s + head_s)) / t + 1
    limit = types.global_batch / types.share[which].max()
    found = min(limit, float(most.min()), float((step_s / t).min()))
    each = len(which) if chain.shape.interleaved else 1  # micro-batches come in multiples of interleaved stages
    return int(each * floor(max(0.0, found) / each))
