"""The compiled parts of the proof: recurrences, the search for one pipeline, and packing.

Kinds of stages: 0 inner, 1 first, 2 last, 3 alone. Groups g are pairs of a machine and a TP degree. `both_s` is the sum
of forward and backward, `NEVER_S` where a stage does not fit; its second index is the number of micro-batches in flight
less one under 1F1B, and 0 where all are in flight (GPipe).
"""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NEVER_S = 1e300
_OPERATIONS_OF_A_STAGE = 8  # in a search's cheap bound
YES, NO, LIMIT = 1, 0, -1  # answers of a search: there is one, there is none, the limit was reached


class Groups(NamedTuple):
    """TP groups, [groups] each: machine and degree."""

    machine: Ints
    tp: Ints


class StageSeconds(NamedTuple):
    """Seconds of stages: `forward_s` [kinds, groups, layers + 1], `both_s` [kinds, in flight, groups, layers + 1]."""

    forward_s: Floats
    both_s: Floats
    all_forward_first: bool  # GPipe; else 1F1B


class Messages(NamedTuple):
    """Messages of one micro-batch. Inside a machine they take `inside_s` [groups, groups]. Between machines, interfaces
    pass `num_bytes` at `nic` bytes/s [machines] for each sender and receiver on the machine, including the `base`
    [machines] of other pipelines. `round_trip_s` [machines, machines] is the least round-trip time."""

    inside_s: Floats
    round_trip_s: Floats
    num_bytes: float
    latency_s: float
    nic: Floats
    base: Floats


class Tails(NamedTuple):
    """Least seconds from the end of a stage's last backward to the end of the step.

    Sync: `local_s` [kinds, groups, layers + 1], `layer_s` [machines] for each layer of the pipeline on that machine
    (embedding and head count as `units` [kinds] layers), `all_s` at every stage; the largest counts. The
    optimiser's `after_s` [kinds, groups, layers + 1] follow. A matrix that the first and the last stage share counts as
    `tied_units` of their units, once on a machine. Where they are on two machines, it takes `tied_s` [machines].
    """

    local_s: Floats
    layer_s: Floats
    all_s: float
    after_s: Floats
    units: Floats
    tied_units: float
    tied_s: Floats


@numba.njit(cache=True)
def chain_ends(
    all_forward_first: bool, forward_s: Floats, backward_s: Floats, ahead_s: Floats, back_s: Floats,
    p: int, num_micro_batches: int, ends_s: Floats,
) -> None:  # fmt: skip
    """Write to `ends_s` [p] when each stage of a chain ends; `ahead_s[i]` is the message from stage i to i + 1,
    `back_s[i]` the one back."""
    if all_forward_first:
        _gpipe_ends(forward_s, backward_s, ahead_s, back_s, p, num_micro_batches, ends_s)
    else:
        one_f_one_b_ends(forward_s, backward_s, ahead_s, back_s, p, num_micro_batches, ends_s, np.empty((3, p)))


@numba.njit(cache=True)
def _gpipe_ends(
    forward_s: Floats, backward_s: Floats, ahead_s: Floats, back_s: Floats, p: int, num_micro_batches: int,
    ends_s: Floats,
) -> None:  # fmt: skip
    arrived = np.zeros(num_micro_batches)
    for i in range(p):
        busy = link = 0.0
        for j in range(num_micro_batches):
            busy = max(busy, arrived[j]) + forward_s[i]
            if i < p - 1:
                link = max(busy, link) + ahead_s[i]
                arrived[j] = link
        ends_s[i] = busy
    arrived[:] = 0.0
    for i in range(p - 1, -1, -1):
        busy, link = ends_s[i], 0.0
        for j in range(num_micro_batches):
            busy = max(busy, arrived[j]) + backward_s[i]
            if i:
                link = max(busy, link) + back_s[i - 1]
                arrived[j] = link
        ends_s[i] = busy


