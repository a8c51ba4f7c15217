"""The compiled parts of the last level: pipelines that run next to each other, and what each can process there.

What pipelines do to each other depends only on the machine of each of their layers: messages of others are neglected,
which only makes a step shorter. Pipelines of one usage with equal machines form a *family*. So families are combined,
and a combination of families says of each member what it can process, whichever members the others are.
"""

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
    chain_ends,
    exposed_s,
    interfaces_s,
    kind_of,
    sync_s,
)


class Lines(NamedTuple):
    """Pipelines: numbers of stages, indices of micro-batch sizes and most micro-batches [pipelines]; groups and layers
    of their stages [pipelines, stages]."""

    num_stages: Ints
    size: Ints
    num_micro_batches: Ints
    groups: Ints
    layers: Ints


class JointSeconds(NamedTuple):
    """What pipelines of a plan with a known number of pipelines take, by micro-batch size [sizes].

    `forward_s` [sizes, kinds, groups, layers + 1], `both_s` [sizes, kinds, in flight, groups, layers + 1]; optimiser
    `after_s` and sync over own links `local_s` [kinds, groups, layers + 1]; messages `alone_s` [sizes, groups, groups].
    A ring of a layer between machines passes `pass_bytes` times its factor; embedding and head count as `first_units`
    and `last_units` layers, and a matrix that the first and the last stage share as `tied_units`. Inside machines, a
    group passes its share of a layer over its own ports in `port_s` [groups] times the factor.
    """

    sizes: Ints
    all_forward_first: bool
    forward_s: Floats
    both_s: Any
    after_s: Floats
    local_s: Floats
    alone_s: Floats
    nic: Floats
    first_units: float
    last_units: float
    tied_units: float
    pass_bytes: float
    port_s: Floats
    per_machine: bool  # states are sharded within machines
    shown: float  # as in `Tails`


class Families(NamedTuple):
    """Families of all usages of a partition, usage by usage, those that can process most sequences first.

    `of_usage` [usages + 1] and `members` [families + 1] are where each begins; `most` [families] sequences of a member;
    `machines` [families, layers].
    """

    of_usage: Ints
    members: Ints
    most: Ints
    machines: Ints


@numba.njit(cache=True)
def most_alone(
    groups: Groups, seconds: StageSeconds, tails: Tails, messages: Messages, row: Ints, layers: Ints, p: int,
    least: int, most: int, limit_s: float,
) -> int:  # fmt: skip
    """The most micro-batches, at least `least` and at most `most`, with which a pipeline of p stages ends in time."""
    num_machines = len(messages.interface_s)
    forward_s, backward_s, ahead_s, back_s = np.zeros(p), np.zeros(p), np.zeros(p), np.zeros(p)
    ends_s, machines = np.zeros(p), np.zeros(p, np.int64)
    on = np.zeros(num_machines)
    for s in range(p):
        machines[s] = groups.machine[row[s]]
        on[machines[s]] += layers[s] + tails.units[kind_of(s, p, True)]
    if p > 1 and machines[0] == machines[p - 1]:
        on[machines[0]] -= tails.tied_units
    for s in range(p - 1):
        ahead_s[s], back_s[s] = messages.alone_s[row[s], row[s + 1]], messages.alone_s[row[s + 1], row[s]]
    shared_s = interfaces_s(messages, machines, p)
    count = least
    while count < most and (count + 1) * shared_s <= limit_s:
        for s in range(p):
            g, n, kind = row[s], layers[s], kind_of(s, p, True)
            both = seconds.both_s[kind, 0 if seconds.all_forward_first else min(count + 1, p - s) - 1, g, n]
            if both >= NEVER_S:
                return count
            forward_s[s] = seconds.forward_s[kind, g, n]
            backward_s[s] = both - forward_s[s]
        chain_ends(seconds.all_forward_first, forward_s, backward_s, ahead_s, back_s, p, count + 1, ends_s)
        for s in range(p):
            g, n = row[s], layers[s]
            ends_s[s] += sync_s(tails, s, p, True, g, n, machines, on[machines[s]], backward_s[s])
            ends_s[s] += tails.after_s[kind_of(s, p, True), g, n]
        if ends_s.max() > limit_s:
            return count
        count += 1
    return count


