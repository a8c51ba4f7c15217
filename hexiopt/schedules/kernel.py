"""The recurrence of `recurrence.py`, compiled. Times are whole ticks, so that a state that repeats is seen exactly.

A *state* is where every executor stands in its programme, when it is free, when every link is free, and which
messages have come and are not taken yet. In a *sweep* every executor runs as far as its messages reach, one round of
its block at most. Which operations a sweep runs depends on their order alone, not on times; so after a while every few
sweeps, a *period*, bring each executor as many rounds on.

Periods are skipped. Let f be the map of times over a period. It is max-plus linear, so where it moves all times by the
same v it does so again and again. Times may also move by a vector v, as where an executor falls behind and messages
wait longer and longer. Each component of f is convex, so if three states in a row are x − 2v, x − v and x, and
f(x + (n − 1)·v) = x + n·v, then f is on one line at three points between x − 2v and x + (n − 1)·v, hence on all of it,
and n periods move the state by v each. n is halved until the equation holds.
"""

from math import frexp, ldexp
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_BITS = 52  # of the longest time, in ticks
_LIMIT = 1 << 62  # of any time, in ticks; a sum of two cannot overflow
_FULL, _OVERFLOW, _STUCK = -1, -2, -3  # what may go wrong in a sweep
_LAGS = 64  # sweeps of a period at most
_WORTH = 4  # rounds left beyond which skipping is tried


class Order(NamedTuple):
    """What executors run: e has blocks `first[e]` to `first[e + 1]`.

    Block k is `turns[start : start + length]`, `repeats` times: `blocks[k]` has the three. A turn is the number of an
    operation of its executor.
    """

    first: Ints
    blocks: Ints
    turns: Ints


class Wiring(NamedTuple):
    """Operation k, of all executors' in a row, takes a message from each of the queues `takes[at[k, 0] : at[k, 1]]`,
    and sends one over each link to each queue `sends[at[k, 2] : at[k, 3]]` [(link, queue)]."""

    at: Ints
    takes: Ints
    sends: Ints


class State(NamedTuple):
    """`place[e]`: block, turn and rounds done of executor e. `busy`: when executors are free, `free`: links.

    Queue q holds `queues[q, 1]` messages in the ring `came[q]`, from `queues[q, 0]` on: when they came.
    """

    place: Ints
    busy: Ints
    free: Ints
    queues: Ints
    came: Ints


@numba.njit(cache=True, nogil=True)
def _sweep(order: Order, wiring: Wiring, ticks: Ints, state: State, budget: Ints) -> Any:
    """Let every executor run as far as its messages reach, a round at most; how many operations ran, or what went
    wrong. None runs more operations than its `budget`, which is lowered."""
    place, queues, came = state.place, state.queues, state.came
    count, capacity = len(state.busy), came.shape[1]
    operations = len(wiring.at) // count
    quota, ran = np.zeros(count, np.int64), 0
    for visit in range(2 * count - 1):  # there and back
        e = min(visit, 2 * count - 2 - visit)
        end = order.first[e + 1]
        if visit < count and place[e, 0] < end:
            quota[e] = min(order.blocks[place[e, 0], 1], budget[e])
        while quota[e] and place[e, 0] < end:
            block, turn = place[e, 0], place[e, 1]
            operation = e * operations + order.turns[order.blocks[block, 0] + turn]
            take, take_end, send, sent = wiring.at[operation]
            ready = True
            for k in range(take, take_end):
                ready = ready and queues[wiring.takes[k], 1] > 0
            if not ready:
                break
            for k in range(send, sent):
                if queues[wiring.sends[k, 1], 1] == capacity:
                    return _FULL
            now = state.busy[e]
            for k in range(take, take_end):
                queue = wiring.takes[k]
                head = queues[queue, 0]
                now = max(now, came[queue, head])
                queues[queue, 0] = head + 1 if head + 1 < capacity else 0
                queues[queue, 1] -= 1
            now += ticks[operation]
            state.busy[e] = latest = now
            for k in range(send, sent):
                link, queue = wiring.sends[k]
                through = max(now, state.free[link]) + ticks[len(wiring.at) + link]
                state.free[link] = through
                latest = max(latest, through)
                tail = queues[queue, 0] + queues[queue, 1]
                came[queue, tail if tail < capacity else tail - capacity] = through
                queues[queue, 1] += 1
            if latest > _LIMIT:
                return _OVERFLOW
            place[e, 1] = turn + 1
            if turn + 1 == order.blocks[block, 1]:
                place[e, 1] = 0
                place[e, 2] += 1
                if place[e, 2] == order.blocks[block, 2]:
                    place[e, 0] += 1
                    place[e, 2] = 0
            quota[e] -= 1
            budget[e] -= 1
            ran += 1
    return ran


