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
    """Boxes: least micro-batches, least and most Σ, and the highest price of interest, each [boxes]."""

    low_m: Floats
    low_s: Floats
    high_s: Floats
    wanted: Floats


class Found(NamedTuple):
    """The least price of a chain [boxes], infinite if above the wanted one; the number of stages of the cheapest chain
    [boxes], and from the last to the first the type and layers of each [boxes, stages, 2]."""

    least: Floats
    counts: Ints
    chains: Ints

    def some(self, boxes: slice | Ints) -> "Found":
        """A view of some boxes; filling it fills the whole."""
        return Found(self.least[boxes], self.counts[boxes], self.chains[boxes])


class _BoxStages(NamedTuple):
    """Stages of a box: the most layers of every type [types] that its micro-batches allow, and prices up to there.

    `own_price` is [types, layers + 1]; `shared_price` [types, layers + 1, modes] is that of the cheapest mode up to
    each. For a number of following stages, `value` has the prices of inner and first stages [types, layers + 1, 2],
    infinite where one does not fit, and `journey` [types, layers + 1] its contribution to Σ.
    """

    longest: Ints
    own_price: Floats
    shared_price: Floats
    value: Floats
    journey: Floats


@numba.njit(cache=True, nogil=True)
def stage_prices(
    kind: int,
    devices: float,
    prices: Multipliers,
    batch: float,
    m: float,
    n: int,
    own: Floats,
    shared: Floats,
) -> Any:
    """Lower bounds on the price of a stage of n layers of a type with m micro-batches, by mode.

    `own` applies if no other machine has its layers, `shared` if other machines have some of them.
    """
    machines = devices / prices.machine_devices[kind]
    for j in range(len(prices.most_shared)):
        price = devices * prices.device[kind, j] + n * m / batch * prices.slot[kind, j]
        least = max(0.0, n - prices.most_shared[j])
        own[j] = price + machines * n * prices.longest[kind, j]
        shared[j] = price + machines * least * prices.longest[kind, j]


@numba.njit(cache=True, nogil=True)
def _no_stages(task: Task) -> Any:
    num_rows, lengths, num_modes = len(task.rows.kind), task.rows.many.shape[2], len(task.prices.most_shared)
    return _BoxStages(
        np.zeros(num_rows, np.int64),
        np.empty((num_rows, lengths)),
        np.empty((num_rows, lengths, num_modes)),
        np.empty((num_rows, lengths, 2)),
        np.empty((num_rows, lengths)),
    )


@numba.njit(cache=True, nogil=True)
def _price_lengths(m: float, task: Task, stages: _BoxStages) -> Any:
    """Fill the values that do not depend on the following stages: longest, own and shared prices."""
    rows, prices, layers = task.rows, task.prices, task.rows.many.shape[2] - 1
    num_modes = len(prices.most_shared)
    own, shared = np.empty(num_modes), np.empty(num_modes)
    for row in range(len(rows.kind)):
        stages.longest[row] = 0
        if rows.share[row] * m > task.batch:
            continue
        for n in range(task.shape[0], layers + 1):
            if n * rows.layer_s[row] * m > task.limit_s:
                break
            stages.longest[row] = n
            stage_prices(rows.kind[row], rows.devices[row], prices, task.batch, m, n, own, shared)
            stages.own_price[row, n] = own.min()
            best = np.inf
            for j in range(num_modes):  # modes sync ever longer
                best = min(best, shared[j])
                stages.shared_price[row, n, j] = best


