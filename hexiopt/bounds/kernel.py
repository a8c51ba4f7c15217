"""The compiled recursion of `chains.py` over stages and layers: least prices of chains in boxes."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SLACK = 1 + 1e-9  # rounding errors may only make a chain more feasible


class Rows(NamedTuple):
    """Stage types, as in `StageTypes`, and their seconds for the stages of one schedule family.

    `many` and `few` are forward and backward seconds [following stages, types, layers + 1] with many micro-batches and
    with fewer than `enough` [following stages]; `ahead` [following stages] is the most forwards a stage runs ahead.
    """

    kind: Ints
    devices: Floats
    share: Floats
    lockstep: NDArray[np.bool_]
    inner_s: Floats
    forward_s: Floats
    layer_s: Floats
    head_forward_s: Floats
    many: Floats
    few: Floats
    enough: Ints
    ahead: Ints


class Multipliers(NamedTuple):
    """Prices of the program's rows (`columns.py`), [kinds, modes] except for `holder`; `tail_s` is a mode's sync."""

    device: Floats
    slot: Floats
    longest: Floats
    holder: float
    most_shared: Floats  # [modes]
    tail_s: Floats
    machine_devices: Floats  # [kinds]


class Task(NamedTuple):
    """The data shared by all boxes; `shape` has the least and most ranges and the least and most stages."""

    limit_s: float
    batch: float
    shape: tuple[int, int, int, int]
    rows: Rows
    prices: Multipliers


class BoxArrays(NamedTuple):
    """Boxes: least and most micro-batches, least and most Σ, and the highest price of interest, each [boxes]."""

    low_m: Floats
    high_m: Floats
    low_s: Floats
    high_s: Floats
    wanted: Floats


class Found(NamedTuple):
    """The least price of a chain [boxes], infinite if above the wanted one; the number of stages of the cheapest chain
    [boxes], and from the last to the first the type and layers of each [boxes, stages, 2].

    A chain of m micro-batches counts with its price times `high_m` / m, so that `high_m` / `least` bounds micro-batches
    per price."""

    least: Floats
    counts: Ints
    chains: Ints

    def some(self, boxes: slice | Ints) -> "Found":
        """A view of some boxes; filling it fills the whole."""
        return Found(self.least[boxes], self.counts[boxes], self.chains[boxes])


class _BoxStages(NamedTuple):
    """Stages of a box that chains of interest may have, one array element each: type and layers.

    `cheapest` [types, layers + 1] is the least price of any stage. For a number of following stages, `value` has the
    prices of inner and first stages [stages, 2], infinite where one does not fit, and `journey` [stages] its
    contribution to Σ. Of `stage_prices` with the latest `factor` [stages], `own` has the least and `shared` [stages,
    modes] all.
    """

    row: Ints
    layers: Ints
    factor: Floats
    own: Floats
    shared: Floats
    value: Floats
    journey: Floats
    cheapest: Floats


@numba.njit(cache=True, nogil=True)
def stage_prices(
    kind: int,
    devices: float,
    prices: Multipliers,
    passes: float,
    n: int,
    factor: float,
    own: Floats,
    shared: Floats,
) -> Any:
    """Lower bounds on the price of a stage of n layers of a type, by mode.

    `own` applies if no other machine has its layers, `shared` if other machines have some of them. `passes` is the
    share of the batch that it processes; `factor` multiplies what does not depend on that.
    """
    machines = devices / prices.machine_devices[kind]
    for j in range(len(prices.most_shared)):
        price = factor * devices * prices.device[kind, j] + n * passes * prices.slot[kind, j]
        least = max(0.0, n - prices.most_shared[j])
        own[j] = price + factor * machines * n * prices.longest[kind, j]
        shared[j] = price + factor * machines * least * prices.longest[kind, j]


@numba.njit(cache=True, nogil=True)
def _no_stages(task: Task) -> Any:
    num_rows, lengths = len(task.rows.kind), task.rows.many.shape[2]
    most = num_rows * lengths
    return _BoxStages(
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most),
        np.empty(most),
        np.empty((most, len(task.prices.most_shared))),
        np.empty((most, 2)),
        np.empty(most),
        np.empty((num_rows, lengths)),
    )


@numba.njit(cache=True, nogil=True)
def _factor(low_m: float, high_m: float, most_m: float) -> float:
    """`high_m` / m for the most micro-batches of a box that take no longer than `most_m` do."""
    return float(high_m / max(low_m, min(high_m, np.floor(most_m * SLACK))))


@numba.njit(cache=True, nogil=True)
def _cheapest(low_m: float, high_m: float, task: Task, stages: _BoxStages) -> Any:
    """Fill `cheapest` for a number of micro-batches in between; returns the least price of a layer in any stage."""
    rows, prices, layers = task.rows, task.prices, task.rows.many.shape[2] - 1
    own, shared = np.empty(len(prices.most_shared)), np.empty(len(prices.most_shared))
    layer_price = np.inf
    for row in range(len(rows.kind)):
        stages.cheapest[row] = np.inf
        if rows.share[row] * low_m > task.batch:
            continue
        for n in range(task.shape[0], layers + 1):
            if n * rows.layer_s[row] * low_m > task.limit_s:
                break
            factor = _factor(low_m, high_m, task.limit_s / (n * rows.layer_s[row]))
            passes = high_m / task.batch
            stage_prices(rows.kind[row], rows.devices[row], prices, passes, n, factor, own, shared)
            stages.cheapest[row, n] = min(own.min(), shared.min())
            layer_price = min(layer_price, stages.cheapest[row, n] / n)
    return layer_price


@numba.njit(cache=True, nogil=True)
def _affordable(layer_price: float, wanted: float, task: Task, stages: _BoxStages) -> Any:
    """List the stages that a chain of price `wanted` may have; returns their number.

    A stage is left out if it and the other layers at `layer_price` cost more than `wanted` already.
    """
    layers, count, most_price = task.rows.many.shape[2] - 1, 0, wanted * SLACK
    if not layers * layer_price <= most_price:
        return count
    for row in range(len(task.rows.kind)):
        for n in range(task.shape[0], layers + 1):
            if stages.cheapest[row, n] + (layers - n) * layer_price <= most_price:
                stages.row[count], stages.layers[count], stages.factor[count] = row, n, 0.0
                count += 1
    return count


@numba.njit(cache=True, nogil=True)
def _price_stages(
    count: int,
    layer_price: float,
    after: int,
    box: tuple[float, float, float, float, float],
    task: Task,
    stages: _BoxStages,
) -> Any:
    """Fill value and journey of the first `count` stages, followed by `after` others. Returns the most layers of any.

    `box` has the least and most micro-batches, the least and most Σ, and the highest price of interest.
    """
    limit_s, rows, prices = task.limit_s, task.rows, task.prices
    m, high_m, low_s, high_s, wanted = box
    least_ranges, most_ranges, layers = task.shape[0], task.shape[1], task.rows.many.shape[2] - 1
    enough, ahead, top = m >= rows.enough[after], rows.ahead[after], 0
    own = np.empty(len(prices.most_shared))
    for k in range(count):
        row, n = stages.row[k], stages.layers[k]
        kind = rows.kind[row]
        head_s = rows.head_forward_s[row] if after == 0 else 0.0
        stages.value[k] = np.inf
        t = rows.many[after, row, n] if enough else rows.few[after, row, n]
        work_s = m * t
        if not work_s <= limit_s:
            continue
        most_m = limit_s / t
        if most_ranges > 1:
            most, fewest = -(-n // least_ranges), n // most_ranges
            journey_s, busy_s = fewest * rows.layer_s[row], work_s
            # Used only where a link slower than the assumed one, whose forwards count negatively, cannot lower it.
            if m * n >= ahead * most + fewest:
                other_s = low_s - journey_s - ahead * (most * rows.forward_s[row] + head_s)
                busy_s = max(busy_s, work_s + other_s)
                most_m = min(most_m, (limit_s - other_s) / t)
        else:
            journey_s = t
            ahead_s = n * rows.forward_s[row] + head_s
            busy_s = max(work_s, work_s - t - min(ahead, m - 1) * ahead_s + low_s)
            most_m = min(most_m, (limit_s - low_s + t + ahead * ahead_s) / t)
        if busy_s > limit_s or journey_s > high_s * SLACK:
            continue
        stages.journey[k] = journey_s
        factor = _factor(m, high_m, most_m)
        if factor != stages.factor[k]:
            passes = high_m / task.batch
            stage_prices(kind, rows.devices[row], prices, passes, n, factor, own, stages.shared[k])
            stages.factor[k], stages.own[k] = factor, own.min()
        for first in range(2):
            # Only a first stage certainly ends its last backward at the end of the last journey.
            slack_s = limit_s - (busy_s if first else work_s)
            price = stages.own[k]
            for j in range(len(prices.most_shared)):  # modes sync ever longer
                if rows.lockstep[row] or prices.tail_s[kind, j] <= slack_s:
                    price = min(price, stages.shared[k, j])
            if rows.inner_s[row] > 0.0:
                alone = n - slack_s / rows.inner_s[row]
                if alone > 0.0:
                    price += factor * prices.holder / rows.share[row] * alone
            if price + (layers - n) * layer_price <= wanted * SLACK:
                stages.value[k, first] = price
                top = max(top, n)
    return top


@numba.njit(cache=True, nogil=True)
def least_prices(task: Task, boxes: BoxArrays, weights: Floats, found: Found) -> Any:
    """Fill `found`. Each row of `weights` [weights, boxes] prices a second of Σ; the row with the best bound counts."""
    least_stages, most_stages = task.shape[2], task.shape[3]
    layers, num_weights = task.rows.many.shape[2] - 1, len(weights)
    stages = _no_stages(task)
    value, journey = stages.value, stages.journey
    cost, total = np.empty((num_weights, layers + 1)), np.empty((num_weights, layers + 1))
    price = np.empty((2, num_weights, layers + 1))
    picked = np.zeros((2, num_weights, layers + 1), np.int64)
    taken = np.zeros((most_stages, num_weights, layers + 1), np.int64)
    type_of = np.zeros((most_stages, num_weights, layers + 1), np.int64)
    known, layer_price = (-1.0, -1.0), np.inf
    for box in range(len(boxes.low_m)):
        m, high_m, high_s, wanted = boxes.low_m[box], boxes.high_m[box], boxes.high_s[box], boxes.wanted[box]
        if (m, high_m) != known:
            known, layer_price = (m, high_m), _cheapest(m, high_m, task, stages)
        count = _affordable(layer_price, wanted, task, stages)
        if not count:
            found.least[box], found.counts[box] = max(wanted * SLACK, layers * layer_price), 0
            continue
        cost[:] = np.inf
        cost[:, 0] = 0.0
        best_value, best_count = np.full(num_weights, np.inf), np.zeros(num_weights, np.int64)
        for after in range(most_stages):
            ends = m, high_m, boxes.low_s[box], high_s, wanted
            top = _price_stages(count, layer_price, after, ends, task, stages)
            price[:] = np.inf
            for k in range(count):
                n = stages.layers[k]
                for first in range(2):
                    if value[k, first] < np.inf:
                        for w in range(num_weights):
                            weighted = value[k, first] + weights[w, box] * journey[k]
                            if weighted < price[first, w, n]:
                                price[first, w, n], picked[first, w, n] = weighted, stages.row[k]
            alive = False
            total[:] = np.inf
            for w in range(num_weights):
                most_price = (wanted + weights[w, box] * high_s) * SLACK
                for before in range(layers):
                    begun = cost[w, before]
                    if begun + (layers - before) * layer_price > most_price or (after == 0) != (before == 0):
                        continue
                    for n in range(1, min(top, layers - before) + 1):
                        first = 1 if before + n == layers else 0
                        reached = begun + price[first, w, n]
                        if reached < total[w, before + n]:
                            total[w, before + n] = reached
                            taken[after, w, before + n] = n
                            type_of[after, w, before + n] = picked[first, w, n]
                            alive = alive or not first
                if after + 1 >= least_stages and total[w, layers] < best_value[w]:
                    best_value[w], best_count[w] = total[w, layers], after + 1
            cost[:] = total
            if not alive:
                break
        found.least[box], best = -np.inf, 0
        for w in range(num_weights):
            priced = best_value[w] - weights[w, box] * high_s
            if priced > found.least[box]:
                found.least[box], best = priced, w
        found.counts[box] = best_count[best] if best_value[best] < np.inf else 0
        covered = layers
        for after in range(found.counts[box] - 1, -1, -1):
            n = taken[after, best, covered]
            found.chains[box, after, 0], found.chains[box, after, 1] = type_of[after, best, covered], n
            covered -= n


@numba.njit(cache=True, nogil=True)
def least_prices_finely(task: Task, boxes: BoxArrays, parts: int, found: Found) -> Any:
    """Like `least_prices`, but instead of pricing Σ by multipliers the recursion tracks it in `parts` of its maximum,
    rounding down each stage's share."""
    least_stages, most_stages = task.shape[2], task.shape[3]
    layers = task.rows.many.shape[2] - 1
    stages = _no_stages(task)
    value, journey = stages.value, stages.journey
    cost, total = np.empty((layers + 1, parts + 1)), np.empty((layers + 1, parts + 1))
    price = np.empty((2, layers + 1, parts + 1))
    picked = np.zeros((2, layers + 1, parts + 1), np.int64)
    taken = np.zeros((most_stages, layers + 1, parts + 1, 3), np.int64)  # layers, part, type
    known, layer_price = (-1.0, -1.0), np.inf
    for box in range(len(boxes.low_m)):
        m, high_m, high_s, wanted = boxes.low_m[box], boxes.high_m[box], boxes.high_s[box], boxes.wanted[box]
        if (m, high_m) != known:
            known, layer_price = (m, high_m), _cheapest(m, high_m, task, stages)
        count = _affordable(layer_price, wanted, task, stages)
        if not count:
            found.least[box], found.counts[box] = max(wanted * SLACK, layers * layer_price), 0
            continue
        cost[:] = np.inf
        cost[0, 0] = 0.0
        found.least[box], found.counts[box], last = np.inf, 0, 0
        for after in range(most_stages):
            ends = m, high_m, boxes.low_s[box], high_s, wanted
            top = _price_stages(count, layer_price, after, ends, task, stages)
            price[:] = np.inf
            for k in range(count):
                n = stages.layers[k]
                for first in range(2):
                    if value[k, first] < np.inf:
                        part = min(parts, int(journey[k] / high_s * parts))
                        if value[k, first] < price[first, n, part]:
                            price[first, n, part], picked[first, n, part] = value[k, first], stages.row[k]
            for first in range(2):  # more time without a lower price is dominated
                for n in range(1, top + 1):
                    best = np.inf
                    for part in range(parts + 1):
                        if price[first, n, part] >= best:
                            price[first, n, part] = np.inf
                        best = min(best, price[first, n, part])
            alive = False
            total[:] = np.inf
            for n in range(1, top + 1):
                for first in range(2):
                    for part in range(parts + 1):
                        own = price[first, n, part]
                        if own == np.inf:
                            continue
                        for before in range(layers - n, layers - n + 1) if first else range(layers - n):
                            if (after == 0) != (before == 0):
                                continue
                            for begun in range(parts + 1 - part):
                                reached = cost[before, begun] + own
                                left = (layers - before - n) * layer_price
                                if reached + left <= wanted * SLACK and reached < total[before + n, begun + part]:
                                    total[before + n, begun + part] = reached
                                    taken[after, before + n, begun + part] = (n, part, picked[first, n, part])
                                    alive = alive or not first
            if after + 1 >= least_stages:
                for part in range(parts + 1):
                    if total[layers, part] < found.least[box]:
                        found.least[box], found.counts[box], last = total[layers, part], after + 1, part
            cost[:] = total
            if not alive:
                break
        covered, part = layers, last
        for after in range(found.counts[box] - 1, -1, -1):
            n, own_part, row = taken[after, covered, part]
            found.chains[box, after, 0], found.chains[box, after, 1] = row, n
            covered, part = covered - n, part - own_part
