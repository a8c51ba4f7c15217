"""The kernel of the clock: operations and messages of a set of pipelines, event by event, messages by max-min fairness.

An executor runs its programme: each operation begins when the executor is free and all messages that it takes have
come. A link sends one message after another: each waits a latency, and then, if it crosses shared resources, moves at
the rate that max-min fairness allots it among the messages in transit. `hexiopt/simulation/engine.py` follows the same
rules with an object for each message.

Where backwards are split, an executor chooses what it runs by the rule of `hexiopt/schedules/split.py`, once all that
happens at a moment has happened, and writes its order down.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from hexiopt.schedules.split import ROOM, SAME

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_RING = 8  # messages that may wait on a link at first
LATE = -1  # in an order: a layer that was put off
_IDLE, _BUSY, _BUSY_LATE = 0, 1, 2  # what an executor does


class Programmes(NamedTuple):
    """The operations of all executors.

    Executor e runs blocks `first[e]` to `first[e + 1]`; block k is `turns[start : start + length]`, `repeats` times:
    `blocks[k]` is (start, length, repeats). Operation `operation[e] + turn` takes `seconds`, a message from each of the
    queues `takes[at[0] : at[1]]`, and sends one over each link to each queue `sends[at[2] : at[3]]` [(link, queue)].
    """

    first: Ints
    blocks: Ints
    turns: Ints
    operation: Ints
    seconds: Floats
    at: Ints
    takes: Ints
    sends: Ints


class LaneArrays(NamedTuple):
    """The links: `receiver` executor, `fixed_s` of each message, and at `most` so many messages a second.

    Link k crosses `resources[first[k] : first[k + 1]]`. A message alone occupies each for `need_s` seconds, and `flows`
    equal messages, of its class of pipelines, cross it at once.
    """

    receiver: Ints
    fixed_s: Floats
    most: Floats
    first: Ints
    resources: Ints
    need_s: Floats
    flows: Floats


class Splits(NamedTuple):
    """What executors put off and how much room it takes; without executors where backwards are whole.

    `layers`, `stored`, `begin` and `end` are those of `Turnover`, by operation. Executor e computes a layer put off in
    `weights_s[e]`, which takes `delayed[e]` until then. `orders[first[e] : first[e + 1]]` is where its order goes.
    """

    layers: Ints
    stored: Floats
    begin: Floats
    end: Floats
    weights_s: Floats
    delayed: Floats
    first: Ints
    orders: Ints


class Traffic(NamedTuple):
    """The messages that are under way over resources: `moving[: under_way[0]]` are their links, in the order of their
    starts.

    By link: the `share` of its message that was left at `since_s`, its `rate` since then in messages a second, when it
    arrives at that rate (infinite where none is under way), `alone`, the rate beside no other, and `longest_s`, the
    most seconds that it needs one resource alone. Resource r is crossed by links `crossing[first[r] : first[r + 1]]`.
    The rest is scratch: `level` [2, resources]; `rising`, `near` and `before` [links].
    """

    moving: Ints
    under_way: Ints
    share: Floats
    since_s: Floats
    rate: Floats
    arrival_s: Floats
    alone: Floats
    longest_s: Floats
    first: Ints
    crossing: Ints
    level: Floats
    rising: Ints
    near: Ints
    before: Floats


class Agenda(NamedTuple):
    """A binary heap of events by `time_s`: executor `what` ends an operation, or the latency of link `what` − executors
    ends. `size` [1].
    """

    time_s: Floats
    what: Ints
    size: Ints


@numba.njit(cache=True, nogil=True)
def _push(agenda: Agenda, time_s: float, what: int) -> None:
    k = agenda.size[0]
    agenda.size[0] = k + 1
    while k > 0:
        above = (k - 1) >> 1
        if agenda.time_s[above] <= time_s:
            break
        agenda.time_s[k], agenda.what[k] = agenda.time_s[above], agenda.what[above]
        k = above
    agenda.time_s[k], agenda.what[k] = time_s, what


@numba.njit(cache=True, nogil=True)
def _pop(agenda: Agenda) -> Any:
    what, last = agenda.what[0], agenda.size[0] - 1
    agenda.size[0] = last
    time_s, moved = agenda.time_s[last], agenda.what[last]
    k = 0
    while True:
        below = 2 * k + 1
        if below >= last:
            break
        if below + 1 < last and agenda.time_s[below + 1] < agenda.time_s[below]:
            below += 1
        if agenda.time_s[below] >= time_s:
            break
        agenda.time_s[k], agenda.what[k] = agenda.time_s[below], agenda.what[below]
        k = below
    agenda.time_s[k], agenda.what[k] = time_s, moved
    return what


@numba.njit(cache=True, nogil=True)
def _share(lanes: LaneArrays, traffic: Traffic, count: int) -> None:
    """Set the rates of the links `rising[:count]`, in messages a second: as `hexiopt/simulation/fair_shares.py`.
    `rising` is overwritten."""
    first, resources, longest_s, rising = lanes.first, lanes.resources, traffic.longest_s, traffic.rising
    left, load = traffic.level
    for k in rising[:count]:
        for j in range(first[k], first[k + 1]):
            left[resources[j]] = 1.0
    rest, level = count, 0.0
    while rest:
        top = np.inf
        for k in rising[:rest]:
            for j in range(first[k], first[k + 1]):
                load[resources[j]] = 0.0
        for k in rising[:rest]:
            top = min(top, lanes.most[k] * longest_s[k])
            for j in range(first[k], first[k + 1]):
                load[resources[j]] += lanes.flows[j] * lanes.need_s[j] / longest_s[k]
        full, lowest = -1, np.inf
        for k in rising[:rest]:
            for j in range(first[k], first[k + 1]):
                r = resources[j]
                if load[r] > 0.0 and left[r] / load[r] < lowest:
                    full, lowest = r, left[r] / load[r]
        level = max(level, min(lowest, top))  # rounding aside, it only rises
        still = 0
        for n in range(rest):
            k = rising[n]
            done = lowest > top and lanes.most[k] * longest_s[k] <= top
            for j in range(first[k], first[k + 1]):
                done = done or (lowest <= top and resources[j] == full)
            if done:
                traffic.rate[k] = level / longest_s[k]
                for j in range(first[k], first[k + 1]):
                    left[resources[j]] -= lanes.flows[j] * traffic.rate[k] * lanes.need_s[j]
            else:
                rising[still] = k
                still += 1
        rest = still


@numba.njit(cache=True, nogil=True)
def _new_traffic(lanes: LaneArrays, num_resources: int) -> Any:
    links = len(lanes.receiver)
    first, crossing = np.zeros(num_resources + 1, np.int64), np.empty(len(lanes.resources), np.int64)
    for r in lanes.resources:
        first[r + 1] += 1
    for r in range(num_resources):
        first[r + 1] += first[r]
    traffic = Traffic(
        np.zeros(links, np.int64), np.zeros(1, np.int64), np.zeros(links), np.zeros(links), np.zeros(links),
        np.full(links, np.inf), np.zeros(links), np.zeros(links), first, crossing, np.zeros((2, num_resources)),
        np.zeros(links, np.int64), np.zeros(links, np.int64), np.zeros(links),
    )  # fmt: skip
    at = first.copy()
    for k in range(links):
        for j in range(lanes.first[k], lanes.first[k + 1]):
            traffic.longest_s[k] = max(traffic.longest_s[k], lanes.need_s[j])
            crossing[at[lanes.resources[j]]] = k
            at[lanes.resources[j]] += 1
        if lanes.first[k + 1] > lanes.first[k]:
            traffic.rising[0] = k
            _share(lanes, traffic, 1)
            traffic.alone[k] = traffic.rate[k]
    return traffic


@numba.njit(cache=True, nogil=True)
def _set_rate(traffic: Traffic, link: int, before: float, now_s: float) -> None:
    """When a link's message arrives, whose rate has been `before` until now."""
    traffic.share[link] -= before * (now_s - traffic.since_s[link])
    traffic.since_s[link] = now_s
    traffic.arrival_s[link] = now_s + max(0.0, traffic.share[link]) / traffic.rate[link]