@numba.njit(cache=True)
def one_f_one_b_ends(
    forward_s: Floats, backward_s: Floats, ahead_s: Floats, back_s: Floats, p: int, num_micro_batches: int,
    ends_s: Floats, scratch_s: Floats,
) -> None:  # fmt: skip
    """As `chain_ends` under 1F1B; `scratch_s` [3, p] is overwritten."""
    last = p - 1
    came_s, ready_s, back_at_s = scratch_s[0], scratch_s[1], scratch_s[2]
    for i in range(p):
        ends_s[i] = came_s[i] = back_at_s[i] = 0.0
    for j in range(-last, num_micro_batches):
        for i in range(p):
            ready_s[i] = came_s[i]
        for i in range(max(0, last + j - num_micro_batches + 1), min(p, p + j)):
            ends_s[i] = max(ends_s[i], ready_s[i]) + forward_s[i]
            if i < last:
                came_s[i + 1] = max(ends_s[i], came_s[i + 1]) + ahead_s[i]
        if j >= 0:
            came = 0.0
            for i in range(last, -1, -1):
                ends_s[i] = max(ends_s[i], came) + backward_s[i]
                if i:
                    back_at_s[i] = max(ends_s[i], back_at_s[i]) + back_s[i - 1]
                    came = back_at_s[i]


@numba.njit(cache=True)
def add_own_load(machines: Ints, p: int, sent: Floats, received: Floats) -> None:
    """Add the load of a chain on `machines` [p] on their interfaces, in messages: each stage sends ahead and back in
    turn, so the larger of both counts, once per machine."""
    for i in range(p):
        m = machines[i]
        left = machines[i - 1] if i > 0 else m
        right = machines[i + 1] if i < p - 1 else m
        if left != m:
            received[left] += 1.0
        if right != m and right != left:
            received[right] += 1.0
        if left != m or right != m:
            sent[m] += 1.0


@numba.njit(cache=True)
def between_s(messages: Messages, a: int, b: int, g: int, h: int, sent: Floats, received: Floats) -> Any:
    """Seconds of a message from group g on machine a to group h on machine b."""
    if a == b:
        return messages.inside_s[g, h]
    slowest = max(sent[a] / messages.nic[a], received[b] / messages.nic[b])
    return slowest * messages.num_bytes + messages.latency_s


@numba.njit(cache=True)
def kind_of(i: int, p: int, begins: bool) -> int:
    """The kind of stage i of the last p stages of a pipeline, which are all of its stages if it `begins` with them."""
    if i == 0 and begins:
        return 3 if p == 1 else 1
    return 2 if i == p - 1 else 0


@numba.njit(cache=True)
def sync_s(tails: Tails, i: int, p: int, begins: bool, g: int, n: int, machines: Ints, on: float) -> Any:
    """Seconds of sync after stage i of the last p stages of a pipeline, on `machines` [p], with `on` layers on its own
    machine."""
    kind, m = kind_of(i, p, begins), machines[i]
    found = max(tails.all_s, tails.local_s[kind, g, n], tails.layer_s[m] * on)
    if begins and machines[0] != machines[p - 1] and (i == 0 or i == p - 1):
        found = max(found, tails.tied_s[m])
    return found


