"""The smallest changes of a candidate, of which moves consist. Devices of a machine are bits of a mask; each keeps
`free` in step, so that no device has two stages."""

from typing import Any

from solvers.compiled.kernels import entry, kernel
from solvers.compiled.state import touch
from solvers.loop.dice import roll


@entry
def count_devices(mask: int) -> int:
    """How many devices a mask has."""
    count = 0
    while mask:
        mask &= mask - 1
        count += 1
    return count


@entry
def pick(free: int, degree: int) -> int:
    """The mask of `degree` devices of `free`: an aligned run if there is one, else the lowest; 0 where it has fewer."""
    run, at = (1 << degree) - 1, 0
    while free >> at:
        if (free >> at) & run == run:
            return run << at
        at += degree
    return lowest(free, degree)


@entry
def lowest(mask: int, count: int) -> int:
    """The lowest `count` devices of a mask; 0 where it has fewer."""
    picked, rest = 0, mask
    for _ in range(count):
        if rest == 0:
            return 0
        low = rest & -rest
        picked |= low
        rest ^= low
    return picked


@kernel
def draw(dice: Any, free: int, degree: int) -> int:
    """The mask of any `degree` devices of `free`; 0 where it has fewer."""
    drawn, rest = 0, free
    for _ in range(degree):
        if rest == 0:
            return 0
        left = rest
        for _ in range(roll(dice, count_devices(rest))):
            left &= left - 1
        drawn |= left & -left
        rest ^= left & -left
    return drawn


@entry
def is_group(tables: Any, m: int, mask: int) -> Any:
    """Whether devices `mask` of machine m may form a TP group."""
    machine = tables.machines[m]
    if machine.uneven >= 0:
        return tables.mask_group[machine.uneven, mask] >= 0
    degree = count_devices(mask)
    return 0 < degree < tables.kind_group.shape[1] and tables.kind_group[machine.kind, degree] >= 0


@kernel
def take(tables: Any, free: Any, m: int, degree: int) -> int:
    """Take a TP group of at most `degree` free devices of machine m; its mask, 0 where there is none."""
    while degree > 0:
        mask = pick(free[m], degree)
        if mask and is_group(tables, m, mask):
            free[m] &= ~mask
            return mask
        degree //= 2
    return 0


@kernel
def put(work: Any, stages: Any, p: int, s: int, m: int, mask: int) -> None:
    """Stage s of pipeline p is on devices `mask` of machine m from now on."""
    touch(work, p)
    stages[p, s].machine = m
    stages[p, s].mask = mask


@kernel
def insert(work: Any, state: Any, p: int, at: int, m: int, mask: int) -> None:
    """A new stage on devices `mask` of machine m, before stage `at` of pipeline p."""
    stages, pipeline = state.stages, state.pipelines[p]
    for s in range(pipeline.num_stages, at, -1):
        stages[p, s].machine = stages[p, s - 1].machine
        stages[p, s].mask = stages[p, s - 1].mask
    put(work, stages, p, at, m, mask)
    pipeline.num_stages += 1


@kernel
def drop(work: Any, state: Any, p: int, at: int) -> None:
    """Stage `at` of pipeline p goes; its devices are not freed."""
    touch(work, p)
    stages, pipeline = state.stages, state.pipelines[p]
    for s in range(at, pipeline.num_stages - 1):
        stages[p, s].machine = stages[p, s + 1].machine
        stages[p, s].mask = stages[p, s + 1].mask
    pipeline.num_stages -= 1


@kernel
def release(state: Any, p: int, s: int) -> None:
    """The devices of stage s of pipeline p are free."""
    stage = state.stages[p, s]
    state.free[stage.machine] |= stage.mask


@kernel
def add_pipeline(work: Any, state: Any, size: int) -> Any:
    """A new pipeline without stages, of micro-batches of row `size`; its number."""
    p = state.plan[0].num_pipelines
    touch(work, p)
    pipeline = state.pipelines[p]
    pipeline.num_stages, pipeline.size, pipeline.fits, pipeline.batches, pipeline.shape = 0, size, 0, 0, 0
    state.plan[0].num_pipelines = p + 1
    return p


@kernel
def remove_pipeline(work: Any, state: Any, p: int) -> None:
    """Pipeline p goes, its devices are not freed; the last one takes its number."""
    last = state.plan[0].num_pipelines - 1
    touch(work, p)
    touch(work, last)
    if p != last:
        state.pipelines[p] = state.pipelines[last]
        for s in range(state.pipelines[p].num_stages):
            state.stages[p, s] = state.stages[last, s]
    state.pipelines[last].num_stages, state.pipelines[last].fits = 0, 0
    state.pipelines[last].shape = 0
    state.plan[0].num_pipelines = last


@kernel
def dissolve(work: Any, state: Any, p: int) -> None:
    """Pipeline p goes, and its devices are free."""
    for s in range(state.pipelines[p].num_stages):
        release(state, p, s)
    remove_pipeline(work, state, p)


@kernel
def swap(work: Any, state: Any, p: int, s: int, q: int, t: int) -> None:
    """Stage s of pipeline p and stage t of pipeline q change devices."""
    one, other = state.stages[p, s], state.stages[q, t]
    m, mask = one.machine, one.mask
    put(work, state.stages, p, s, other.machine, other.mask)
    put(work, state.stages, q, t, m, mask)


@kernel
def shift(work: Any, state: Any, p: int, s: int, t: int) -> None:
    """Stage s of pipeline p becomes its stage t."""
    m, mask = state.stages[p, s].machine, state.stages[p, s].mask
    drop(work, state, p, s)
    insert(work, state, p, t, m, mask)


@kernel
def are_alike(tables: Any, state: Any, p: int, q: int) -> bool:
    """Whether two pipelines have micro-batches of one size and, in order, stages of the same kinds and degrees."""
    pipelines, stages, machines = state.pipelines, state.stages, tables.machines
    if pipelines[p].num_stages != pipelines[q].num_stages or pipelines[p].size != pipelines[q].size:
        return False
    for s in range(pipelines[p].num_stages):
        one, other = stages[p, s], stages[q, s]
        if machines[one.machine].kind != machines[other.machine].kind:
            return False
        if count_devices(one.mask) != count_devices(other.mask):
            return False
    return True


@kernel
def list_alike(tables: Any, state: Any, p: int, listed: Any) -> int:
    """The pipelines like p, itself among them, into `listed`; how many."""
    count = 0
    for q in range(state.plan[0].num_pipelines):
        if are_alike(tables, state, p, q):
            listed[count] = q
            count += 1
    return count