@numba.njit(cache=True, nogil=True)
def _enter(lanes: LaneArrays, traffic: Traffic, link: int, now_s: float) -> None:
    """A link's message starts over its resources."""
    near = _mark_near(lanes, traffic, link)
    traffic.moving[traffic.under_way[0]] = link
    traffic.under_way[0] += 1
    traffic.share[link], traffic.since_s[link], traffic.rate[link] = 1.0, now_s, 0.0
    if near:
        _share_near(lanes, traffic, now_s)
    else:
        traffic.rate[link] = traffic.alone[link]
        _set_rate(traffic, link, 0.0, now_s)


@numba.njit(cache=True, nogil=True)
def _leave(lanes: LaneArrays, traffic: Traffic, link: int, now_s: float) -> None:
    """A link's message has arrived."""
    still = 0
    for n in range(traffic.under_way[0]):
        if traffic.moving[n] != link:
            traffic.moving[still] = traffic.moving[n]
            still += 1
    traffic.under_way[0] = still
    traffic.arrival_s[link] = np.inf
    if _mark_near(lanes, traffic, link):
        _share_near(lanes, traffic, now_s)


@numba.njit(cache=True, nogil=True)
def _mark_near(lanes: LaneArrays, traffic: Traffic, link: int) -> Any:
    """Mark as `near` the link, the links whose messages are under way on one of its resources, those whose messages
    share with them, and so on: no other rates depend on it. Whether there are more than itself."""
    near, todo, first = traffic.near, traffic.rising, lanes.first
    near[:] = 0
    near[link], todo[0], size, alone = 1, link, 1, True
    while size:
        size -= 1
        k = todo[size]
        for j in range(first[k], first[k + 1]):
            r = lanes.resources[j]
            for other in traffic.crossing[traffic.first[r] : traffic.first[r + 1]]:
                if near[other] == 0 and traffic.arrival_s[other] < np.inf:
                    near[other], todo[size], alone = 1, other, False
                    size += 1
    return not alone


