"""The compiled search for one pipeline: all choices of its stages that end in time."""

from typing import Any, NamedTuple

import numba
import numpy as np

from hexiopt.plan.token_layout import Floats, Ints
from solvers.proof.kernels import (
    LIMIT,
    NEVER_S,
    NO,
    YES,
    Groups,
    Messages,
    StageSeconds,
    Tails,
    exposed_s,
    gpipe_ends,
    interfaces_s,
    kind_of,
    least_ends,
    one_f_one_b_ends,
    sync_s,
)

_OPERATIONS_OF_A_STAGE = 8  # in bounds in closed form


class Before(NamedTuple):
    """The first stages of pipelines, from `least_sums` and `least_rests`, for the usages inside one; and the least tail
    of a first stage."""

    sum_s: Floats
    rest_s: Floats
    tail_s: float


@numba.njit(cache=True)
def _layers_before(before_s: Floats) -> Any:
    """The least and the most layers that the first stages on a usage may have before a stage on a machine [usages,
    machines]; the most are −1 where there are no such stages."""
    _, num_usages, num_layers, num_machines = before_s.shape
    least, most = np.full((num_usages, num_machines), num_layers), np.full((num_usages, num_machines), -1)
    for f in range(len(before_s)):
        for v in range(num_usages):
            for n in range(num_layers):
                for q in range(num_machines):
                    if before_s[f, v, n, q] < NEVER_S:
                        least[v, q], most[v, q] = min(least[v, q], n), max(most[v, q], n)
    return least, most


@numba.njit(cache=True)
def _most_layers(
    seconds: StageSeconds, tails: Tails, kind: int, behind: int, g: int, num_layers: int, num_micro_batches: int,
    limit_s: float,
) -> int:  # fmt: skip
    """The most layers with which a stage's own work and tail are in time, with so many stages `behind`."""
    w = 0 if seconds.all_forward_first else min(behind, num_micro_batches - 1)
    for n in range(num_layers, 0, -1):
        both_s = seconds.both_s[kind, w, g, n]
        if both_s < NEVER_S:
            forward_s = seconds.forward_s[kind, g, n]
            sync = exposed_s(max(tails.all_s, tails.local_s[kind, g, n]), both_s - forward_s, tails.shown)
            if num_micro_batches * both_s - w * forward_s + sync + tails.after_s[kind, g, n] <= limit_s:
                return n
    return 0


