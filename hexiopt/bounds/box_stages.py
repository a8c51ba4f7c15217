"""Compiled prices of stages in a box: what the recursions of `kernel.py` add up."""

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
    with fewer than `enough` [following stages]; `ahead` [following stages, types]: the most forwards that a stage runs
    ahead. `split`: backwards may be, and journeys leave out weight gradients, `late_s` seconds of a layer. All stages
    but the first wait for a share `elsewhere` of the journeys of others, 1 where backwards are whole.
    `nested`: a stage has one layer range, and no more micro-batches in flight than those with more stages after it.
    `shown`: the share of sync that follows the last backward (`sync_room_s`).
    """

    kind: Ints
    devices: Floats
    share: Floats
    lockstep: NDArray[np.bool_]
    inner_s: Floats
    forward_s: Floats  # [types, layers + 1]
    layer_s: Floats
    late_s: Floats
    head_forward_s: Floats
    head_s: Floats
    many: Floats
    few: Floats
    enough: Ints
    ahead: Ints
    split: bool
    elsewhere: float
    nested: bool
    shown: float


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


class BoxStages(NamedTuple):
    """Stages of a box that chains of interest may have, one array element each: type and layers.

    `cheapest` [types, layers + 1] is the least price of any stage. By the number of following stages, `value` has the
    prices of inner and first stages [following stages, stages, 2], infinite where one does not fit, `journey`
    [following stages, stages] its contribution to Σ, and `top` [following stages] the most layers of any that fits, -1
    where these are not known yet. Of `stage_prices` with the latest `factor` [stages], `exclusive` [stages] has the
    least and `shared` [stages, modes] all.
    """

    row: Ints
    layers: Ints
    factor: Floats
    exclusive: Floats
    shared: Floats
    value: Floats
    journey: Floats
    top: Ints
    cheapest: Floats


@numba.vectorize(["float64(float64, float64, float64, float64)"], cache=True)  # type: ignore[no-untyped-call, untyped-decorator]
def sync_room_s(left_s: float, backward_s: float, shown: float, m: float) -> float:
    """The most seconds of sync of a stage that leave `left_s` after its last backward, of at least `backward_s`.

    Sync runs beside that backward, but for a share of `shown` that follows it. A longer backward ends no earlier than
    by so much in all micro-batches but one: of a single one no more is known than that share.
    """
    if shown >= 1.0:
        return left_s
    room_s = left_s + backward_s if m >= 2.0 else np.inf
    return min(room_s, left_s / shown) if shown > 0.0 else room_s


@numba.njit(cache=True, nogil=True)
def stage_prices(
    kind: int,
    devices: float,
    prices: Multipliers,
    passes: float,
    n: int,
    factor: float,
    exclusive: Floats,
    shared: Floats,
) -> Any:
    """Fill `exclusive` and `shared` [modes] with lower bounds on the price of a stage of n layers of a type.

    `exclusive` applies if no other machine has its layers, `shared` if other machines have some of them. `passes` is
    the share of the batch that the stage processes; `factor` multiplies what does not depend on that share.
    """
    machines = devices / prices.machine_devices[kind]
    for j in range(len(prices.most_shared)):
        price = factor * devices * prices.device[kind, j] + n * passes * prices.slot[kind, j]
        least = max(0.0, n - prices.most_shared[j])
        exclusive[j] = price + factor * machines * n * prices.longest[kind, j]
        shared[j] = price + factor * machines * least * prices.longest[kind, j]


@numba.njit(cache=True, nogil=True)
def no_stages(task: Task) -> Any:
    """Arrays for the stages of a box, not yet filled."""
    num_rows, lengths = len(task.rows.kind), task.rows.many.shape[2]
    most = num_rows * lengths
    return BoxStages(
        np.empty(most, np.int64),
        np.empty(most, np.int64),
        np.empty(most),
        np.empty(most),
        np.empty((most, len(task.prices.most_shared))),
        np.empty((task.shape[3], most, 2)),
        np.empty((task.shape[3], most)),
        np.empty(task.shape[3], np.int64),
        np.empty((num_rows, lengths)),
    )


@numba.njit(cache=True, nogil=True)
def _factor(low_m: float, high_m: float, most_m: float) -> float:
    """`high_m` / m for the most micro-batches of a box that take no longer than `most_m` do."""
    return float(high_m / max(low_m, min(high_m, np.floor(most_m * SLACK))))


@numba.njit(cache=True, nogil=True)
def least_stage_prices(low_m: float, high_m: float, task: Task, stages: BoxStages) -> Any:
    """Fill `cheapest` for a number of micro-batches in between; returns the least price of a layer in any stage."""
    rows, prices, layers = task.rows, task.prices, task.rows.many.shape[2] - 1
    exclusive, shared = np.empty(len(prices.most_shared)), np.empty(len(prices.most_shared))
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
            stage_prices(rows.kind[row], rows.devices[row], prices, passes, n, factor, exclusive, shared)
            stages.cheapest[row, n] = min(exclusive.min(), shared.min())
            layer_price = min(layer_price, stages.cheapest[row, n] / n)
    return layer_price


@numba.njit(cache=True, nogil=True)
def affordable_stages(layer_price: float, wanted: float, task: Task, stages: BoxStages) -> Any:
    """List the stages that a chain of price `wanted` may have; returns their number.

    A stage is left out if it and the other layers at `layer_price` cost more than `wanted` already.
    """
    layers, count, most_price = task.rows.many.shape[2] - 1, 0, wanted * SLACK
    stages.top[:] = -1
    if not layers * layer_price <= most_price:
        return count
    for row in range(len(task.rows.kind)):
        for n in range(task.shape[0], layers + 1):
            if stages.cheapest[row, n] + (layers - n) * layer_price <= most_price:
                stages.row[count], stages.layers[count], stages.factor[count] = row, n, 0.0
                count += 1
    return count


@numba.njit(cache=True, nogil=True)
def price_stages(
    count: int,
    layer_price: float,
    after: int,
    box: tuple[float, float, float, float, float],
    task: Task,
    stages: BoxStages,
) -> Any:
    """Fill value, journey and top of the first `count` stages, followed by `after` others.

    `box` has the least and most micro-batches, the least and most Σ, and the highest price of interest.
    """
    limit_s, rows, prices = task.limit_s, task.rows, task.prices
    m, high_m, low_s, high_s, wanted = box
    least_ranges, most_ranges, layers = task.shape[0], task.shape[1], task.rows.many.shape[2] - 1
    top, like = 0, after
    # Of few micro-batches a stage holds no fewer than one with fewer stages after it holds of many.
    while rows.nested and like > 1 and m < rows.enough[like]:
        like -= 1
    enough = m >= rows.enough[like]
    exclusive, busy_s = np.empty(len(prices.most_shared)), np.empty(2)
    for k in range(count):
        row, n = stages.row[k], stages.layers[k]
        kind, ahead = rows.kind[row], rows.ahead[after, row]
        head_s = rows.head_forward_s[row] if after == 0 else 0.0
        stages.value[after, k] = np.inf
        t = rows.many[like, row, n] if enough else rows.few[after, row, n]
        work_s = m * t
        if not work_s <= limit_s:
            continue
        most, fewest = -(-n // least_ranges), n // most_ranges
        turns, forward_s = ahead, rows.forward_s[row, most] + head_s
        if rows.split:
            journey_s = fewest * (rows.layer_s[row] - rows.late_s[row]) + (rows.head_s[row] if after == 0 else 0.0)
        else:
            journey_s = fewest * rows.layer_s[row] if most_ranges > 1 else t
        certain = True
        if most_ranges > 1:
            # Used only where a link slower than the assumed one, whose forwards count negatively, cannot lower it.
            certain = m * n >= ahead * most + fewest
        else:
            turns = min(ahead, m - 1)
        most_m = limit_s / t
        for first in range(2):
            other_s = (1.0 if first else rows.elsewhere) * (low_s - journey_s)
            busy_s[first] = work_s + max(0.0, other_s - turns * forward_s) if certain else work_s
            if certain and not first:
                most_m = min(most_m, (limit_s - other_s + ahead * forward_s) / t)
        if busy_s[0] > limit_s or journey_s > high_s * SLACK:
            continue
        stages.journey[after, k] = journey_s
        factor = _factor(m, high_m, most_m)
        if factor != stages.factor[k]:
            passes = high_m / task.batch
            stage_prices(kind, rows.devices[row], prices, passes, n, factor, exclusive, stages.shared[k])
            stages.factor[k], stages.exclusive[k] = factor, exclusive.min()
        for first in range(2):
            if busy_s[first] > limit_s:
                continue
            # Of whole backwards, only a first stage's last one certainly ends at the end of the last journey.
            backward_s, ends = t - rows.forward_s[row, n] - head_s, first or rows.split
            slack_s = sync_room_s(limit_s - (busy_s[first] if ends else work_s), backward_s, rows.shown, m)
            price = stages.exclusive[k]
            for j in range(len(prices.most_shared)):  # modes sync ever longer
                if rows.lockstep[row] or prices.tail_s[kind, j] <= slack_s:
                    price = min(price, stages.shared[k, j])
            if rows.inner_s[row] > 0.0:
                alone = n - slack_s / rows.inner_s[row]
                if alone > 0.0:
                    price += factor * prices.holder / rows.share[row] * alone
            if price + (layers - n) * layer_price <= wanted * SLACK:
                stages.value[after, k, first] = price
                top = max(top, n)
    stages.top[after] = top
