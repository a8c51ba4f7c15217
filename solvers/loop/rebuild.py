"""Ruin and rebuild: some pipelines go, others are built on the devices that are free then; as in `stage_moves.py`."""

from typing import Any

from solvers.compiled.kernels import kernel
from solvers.loop.dice import chance, roll
from solvers.loop.edits import add_pipeline, are_alike, count_devices, dissolve, insert, put, take

_MOST_GONE = 3  # pipelines that a ruin takes


@kernel
def ruin(work: Any, state: Any, dice: Any, count: int) -> None:
    """`count` pipelines go, or all."""
    for _ in range(min(count, state.plan[0].num_pipelines)):
        dissolve(work, state, roll(dice, state.plan[0].num_pipelines))


@kernel
def build(tables: Any, work: Any, state: Any, kit: Any, chain: Any, near: int) -> bool:
    """A pipeline on free devices: `chain` is its length, the row of its micro-batch size, and then kind and degree of
    each stage. Machines are those of pipeline `near` (-1: none) where they have room, else that of the stage before,
    else any. False, and nothing is built, where a stage finds none."""
    stages, free, machines = state.stages, state.free, tables.machines
    if state.plan[0].num_pipelines >= len(state.pipelines) or chain[0] == 0:
        return False
    p = add_pipeline(work, state, chain[1])
    for s in range(chain[0]):
        kind, degree = chain[2 + 2 * s], chain[3 + 2 * s]
        m = -1
        if 0 <= near < p and s < state.pipelines[near].num_stages:
            m = stages[near, s].machine
            if machines[m].kind != kind or count_devices(free[m]) < degree:
                m = -1
        if m < 0 and s > 0:
            m = stages[p, s - 1].machine
            if machines[m].kind != kind or count_devices(free[m]) < degree:
                m = -1
        if m < 0:
            start = roll(kit.dice, len(machines))
            for k in range(len(machines)):
                other = (start + k) % len(machines)
                if machines[other].kind == kind and count_devices(free[other]) >= degree:
                    m = other
                    break
        mask = take(tables, free, m, degree) if m >= 0 else 0
        if mask == 0:
            dissolve(work, state, p)
            return False
        put(work, stages, p, s, m, mask)
        state.pipelines[p].num_stages = s + 1
    return True


@kernel
def read_chain(tables: Any, state: Any, p: int, chain: Any) -> None:
    """The `chain` (see `build`) that pipeline p is."""
    chain[0], chain[1] = state.pipelines[p].num_stages, state.pipelines[p].size
    for s in range(state.pipelines[p].num_stages):
        stage = state.stages[p, s]
        chain[2 + 2 * s] = tables.machines[stage.machine].kind
        chain[3 + 2 * s] = count_devices(stage.mask)


@kernel
def copy_pipelines(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """Some pipelines give way to others like one that stays, as many as find devices; on its machines or on any."""
    dice = kit.dice
    ruin(work, state, dice, 1 + roll(dice, _MOST_GONE))
    if state.plan[0].num_pipelines == 0:
        return False
    for _ in range(2):
        p = roll(dice, state.plan[0].num_pipelines)
        read_chain(tables, state, p, kit.chain)
        for _ in range(_MOST_GONE + 1):
            if not build(tables, work, state, kit, kit.chain, p if roll(dice, 2) else -1):
                break
    return True


@kernel
def deal(tables: Any, work: Any, state: Any, kit: Any, count: int, size: int) -> None:
    """`count` new pipelines share all free devices: machines kind by kind in random order, each kind in TP groups of
    one random degree; the groups of a machine go to one pipeline or to different ones, the shortest first."""
    machines, free, pipelines, dice = tables.machines, state.free, state.pipelines, kit.dice
    first = state.plan[0].num_pipelines
    count = min(count, len(pipelines) - first)
    for _ in range(count):
        add_pipeline(work, state, size)
    kinds, together, turn = len(tables.kind_group), roll(dice, 2), 0
    for k in range(kinds):
        kit.others[k] = k
    for k in range(kinds - 1, 0, -1):
        other = roll(dice, k + 1)
        kit.others[k], kit.others[other] = kit.others[other], kit.others[k]
    for k in range(kinds):
        degree = tables.degrees[roll(dice, len(tables.degrees))]
        start = roll(dice, len(machines))
        for n in range(len(machines)):
            m = (start + n) % len(machines)
            if machines[m].kind != kit.others[k]:
                continue
            while free[m]:
                taker, shortest = -1, state.stages.shape[1]
                for j in range(count):
                    p = first + (turn + j) % count
                    if pipelines[p].num_stages < shortest:
                        taker, shortest = p, pipelines[p].num_stages
                    if together and shortest < state.stages.shape[1]:
                        break
                mask = take(tables, free, m, degree) if taker >= 0 else 0
                if mask == 0:
                    break
                insert(work, state, taker, pipelines[taker].num_stages, m, mask)
            turn += together
        turn += 1 - together
    remove_empty(work, state, first)


@kernel
def remove_empty(work: Any, state: Any, first: int) -> None:
    """Pipelines without stages go, from number `first` on."""
    p = first
    while p < state.plan[0].num_pipelines:
        if state.pipelines[p].num_stages == 0:
            dissolve(work, state, p)
        else:
            p += 1


@kernel
def deal_again(tables: Any, work: Any, state: Any, kit: Any) -> bool:
    """Some pipelines, sometimes all, give way to about as many on their devices and those that are idle."""
    dice, count = kit.dice, state.plan[0].num_pipelines
    gone = count if roll(dice, 30) == 0 else 1 + roll(dice, _MOST_GONE)
    size = state.pipelines[roll(dice, count)].size if count else 0
    ruin(work, state, dice, gone)
    deal(tables, work, state, kit, max(1, min(gone, count) + roll(dice, 3) - 1), size)
    return True


@kernel
def build_anew(tables: Any, work: Any, state: Any, kit: Any) -> Any:
    """Some pipelines give way to chains of the catalogue, the better ones more often."""
    dice, known = kit.dice, len(kit.catalogue)
    if known == 0:
        return False
    gone = 1 + roll(dice, _MOST_GONE)
    ruin(work, state, dice, gone)
    for _ in range(2):
        share = chance(dice)
        chain = kit.catalogue[int(share * share * known)]
        for _ in range(gone + 1):
            near = state.plan[0].num_pipelines - 1
            if not build(tables, work, state, kit, chain, near if roll(dice, 2) else -1):
                break
    return state.plan[0].num_pipelines > 0


@kernel
def convert_alike(tables: Any, work: Any, state: Any, kit: Any) -> Any:
    """All pipelines of one sort give way to a chain of the catalogue, as many as find devices."""
    dice, known = kit.dice, len(kit.catalogue)
    if known == 0 or state.plan[0].num_pipelines == 0:
        return False
    p = roll(dice, state.plan[0].num_pipelines)
    q = state.plan[0].num_pipelines - 1
    while q >= 0:
        if q != p and are_alike(tables, state, p, q):
            dissolve(work, state, q)
            if p == state.plan[0].num_pipelines:  # it was the last, and has the number of the one that went
                p = q
        q -= 1
    dissolve(work, state, p)
    share = chance(dice)
    chain = kit.catalogue[int(share * share * known)]
    first = state.plan[0].num_pipelines
    while build(tables, work, state, kit, chain, state.plan[0].num_pipelines - 1 if roll(dice, 2) else -1):
        pass
    return state.plan[0].num_pipelines > first