@numba.njit(cache=True)
def search_pipelines(
    usage: Ints, strides: Ints, groups: Groups, seconds: StageSeconds, tails: Tails, messages: Messages,
    before: Before, least_on: Ints, most_on: Ints, num_layers: int, num_micro_batches: int, limit_s: float,
    most_work: int, found: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Find the pipelines on exactly `usage` that end, with tails, within `limit_s`: all, or one if `found` has one row.

    Only pipelines with `least_on` to `most_on`
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
    forward_s, backward_s = np.zeros(most + 1), np.zeros(most + 1)  # by stages behind
    chain_f, chain_b, ahead_s, back_s = np.zeros(most + 1), np.zeros(most + 1), np.zeros(most + 1), np.zeros(most + 1)
    ends_s, after_s, machines = np.zeros(most + 1), np.zeros(most + 1), np.zeros(most + 1, np.int64)
    scratch_s = np.zeros((3, most + 1))
    least_forward_s = NEVER_S
    for g in range(len(groups.machine)):
        if usage[groups.machine[g]] >= groups.tp[g]:
            least_forward_s = min(least_forward_s, seconds.forward_s[0, g, 1])
    free[0] = usage
    before_s = before.sum_s
    least_before, most_before = _layers_before(before_s)
    most_own = np.full((4, most, len(groups.machine)), -1, np.int64)
    inner_of, at = np.zeros(most + 1, np.bool_), np.zeros(most + 1, np.int64)
    least_n, way_s, rounds_s = np.zeros(most + 1, np.int64), np.zeros(most + 2), np.zeros(most + 2)
    # Of the suffix alone, when sync begins on each machine, optimisers counted before it, and when all of it ends.
    latest_s, all_latest_s = np.zeros((most + 2, num_machines)), np.zeros(most + 2)
    d = work = count = 0
    gpipe, row[0] = seconds.all_forward_first, -1
    while d >= 0:
        work += 1
        if work > most_work:
            return LIMIT, count
        p, total = d + 1, num_layers - held[d]
        layers[d] -= 1
        n, g = layers[d], row[d]
        if n < least_n[d]:  # the next group, with the layers that it may have
            row[d] = g = g + 1
            layers[d] = least_n[d] = 0
            if g >= len(groups.machine):
                d -= 1
                continue
            m, tp = groups.machine[g], groups.tp[g]
            if free[d, m] < tp:
                continue
            rest = at[d] = 0
            for q in range(num_machines):
                free[d + 1, q] = free[d, q] - (tp if q == m else 0)
                rest += free[d + 1, q]
                at[d] += free[d + 1, q] * strides[q]
            inner_of[d] = rest > 0
            low, high = total, total  # the first stage has all layers that are left
            if rest > 0:
                low, high = max(1, total - most_before[at[d], m]), total - least_before[at[d], m]
            others = 1 if free[d + 1, m] else 0  # stages of the machine to come have layers too
            high = min(high, most_on[m] - has[d, m] - others)
            if others == 0:
                low = max(low, least_on[m] - has[d, m])
            kind = kind_of(0, p, rest == 0)
            if high >= low and most_own[kind, d, g] < 0:
                most_own[kind, d, g] = _most_layers(seconds, tails, kind, d, g, num_layers, m_batches, limit_s)
            layers[d], least_n[d] = min(high, most_own[kind, d, g]) + 1, low
            continue
        m, left, begins = groups.machine[g], total - n, not inner_of[d]
        kind = kind_of(0, p, begins)
        both = seconds.both_s[kind, 0 if gpipe else min(m_batches, p) - 1, g, n]
        if both >= NEVER_S:
            continue
        forward_s[d] = seconds.forward_s[kind, g, n]
        backward_s[d] = both - forward_s[d]
        # The prefix and the first stage's tail, at least; `together_s` if that is on the machine of the last stage; and
        # the prefix with what its slowest stage adds.
        slowest_s, z = 0.0, groups.machine[row[0]]
        prefix_s = together_s = exposed_s(tails.all_s, backward_s[d], tails.shown)
        if not begins:
            prefix_s = together_s = slowest_s = NEVER_S
            for f in range(len(before_s)):
                own_s = before_s[f, at[d], left, m]
                slowest_s = min(slowest_s, own_s + before.rest_s[f, at[d], left, m])
                if len(before_s) == 1 or f == z:
                    together_s = own_s + before.tail_s
                    prefix_s = min(prefix_s, together_s)
                else:
                    prefix_s = min(prefix_s, own_s + max(before.tail_s, tails.tied_s[f]))
        # Bounds that need no look at the suffix: what it takes by itself, and the head.
        w = 0 if gpipe else min(d, m_batches - 1)
        turns, hop_s, next_s = m_batches - 1 - w, 0.0, both
        if d:
            hop_s = messages.round_trip_s[m, groups.machine[row[d - 1]]]
            next_s = both if gpipe else max(both, hop_s + forward_s[d - 1] + backward_s[d - 1])
        through_s = way_s[d] + both + hop_s
        own_s = turns // 2 * (both + next_s) + turns % 2 * both + w * backward_s[d]  # see `least_ends`
        if through_s + max(prefix_s + max(rounds_s[d], own_s), slowest_s) > limit_s:
            continue
        on_s = tails.layer_s[m] * max(on[d, m] + n + tails.units[kind], least_on[m])
        if begins and p > 1 and z == m:
            on_s = tails.layer_s[m] * max(on[d, m] + n + tails.units[kind] - tails.tied_units, least_on[m])
        synced_s = exposed_s(max(tails.all_s, tails.local_s[kind, g, n], on_s), backward_s[d], tails.shown)
        own_s += through_s + synced_s + tails.after_s[kind, g, n]
        coming_s = left * least_forward_s  # forwards before the head
        later_s = forward_s[d] + max(all_latest_s[d], latest_s[d, m] + on_s)
        if coming_s + max(own_s, later_s) > limit_s:
            continue
        for i in range(p):
            machines[i] = groups.machine[row[d - i]]
            chain_f[i], chain_b[i] = forward_s[d - i], backward_s[d - i]
        if m_batches * interfaces_s(messages, machines, p) > limit_s:
            continue
        for i in range(p - 1):
            x, y = row[d - i], row[d - i - 1]
            ahead_s[i], back_s[i] = messages.alone_s[x, y], messages.alone_s[y, x]
        # Closed-form bounds first, which take less time than the recurrence.
        work += _OPERATIONS_OF_A_STAGE * p + p * p
        way_s[p], rounds_s[p] = least_ends(gpipe, chain_f, chain_b, ahead_s, back_s, p, m_batches, ends_s)
        if way_s[p] + max(prefix_s + rounds_s[p], slowest_s) > limit_s:
            continue
        on[d + 1] = on[d]
        on[d + 1, m] += n + tails.units[kind]
        if begins and p > 1 and z == m:
            on[d + 1, m] -= tails.tied_units  # the last stage has it
        fits = True
        for i in range(p):
            own_kind, own, k = kind_of(i, p, begins), row[d - i], layers[d - i]
            held_on = max(on[d + 1, machines[i]], least_on[machines[i]])
            own_s = sync_s(tails, i, p, begins, own, k, machines, held_on, chain_b[i])
            after_s[i] = coming_s + own_s + tails.after_s[own_kind, own, k]
            if ends_s[i] + after_s[i] > limit_s:
                fits = False
                break
        if not fits:
            continue
        work += 2 * p * m_batches
        if gpipe:
            gpipe_ends(chain_f, chain_b, ahead_s, back_s, p, m_batches, ends_s)
        else:
            one_f_one_b_ends(chain_f, chain_b, ahead_s, back_s, p, m_batches, ends_s, scratch_s)
        fits = ends_s[0] + prefix_s <= limit_s
        if fits and ends_s[0] + together_s > limit_s:  # first and last stage are apart
            own_s = tails.tied_s[z] + tails.after_s[kind_of(p - 1, p, begins), row[0], layers[0]]
            after_s[p - 1] = max(after_s[p - 1], coming_s + own_s)
        for i in range(p if fits else 0):
            if ends_s[i] + after_s[i] > limit_s:
                fits = False
                break
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
            has[d + 1, m] += n
            latest_s[p], all_latest_s[p] = 0.0, 0.0
            for i in range(p):
                own_s = ends_s[i] + tails.after_s[kind_of(i, p, False), row[d - i], layers[d - i]]
                own_s -= chain_b[i] if tails.shown < 1.0 else 0.0
                latest_s[p, machines[i]] = max(latest_s[p, machines[i]], own_s)
                all_latest_s[p] = max(all_latest_s[p], ends_s[i] + after_s[i] - coming_s)
            d += 1
            row[d], layers[d], least_n[d] = -1, 0, 0
    return YES if count else NO, count
