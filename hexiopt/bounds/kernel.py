"""The compiled recursions of `chains.py` over stages and layers: least prices of chains in boxes."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from hexiopt.bounds.box_stages import (
    SLACK,
    BoxArrays,
    BoxStages,
    Task,
    affordable_stages,
    least_stage_prices,
    no_stages,
    price_stages,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class CheapestChains(NamedTuple):
    """The least price of a chain [boxes], infinite if above the wanted one; the number of stages of the cheapest chain
    [boxes], and from the last to the first the type and layers of each [boxes, stages, 2].

    A chain of m micro-batches counts with its price times `high_m` / m, so that `high_m` / `least` bounds micro-batches
    per price."""

    least: Floats
    counts: Ints
    chains: Ints

    def some(self, boxes: slice | Ints) -> "CheapestChains":
        """A view of some boxes; filling it fills the whole."""
        return CheapestChains(self.least[boxes], self.counts[boxes], self.chains[boxes])


class _Recursion(NamedTuple):
    """The recursion with multipliers of Σ, of a box: by multiplier, the least price with Σ priced of all chains
    [weights], and of the cheapest one its Σ [weights] and number of stages [weights].

    By number of layers from the end of the model on [weights, layers + 1]: `cost` and `total` are least prices before
    and after a stage is added, `begun_s` and `ended_s` the Σ of the chains that have them. By number of following
    stages too [stages, weights, layers + 1]: `layers_of` and `type_of` of the stage that chains end with. By
    layers of a stage, inner or first [2, weights, layers + 1]: `price` is the least, `picked` the type that has it, and
    `picked_s` what that adds to Σ.
    """

    value: Floats
    sum_s: Floats
    stages: Ints
    cost: Floats
    total: Floats
    begun_s: Floats
    ended_s: Floats
    layers_of: Ints
    type_of: Ints
    price: Floats
    picked: Ints
    picked_s: Floats


@numba.njit(cache=True, nogil=True)
def _no_recursion(task: Task, count: int) -> Any:
    most, lengths = task.shape[3], task.rows.many.shape[2]
    return _Recursion(
        np.empty(count),
        np.empty(count),
        np.zeros(count, np.int64),
        np.empty((count, lengths)),
        np.empty((count, lengths)),
        np.zeros((count, lengths)),
        np.zeros((count, lengths)),
        np.zeros((most, count, lengths), np.int64),
        np.zeros((most, count, lengths), np.int64),
        np.empty((2, count, lengths)),
        np.zeros((2, count, lengths), np.int64),
        np.zeros((2, count, lengths)),
    )


@numba.njit(cache=True, nogil=True)
def _price_chains(
    count: int,
    layer_price: float,
    ends: tuple[float, float, float, float, float],
    weights: Floats,
    task: Task,
    stages: BoxStages,
    run: _Recursion,
) -> Any:
    """Fill `run` with chains of the first `count` stages, where each of `weights` prices a second of Σ."""
    least_stages, most_stages, layers = task.shape[2], task.shape[3], task.rows.many.shape[2] - 1
    high_s, wanted = ends[3], ends[4]
    cost, total, begun_s, ended_s, price = run.cost, run.total, run.begun_s, run.ended_s, run.price
    cost[:] = np.inf
    cost[:, 0], begun_s[:, 0] = 0.0, 0.0
    run.value[:] = np.inf
    run.stages[:] = 0
    for after in range(most_stages):
        if stages.top[after] < 0:
            price_stages(count, layer_price, after, ends, task, stages)
        top, value, journey = stages.top[after], stages.value[after], stages.journey[after]
        price[:] = np.inf
        for k in range(count):
            n = stages.layers[k]
            for first in range(2):
                if value[k, first] < np.inf:
                    for w in range(len(weights)):
                        weighted = value[k, first] + weights[w] * journey[k]
                        if weighted < price[first, w, n]:
                            price[first, w, n], run.picked[first, w, n] = weighted, stages.row[k]
                            run.picked_s[first, w, n] = journey[k]
        alive = False
        total[:] = np.inf
        for w in range(len(weights)):
            most_price = (wanted + weights[w] * high_s) * SLACK
            for before in range(layers):
                begun = cost[w, before]
                if begun + (layers - before) * layer_price > most_price or (after == 0) != (before == 0):
                    continue
                for n in range(1, min(top, layers - before) + 1):
                    first = 1 if before + n == layers else 0
                    reached = begun + price[first, w, n]
                    if reached < total[w, before + n]:
                        total[w, before + n] = reached
                        ended_s[w, before + n] = begun_s[w, before] + run.picked_s[first, w, n]
                        run.layers_of[after, w, before + n] = n
                        run.type_of[after, w, before + n] = run.picked[first, w, n]
                        alive = alive or not first
            if after + 1 >= least_stages and total[w, layers] < run.value[w]:
                run.value[w], run.sum_s[w], run.stages[w] = total[w, layers], ended_s[w, layers], after + 1
        cost[:], begun_s[:] = total, ended_s
        if not alive:
            break


@numba.njit(cache=True, nogil=True)
def _better_weights(high_s: float, run: _Recursion, weights: Floats) -> float:
    """Set `weights` nearer to the best one; returns a price that no weight can prove more than.

    The price that a weight proves is the least of straight lines, a chain each: at weight w, its price + w · (its Σ −
    `high_s`). So the best one lies between the greatest weight whose chain has a greater Σ and the least whose chain
    has not, and no higher than where their lines meet (Kelley, 1960).
    """
    left, right = -1, -1
    for w in range(len(weights)):
        if run.sum_s[w] > high_s:
            left = w if left < 0 or weights[w] > weights[left] else left
        elif right < 0 or weights[w] < weights[right]:
            right = w
    if left < 0:  # the chain without multiplier lies in the box
        return float(run.value[right] - weights[right] * high_s)
    rise = run.sum_s[left] - high_s
    at_left = run.value[left] - weights[left] * high_s
    if right < 0:
        low = weights[left]
        for w in range(len(weights)):
            weights[w] = low * 4.0 ** (w + 1)
        return np.inf
    low, high = weights[left], weights[right]
    fall = high_s - run.sum_s[right]
    meet = (run.value[right] - high * high_s - at_left + high * fall + low * rise) / (rise + fall)
    meet = min(max(meet, low), high)
    most = at_left + (meet - low) * rise
    for w in range(len(weights)):  # one where they meet, one below and the others above
        weights[w] = 0.5 * (low + meet) if w == 0 else meet + (high - meet) * (w - 1) / (len(weights) - 1)
    return float(most)


@numba.njit(cache=True, nogil=True)
def _keep_chain(run: _Recursion, weight: int, layers: int, chain: Ints, count: int) -> Any:
    """Write the cheapest chain at a weight, of `count` stages, to `chain` [stages, 2]."""
    for after in range(count - 1, -1, -1):
        chain[after, 0], chain[after, 1] = run.type_of[after, weight, layers], run.layers_of[after, weight, layers]
        layers -= run.layers_of[after, weight, layers]


@numba.njit(cache=True, nogil=True)
def least_prices(task: Task, boxes: BoxArrays, weights: Floats, passes: int, result: CheapestChains) -> Any:
    """Fill `result`. Each row of `weights` [weights, boxes] prices a second of Σ; the one with the best bound counts.

    Where none proves the wanted price, better ones are sought in up to `passes` passes."""
    layers = task.rows.many.shape[2] - 1
    stages, run = no_stages(task), _no_recursion(task, len(weights))
    known, layer_price = (-1.0, -1.0), np.inf
    for box in range(len(boxes.low_m)):
        m, high_m, high_s, wanted = boxes.low_m[box], boxes.high_m[box], boxes.high_s[box], boxes.wanted[box]
        if (m, high_m) != known:
            known, layer_price = (m, high_m), least_stage_prices(m, high_m, task, stages)
        count = affordable_stages(layer_price, wanted, task, stages)
        if not count:
            result.least[box], result.counts[box] = max(wanted * SLACK, layers * layer_price), 0
            continue
        ends = m, high_m, boxes.low_s[box], high_s, wanted
        tried, cheapest = weights[:, box].copy(), np.inf
        result.least[box], result.counts[box] = -np.inf, 0
        for _ in range(passes):
            _price_chains(count, layer_price, ends, tried, task, stages, run)
            for w in range(len(tried)):
                proved = run.value[w] - tried[w] * high_s
                # A chain of the box is more likely to be one that the program lacks than one with too great a Σ.
                priced = run.value[w] - tried[w] * min(run.sum_s[w], high_s) + (run.sum_s[w] > high_s) * wanted
                result.least[box] = max(result.least[box], proved)
                if priced < cheapest:
                    cheapest, result.counts[box] = priced, run.stages[w]
                    _keep_chain(run, w, layers, result.chains[box], run.stages[w])
            if result.least[box] >= wanted or _better_weights(high_s, run, tried) < wanted:
                break


@numba.njit(cache=True, nogil=True)
def least_prices_finely(task: Task, boxes: BoxArrays, parts: int, result: CheapestChains) -> Any:
    """Like `least_prices`, but instead of pricing Σ by multipliers the recursion tracks it in `parts` of its maximum,
    rounding down each stage's share."""
    least_stages, most_stages = task.shape[2], task.shape[3]
    layers = task.rows.many.shape[2] - 1
    stages = no_stages(task)
    cost, total = np.empty((layers + 1, parts + 1)), np.empty((layers + 1, parts + 1))
    price = np.empty((2, layers + 1, parts + 1))
    picked = np.zeros((2, layers + 1, parts + 1), np.int64)
    last_stage = np.zeros((most_stages, layers + 1, parts + 1, 3), np.int64)  # layers, part, type
    known, layer_price = (-1.0, -1.0), np.inf
    for box in range(len(boxes.low_m)):
        m, high_m, high_s, wanted = boxes.low_m[box], boxes.high_m[box], boxes.high_s[box], boxes.wanted[box]
        if (m, high_m) != known:
            known, layer_price = (m, high_m), least_stage_prices(m, high_m, task, stages)
        count = affordable_stages(layer_price, wanted, task, stages)
        if not count:
            result.least[box], result.counts[box] = max(wanted * SLACK, layers * layer_price), 0
            continue
        cost[:] = np.inf
        cost[0, 0] = 0.0
        result.least[box], result.counts[box], last = np.inf, 0, 0
        for after in range(most_stages):
            ends = m, high_m, boxes.low_s[box], high_s, wanted
            price_stages(count, layer_price, after, ends, task, stages)
            top, value, journey = stages.top[after], stages.value[after], stages.journey[after]
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
                        stage_price = price[first, n, part]
                        if stage_price == np.inf:
                            continue
                        for before in range(layers - n, layers - n + 1) if first else range(layers - n):
                            if (after == 0) != (before == 0):
                                continue
                            for begun in range(parts + 1 - part):
                                reached = cost[before, begun] + stage_price
                                left = (layers - before - n) * layer_price
                                if reached + left <= wanted * SLACK and reached < total[before + n, begun + part]:
                                    total[before + n, begun + part] = reached
                                    last_stage[after, before + n, begun + part] = (n, part, picked[first, n, part])
                                    alive = alive or not first
            if after + 1 >= least_stages:
                for part in range(parts + 1):
                    if total[layers, part] < result.least[box]:
                        result.least[box], result.counts[box], last = total[layers, part], after + 1, part
            cost[:] = total
            if not alive:
                break
        covered, part = layers, last
        for after in range(result.counts[box] - 1, -1, -1):
            n, stage_part, row = last_stage[after, covered, part]
            result.chains[box, after, 0], result.chains[box, after, 1] = row, n
            covered, part = covered - n, part - stage_part