@numba.njit(cache=True, nogil=True)
def _grow(state: State) -> Any:
    """The state with room for twice as many messages in each queue."""
    capacity = state.came.shape[1]
    came = np.zeros((len(state.came), 2 * capacity), np.int64)
    for q in range(len(came)):
        for k in range(state.queues[q, 1]):
            came[q, k] = state.came[q, (state.queues[q, 0] + k) % capacity]
        state.queues[q, 0] = 0
    return State(state.place, state.busy, state.free, state.queues, came)


@numba.njit(cache=True, nogil=True)
def _write_state(state: State, times: Ints, shape: Ints) -> Any:
    """Write the state's times into one row, and all else but rounds into another; how many times, 0 if too many."""
    count, links, capacity = len(state.busy), len(state.free), state.came.shape[1]
    size = count + links
    for e in range(count):
        times[e] = state.busy[e]
        shape[2 * e], shape[2 * e + 1] = state.place[e, 0], state.place[e, 1]
    for link in range(links):
        times[count + link] = state.free[link]
    for q in range(len(state.queues)):
        head, held = state.queues[q]
        shape[2 * count + q] = held
        if size + held > len(times):
            return 0
        for k in range(held):
            times[size + k] = state.came[q, (head + k) % capacity]
        size += held
    return size


@numba.njit(cache=True, nogil=True)
def _move(state: State, periods: int, change: Ints, rounds: Ints) -> None:
    """Move all times by `change` (in the order of `_write_state`) and all executors by `rounds`, `periods` times."""
    count, links, capacity = len(state.busy), len(state.free), state.came.shape[1]
    for e in range(count):
        state.busy[e] += periods * change[e]
        state.place[e, 2] += periods * rounds[e]
    for link in range(links):
        state.free[link] += periods * change[count + link]
    at = count + links
    for q in range(len(state.queues)):
        head, held = state.queues[q]
        for k in range(held):
            state.came[q, (head + k) % capacity] += periods * change[at + k]
        at += held


@numba.njit(cache=True, nogil=True)
def _periods(order: Order, wiring: Wiring, ticks: Ints, state: State, change: Ints, rounds: Ints, most: int) -> Any:
    """How many periods, up to `most`, certainly move `state` by `change` and `rounds` each: see above."""
    count, size = len(state.busy), len(change)
    times, shape = np.empty((2, size), np.int64), np.empty(2 * count + len(state.queues), np.int64)
    budget = np.zeros(count, np.int64)
    _write_state(state, times[0], shape)
    sure, step = 0, most
    while step > 1:
        if sure + step <= most:
            tried = State(
                state.place.copy(), state.busy.copy(), state.free.copy(), state.queues.copy(), state.came.copy()
            )
            _move(tried, sure + step - 1, change, rounds)
            for e in range(count):
                budget[e] = rounds[e] * order.blocks[state.place[e, 0], 1] if rounds[e] else 0
            while budget.any() and _sweep(order, wiring, ticks, tried, budget) > 0:
                pass
            same = not budget.any() and _write_state(tried, times[1], shape) == size
            for k in range(size):
                same = same and times[1, k] == times[0, k] + (sure + step) * change[k]
            if same:
                sure += step
        step //= 2
    return sure


