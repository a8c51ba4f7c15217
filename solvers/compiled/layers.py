"""Layers of a pipeline: the slowest stage is as fast as memory allows, as `solvers/completion/layers.py` has it.

Least seconds of a stage by its number of layers, over recompute policies and pairs of them, are made when first needed
and remembered under everything that they depend on.
"""

from typing import Any

import numpy as np

from solvers.compiled.kernels import entry, kernel
from solvers.compiled.state import OPTION_SLOTS

_BOTTLENECK = 1e-4  # share of a bottleneck to which bisection brackets it; rounding decides within
MOST_GROUPS, MOST_IN_FLIGHT = (1 << 9) - 1, (1 << 16) - 1
_MOST_HOLDERS, _MOST_ROOM, _MOST_PAIRS = (1 << 11) - 1, (1 << 9) - 1, (1 << 7) - 1
RESERVED = 8  # groups, and pairs, that every device has memory for


@kernel
def classify(machines: Any, kind_group: Any, mask_group: Any, stage: Any) -> None:
    """Fill in a stage's degree and class from its machine and mask."""
    machine, mask = machines[stage.machine], stage.mask
    degree, left = 0, mask
    while left:
        left &= left - 1
        degree += 1
    stage.degree = degree
    if machine.uneven >= 0:
        stage.group = mask_group[machine.uneven, mask]
    elif degree < kind_group.shape[1]:
        stage.group = kind_group[machine.kind, degree]
    else:
        stage.group = -1