@numba.njit(cache=True)
def machines_of_layers(lines: Lines, groups: Groups, machines: Ints) -> None:
    """Write the machine of each layer to `machines` [pipelines, layers]."""
    for i in range(len(machines)):
        at = 0
        for s in range(lines.num_stages[i]):
            machines[i, at : at + lines.layers[i, s]] = groups.machine[lines.groups[i, s]]
            at += lines.layers[i, s]


@numba.njit(cache=True)
def ring_seconds(machines: Ints, missing: int, seconds: JointSeconds, ring_s: Floats, inside: Floats) -> None:
    """Write the seconds of the rings of each layer to `ring_s` [layers + 1], given the machines [pipelines, layers] of
    each pipeline's layers, and to `inside` [layers + 1, machines] the share of a layer that each of its holders on a
    machine passes over its own ports. The last row is a matrix that first and last stages share. Where `missing` more
    pipelines are not known yet, these are lower bounds whatever they are: another holder never shortens a ring between
    machines, but may make one of a ring inside a machine.

    A ring passes (k − 1)/k of its bytes, of k holders, and takes as long as its most loaded interface needs for all
    rings. With states sharded within machines, there are rings inside each machine, and rings of the machines.
    Otherwise one ring passes all holders, which use only their ports where all are on one machine.
    """
    count, num_layers = machines.shape
    num_machines = len(seconds.nic)
    load, held = np.zeros(num_machines), np.zeros((num_layers + 1, num_machines), np.int64)  # holders on each machine
    ring_s[:] = 0.0
    inside[:] = 0.0
    for layer in range(num_layers + (1 if seconds.tied_units > 0.0 else 0)):
        holders, met, units = missing, 0, seconds.tied_units
        for i in range(count):
            if layer < num_layers:
                held[layer, machines[i, layer]] += 1
            else:
                held[layer, machines[i, 0]] += 1
                if machines[i, num_layers - 1] != machines[i, 0]:
                    held[layer, machines[i, num_layers - 1]] += 1
        for q in range(num_machines):
            holders += held[layer, q]
            met += 1 if held[layer, q] else 0
        if layer < num_layers:
            units = 1.0 + (seconds.first_units if layer == 0 else 0.0)
            units += seconds.last_units if layer == num_layers - 1 else 0.0
        factor = (met - 1.0) / met if seconds.per_machine else ((holders - 1.0) / holders if met > 1 else 0.0)
        for q in range(num_machines):
            if held[layer, q]:
                load[q] += factor * units
                if seconds.per_machine or (met == 1 and missing == 0):
                    inside[layer, q] = (held[layer, q] - 1.0) / held[layer, q] * units
                if met == 1:
                    held[layer, q] = 0
    for layer in range(num_layers + 1):
        for q in range(num_machines):
            if held[layer, q]:
                ring_s[layer] = max(ring_s[layer], seconds.pass_bytes * load[q] / seconds.nic[q])


@numba.njit(cache=True)
def most_next_to(
    lines: Lines, i: int, groups: Groups, seconds: JointSeconds, ring_s: Floats, inside: Floats, least: int,
    limit_s: float,
) -> int:  # fmt: skip
    """The most micro-batches, at most its own, that pipeline i processes in time next to others; 0 if below `least`.

    `ring_s` and `inside` are the rings of all, from `ring_seconds`. Waiting for late holders and for messages of others
    is neglected, so that this is an upper bound.
    """
    num_layers = len(ring_s) - 1
    p, c = lines.num_stages[i], lines.size[i]
    forward_s, backward_s, ahead_s, back_s = np.zeros(p), np.zeros(p), np.zeros(p), np.zeros(p)
    ends_s, beside_s, after_s = np.zeros(p), np.zeros((2, p)), np.zeros((2, p))  # backwards: sync, and what follows it
    at = 0
    for s in range(p):
        g, n, kind = lines.groups[i, s], lines.layers[i, s], kind_of(s, p, True)
        between, units = ring_s[at : at + n].max(), inside[at : at + n, groups.machine[g]].sum()
        if s == 0 or s == p - 1:
            between = max(between, ring_s[num_layers])
            units += inside[num_layers, groups.machine[g]]
        own_s = units * seconds.port_s[g]
        # With states sharded within machines, sums between them follow those inside; otherwise all run at once.
        beside_s[0, s], beside_s[1, s] = seconds.local_s[kind, g, n], own_s
        after_s[:, s] = seconds.after_s[kind, g, n]
        if seconds.per_machine:
            after_s[1, s] += between
        else:
            beside_s[1, s] = max(own_s, between)
        at += n
        if s < p - 1:
            h = lines.groups[i, s + 1]
            ahead_s[s], back_s[s] = seconds.alone_s[c, g, h], seconds.alone_s[c, h, g]
    count = lines.num_micro_batches[i]
    while count >= max(1, least):
        fits = True
        for s in range(p):
            g, n, kind = lines.groups[i, s], lines.layers[i, s], kind_of(s, p, True)
            both = seconds.both_s[c, kind, 0 if seconds.all_forward_first else min(count, p - s) - 1, g, n]
            fits = fits and both < NEVER_S
            forward_s[s] = seconds.forward_s[c, kind, g, n]
            backward_s[s] = both - forward_s[s]
        if fits:
            chain_ends(seconds.all_forward_first, forward_s, backward_s, ahead_s, back_s, p, count, ends_s)
            for s in range(p):
                own_s = exposed_s(beside_s[0, s], backward_s[s], seconds.shown) + after_s[0, s]
                ends_s[s] += max(own_s, exposed_s(beside_s[1, s], backward_s[s], seconds.shown) + after_s[1, s])
            if ends_s.max() <= limit_s:
                return int(count)
        count -= 1
    return 0