@numba.njit(cache=True, nogil=True)
def _run(order: Order, wiring: Wiring, ticks: Ints, num_queues: int) -> Any:
    """What went wrong, 0 for nothing; when every executor ends, in ticks, and the ticks that all of them end later."""
    count, links = len(order.first) - 1, len(ticks) - len(wiring.at)
    later = 0.0
    state = State(
        np.zeros((count, 3), np.int64),
        np.zeros(count, np.int64),
        np.zeros(links, np.int64),
        np.zeros((num_queues, 2), np.int64),
        np.zeros((num_queues, 8), np.int64),
    )
    budget = np.zeros(count, np.int64)  # operations left
    for e in range(count):
        state.place[e, 0] = order.first[e]
        for block in range(order.first[e], order.first[e + 1]):
            budget[e] += order.blocks[block, 1] * order.blocks[block, 2]
    # The latest states, in turns.
    slots, known, enough, patience = 2 * _LAGS + 1, 0, 2, 1
    times = np.empty((slots, count + links + 4 * num_queues), np.int64)
    shapes = np.empty((slots, 2 * count + num_queues), np.int64)
    done, sizes = np.empty((slots, count), np.int64), np.zeros(slots, np.int64)
    while budget.any():
        ran = _sweep(order, wiring, ticks, state, budget)
        if ran == _FULL:
            state = _grow(state)
            continue
        if ran <= 0:
            return _OVERFLOW if ran == _OVERFLOW else _STUCK, state.busy, later
        now, fewest = known % slots, _LIMIT  # rounds left
        for e in range(count):
            block = state.place[e, 0]
            done[now, e] = state.place[e, 2]
            if block < order.first[e + 1]:
                fewest = min(fewest, order.blocks[block, 2] - state.place[e, 2])
        size = _write_state(state, times[now], shapes[now]) if fewest > _WORTH else 0
        known = known + 1 if size else 0
        sizes[now] = size
        if known < enough:
            continue
        for lag in range(1, min(_LAGS, known - 1) + 1):
            old = (known - 1 - lag) % slots
            if sizes[old] != size or (shapes[now] != shapes[old]).any():
                continue
            change, rounds = times[now, :size] - times[old, :size], done[now] - done[old]
            most = _LIMIT
            for e in range(count):
                if rounds[e]:
                    block = state.place[e, 0]
                    most = min(most, (order.blocks[block, 2] - 1 - state.place[e, 2]) // rounds[e])
            skipped = 0
            if (change == change[0]).all():
                skipped = most
                later += most * np.float64(change[0])
                change[:] = 0
            elif 2 * lag < known:
                two = (known - 1 - 2 * lag) % slots
                if sizes[two] != size or (shapes[now] != shapes[two]).any() or (rounds != done[old] - done[two]).any():
                    continue
                if (change != times[old, :size] - times[two, :size]).any():
                    continue
                if most > (_LIMIT - times[now, :size].max()) // change.max() - 1:
                    return _OVERFLOW, state.busy, later
                skipped = _periods(order, wiring, ticks, state, change, rounds, most)
            else:
                continue
            _move(state, skipped, change, rounds)
            for e in range(count):
                if rounds[e]:
                    budget[e] -= skipped * rounds[e] * order.blocks[state.place[e, 0], 1]
            known, patience = 0, 1 if skipped else 2 * patience
            enough = 1 + patience
            break
    return 0, state.busy, later


@numba.njit("f8[::1](f8[::1], i8[::1], i8[::1])", cache=True, nogil=True)
def ends_s(seconds: Floats, order: Ints, wiring: Ints) -> Any:
    """When each executor ends, in seconds from the step's start; NaN where executors wait for each other for ever.

    `seconds` of the operations of all executors, and then of a message on each link. Sums are exact; each time is
    rounded to about 2^-53 of the longest one. `order` has the arrays of `Order` in a row, after the lengths of the
    first two; `wiring` those of `Wiring`, after the number of queues and the lengths of the first two.
    """
    executors, end = order[0] - 1, 2 + order[0]
    programme = Order(order[2:end], order[end : end + 3 * order[1]].reshape(-1, 3), order[end + 3 * order[1] :])
    takes_at = 3 + 4 * wiring[1]
    wires = Wiring(
        wiring[3:takes_at].reshape(-1, 4),
        wiring[takes_at : takes_at + wiring[2]],
        wiring[takes_at + wiring[2] :].reshape(-1, 2),
    )
    ends, longest_s = np.zeros(executors), 0.0
    for s in seconds:
        longest_s = max(longest_s, s)
    if longest_s == 0.0:
        return ends
    ticks = np.empty(len(seconds), np.int64)
    exponent = _BITS - frexp(longest_s)[1]  # a second has two to the power of it ticks
    while True:
        for k in range(len(seconds)):
            ticks[k] = np.int64(np.rint(ldexp(seconds[k], exponent)))
        wrong, busy, later = _run(programme, wires, ticks, wiring[0])
        if wrong != _OVERFLOW:
            break
        exponent -= 1
    for e in range(executors):
        ends[e] = np.nan if wrong else ldexp(np.float64(busy[e]) + later, -exponent)
    return ends
