"""Least sums of the stages of pipelines, and what caps the stages of those that are in time."""

from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from hexiopt.plan.token_layout import Floats, Ints
from solvers.proof.kernels import NEVER_S, Groups
from solvers.proof.tables import ProofTables, Surroundings

Bools = NDArray[np.bool_]
_ROUNDING = 1e-9  # of a layer


class Most(NamedTuple):
    """What is known of stages on exactly the devices of each usage [usages]: the most devices that are `behind` them,
    the least and most layers, and the most seconds of all their stages and messages both ways if they are the first of
    a pipeline (`before_s`), or all (`whole_s`)."""

    behind: Ints
    least_layers: Ints
    most_layers: Ints
    before_s: Floats
    whole_s: Floats


class Caps(NamedTuple):
    """The times of stages, and their additions to the sum of a pipeline, [groups, layers + 1] each: see
    `least_sums`. Those of inner and first stages depend on the most stages behind them, and on the machine of the next
    one [stages, groups, layers + 1, machines]."""

    inner_s: Floats
    inner_rest_s: Any
    first_s: Floats
    first_rest_s: Any
    last_s: Floats
    last_rest_s: Floats
    alone_s: Floats
    alone_rest_s: Floats
    first_tail_s: float  # that the rests of inner and last stages contain


@numba.njit(cache=True)
def least_sums(
    vectors: Ints, strides: Ints, needed: Bools, groups: Groups, caps: Caps, round_trip_s: Floats, tied_s: Floats,
    most: Most, num_layers: int, limit_s: float, known_s: float, before_s: Floats, whole_s: Floats,
) -> None:  # fmt: skip
    """Least sums of stages and round trips of pipelines that use exactly u, into `whole_s` [usages], and of their first
    stages, with the round trip to the next, into `before_s` [firsts, usages, layers + 1, machine of the next stage];
    infinite where no pipeline keeps the caps. There is one of `firsts` for each machine that the first stage may be on,
    or one for all.

    A stage followed by r stages and with w = min(r, M − 1) ends no earlier than S + (M − 1 − w) t + w b, where S is the
    sum of all stages and messages both ways: the first micro-batch goes to the end and back to it, then it has
    M − 1 − w forwards and M − 1 backwards left, and the last goes back to the first stage. (Under GPipe w = 0: no
    backward starts before the last micro-batch has reached the end.) Under 1F1B the cycle from a stage to the next and
    back advances two micro-batches: where this takes longer than two t, it takes the place of M − 1 − r of these, in
    pairs. Everything beyond S, including the tail of sync, is what the stage adds; `tied_s` as in `Tails`. `known_s` is
    a known lower bound on the sums of these usages, which count where they are `needed` [usages], with all usages
    inside them.
    """
    whole_s[:] = NEVER_S
    for f in range(len(before_s)):
        _least_sums(
            f if len(before_s) > 1 else -1, vectors, strides, needed, groups, caps, round_trip_s, tied_s, most,
            num_layers, limit_s, known_s, before_s[f], whole_s,
        )  # fmt: skip
    for v in range(len(vectors)):
        if whole_s[v] > most.whole_s[v]:
            whole_s[v] = NEVER_S


@numba.njit(cache=True)
def _least_sums(
    f: int, vectors: Ints, strides: Ints, needed: Bools, groups: Groups, caps: Caps, round_trip_s: Floats,
    tied_s: Floats, most: Most, num_layers: int, limit_s: float, known_s: float, before_s: Floats, whole_s: Floats,
) -> None:  # fmt: skip
    """As `least_sums`, of pipelines whose first stage is on machine f, or on any if it is −1; lowers `whole_s`."""
    num_groups, num_machines = len(groups.machine), vectors.shape[1]
    before_s[:] = NEVER_S
    for v in range(1, len(vectors)):
        if not needed[v] or (f >= 0 and vectors[v, f] == 0):
            continue
        most_s = most.before_s[v]
        for g in range(num_groups):
            m, tp = groups.machine[g], groups.tp[g]
            if vectors[v, m] < tp:
                continue
            w = v - tp * strides[m]
            if w == 0:
                for n in range(max(1, most.least_layers[v]), min(num_layers, most.most_layers[v]) + 1):
                    own = caps.first_s[g, n]
                    for q in range(num_machines if own <= most_s else 0):
                        total, rest = own + round_trip_s[m, q], caps.first_rest_s[most.behind[v], g, n, q]
                        if max(total, known_s) + rest <= limit_s and total < before_s[v, n, q]:
                            before_s[v, n, q] = total
                own = caps.alone_s[g, num_layers]
                fits = own + caps.alone_rest_s[g, num_layers] <= limit_s and most.most_layers[v] >= num_layers
                if fits and own < whole_s[v]:
                    whole_s[v] = own
                continue
            for n in range(1, num_layers):
                possible = False
                for q in range(num_machines):
                    own, rest = caps.inner_s[g, n], caps.inner_rest_s[most.behind[v], g, n, q]
                    with_message = own + round_trip_s[m, q]
                    if not max(known_s, with_message) + rest <= limit_s:
                        continue
                    possible = True
                    for held in range(max(1, most.least_layers[v] - n), min(num_layers, most.most_layers[v] + 1) - n):
                        before = before_s[w, held, m]
                        total = before + with_message
                        if total < before_s[v, held + n, q] and total + rest <= limit_s and before + own <= most_s:
                            before_s[v, held + n, q] = total
                if not possible:
                    break
            apart = f >= 0 and f != m  # the first stage ends with the shared matrix, and so does the last
            more_s = max(0.0, tied_s[f] - caps.first_tail_s) if apart else 0.0
            own_more_s = tied_s[m] - caps.first_tail_s if apart else -NEVER_S
            for n in range(1, num_layers if most.most_layers[v] >= num_layers else 0):
                own, rest = caps.last_s[g, n], caps.last_rest_s[g, n]
                if not max(known_s + more_s, own + own_more_s, own) + rest <= limit_s:
                    break
                total = before_s[w, num_layers - n, m] + own
                if total < whole_s[v] and total + rest + more_s <= limit_s:
                    whole_s[v] = total


