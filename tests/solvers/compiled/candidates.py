"""Random candidates of a problem, as a search makes them: devices anywhere, all sharding modes, sizes and lengths."""

import random

import numpy as np

from hexiopt.problem.problem import Problem
from solvers.compiled.state import SearchState, new_state
from solvers.compiled.tables import Tables


def free_devices(state: SearchState, machine: int) -> list[int]:
    """The free devices of a machine."""
    mask = int(state.free[machine])
    return [k for k in range(mask.bit_length()) if mask >> k & 1]


def add_stage(rng: random.Random, tables: Tables, state: SearchState, p: int, *, near: int | None = None) -> bool:
    """Append a stage on a random part of a machine with free devices, of `near` rather; whether there is room."""
    pipeline = state.pipelines[p]
    open_ = [m for m in range(len(tables.machines)) if state.free[m]]
    if not open_ or pipeline["num_stages"] >= state.stages.shape[1]:
        return False
    machine = near if near in open_ and rng.random() < 0.5 else rng.choice(open_)
    free = free_devices(state, machine)
    degrees = [int(d) for d in tables.degrees if d <= len(free)]
    degree = rng.choice(degrees)
    start = rng.randrange(len(free) // degree) * degree  # aligned, as moves take devices
    mask = sum(1 << k for k in free[start : start + degree])
    stage = state.stages[p, pipeline["num_stages"]]
    stage["machine"], stage["mask"] = machine, mask
    state.free[machine] &= ~mask
    pipeline["num_stages"] += 1
    return True


def random_state(rng: random.Random, tables: Tables, problem: Problem) -> SearchState:
    """A candidate that may not fit."""
    state = new_state(tables)
    plan = state.plan[0]
    plan["zero_stage"], plan["by_machine"] = tables.modes[rng.randrange(len(tables.modes))]
    plan["forwards_first"] = int(tables.problem[0]["only_forwards_first"])
    devices = len(problem.usable_devices)
    most = min(len(state.pipelines), problem.workload.global_batch, max(1, devices // 2))
    wanted = problem.space.num_pipelines or rng.choice([1, 2, 3, rng.randint(1, most)])
    size = rng.randrange(len(tables.sizes))
    for p in range(min(wanted, most)):
        length = problem.space.num_stages or rng.randint(1, max(1, min(devices // wanted, problem.model.num_layers)))
        if problem.space.uneven_batch and rng.random() < 0.3:
            size = rng.randrange(len(tables.sizes))
        state.pipelines[p]["size"] = size
        near = None
        for _ in range(length):
            if not add_stage(rng, tables, state, p, near=near):
                break
            near = int(state.stages[p, state.pipelines[p]["num_stages"] - 1]["machine"])
        if not state.pipelines[p]["num_stages"]:
            break
        plan["num_pipelines"] = p + 1
    return state


def like_state(rng: random.Random, tables: Tables, problem: Problem) -> SearchState:
    """A candidate of like pipelines, a stage on a part of each machine in turn, as sharding inside machines suits
    it."""
    state = new_state(tables)
    plan = state.plan[0]
    plan["zero_stage"], plan["by_machine"] = tables.modes[-1]
    plan["forwards_first"] = int(tables.problem[0]["only_forwards_first"])
    degree = int(rng.choice(list(tables.degrees)))
    machines = [m for m in range(len(tables.machines)) if int(tables.machines[m]["usable"]).bit_count() >= degree]
    rng.shuffle(machines)
    width = min((int(tables.machines[m]["usable"]).bit_count() // degree for m in machines), default=0)
    length = rng.randint(1, min(len(machines), state.stages.shape[1])) if machines else 0
    size = rng.randrange(len(tables.sizes))
    for p in range(min(width, len(state.pipelines), problem.workload.global_batch)):
        state.pipelines[p]["size"], state.pipelines[p]["num_stages"] = size, length
        for s, machine in enumerate(machines[:length]):
            mask = sum(1 << k for k in free_devices(state, machine)[:degree])
            state.stages[p, s]["machine"], state.stages[p, s]["mask"] = machine, mask
            state.free[machine] &= ~mask
        plan["num_pipelines"] = p + 1
    return state


def random_step(rng: random.Random, tables: Tables, state: SearchState) -> set[int]:
    """Move the last stage of a pipeline to the end of another, on other devices; which pipelines that changed."""
    giver, taker = (rng.randrange(int(state.plan[0]["num_pipelines"])) for _ in range(2))
    pipeline = state.pipelines[giver]
    if pipeline["num_stages"] < 2:
        return {taker} if add_stage(rng, tables, state, taker) else set()
    pipeline["num_stages"] -= 1
    stage = state.stages[giver, pipeline["num_stages"]]
    state.free[stage["machine"]] |= stage["mask"]
    return {giver, taker} if add_stage(rng, tables, state, taker) else {giver}


def assert_free(tables: Tables, state: SearchState) -> None:
    """No device is in two stages, and `free` has those of none."""
    used = np.zeros(len(tables.machines), np.int64)
    for p in range(int(state.plan[0]["num_pipelines"])):
        for s in range(int(state.pipelines[p]["num_stages"])):
            stage = state.stages[p, s]
            assert not used[stage["machine"]] & stage["mask"]
            used[stage["machine"]] |= stage["mask"]
    assert ((used | state.free) == tables.machines["usable"]).all()
    assert not (used & state.free).any()