@numba.njit(cache=True)
def search_pipelines(
    usage: Ints, strides: Ints, groups: Groups, seconds: StageSeconds, tails: Tails, messages: Messages,
    before_s: Floats, least_on: Ints, most_on: Ints, num_layers: int, num_micro_batches: int, limit_s: float,
    most_work: int, found: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Find the pipelines on exactly `usage` that end, with tails, within `limit_s`: all, or one if `found` has one row.

    `before_s` is from `least_sums` for the usages inside this one; only pipelines with `least_on` to `most_on`
    [machines] layers on each machine count. Writes group and layers of each stage, then −1, to `found` [pipelines,
    stages + 1, 2]. Returns YES, NO or LIMIT (too much work or too many pipelines) and the number found. Work is counted
    in operations of recurrences.

    The search is depth first, from the last stage of a pipeline to the first, so that the micro-batches in flight, the
    memory, and the recurrence of the suffix as a pipeline of its own are exact. 1F1B and GPipe determine a stage's
    order by the stages that follow it, and its operations start no earlier than if all inputs were available at once.
    So stage s ends no earlier than in the suffix alone plus the forwards before it, and the step no earlier than the
    head of the suffix plus the whole prefix (max-plus systems are monotone).
    """
    num_machines, most = len(usage), int(usage.sum())
    m_batches = num_micro_batches
    row, layers = np.zeros(most + 1, np.int64), np.zeros(most + 1, np.int64)  # by stages behind
    free, held = np.zeros((most + 2, num_machines), np.int64), np.zeros(most + 2, np.int64)
    on = np.zeros((most + 2, num_machines))  # layers of the suffix on each machine, with embedding and head
    has = np.zeros((most + 2, num_machines), np.int64)  # without
    started = np.zeros(most + 1, np.bool_)
    forward_s, backward_s = np.zeros(most + 1), np.zeros(most + 1)  # by stages behind
    chain_f, chain_b, ahead_s, back_s = np.zeros(most + 1), np.zeros(most + 1), np.zeros(most + 1), np.zeros(most + 1)
    ends_s, machines = np.zeros(most + 1), np.zeros(most + 1, np.int64)
    scratch_s, sent, received = np.zeros((3, most + 1)), np.zeros(num_machines), np.zeros(num_machines)
    least_forward_s = NEVER_S
    for g in range(len(groups.machine)):
        if usage[groups.machine[g]] >= groups.tp[g]:
            least_forward_s = min(least_forward_s, seconds.forward_s[0, g, 1])
    free[0] = usage
    d = work = count = 0
    while d >= 0:
        work += 1
        if work > most_work:
            return LIMIT, count
        if not started[d]:
            started[d], row[d], layers[d] = True, 0, num_layers - held[d] + 1
        g, n = row[d], layers[d] - 1
        if n < 1:
            row[d] += 1
            layers[d] = num_layers - held[d] + 1
            if row[d] >= len(groups.machine):
                started[d] = False
                d -= 1
            continue
        layers[d] = n
        m, tp = groups.machine[g], groups.tp[g]
        if free[d, m] < tp:
            layers[d] = 1
            continue
        left = num_layers - held[d] - n
        free[d + 1] = free[d]
        free[d + 1, m] -= tp
        rest = int(free[d + 1].sum())
        if rest == 0 and left > 0:
            layers[d] = 1  # only all layers that are left
            continue
        if rest > 0 and left == 0:
            continue
        own_layers, others = has[d, m] + n, 1 if free[d + 1, m] else 0  # stages of the machine to come have layers too
        if own_layers + others > most_on[m]:
            continue
        if others == 0 and own_layers < least_on[m]:
            layers[d] = 1
            continue
        begins, p = rest == 0, d + 1
        kind = kind_of(0, p, begins)
        in_flight = 0 if seconds.all_forward_first else min(m_batches, p) - 1
        both = seconds.both_s[kind, in_flight, g, n]
        if both >= NEVER_S:
            continue
        forward_s[d] = seconds.forward_s[kind, g, n]
        backward_s[d] = both - forward_s[d]
        if m_batches * both - (0 if seconds.all_forward_first else min(d, m_batches - 1)) * forward_s[d] > limit_s:
            continue
        # The prefix and the first stage's tail, at least; `together_s` if that is on the machine of the last stage.
        prefix_s, together_s, z = tails.all_s, tails.all_s, groups.machine[row[0]]
        if not begins:
            v = 0
            for q in range(num_machines):
                v += free[d + 1, q] * strides[q]
            prefix_s = together_s = NEVER_S
            for f in range(len(before_s)):
                own_s = before_s[f, v, left, m]
                if len(before_s) == 1 or f == z:
                    together_s = own_s + tails.all_s
                    prefix_s = min(prefix_s, together_s)
                else:
                    prefix_s = min(prefix_s, own_s + max(tails.all_s, tails.tied_s[f]))
            if prefix_s >= NEVER_S:
                continue
        for i in range(p):
            machines[i] = groups.machine[row[d - i]]
            chain_f[i], chain_b[i] = forward_s[d - i], backward_s[d - i]
        sent[:] = messages.base
        received[:] = messages.base
        add_own_load(machines, p, sent, received)
        # A cheap bound: the path of the first micro-batch, and one stage's own rounds.
        total_s, rounds_s = prefix_s, 0.0
        for i in range(p):
            behind = 0 if seconds.all_forward_first else min(d - i, m_batches - 1)
            own = (m_batches - 1) * (chain_f[i] + chain_b[i]) - behind * chain_f[i]
            rounds_s = max(rounds_s, own)
            total_s += chain_f[i] + chain_b[i]
            if i < p - 1:
                a, b, x, y = machines[i], machines[i + 1], row[d - i], row[d - i - 1]
                ahead_s[i] = between_s(messages, a, b, x, y, sent, received)
                back_s[i] = between_s(messages, b, a, y, x, sent, received)
                total_s += ahead_s[i] + back_s[i]
        work += _OPERATIONS_OF_A_STAGE * p
        if total_s + rounds_s > limit_s:
            continue
        work += 2 * p * m_batches
        if seconds.all_forward_first:
            _gpipe_ends(chain_f, chain_b, ahead_s, back_s, p, m_batches, ends_s)
        else:
            one_f_one_b_ends(chain_f, chain_b, ahead_s, back_s, p, m_batches, ends_s, scratch_s)
        on[d + 1] = on[d]
        on[d + 1, m] += n + tails.units[kind]
        if begins and p > 1 and machines[p - 1] == m:
            on[d + 1, m] -= tails.tied_units  # the last stage has it
        fits = ends_s[0] + prefix_s <= limit_s
        apart = ends_s[0] + together_s > limit_s
        for i in range(p):
            if not fits:
                break
            own_kind, own, k = kind_of(i, p, begins), row[d - i], layers[d - i]
            tail_s = sync_s(tails, i, p, begins, own, k, machines, max(on[d + 1, machines[i]], least_on[machines[i]]))
            if apart and i == p - 1:
                tail_s = max(tail_s, tails.tied_s[z])
            fits = ends_s[i] + left * least_forward_s + tail_s + tails.after_s[own_kind, own, k] <= limit_s
        if fits and begins:
            for i in range(p):
                found[count, i, 0], found[count, i, 1] = row[d - i], layers[d - i]
            found[count, p, 0] = -1
            count += 1
            if len(found) == 1:
                return YES, count
            if count == len(found):
                return LIMIT, count
        if fits and not begins:
            held[d + 1] = held[d] + n
            has[d + 1] = has[d]
            has[d + 1, m] = own_layers
            d += 1
            started[d] = False
    return YES if count else NO, count


@numba.njit(cache=True)
def pack(vectors: Ints, sequences: Ints, most_pipelines: int) -> Ints:
    """The most sequences of exactly k pipelines inside each usage [pipelines + 1, usages], by the most of one pipeline
    on each usage; far below 0 where k pipelines do not fit."""
    size = len(vectors)
    best = np.full((most_pipelines + 1, size), -(1 << 40), np.int64)
    best[0] = 0
    for k in range(1, most_pipelines + 1):
        for w in range(1, size):
            if sequences[w] < 1:
                continue
            for v in range(w, size):
                inside = True
                for q in range(vectors.shape[1]):
                    inside = inside and vectors[v, q] >= vectors[w, q]
                if inside:
                    best[k, v] = max(best[k, v], best[k - 1, v - w] + sequences[w])
    return best