@kernel
def pairs_of(stages: Any, p: int, num_stages: int, s: int) -> int:
    """Pairs beyond the reserved ones in which a device of stage s exchanges messages with neighbours, at most; as the
    degrees are powers of two, exactly."""
    own, before, after = stages[p, s].degree, 0, 0
    if s > 0:
        before = stages[p, s - 1].degree
    if s < num_stages - 1:
        after = stages[p, s + 1].degree
    count = 0
    if before > 0:
        count += 2 * ((before + own - 1) // own + (0 if before % own == 0 or own % before == 0 else 1))
    if after > 0:
        count += 2 * ((after + own - 1) // own + (0 if after % own == 0 or own % after == 0 else 1))
    return max(0, count - RESERVED)


@kernel
def stage_step_s(group: Any, layers: int, first: bool, last: bool) -> Any:
    """Seconds of memory traffic of an optimizer step of a stage whose states are not spread."""
    seconds = layers * group.layer_step_s
    if first:
        seconds += group.embedding_step_s
    if last:
        seconds += group.head_step_s_beside if first else group.head_step_s
    return seconds


@kernel
def tied_step_s(group: Any, first: bool, last: bool) -> Any:
    """Of these, those of a matrix that both ends spread together."""
    return group.tied_step_s if first or last else 0.0


@kernel
def ends_bytes(group: Any, first: int, last: int, holders: int, tied_holders: int) -> Any:
    """Bytes of the states of embedding and LM head, as far as a stage has them, spread over `holders`, those of a tied
    matrix over `tied_holders`."""
    whole = first * group.embedding_bytes
    spread = first * group.embedding_sharded_bytes
    if last:
        whole += group.head_bytes_beside if first else group.head_bytes
        spread += group.head_sharded_bytes_beside if first else group.head_sharded_bytes
    tied = group.tied_sharded_bytes if first or last else 0.0
    return whole + (spread - tied) / holders + tied / tied_holders


@kernel
def room_bytes(problem: Any, group: Any, cost: Any, stage: Any, at: Any) -> Any:
    """Bytes that a stage has for layers and what they store, and bytes of a layer's states; divided by what
    fragmentation takes beside activations. `at`: micro-batches in flight, whether it is the first and the last stage (0
    or 1), the ZeRO stage, pairs beyond the reserved ones, whether as many more hold a tied matrix (0 or 1)."""
    count, first, last, zero_stage, pairs, apart = at
    holders = stage.holders if zero_stage else 1
    tied_holders = holders * (1 + apart) if zero_stage else 1
    more = 1.0 + problem.fragmentation
    limit = group.limit_bytes - stage.room * group.sum_bytes - pairs * group.pair_bytes
    room = (limit - ends_bytes(group, first, last, holders, tied_holders)) / more - cost.buffer_bytes
    if first:
        room -= count * cost.token_bytes
    if last:
        room -= cost.logits_bytes + count * cost.head_bytes
    return room, (group.layer_bytes + group.layer_sharded_bytes / holders) / more


@kernel
def working_bytes(policy: Any, last: int) -> Any:
    """What recomputing a layer holds beside what is stored."""
    return policy.last_working_bytes if last else policy.working_bytes


@kernel
def least_recomputed(policies: Any, n: int, count: int, last: int, room: float, faster: int, smaller: int) -> Any:
    """How many of n layers at least must have the policy `smaller` where the others have `faster`, for the stage to
    fit; n where none may be faster. `room` without states; `policies` [policies] of a class and size."""
    a, b = policies[faster], policies[smaller]
    saved = a.stored_bytes - b.stored_bytes
    if saved <= 0.0:
        return n
    room -= max(working_bytes(a, last), working_bytes(b, last))
    need = np.ceil((n * count * a.stored_bytes - room) / (count * saved))
    return int(min(float(n), max(1.0, need)))


@kernel
def choose_policies(policies: Any, n: int, count: int, last: int, room: float, only: int, mixed: bool) -> Any:
    """The least seconds of the backwards of n layers that fit, infinite if none do; the policies of the first layers
    and of the others, and how many are the first. `policies` [policies] of a class and size, `room` without states,
    `only` one policy if not -1, of `mixed` ones two."""
    best, smaller, faster, lean = np.inf, 0, 0, 0
    for q in range(len(policies)):
        policy = policies[q]
        fits = n * count * policy.stored_bytes + working_bytes(policy, last) <= room
        if fits and (only < 0 or q == only) and n * policy.backward_s < best:
            best, smaller, faster = n * policy.backward_s, q, q
    if mixed and (best == np.inf or faster > 0):
        for q in range(len(policies)):
            for r in range(q + 1, len(policies)):
                least = least_recomputed(policies, n, count, last, room, q, r)
                if least < n:
                    now = least * policies[r].backward_s + (n - least) * policies[q].backward_s
                    if now < best:
                        best, smaller, faster, lean = now, r, q, least
    return best, smaller, faster, lean


@kernel
def fill_options(
    problem: Any, cost: Any, policies: Any, room: Any, at: Any, only: int, seconds: Any, start: int
) -> int:
    """Least seconds, forward and backward, of 1, 2, ... layers of a stage, into `seconds[start:]`; how many fit.

    `room` as of `room_bytes`, `at` as there, `only` as of `choose_policies`."""
    count, first, last = at[0], at[1], at[2]
    ends_s = 2 * (2 - first - last) * cost.quantization_s
    if first:
        ends_s += cost.embedding_forward_s + cost.embedding_backward_s
    if last:
        ends_s += cost.head_forward_s + cost.head_backward_s
    mixed, most = problem.mixed and only < 0, 0
    for n in range(1, problem.num_layers + 1):
        best = choose_policies(policies, n, count, last, room[0] - n * room[1], only, mixed)[0]
        if best == np.inf:
            break
        seconds[start + n - 1] = ends_s + n * cost.forward_s + best
        most = n
    return most


@kernel
def option_key(stage: Any, size: int, at: Any, only: int) -> Any:
    """Everything that the least seconds of a stage depend on, as a number. `at`, `only` as of `fill_options`."""
    count, first, last, zero_stage, pairs, apart = at
    key = stage.group << 1 | apart
    key = key << 4 | size
    key = key << 16 | min(count, MOST_IN_FLIGHT)
    key = key << 2 | first << 1 | last
    key = key << 1 | zero_stage
    key = key << 2 | (only + 1)
    key = key << 11 | (min(stage.holders, _MOST_HOLDERS) if zero_stage else 0)
    key = key << 9 | min(stage.room, _MOST_ROOM)
    return key << 7 | min(pairs, _MOST_PAIRS)


@kernel
def slot_of(keys: Any, key: int) -> Any:
    """The slot of a key, or the free one where it would be."""
    slot = ((key ^ (key >> 31)) * 0x5851F42D4C957F2D >> 24) & (OPTION_SLOTS - 1)
    while keys[slot] != key and keys[slot] >= 0:
        slot = (slot + 1) & (OPTION_SLOTS - 1)
    return slot


@kernel
def most_within(seconds: Any, start: int, most: int, limit: float) -> Any:
    """The most layers, up to `most`, that take no longer than `limit`; `seconds[start:]` rise about linearly."""
    if most == 0:
        return 0
    low_s, high_s = seconds[start], seconds[start + most - 1]
    if low_s > limit:
        return 0
    if high_s <= limit:
        return most
    low, high = 1, most
    while high - low > 1:
        middle = low + int((limit - low_s) / (high_s - low_s) * (high - low))
        middle = min(max(middle, low + 1), high - 1)
        now = seconds[start + middle - 1]
        if now <= limit:
            low, low_s = middle, now
        else:
            high, high_s = middle, now
    return low


@kernel
def layers_within(columns: Any, seconds: Any, num_stages: int, limit: float) -> Any:
    """Layers that all stages together have within a bottleneck of `limit` seconds."""
    total = 0
    for s in range(num_stages):
        column = columns[s]
        total += most_within(seconds, column.offset, column.most, limit - column.added_s)
    return total


@kernel
def least_bottleneck(columns: Any, seconds: Any, stages: Any, p: int, num_stages: int, num_layers: int) -> None:
    """Layers of each stage, at least one, so that the slowest stage, with what is added to it, is as fast as can be."""
    low, high = 0.0, 0.0
    for s in range(num_stages):
        column = columns[s]
        low = max(low, seconds[column.offset] + column.added_s)
        high = max(high, seconds[column.offset + column.most - 1] + column.added_s)
    bottleneck, step, most = low, 0.01, high
    while layers_within(columns, seconds, num_stages, bottleneck) < num_layers and bottleneck < most:
        low = bottleneck
        bottleneck = min(most, bottleneck * (1 + step))
        step *= 2
    high = bottleneck
    while high - low > _BOTTLENECK * high:
        middle = 0.5 * (low + high)
        total = layers_within(columns, seconds, num_stages, middle)
        if total >= num_layers:
            high = middle
            if total == num_layers:
                break
        else:
            low = middle
    total = 0
    for s in range(num_stages):
        column = columns[s]
        n = max(1, most_within(seconds, column.offset, column.most, high * (1 + 1e-9) - column.added_s))
        stages[p, s].layers = n
        total += n
    while total > num_layers:
        best, at = -1.0, -1
        for s in range(num_stages):
            n = stages[p, s].layers
            if n > 1:
                start = columns[s].offset
                saved = seconds[start + n - 1] - seconds[start + n - 2]
                if saved > best:
                    best, at = saved, s
        stages[p, at].layers -= 1
        total -= 1


@kernel
def even_layers(columns: Any, seconds: Any, stages: Any, p: int, num_stages: int, num_layers: int) -> int:
    """Equally many layers everywhere, the remainder where it takes least; how many do not fit."""
    low, more = num_layers // num_stages, num_layers % num_stages
    missing = 0
    for s in range(num_stages):
        missing += max(0, low - columns[s].most)
        stages[p, s].layers = low
    for _ in range(more):
        best, at = np.inf, -1
        for s in range(num_stages):
            column = columns[s]
            if stages[p, s].layers == low and column.most > low and seconds[column.offset + low] < best:
                best, at = seconds[column.offset + low], s
        if at < 0:
            missing += 1
        else:
            stages[p, at].layers += 1
    return missing


@kernel
def set_seconds(costs: Any, seconds: Any, columns: Any, stages: Any, pipeline: Any, p: int, s: int) -> None:
    """Forward and backward seconds of a stage from its layers, as the last split left its options in `seconds`."""
    stage = stages[p, s]
    cost = costs[stage.group, pipeline.size]
    first, last = s == 0, s == pipeline.num_stages - 1
    forward_s = stage.layers * cost.forward_s + (2 - first - last) * cost.quantization_s
    if first:
        forward_s += cost.embedding_forward_s
    if last:
        forward_s += cost.head_forward_s
    stage.forward_s = forward_s
    stage.backward_s = seconds[columns[s].offset + stage.layers - 1] - forward_s
    stage.late_s = stage.layers * cost.late_s  # `set_room` says what of it there is room for


@kernel
def shape_fault(
    problem: Any, machines: Any, kind_group: Any, mask_group: Any, pipeline: Any, stages: Any, p: int
) -> Any:
    """How far a pipeline is from what the plan space allows, about in layers; 0 if it is allowed. Classifies its
    stages."""
    count = pipeline.num_stages
    if count == 0 or count > problem.num_layers:
        return 100.0
    fault = 0.0
    if problem.num_stages and count != problem.num_stages:
        fault += abs(count - problem.num_stages)
    for s in range(count):
        stage = stages[p, s]
        classify(machines, kind_group, mask_group, stage)
        if stage.group < 0:
            fault += 3.0
    if problem.one_degree and fault == 0.0:
        for s in range(count):
            if stages[p, s].degree != stages[0, 0].degree:
                fault += 1.0
    return fault


@kernel
def in_flight(plan: Any, pipeline: Any, s: int) -> Any:
    """Micro-batches in flight in a stage."""
    return pipeline.in_flight if plan.forwards_first else min(pipeline.num_stages - s, pipeline.in_flight)


@kernel
def position(plan: Any, pipeline: Any, stages: Any, p: int, s: int) -> Any:
    """What the memory of a stage depends on beside its layers: `at` of `room_bytes`."""
    count = pipeline.num_stages
    first, last = 1 if s == 0 else 0, 1 if s == count - 1 else 0
    return in_flight(plan, pipeline, s), first, last, plan.zero_stage, pairs_of(stages, p, count, s), plan.apart


@entry
def split(tables: Any, work: Any, state: Any, p: int) -> None:
    """Layers of pipeline p and the seconds of its stages, beside what `columns[s].added_s` says; whether it fits, and
    how many layers do not."""
    problem, plan, pipeline = tables.problem[0], state.plan[0], state.pipelines[p]
    stages, columns, costs, seconds = state.stages, work.columns, tables.costs, work.option_s
    keys, most, option_count = work.option_key, work.option_most, work.option_count
    fault = shape_fault(problem, tables.machines, tables.kind_group, tables.mask_group, pipeline, stages, p)
    pipeline.fits, pipeline.missing = 0, fault
    if fault > 0.0:
        return
    count, num_layers, size = pipeline.num_stages, problem.num_layers, pipeline.size
    if option_count[0] > OPTION_SLOTS // 2:
        keys[:] = -1
        option_count[0] = 0
    total, without = 0, 0
    for s in range(count):
        stage, column = stages[p, s], columns[s]
        if not plan.by_machine:
            stage.holders = plan.holders
        at = position(plan, pipeline, stages, p, s)
        key = option_key(stage, size, at, plan.policy)
        slot = slot_of(keys, key)
        column.offset = slot * num_layers
        if keys[slot] != key:
            keys[slot] = key
            option_count[0] += 1
            cost = costs[stage.group, size]
            room = room_bytes(problem, tables.groups[stage.group, size], cost, stage, at)
            policies = tables.policies[stage.group, size]
            most[slot] = fill_options(problem, cost, policies, room, at, plan.policy, seconds, column.offset)
        column.most = most[slot]
        total += column.most
        without += 1 if column.most == 0 else 0
    if without or total < num_layers:
        pipeline.missing = max(num_layers - total, 0) + 3.0 * without
        return
    if problem.even_layers:
        pipeline.missing = even_layers(columns, seconds, stages, p, count, num_layers)
        if pipeline.missing > 0.0:
            return
    else:
        least_bottleneck(columns, seconds, stages, p, count, num_layers)
    pipeline.fits = 1
    for s in range(count):
        stages[p, s].depth = count - s
        set_seconds(costs, seconds, columns, stages, pipeline, p, s)


@entry
def policies_of(tables: Any, state: Any, p: int, s: int) -> Any:
    """The policies of a stage's first layers and of the others, and how many are the first, as of `choose_policies`."""
    problem, plan, pipeline, stage = tables.problem[0], state.plan[0], state.pipelines[p], state.stages[p, s]
    at = position(plan, pipeline, state.stages, p, s)
    cost = tables.costs[stage.group, pipeline.size]
    room, layer_bytes = room_bytes(problem, tables.groups[stage.group, pipeline.size], cost, stage, at)
    policies, mixed = tables.policies[stage.group, pipeline.size], problem.mixed and plan.policy < 0
    n = stage.layers
    return choose_policies(policies, n, at[0], at[2], room - n * layer_bytes, plan.policy, mixed)[1:]
