"""The recursion of `chains.py` over stages and layers, compiled: least prices of chains in boxes."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_SLACK = 1 + 1e-9  # rounding may only make a chain more feasible


class Rows(NamedTuple):
    """Stage types, as in `StageTypes`, and their seconds for the stages of one shape.

    `many` and `few` are forward and backward seconds [stages behind, types, layers + 1] with many micro-batches
    and with fewer than the row of `enough` says.
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


class Multipliers(NamedTuple):
    """Prices of what is scarce, [kinds, modes] but `holder`; see `shapes.py`. `tail_s` is a mode's sync."""

    device: Floats
    slot: Floats
    longest: Floats
    holder: float
    most_shared: Floats  # [modes]
    tail_s: Floats
    machine_devices: Floats  # [kinds]


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
    """Price of a stage of n layers of a type with m micro-batches: at least, by mode.

    `own` if it alone has its layers, `shared` if other machines have some of them.
    """
    machines = devices / prices.machine_devices[kind]
    for j in range(len(prices.most_shared)):
        price = devices * prices.device[kind, j] + n * m / batch * prices.slot[kind, j]
        least = max(0.0, n - prices.most_shared[j])
        own[j] = price + machines * n * prices.longest[kind, j]
        shared[j] = price + machines * least * prices.longest[kind, j]


@numba.njit(cache=True, nogil=True)
def least_prices(
    step_s: float,
    batch: float,
    shape: tuple[int, int, int, int],
    rows: Rows,
    prices: Multipliers,
    boxes: tuple[Floats, Floats, Floats],
    weights: Floats,
    least: Floats,
    counts: Ints,
    chains: Ints,
) -> Any:
    """Fill `least` [boxes] with what a chain costs at least, and its stages from the last to the first:

    `counts` [boxes] of them, type and layers in `chains` [boxes, stages, 2]. `boxes` are their least micro-batches,
    least and most Σ.
    """
    least_ranges, most_ranges, least_stages, most_stages = shape
    interleaved = most_ranges > 1
    low_m, low_s, high_s = boxes
    num_rows, layers, num_modes = len(rows.kind), rows.many.shape[2] - 1, len(prices.most_shared)
    num_weights = len(weights)
    limit_s = step_s * _SLACK
    own_price = np.empty((num_rows, layers + 1))
    shared_price = np.empty((num_rows, layers + 1, num_modes))
    own, shared = np.empty(num_modes), np.empty(num_modes)
    cost, total = np.empty((num_weights, layers + 1)), np.empty((num_weights, layers + 1))
    price = np.empty((2, num_weights, layers + 1))  # of inner stages, and of first ones
    picked = np.zeros((2, num_weights, layers + 1), np.int64)
    taken = np.zeros((most_stages, num_weights, layers + 1), np.int64)
    type_of = np.zeros((most_stages, num_weights, layers + 1), np.int64)
    longest = np.zeros(num_rows, np.int64)
    for box in range(len(low_m)):
        m = low_m[box]
        for row in range(num_rows):
            longest[row] = 0
            if rows.share[row] * m > batch:
                continue
            for n in range(least_ranges, layers + 1):
                if n * rows.layer_s[row] * m > limit_s:
                    break
                longest[row] = n
                stage_prices(rows.kind[row], rows.devices[row], prices, batch, m, n, own, shared)
                own_price[row, n] = own.min()
                best = np.inf
                for j in range(num_modes):  # modes sync ever longer
                    best = min(best, shared[j])
                    shared_price[row, n, j] = best
        least[box] = np.inf
        counts[box] = 0
        cost[:] = np.inf
        cost[:, 0] = 0.0
        best_value, best_weight, best_count = np.full(num_weights, np.inf), 0, np.zeros(num_weights, np.int64)
        for after in range(most_stages):
            price[:] = np.inf
            top = 0
            enough = m >= rows.enough[after]
            for row in range(num_rows):
                kind = rows.kind[row]
                head_s = rows.head_forward_s[row] if after == 0 else 0.0
                for n in range(least_ranges, longest[row] + 1):
                    t = rows.many[after, row, n] if enough else rows.few[after, row, n]
                    work_s = m * t
                    if not work_s <= limit_s:
                        break
                    if interleaved:
                        most, fewest = -(-n // least_ranges), n // most_ranges
                        journey_s = fewest * rows.layer_s[row]
                        busy_s = work_s
                        # Where forwards count negatively, a slower link than the best would not make it worse.
                        if m * n >= 2 * after * most + fewest:
                            ahead_s = 2 * after * (most * rows.forward_s[row] + head_s)
                            busy_s = max(busy_s, work_s - journey_s - ahead_s + low_s[box])
                    else:
                        journey_s = t
                        ahead_s = min(after, m - 1) * (n * rows.forward_s[row] + head_s)
                        busy_s = max(work_s, work_s - t - ahead_s + low_s[box])
                    if busy_s > limit_s or journey_s > high_s[box] * _SLACK:
                        continue
                    top = max(top, n)
                    for first in range(2):
                        # Only a first stage surely ends its last backward when the step's journeys are over.
                        slack_s = limit_s - (busy_s if first else work_s)
                        value = own_price[row, n]
                        mode = num_modes - 1
                        if not rows.lockstep[row]:
                            while mode >= 0 and prices.tail_s[kind, mode] > slack_s:
                                mode -= 1
                        if mode >= 0:
                            value = min(value, shared_price[row, n, mode])
                        if rows.inner_s[row] > 0.0:
                            alone = n - slack_s / rows.inner_s[row]
                            if alone > 0.0:
                                value += prices.holder / rows.share[row] * alone
                        for w in range(num_weights):
                            weighted = value + weights[w, box] * journey_s
                            if weighted < price[first, w, n]:
                                price[first, w, n] = weighted
                                picked[first, w, n] = row
            alive = False
            for w in range(num_weights):
                for covered in range(layers + 1):
                    total[w, covered] = np.inf
                for before in range(layers):
                    begun = cost[w, before]
                    if begun == np.inf or (after == 0) != (before == 0):
                        continue
                    for n in range(1, min(top, layers - before) + 1):
                        first = 1 if before + n == layers else 0
                        value = begun + price[first, w, n]
                        if value < total[w, before + n]:
                            total[w, before + n] = value
                            taken[after, w, before + n] = n
                            type_of[after, w, before + n] = picked[first, w, n]
                            alive = alive or not first
                for covered in range(layers + 1):
                    cost[w, covered] = total[w, covered]
                if after + 1 >= least_stages and cost[w, layers] < best_value[w]:
                    best_value[w], best_count[w] = cost[w, layers], after + 1
            if not alive:
                break
        highest = -np.inf
        for w in range(num_weights):
            value = best_value[w] - weights[w, box] * high_s[box]
            if value > highest:
                highest, best_weight = value, w
        least[box] = highest
        if best_value[best_weight] < np.inf:
            counts[box] = best_count[best_weight]
            covered = layers
            for after in range(counts[box] - 1, -1, -1):
                n = taken[after, best_weight, covered]
                chains[box, after, 0] = type_of[after, best_weight, covered]
                chains[box, after, 1] = n
                covered -= n