@numba.njit(cache=True)
def least_rests(
    vectors: Ints, strides: Ints, groups: Groups, caps: Caps, round_trip_s: Floats, most: Most, num_layers: int,
    limit_s: float, known_s: float, before_s: Floats, rest_s: Floats,
) -> None:  # fmt: skip
    """Of the same first stages as `before_s` of `least_sums`, the least that the one which adds most to the sum of the
    pipeline adds, into `rest_s`. The end is no earlier than that sum and what any stage adds."""
    num_machines = vectors.shape[1]
    rest_s[:] = NEVER_S
    for f in range(len(before_s)):
        for v in range(1, len(vectors)):
            if len(before_s) > 1 and vectors[v, f] == 0:
                continue
            for g in range(len(groups.machine)):
                m, tp = groups.machine[g], groups.tp[g]
                if vectors[v, m] < tp:
                    continue
                w = v - tp * strides[m]
                for n in range(1, num_layers):
                    for q in range(num_machines):
                        if w == 0:
                            own_s = caps.first_s[g, n] + round_trip_s[m, q]
                            adds_s = caps.first_rest_s[most.behind[v], g, n, q]
                            if before_s[f, v, n, q] < NEVER_S and max(own_s, known_s) + adds_s <= limit_s:
                                rest_s[f, v, n, q] = min(rest_s[f, v, n, q], adds_s)
                            continue
                        own_s = caps.inner_s[g, n] + round_trip_s[m, q]
                        adds_s = caps.inner_rest_s[most.behind[v], g, n, q]
                        if not max(known_s, own_s) + adds_s <= limit_s:
                            continue
                        low, high = most.least_layers[v] - n, min(num_layers, most.most_layers[v] + 1) - n
                        for held in range(max(1, low), high):
                            if before_s[f, w, held, m] + own_s + adds_s <= limit_s:
                                slowest_s = max(adds_s, rest_s[f, w, held, m])
                                rest_s[f, v, held + n, q] = min(rest_s[f, v, held + n, q], slowest_s)


@numba.njit(cache=True)
def raise_sums(
    vectors: Ints, strides: Ints, needed: Bools, groups: Groups, caps: Caps, round_trip_s: Floats, num_layers: int,
    limit_s: float, whole_s: Floats,
) -> None:  # fmt: skip
    """Raise `whole_s` [usages] of `least_sums` where pipelines made from the last stage to the first take longer: of
    these it is known how many devices are behind a stage, whatever comes before."""
    num_groups, num_machines = len(groups.machine), vectors.shape[1]
    after_s = np.full((len(vectors), num_layers, num_machines), NEVER_S)  # by the machine of the first of these stages
    devices = vectors.sum(axis=1)
    for v in range(1, len(vectors)):
        if not needed[v]:
            continue
        least_s = NEVER_S
        for g in range(num_groups):
            m, tp = groups.machine[g], groups.tp[g]
            if vectors[v, m] < tp:
                continue
            w = v - tp * strides[m]
            if w == 0:
                for n in range(1, num_layers):
                    if not caps.last_s[g, n] + caps.last_rest_s[g, n] <= limit_s:
                        break
                    after_s[v, n, m] = min(after_s[v, n, m], caps.last_s[g, n])
                if caps.alone_s[g, num_layers] + caps.alone_rest_s[g, num_layers] <= limit_s:
                    least_s = min(least_s, caps.alone_s[g, num_layers])
                continue
            for n in range(1, num_layers):
                for q in range(num_machines):
                    own = caps.first_s[g, n] + round_trip_s[m, q]
                    total = after_s[w, num_layers - n, q] + own
                    if total < least_s and total + caps.first_rest_s[devices[w], g, n, q] <= limit_s:
                        least_s = total
                    own, rest = caps.inner_s[g, n] + round_trip_s[m, q], caps.inner_rest_s[devices[w], g, n, q]
                    for held in range(1, num_layers - n if own + rest <= limit_s else 0):
                        total = after_s[w, held, q] + own
                        if total < after_s[v, held + n, m] and total + rest <= limit_s:
                            after_s[v, held + n, m] = total
        whole_s[v] = max(whole_s[v], least_s)


