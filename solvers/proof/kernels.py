"""The compiled parts of the proof that others share: recurrences, their bounds, and packing.

Kinds of stages: 0 inner, 1 first, 2 last, 3 alone. Groups g are pairs of a machine and a TP degree. `both_s` is the sum
of forward and backward, `NEVER_S` where a stage does not fit; its second index is the number of micro-batches in flight
less one under 1F1B, and 0 where all are in flight (GPipe).
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from hexiopt.plan.token_layout import Floats, Ints

NEVER_S = 1e300
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
    """Messages of one micro-batch, none of which takes less than where it shares the network with no other.

    Alone it takes `alone_s` [groups, groups]; `round_trip_s` [machines, machines] is the least of both directions
    together. Whatever goes at once, each direction of an interface passes one after `interface_s` [machines] more.
    """

    alone_s: Floats
    round_trip_s: Floats
    interface_s: Floats


class Tails(NamedTuple):
    """Least seconds from the end of a stage's last backward to the end of the step, or from its beginning.

    Sync runs beside the last backward, but for a share of `shown` that follows it (`exposed_s`): `local_s` [kinds,
    groups, layers + 1], `layer_s` [machines] for each layer of the pipeline on that machine (embedding and head count
    as `units` [kinds] layers), `all_s` at every stage; the largest counts. The optimiser's `after_s` [kinds, groups,
    layers + 1] follow. A matrix that the first and the last stage share counts as `tied_units` of their units, once on
    a machine. Where they are on two machines, it takes `tied_s` [machines] after the last backward.
    """

    local_s: Floats
    layer_s: Floats
    all_s: float
    after_s: Floats
    units: Floats
    tied_units: float
    tied_s: Floats
    shown: float


@numba.njit(cache=True)
def exposed_s(sync_s: float, backward_s: float, shown: float) -> Any:
    """Of so many seconds of sync, those that follow a last backward: all but what runs beside it, and `shown` of it."""
    return max(sync_s - backward_s, shown * sync_s)


@numba.njit(cache=True)
def chain_ends(
    all_forward_first: bool, forward_s: Floats, backward_s: Floats, ahead_s: Floats, back_s: Floats,
    p: int, num_micro_batches: int, ends_s: Floats,
) -> None:  # fmt: skip
    """Write to `ends_s` [p] when each stage of a chain ends; `ahead_s[i]` is the message from stage i to i + 1,
    `back_s[i]` the one back."""
    if all_forward_first:
        gpipe_ends(forward_s, backward_s, ahead_s, back_s, p, num_micro_batches, ends_s)
    else:
        one_f_one_b_ends(forward_s, backward_s, ahead_s, back_s, p, num_micro_batches, ends_s, np.empty((3, p)))


@numba.njit(cache=True)
def gpipe_ends(
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
def least_ends(
    all_forward_first: bool, forward_s: Floats, backward_s: Floats, ahead_s: Floats, back_s: Floats, p: int,
    num_micro_batches: int, ends_s: Floats,
) -> Any:  # fmt: skip
    """As `chain_ends`, but lower bounds in closed form. Returns the seconds of the first micro-batch's way through the
    chain and back, and the most seconds that some stage adds: the first stage ends no earlier than the sum of both.

    The first micro-batch goes to the end and back to stage i, of t seconds, with r behind it; then M − 1 − w forwards
    and M − 1 backwards are left, w = min(r, M − 1), or 0 under GPipe. Under 1F1B the cycle from stage i to j and back
    advances c = j − i + 1 micro-batches in the sum L of these stages and messages: so q L take the place of q c t, for
    any q c ≤ M − 1 − w.
    """
    most_s, way_s = 0.0, 0.0  # way: from stage i to the end and back
    for i in range(p - 1, -1, -1):
        both_s = forward_s[i] + backward_s[i]
        w = 0 if all_forward_first else min(p - 1 - i, num_micro_batches - 1)
        turns, cycle_s = num_micro_batches - 1 - w, both_s
        rounds_s = turns * both_s
        for j in range(i + 1, p if not all_forward_first else i + 1):
            q = turns // (j - i + 1)
            if q == 0:
                break
            cycle_s += ahead_s[j - 1] + back_s[j - 1] + forward_s[j] + backward_s[j]
            rounds_s = max(rounds_s, q * cycle_s + (turns - q * (j - i + 1)) * both_s)
        rounds_s += w * backward_s[i]
        way_s += both_s + (ahead_s[i] + back_s[i] if i < p - 1 else 0.0)
        ends_s[i] = way_s + rounds_s
        most_s = max(most_s, rounds_s)
    before_s = 0.0
    for i in range(1, p):
        before_s += forward_s[i - 1] + ahead_s[i - 1]
        ends_s[i] += before_s
    return way_s, most_s


@numba.njit(cache=True)
def interfaces_s(messages: Messages, machines: Ints, p: int) -> Any:
    """The most seconds a micro-batch for which a chain on `machines` [p] needs one direction of an interface."""
    most_s = 0.0
    for m in machines[:p]:
        crossing = 0  # boundaries of the chain at that machine: over each it sends and receives one
        for k in range(p - 1):
            if machines[k] != machines[k + 1] and (machines[k] == m or machines[k + 1] == m):
                crossing += 1
        most_s = max(most_s, crossing * messages.interface_s[m])
    return most_s


@numba.njit(cache=True)
def kind_of(i: int, p: int, begins: bool) -> int:
    """The kind of stage i of the last p stages of a pipeline, which are all of its stages if it `begins` with them."""
    if i == 0 and begins:
        return 3 if p == 1 else 1
    return 2 if i == p - 1 else 0


@numba.njit(cache=True)
def sync_s(
    tails: Tails, i: int, p: int, begins: bool, g: int, n: int, machines: Ints, on: float, backward_s: float,
) -> Any:  # fmt: skip
    """Seconds of sync after stage i of the last p stages of a pipeline, on `machines` [p], with `on` layers on its own
    machine, whose last backward takes `backward_s`."""
    kind, m = kind_of(i, p, begins), machines[i]
    found = exposed_s(max(tails.all_s, tails.local_s[kind, g, n], tails.layer_s[m] * on), backward_s, tails.shown)
    if begins and machines[0] != machines[p - 1] and (i == 0 or i == p - 1):
        found = max(found, tails.tied_s[m])
    return found


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