@numba.njit(cache=True, nogil=True)
def _price_stages(
    after: int, m: float, low_s: float, high_s: float, most_price: float, task: Task, stages: _BoxStages
) -> Any:
    """Fill value and journey of stages followed by `after` stages. Returns the most layers of any."""
    limit_s, rows, prices = task.limit_s, task.rows, task.prices
    least_ranges, most_ranges = task.shape[0], task.shape[1]
    enough, ahead, top = m >= rows.enough[after], rows.ahead[after], 0
    for row in range(len(rows.kind)):
        kind = rows.kind[row]
        head_s = rows.head_forward_s[row] if after == 0 else 0.0
        stages.value[row] = np.inf
        for n in range(least_ranges, stages.longest[row] + 1):
            t = rows.many[after, row, n] if enough else rows.few[after, row, n]
            work_s = m * t
            if not work_s <= limit_s:
                break
            if most_ranges > 1:
                most, fewest = -(-n // least_ranges), n // most_ranges
                journey_s, busy_s = fewest * rows.layer_s[row], work_s
                # Used only where a link slower than the assumed one, whose forwards count negatively, cannot lower it.
                if m * n >= ahead * most + fewest:
                    ahead_s = ahead * (most * rows.forward_s[row] + head_s)
                    busy_s = max(busy_s, work_s - journey_s - ahead_s + low_s)
            else:
                journey_s = t
                ahead_s = min(ahead, m - 1) * (n * rows.forward_s[row] + head_s)
                busy_s = max(work_s, work_s - t - ahead_s + low_s)
            if busy_s > limit_s or journey_s > high_s * SLACK:
                continue
            stages.journey[row, n] = journey_s
            for first in range(2):
                # Only a first stage certainly ends its last backward at the end of the last journey.
                slack_s = limit_s - (busy_s if first else work_s)
                price = stages.own_price[row, n]
                mode = len(prices.most_shared) - 1
                if not rows.lockstep[row]:
                    while mode >= 0 and prices.tail_s[kind, mode] > slack_s:
                        mode -= 1
                if mode >= 0:
                    price = min(price, stages.shared_price[row, n, mode])
                if rows.inner_s[row] > 0.0:
                    alone = n - slack_s / rows.inner_s[row]
                    if alone > 0.0:
                        price += prices.holder / rows.share[row] * alone
                if price <= most_price:
                    stages.value[row, n, first] = price
                    top = max(top, n)
    return top


@numba.njit(cache=True, nogil=True)
def least_prices(task: Task, boxes: BoxArrays, weights: Floats, found: Found) -> Any:
    """Fill `found`. Each row of `weights` [weights, boxes] prices a second of Σ; the row with the best bound counts."""
    least_stages, most_stages = task.shape[2], task.shape[3]
    num_rows, layers, num_weights = len(task.rows.kind), task.rows.many.shape[2] - 1, len(weights)
    stages = _no_stages(task)
    value, journey, longest = stages.value, stages.journey, stages.longest
    cost, total = np.empty((num_weights, layers + 1)), np.empty((num_weights, layers + 1))
    price = np.empty((2, num_weights, layers + 1))
    picked = np.zeros((2, num_weights, layers + 1), np.int64)
    taken = np.zeros((most_stages, num_weights, layers + 1), np.int64)
    type_of = np.zeros((most_stages, num_weights, layers + 1), np.int64)
    for box in range(len(boxes.low_m)):
        m, low_s, high_s, wanted = boxes.low_m[box], boxes.low_s[box], boxes.high_s[box], boxes.wanted[box]
        _price_lengths(m, task, stages)
        cost[:] = np.inf
        cost[:, 0] = 0.0
        best_value, best_count = np.full(num_weights, np.inf), np.zeros(num_weights, np.int64)
        for after in range(most_stages):
            top = _price_stages(after, m, low_s, high_s, wanted, task, stages)
            price[:] = np.inf
            for row in range(num_rows):
                for n in range(task.shape[0], longest[row] + 1):
                    for first in range(2):
                        if value[row, n, first] < np.inf:
                            for w in range(num_weights):
                                weighted = value[row, n, first] + weights[w, box] * journey[row, n]
                                if weighted < price[first, w, n]:
                                    price[first, w, n], picked[first, w, n] = weighted, row
            alive = False
            total[:] = np.inf
            for w in range(num_weights):
                most_price = wanted + weights[w, box] * high_s
                for before in range(layers):
                    begun = cost[w, before]
                    if begun > most_price or (after == 0) != (before == 0):
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
    num_rows, layers = len(task.rows.kind), task.rows.many.shape[2] - 1
    stages = _no_stages(task)
    value, journey, longest = stages.value, stages.journey, stages.longest
    cost, total = np.empty((layers + 1, parts + 1)), np.empty((layers + 1, parts + 1))
    price = np.empty((2, layers + 1, parts + 1))
    picked = np.zeros((2, layers + 1, parts + 1), np.int64)
    taken = np.zeros((most_stages, layers + 1, parts + 1, 3), np.int64)  # layers, part, type
    for box in range(len(boxes.low_m)):
        m, low_s, high_s, wanted = boxes.low_m[box], boxes.low_s[box], boxes.high_s[box], boxes.wanted[box]
        _price_lengths(m, task, stages)
        cost[:] = np.inf
        cost[0, 0] = 0.0
        found.least[box], found.counts[box], last = np.inf, 0, 0
        for after in range(most_stages):
            top = _price_stages(after, m, low_s, high_s, wanted, task, stages)
            price[:] = np.inf
            for row in range(num_rows):
                for n in range(task.shape[0], longest[row] + 1):
                    for first in range(2):
                        if value[row, n, first] < np.inf:
                            part = min(parts, int(journey[row, n] / high_s * parts))
                            if value[row, n, first] < price[first, n, part]:
                                price[first, n, part], picked[first, n, part] = value[row, n, first], row
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
                                if reached <= wanted and reached < total[before + n, begun + part]:
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