class StageBounds:
    """Bounds of single stages of pipelines that take `limit_s` seconds or less."""

    def __init__(self, tables: ProofTables, limit_s: float) -> None:
        self.tables, self.limit_s = tables, limit_s

    def most_layers(self, around: Surroundings, size: int, num_micro_batches: int) -> Ints:
        """The most layers that a pipeline has on so many devices of each machine [machines, devices + 1].

        A stage of n layers ends no earlier than its own work, and all y layers of the pipeline on a forced machine are
        passed through its interface before any of the machine's stages is done. So with y layers each stage has few,
        and y is at most what the devices hold then.
        """
        tables, tails = self.tables, self.tables.tails[around]
        work_s = self._least_work_s(around, size, num_micro_batches).min(axis=0)  # [groups, layers + 1]
        numbers = np.arange(tables.num_layers + 1)
        found = np.zeros((len(tables.machines), int(tables.usages.most.max()) + 1), np.int64)
        for m, most in enumerate(tables.usages.most.tolist()):
            held = np.zeros((most + 1, len(numbers)), np.int64)  # the most layers on so many devices, by y
            for devices in range(1, most + 1):
                for g in np.flatnonzero((tables.groups.machine == m) & (tables.groups.tp <= devices)).tolist():
                    rest_s = self.limit_s * (1 + _ROUNDING) - tails.layer_s[m] * numbers
                    own = np.searchsorted(work_s[g], rest_s, side="right") - 1  # `work_s` ascends with layers
                    before = held[devices - tables.groups.tp[g]]
                    held[devices] = np.maximum(held[devices], np.where(own >= 1, before + own, before))
                held[devices] = np.maximum(held[devices], held[devices - 1])
            found[m, : most + 1] = np.where(held >= numbers, numbers, 0).max(axis=1)
        return found

    def _least_work_s(self, around: Surroundings, size: int, num_micro_batches: int) -> Floats:
        """The least seconds from the start of a step to the beginning of a stage's sync, and its optimiser's, over all
        numbers r of stages that may follow [kinds, groups, layers + 1]; `NEVER_S` where it does not fit, or not in
        time.

        The first micro-batch passes it, goes to the end and back, through r stages of one layer or more, and with
        w = min(r, M − 1), 0 under GPipe, M − 1 − w forwards and M − 1 backwards are left.
        """
        tables = self.tables
        seconds, tails = tables.seconds(around.holders, size, num_micro_batches), tables.tails[around]
        one_s = float(seconds.both_s[:, :, :, 1].min())
        sync_s = np.maximum(tails.local_s, tails.all_s)
        found = np.full(sync_s.shape, NEVER_S)
        for kinds, behind in ((slice(0, 2), np.arange(1, tables.most_stages)), (slice(2, 4), np.zeros(1, np.int64))):
            if not len(behind):
                continue
            w, in_flight = self._warm_up(num_micro_batches, behind)
            both = seconds.both_s[kinds][:, in_flight]  # [kinds, behind, groups, layers + 1]
            own = num_micro_batches * both - w[:, None, None] * seconds.forward_s[kinds][:, None]
            own += behind[:, None, None] * one_s + tails.after_s[kinds][:, None]
            beside_s = self._beside_s(both, seconds.forward_s[kinds][:, None])
            exposed_s = np.maximum(sync_s[kinds][:, None] - beside_s, tails.shown * sync_s[kinds][:, None])
            fits = (both < NEVER_S) & (own + exposed_s <= self.limit_s * (1 + _ROUNDING))
            found[kinds] = np.where(fits, own - beside_s, NEVER_S).min(axis=1)
        found[:, :, 0] = 0.0
        return np.maximum.accumulate(found, axis=2)

    def _beside_s(self, both_s: Floats, forward_s: Floats) -> Floats:
        """Seconds of the last backward of stages, beside which sync runs, if any does."""
        found: Floats = np.where(both_s < NEVER_S, both_s - forward_s, 0.0) * (self.tables.shown < 1.0)
        return found

    def _warm_up(self, num_micro_batches: int, behind: Ints) -> tuple[Ints, Ints]:
        """With so many stages `behind` it, how many forwards a stage does before its first backward, less one, and the
        index of the micro-batches in flight of `StageSeconds`."""
        if self.tables.all_forward_first:
            return np.zeros_like(behind), np.zeros_like(behind)
        return np.minimum(behind, num_micro_batches - 1), np.minimum(behind + 1, num_micro_batches) - 1

    def caps(self, around: Surroundings, size: int, num_micro_batches: int, least_on: tuple[int, ...] | None) -> Caps:
        """Caps of any pipeline, or of one that has so many layers on each machine at least, none where that is −1."""
        tables = self.tables
        seconds, tails = tables.seconds(around.holders, size, num_micro_batches), tables.tails[around]
        sync_s = np.maximum(tails.local_s, tails.all_s)
        units = np.arange(tables.num_layers + 1) + tails.units[:, None, None]
        used = np.ones(len(tables.group_list), np.bool_)
        if least_on is not None:
            on = np.array(least_on)[tables.groups.machine][:, None]
            units, used = np.maximum(units, on), on[:, 0] != -1
        sync_s = np.maximum(sync_s, tails.layer_s[tables.groups.machine][:, None] * units)

        def tail_s(kind: int, in_flight: Ints) -> Floats:
            """Seconds after the end of stages with so many micro-batches in flight [in flight, groups, layers + 1]."""
            beside_s = self._beside_s(seconds.both_s[kind, in_flight], seconds.forward_s[kind])
            found: Floats = np.maximum(sync_s[kind] - beside_s, tails.shown * sync_s[kind]) + tails.after_s[kind]
            return found

        fewest = np.zeros(1, np.int64)  # in flight: then backwards are shortest, and what follows them is longest
        first_own_tail_s, alone_tail_s = tail_s(1, fewest)[0], tail_s(3, fewest)[0]
        # What runs beside a backward may leave less after that of many layers.
        first_tail_s = first_own_tail_s[used, 1 : 2 if tables.shown == 1.0 else None].min()
        own = tables.groups.machine
        round_trip_s = tables.messages[size].round_trip_s[own]  # from each group to each machine
        one_s = np.minimum(seconds.both_s[0, 0, :, 1], seconds.both_s[2, 0, :, 1])
        next_s = round_trip_s + [one_s[own == m].min() for m in range(len(tables.machines))]

        def least(kind: int, behind: Ints, first_s: Floats | float) -> tuple[Floats, Floats]:
            """The times of a stage, and the least that it adds to the sum [behind, groups, layers + 1], with the tail
            `first_s` of the first stage; infinite where its own work and tail take too long."""
            w, in_flight = self._warm_up(num_micro_batches, behind)
            both = seconds.both_s[kind, in_flight]
            work_s = num_micro_batches * both - w[:, None, None] * seconds.forward_s[kind]
            fits = (both < NEVER_S) & (work_s + tail_s(kind, in_flight) <= self.limit_s)
            return both, np.where(fits, work_s - both + first_s, NEVER_S)

        def followed(kind: int, first_s: Floats | float) -> tuple[Floats, Floats]:
            """The least time of a stage with others behind it, and what it adds with up to so many, by the machine of
            the next [most stages, groups, layers + 1, machines]. The cycle from a stage to the next and back advances
            two micro-batches."""
            behind = np.arange(1, tables.most_stages)
            none_s = np.full((1, *sync_s.shape[1:], len(tables.machines)), NEVER_S)
            if not len(behind):
                return seconds.both_s[kind, 0], none_s
            both, rest_s = least(kind, behind, first_s)
            turns = np.maximum(0, num_micro_batches - 1 - behind) // 2 * (not tables.all_forward_first)
            slower_s = np.maximum(0.0, next_s[:, None] - both[..., None])
            rest_s = np.minimum(rest_s[..., None] + turns[:, None, None, None] * slower_s, NEVER_S)
            return both[0], np.concatenate((none_s, np.minimum.accumulate(rest_s)))

        alone = np.zeros(1, np.int64)
        last_s, last_rest_s = least(2, alone, first_tail_s)
        alone_s, alone_rest_s = least(3, alone, alone_tail_s)
        return Caps(
            *followed(0, first_tail_s),
            *followed(1, first_own_tail_s),
            last_s[0],
            last_rest_s[0],
            alone_s[0],
            alone_rest_s[0],
            float(first_tail_s),
        )