@numba.njit(cache=True, nogil=True)
def _share_near(lanes: LaneArrays, traffic: Traffic, now_s: float) -> None:
    """Share anew among the messages under way that are marked as near."""
    moving, count = traffic.moving[: traffic.under_way[0]], 0
    for k in moving:  # in the order of their starts, as sums are rounded in some order
        if traffic.near[k]:
            traffic.rising[count], traffic.before[k] = k, traffic.rate[k]
            count += 1
    _share(lanes, traffic, count)
    for k in moving:
        if traffic.near[k] and traffic.rate[k] != traffic.before[k]:
            _set_rate(traffic, k, traffic.before[k], now_s)


@numba.njit(cache=True, nogil=True)
def _begin(programmes: Programmes, place: Ints, came: Ints, agenda: Agenda, e: int, now_s: float) -> None:
    """Start executor e's next operation if the executor is free and the operation's messages have come. `place[e]` is
    (block, turn, round, whether an operation runs)."""
    block = place[e, 0]
    if place[e, 3] or block == programmes.first[e + 1]:
        return
    operation = programmes.operation[e] + programmes.turns[programmes.blocks[block, 0] + place[e, 1]]
    begin, end = programmes.at[operation, 0], programmes.at[operation, 1]
    for j in range(begin, end):
        if came[programmes.takes[j]] == 0:
            return
    for j in range(begin, end):
        came[programmes.takes[j]] -= 1
    place[e, 3] = _BUSY
    _push(agenda, now_s + programmes.seconds[operation], e)


@numba.njit(cache=True, nogil=True)
def _choose(
    programmes: Programmes,
    splits: Splits,
    place: Ints,
    came: Ints,
    stored: Floats,
    late: Ints,
    agenda: Agenda,
    e: int,
    now_s: float,
) -> None:
    """Start what executor e runs next by the rule, if it is free. `stored[e]`: of its room; `late[e]`: how many layers
    are put off, and how many operations it has begun."""
    if place[e, 3] != _IDLE:
        return
    if place[e, 0] < programmes.first[e + 1]:
        operation = programmes.operation[e] + programmes.turns[programmes.blocks[place[e, 0], 0] + place[e, 1]]
        then, delayed = stored[e] + splits.stored[operation], splits.delayed[e]
        first = stored[e] + late[e, 0] * delayed + splits.begin[operation]
        last = then + (late[e, 0] + splits.layers[operation]) * delayed + splits.end[operation]
        if not late[e, 0] or max(first, last) <= ROOM:
            _begin(programmes, place, came, agenda, e, now_s)
        if place[e, 3] == _BUSY:
            stored[e] = then
            splits.orders[splits.first[e] + late[e, 1]] = operation - programmes.operation[e]
            late[e, 1] += 1
    if late[e, 0] and place[e, 3] == _IDLE:
        place[e, 3] = _BUSY_LATE
        late[e, 0] -= 1
        splits.orders[splits.first[e] + late[e, 1]] = LATE
        late[e, 1] += 1
        _push(agenda, now_s + splits.weights_s[e], e)


@numba.njit(cache=True, nogil=True)
def _step(programmes: Programmes, place: Ints, e: int) -> Any:
    """End executor e's operation, whose number is returned, and advance to the next."""
    block, turn = place[e, 0], place[e, 1]
    operation = programmes.operation[e] + programmes.turns[programmes.blocks[block, 0] + turn]
    place[e, 1], place[e, 3] = turn + 1, _IDLE
    if turn + 1 == programmes.blocks[block, 1]:
        place[e, 1] = 0
        place[e, 2] += 1
        if place[e, 2] == programmes.blocks[block, 2]:
            place[e, 0] += 1
            place[e, 2] = 0
    return operation