@numba.njit(cache=True)
def surviving_families(
    usages: Ints, families: Families, lines: Lines, groups: Groups, seconds: JointSeconds, batch: int, limit_s: float,
    most_work: int, found: Ints,
) -> tuple[int, int]:  # fmt: skip
    """Write to `found` [combinations, pipelines] the families, one for each of `usages` [pipelines], whose members may
    process the batch next to each other. Returns YES, NO or LIMIT (too much work or too many) and their number.

    `usages` ascend, and each combination is met once. `lines` are in the order of families. The first two families or
    more of a combination are given up as soon as they process too little next to each other, whatever the rest are.
    """
    k, num_layers, num_machines = len(usages), families.machines.shape[1], len(seconds.nic)
    rest = np.zeros(k + 1, np.int64)  # the most that the pipelines from one on process
    for d in range(k - 1, -1, -1):
        first = families.of_usage[usages[d]]
        rest[d] = rest[d + 1] + (families.most[first] if first < families.of_usage[usages[d] + 1] else -(1 << 40))
    chosen, total = np.full(k, -1, np.int64), np.zeros(k + 1, np.int64)
    machines, ring_s = np.zeros((k, num_layers), np.int64), np.zeros(num_layers + 1)
    inside = np.zeros((num_layers + 1, num_machines))
    d = work = count = 0
    while d >= 0:
        if chosen[d] < 0:
            chosen[d] = families.of_usage[usages[d]]
            if d > 0 and usages[d] == usages[d - 1]:
                chosen[d] = chosen[d - 1]
        else:
            chosen[d] += 1
        f = chosen[d]
        work += 1
        if f >= families.of_usage[usages[d] + 1] or total[d] + families.most[f] + rest[d + 1] < batch:
            chosen[d] = -1
            d -= 1
            continue
        total[d + 1] = total[d] + families.most[f]
        machines[d] = families.machines[f]
        able = total[d + 1] + rest[d + 1]
        if d > 0 or k == 1:
            ring_seconds(machines[: d + 1], k - 1 - d, seconds, ring_s, inside)
            work += num_layers * (d + 1 + num_machines)
            for i in range(d + 1):
                f, best = chosen[i], 0
                able -= families.most[f]
                for line in range(families.members[f], families.members[f + 1]):
                    size = seconds.sizes[lines.size[line]]
                    least = max(best, batch - able) // size
                    work += 2 * lines.num_stages[line] * lines.num_micro_batches[line]
                    own = most_next_to(lines, line, groups, seconds, ring_s, inside, least, limit_s)
                    best = max(best, own * size)
                    if best == families.most[f]:
                        break
                able += best
                if able < batch:
                    break
        if able >= batch:
            if d < k - 1:
                d += 1
                continue
            if count == len(found):
                return LIMIT, count
            found[count] = chosen
            count += 1
        if work > most_work:
            return LIMIT, count
    return YES if count else NO, count
