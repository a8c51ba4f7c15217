"""Moves of single stages. Each is `move(tables, work, state, kit) -> changed`: it draws from `kit.dice`, changes the
candidate and touches what it changed; False where it does not apply, and then nothing that was changed counts."""

from typing import Any

from solvers.compiled.kernels import kernel
from solvers.compiled.state import touch
from solvers.loop.dice import roll
from solvers.loop.edits import (
    count_devices,
    draw,
    drop,
    insert,
    is_group,
    lowest,
    pick,
    put,
    release,
    remove_pipeline,
    shift,
    swap,
    take,
)


@kernel
def move_stage(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """A stage into another pipeline: as often beside one of its kind as anywhere."""
    pipelines, stages, machines, dice = state.pipelines, state.stages, tables.machines, kit.dice
    count = state.plan[0].num_pipelines
    p, q = roll(dice, count), roll(dice, count)
    if q == p or pipelines[q].num_stages >= stages.shape[1]:
        return False
    s = roll(dice, pipelines[p].num_stages)
    m, mask = stages[p, s].machine, stages[p, s].mask
    drop(work, state, p, s)
    length = pipelines[q].num_stages
    at = roll(dice, length + 1)
    if roll(dice, 2):
        for k in range(length):
            t = (at + k) % length
            if machines[stages[q, t].machine].kind == machines[m].kind:
                at = t
                break
    insert(work, state, q, at, m, mask)
    if pipelines[p].num_stages == 0:
        remove_pipeline(work, state, p)
    return True


@kernel
def swap_stages(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """Two stages on unlike devices change places."""
    pipelines, stages, machines, dice = state.pipelines, state.stages, tables.machines, kit.dice
    count = state.plan[0].num_pipelines
    p, q = roll(dice, count), roll(dice, count)
    s, t = roll(dice, pipelines[p].num_stages), roll(dice, pipelines[q].num_stages)
    one, other = stages[p, s], stages[q, t]
    uneven = machines[one.machine].uneven >= 0 and one.mask != other.mask
    if one.machine == other.machine and count_devices(one.mask) == count_devices(other.mask) and not uneven:
        return False
    swap(work, state, p, s, q, t)
    return True


@kernel
def swap_machines_of_stages(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """Stages of two pipelines on two machines of one kind change places."""
    pipelines, stages, machines, dice = state.pipelines, state.stages, tables.machines, kit.dice
    count = state.plan[0].num_pipelines
    p, q = roll(dice, count), roll(dice, count)
    if p == q:
        return False
    s, length = roll(dice, pipelines[p].num_stages), pipelines[q].num_stages
    start, m = roll(dice, length), stages[p, s].machine
    for k in range(length):
        t = (start + k) % length
        other = stages[q, t].machine
        if other != m and machines[other].kind == machines[m].kind:
            swap(work, state, p, s, q, t)
            return True
    return False


@kernel
def swap_for_idle(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """A stage goes to equally many free devices: of its machine, where their links differ, or of another."""
    stages, machines, free, dice = state.stages, tables.machines, state.free, kit.dice
    p = roll(dice, state.plan[0].num_pipelines)
    s = roll(dice, state.pipelines[p].num_stages)
    here, mask = stages[p, s].machine, stages[p, s].mask
    degree, start = count_devices(mask), roll(dice, len(free))
    for k in range(len(free)):
        m = (start + k) % len(free)
        uneven = machines[m].uneven >= 0
        if free[m] and (m != here or uneven):
            other = draw(dice, free[m], degree) if uneven else pick(free[m], degree)
            if other and is_group(tables, m, other):
                free[here] |= mask
                free[m] &= ~other
                put(work, stages, p, s, m, other)
                return True
    return False


@kernel
def reorder_stages(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """A stage at another place of its pipeline."""
    p = roll(kit.dice, state.plan[0].num_pipelines)
    length = state.pipelines[p].num_stages
    if length < 2:
        return False
    s, t = roll(kit.dice, length), roll(kit.dice, length)
    if s == t:
        return False
    shift(work, state, p, s, t)
    return True


@kernel
def change_degree(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """A stage gets as many free devices again, or frees half of its own."""
    stages, free, dice = state.stages, state.free, kit.dice
    p = roll(dice, state.plan[0].num_pipelines)
    s = roll(dice, state.pipelines[p].num_stages)
    m, mask = stages[p, s].machine, stages[p, s].mask
    degree = count_devices(mask)
    if roll(dice, 2):
        wide = pick(free[m] | mask, 2 * degree)
        if wide and is_group(tables, m, wide):
            free[m] = (free[m] | mask) & ~wide
            put(work, stages, p, s, m, wide)
            return True
    half = lowest(mask, degree // 2)
    if half == 0 or not is_group(tables, m, half):
        return False
    free[m] |= mask & ~half
    put(work, stages, p, s, m, half)
    return True


@kernel
def cut_stage(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """A stage becomes two, on half of its devices each."""
    dice = kit.dice
    p = roll(dice, state.plan[0].num_pipelines)
    s = roll(dice, state.pipelines[p].num_stages)
    return cut_at(tables, work, state, p, s)


@kernel
def cut_at(tables: Any, work: Any, state: Any, p: int, s: int) -> bool:
    """Stage s of pipeline p becomes two, on half of its devices each, where it can."""
    stages = state.stages
    m, mask = stages[p, s].machine, stages[p, s].mask
    degree = count_devices(mask)
    half = lowest(mask, degree // 2)
    if degree % 2 or state.pipelines[p].num_stages >= stages.shape[1]:
        return False
    if not (is_group(tables, m, half) and is_group(tables, m, mask & ~half)):
        return False
    put(work, stages, p, s, m, half)
    insert(work, state, p, s + 1, m, mask & ~half)
    return True


@kernel
def join_stages(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """Two stages of a pipeline that have equally many devices of one machine become one."""
    dice = kit.dice
    p = roll(dice, state.plan[0].num_pipelines)
    length = state.pipelines[p].num_stages
    start = roll(dice, length)
    for k in range(length):
        s = (start + k) % length
        for t in range(s + 1, length):
            if join_at(tables, work, state, p, s, t):
                return True
    return False


@kernel
def join_at(tables: Any, work: Any, state: Any, p: int, s: int, t: int) -> bool:
    """Stage t > s of pipeline p becomes part of stage s, where they have equally many devices of one machine."""
    stages = state.stages
    one, other = stages[p, s], stages[p, t]
    m, both = one.machine, one.mask | other.mask
    if m != other.machine or count_devices(one.mask) != count_devices(other.mask) or not is_group(tables, m, both):
        return False
    drop(work, state, p, t)
    put(work, stages, p, s, m, both)
    return True


@kernel
def use_idle(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """A stage more on free devices of a machine."""
    free, dice = state.free, kit.dice
    p = roll(dice, state.plan[0].num_pipelines)
    length, machines = state.pipelines[p].num_stages, len(free)
    if length >= state.stages.shape[1]:
        return False
    start = roll(dice, machines)
    for k in range(machines):
        m = (start + k) % machines
        if free[m]:
            mask = take(tables, free, m, tables.degrees[roll(dice, len(tables.degrees))])
            if mask:
                insert(work, state, p, roll(dice, length + 1), m, mask)
                return True
    return False


@kernel
def leave_idle(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """A stage goes, and its devices are free."""
    p = roll(kit.dice, state.plan[0].num_pipelines)
    if state.pipelines[p].num_stages < 2:
        return False
    s = roll(kit.dice, state.pipelines[p].num_stages)
    release(state, p, s)
    drop(work, state, p, s)
    return True


@kernel
def swap_machines(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """All stages on two machines of equally numbered devices change places."""
    machines, stages, free, dice = tables.machines, state.stages, state.free, kit.dice
    a, b = roll(dice, len(machines)), roll(dice, len(machines))
    usable = machines[a].usable
    if a == b or usable == 0 or usable != machines[b].usable:
        return False
    changed = False
    for p in range(state.plan[0].num_pipelines):
        for s in range(state.pipelines[p].num_stages):
            m = stages[p, s].machine
            if m in (a, b):
                touch(work, p)
                stages[p, s].machine = a + b - m
                changed = True
    free[a], free[b] = free[b], free[a]
    return changed


@kernel
def leave_machines(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """A machine of a stage is left unused, or all of its kind."""
    machines, stages, pipelines, dice = tables.machines, state.stages, state.pipelines, kit.dice
    p = roll(dice, state.plan[0].num_pipelines)
    gone = stages[p, roll(dice, pipelines[p].num_stages)].machine
    kind = machines[gone].kind if roll(dice, 3) == 0 else -1
    q = 0
    while q < state.plan[0].num_pipelines:
        s = 0
        while s < pipelines[q].num_stages:
            m = stages[q, s].machine
            if m == gone or machines[m].kind == kind:
                release(state, q, s)
                drop(work, state, q, s)
            else:
                s += 1
        if pipelines[q].num_stages == 0:
            remove_pipeline(work, state, q)
        else:
            q += 1
    return True
