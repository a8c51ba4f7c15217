"""Moves of whole pipelines, and of all like pipelines at once; as in `stage_moves.py`."""

from typing import Any

from solvers.compiled.kernels import kernel
from solvers.compiled.state import touch, touch_all
from solvers.loop.dice import roll
from solvers.loop.edits import (
    add_pipeline,
    are_alike,
    count_devices,
    drop,
    insert,
    is_group,
    list_alike,
    lowest,
    put,
    remove_pipeline,
    shift,
    swap,
)
from solvers.loop.stage_moves import cut_at, join_at


@kernel
def resize_micro_batches(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """The next larger or smaller micro-batches: in one pipeline, in all like it, or in all."""
    pipelines, dice, count = state.pipelines, kit.dice, state.plan[0].num_pipelines
    p = roll(dice, count)
    size = pipelines[p].size + 2 * roll(dice, 2) - 1
    if size < 0 or size >= len(tables.sizes):
        return False
    how, listed = roll(dice, 3), 1
    kit.listed[0] = p
    if how == 1:
        listed = list_alike(tables, state, p, kit.listed)
    for k in range(count if how == 2 else listed):
        q = k if how == 2 else kit.listed[k]
        touch(work, q)
        pipelines[q].size, pipelines[q].batches = size, 0
    return True


@kernel
def change_sharding(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """Another ZeRO stage or other sharding groups."""
    plan, mode = state.plan[0], tables.modes[roll(kit.dice, len(tables.modes))]
    if plan.zero_stage == mode[0] and plan.by_machine == mode[1]:
        return False
    plan.zero_stage, plan.by_machine = mode[0], mode[1]
    touch_all(work, state)
    return True


@kernel
def cut_pipeline(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """A pipeline becomes two: cut between two stages, stages in turns, or half of the devices of each stage."""
    pipelines, stages, dice = state.pipelines, state.stages, kit.dice
    count, how = state.plan[0].num_pipelines, roll(dice, 3)
    p = roll(dice, count)
    length = pipelines[p].num_stages
    if count >= len(pipelines) or (how < 2 and length < 2):
        return False
    if how == 2:
        for s in range(length):
            m, mask = stages[p, s].machine, stages[p, s].mask
            half = lowest(mask, count_devices(mask) // 2)
            if half == 0 or not (is_group(tables, m, half) and is_group(tables, m, mask & ~half)):
                return False
    q = add_pipeline(work, state, pipelines[p].size)
    touch(work, p)
    pipelines[p].batches = 0
    cut, left = 1 + roll(dice, max(1, length - 1)), 0
    for s in range(length):
        m, mask = stages[p, s].machine, stages[p, s].mask
        if how == 2:
            half = lowest(mask, count_devices(mask) // 2)
            stages[p, s].mask = half
            insert(work, state, q, s, m, mask & ~half)
        elif (how == 0 and s >= cut) or (how == 1 and s % 2):
            insert(work, state, q, pipelines[q].num_stages, m, mask)
        else:
            put(work, stages, p, left, m, mask)
            left += 1
    if how < 2:
        pipelines[p].num_stages = left
    return True


@kernel
def join_pipelines(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """Two pipelines become one: one after the other, in turns, or stage by stage on the same machines."""
    pipelines, stages, dice = state.pipelines, state.stages, kit.dice
    count, how = state.plan[0].num_pipelines, roll(dice, 3)
    p, q = roll(dice, count), roll(dice, count)
    length, more = pipelines[p].num_stages, pipelines[q].num_stages
    if p == q:
        return False
    if how == 2 and length == more:
        for s in range(length):
            one, other = stages[p, s], stages[q, s]
            if one.machine != other.machine or not is_group(tables, one.machine, one.mask | other.mask):
                return False
        for s in range(length):
            put(work, stages, p, s, stages[p, s].machine, stages[p, s].mask | stages[q, s].mask)
    else:
        if length + more > stages.shape[1]:
            return False
        for s in range(more):
            last = pipelines[p].num_stages
            at = min(2 * s + 1, last) if how else last
            insert(work, state, p, at, stages[q, s].machine, stages[q, s].mask)
    pipelines[p].batches = 0
    remove_pipeline(work, state, q)
    return True


@kernel
def reorder_alike(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """A stage at another place, in all like pipelines."""
    p = roll(kit.dice, state.plan[0].num_pipelines)
    length = state.pipelines[p].num_stages
    if length < 2:
        return False
    s, t = roll(kit.dice, length), roll(kit.dice, length)
    if s == t:
        return False
    for k in range(list_alike(tables, state, p, kit.listed)):
        shift(work, state, kit.listed[k], s, t)
    return True


@kernel
def recut_alike(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """A stage becomes two, or two neighbours one, in all like pipelines."""
    p = roll(kit.dice, state.plan[0].num_pipelines)
    s, cuts = roll(kit.dice, state.pipelines[p].num_stages), roll(kit.dice, 2)
    if not cuts and s + 1 >= state.pipelines[p].num_stages:
        return False
    changed = False
    for k in range(list_alike(tables, state, p, kit.listed)):
        q = kit.listed[k]
        if cuts:
            changed |= cut_at(tables, work, state, q, s)
        else:
            changed |= join_at(tables, work, state, q, s, s + 1)
    return changed


@kernel
def swap_alike(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """A stage of all like pipelines and one of all of another sort change places, pair by pair."""
    pipelines, dice, count = state.pipelines, kit.dice, state.plan[0].num_pipelines
    p, q = roll(dice, count), roll(dice, count)
    if are_alike(tables, state, p, q):
        return False
    s, t = roll(dice, pipelines[p].num_stages), roll(dice, pipelines[q].num_stages)
    listed = list_alike(tables, state, p, kit.listed)
    others = list_alike(tables, state, q, kit.others)
    for k in range(min(listed, others)):
        swap(work, state, kit.listed[k], s, kit.others[k], t)
    return True


@kernel
def move_alike(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """A stage of each like pipeline into one of another sort, in turns."""
    pipelines, stages, dice, count = state.pipelines, state.stages, kit.dice, state.plan[0].num_pipelines
    p, q = roll(dice, count), roll(dice, count)
    length = pipelines[p].num_stages
    if length < 2 or are_alike(tables, state, p, q):
        return False
    s, at = roll(dice, length), roll(dice, pipelines[q].num_stages + 1)
    listed = list_alike(tables, state, p, kit.listed)
    others = list_alike(tables, state, q, kit.others)
    if pipelines[q].num_stages + (listed + others - 1) // others > stages.shape[1]:
        return False
    for k in range(listed):
        giver = kit.listed[k]
        m, mask = stages[giver, s].machine, stages[giver, s].mask
        drop(work, state, giver, s)
        insert(work, state, kit.others[k % others], at, m, mask)
    return True