@numba.njit(cache=True, nogil=True)
def _wait(ring: Ints, waiting: Ints, link: int, queue: int) -> Any:
    """Append a message for `queue` to those on a link, and return `ring` [links, messages], enlarged if it was full.
    `waiting[link]` is (place of the first message in the ring, number of messages)."""
    size = ring.shape[1]
    if waiting[link, 1] == size:
        larger = np.empty((len(ring), 2 * size), np.int64)
        for other in range(len(ring)):
            for k in range(waiting[other, 1]):
                larger[other, k] = ring[other, (waiting[other, 0] + k) % size]
            waiting[other, 0] = 0
        ring, size = larger, 2 * size
    ring[link, (waiting[link, 0] + waiting[link, 1]) % size] = queue
    waiting[link, 1] += 1
    return ring


@numba.njit(cache=True, nogil=True)
def ends_s(programmes: Programmes, splits: Splits, lanes: LaneArrays, num_resources: int, num_queues: int) -> Any:
    """When each executor ends [executors], in seconds from the step's start, and the mean seconds of
    each link's messages [links]; NaN where executors wait for each other for ever."""
    executors, links = len(programmes.first) - 1, len(lanes.receiver)
    chooses, stored, late = len(splits.delayed) > 0, np.zeros(executors), np.zeros((executors, 2), np.int64)
    due, choice = np.ones(executors, np.bool_), chooses  # who is to choose, and whether anyone is
    place, came = np.zeros((executors, 4), np.int64), np.zeros(num_queues, np.int64)
    ended_s, now_s = np.zeros(executors), 0.0
    agenda = Agenda(np.empty(executors + links), np.empty(executors + links, np.int64), np.zeros(1, np.int64))
    ring, waiting = np.empty((links, _RING), np.int64), np.zeros((links, 2), np.int64)
    traffic, began_s, sent_s = _new_traffic(lanes, num_resources), np.zeros(links), np.zeros((2, links))
    moving = traffic.moving
    for e in range(executors):
        place[e, 0] = programmes.first[e]
        if not chooses:
            _begin(programmes, place, came, agenda, e, now_s)
    while agenda.size[0] or traffic.under_way[0] or choice:
        soonest_s, arrived = np.inf, -1
        for n in range(traffic.under_way[0]):
            if traffic.arrival_s[moving[n]] < soonest_s:
                soonest_s, arrived = traffic.arrival_s[moving[n]], moving[n]
        if agenda.size[0] and agenda.time_s[0] < soonest_s:
            soonest_s, arrived = agenda.time_s[0], -1
        if choice and soonest_s > now_s * (1 + SAME):
            for e in range(executors):
                if due[e]:
                    _choose(programmes, splits, place, came, stored, late, agenda, e, now_s)
            due[:], choice = False, False
            continue
        now_s = soonest_s
        if arrived >= 0:
            _leave(lanes, traffic, arrived, now_s)
        else:
            what = _pop(agenda)
            if what < executors:
                ended_s[what] = now_s
                if place[what, 3] == _BUSY_LATE:
                    place[what, 3], due[what], choice = _IDLE, True, True
                    continue
                operation = _step(programmes, place, what)
                for j in range(programmes.at[operation, 2], programmes.at[operation, 3]):
                    link = programmes.sends[j, 0]
                    ring = _wait(ring, waiting, link, programmes.sends[j, 1])
                    if waiting[link, 1] == 1:
                        began_s[link] = now_s
                        _push(agenda, now_s + lanes.fixed_s[link], executors + link)
                if chooses:
                    late[what, 0] += splits.layers[operation]
                    due[what], choice = True, True
                else:
                    _begin(programmes, place, came, agenda, what, now_s)
                continue
            arrived = what - executors
            if lanes.first[arrived + 1] > lanes.first[arrived]:
                _enter(lanes, traffic, arrived, now_s)
                continue
        came[ring[arrived, waiting[arrived, 0]]] += 1
        sent_s[0, arrived] += now_s - began_s[arrived]
        sent_s[1, arrived] += 1.0
        waiting[arrived, 0] = (waiting[arrived, 0] + 1) % ring.shape[1]
        waiting[arrived, 1] -= 1
        if waiting[arrived, 1]:
            began_s[arrived] = now_s
            _push(agenda, now_s + lanes.fixed_s[arrived], executors + arrived)
        if chooses:
            due[lanes.receiver[arrived]], choice = True, True
        else:
            _begin(programmes, place, came, agenda, lanes.receiver[arrived], now_s)
    for e in range(executors):
        if place[e, 0] < programmes.first[e + 1]:
            ended_s[e] = np.nan
    return ended_s, sent_s[0] / np.maximum(1.0, sent_s[1])
