"""The rings that sum gradients, as `hexiopt/cost/rings.py` has them.

Every segment of layers that no pipeline cuts is one ring over the stages that hold it: all slices of its parameters go
over the same machines, so they are not listed one by one. Where sharding groups are machines, a segment has a ring in
every machine, and one between machines.
"""

from typing import Any

import numba

from solvers.compiled.messages import (
    crossing_load,
    fullest_interface,
    interface_of,
    latency_s,
    load_interfaces,
)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def tree_depth(ranks: int) -> int:
    """Messages one after another in a pass over `ranks`, as of `hexiopt/cost/executors/collectives.py`."""
    depth, reach = 0, 1
    while reach < ranks:
        reach *= 2
        depth += 1
    return depth


@numba.njit(cache=True, nogil=True, error_model="numpy")
def lowest_device(mask: int) -> int:
    """The position of the lowest bit of a mask that has one."""
    device = 0
    while mask & 1 == 0:
        mask >>= 1
        device += 1
    return device


@numba.njit(cache=True, nogil=True, error_model="numpy")
def place_key(stage: Any) -> Any:
    """Orders stages by machine, then by device."""
    return stage.machine * 64 + lowest_device(stage.mask)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def sort_members(work: Any, stages: Any, first: int, end: int) -> None:
    """Sort members `first` to `end` by machine and device; they nearly are."""
    pipelines, numbers = work.member_pipeline, work.member_stage
    for k in range(first + 1, end):
        p, s = pipelines[k], numbers[k]
        key = place_key(stages[p, s])
        j = k - 1
        while j >= first and place_key(stages[pipelines[j], numbers[j]]) > key:
            pipelines[j + 1], numbers[j + 1] = pipelines[j], numbers[j]
            j -= 1
        pipelines[j + 1], numbers[j + 1] = p, s


@numba.njit(cache=True, nogil=True, error_model="numpy")
def end_of_run(work: Any, stages: Any, first: int, end: int) -> int:
    """Where the members of the machine of member `first` end."""
    machine = stages[work.member_pipeline[first], work.member_stage[first]].machine
    k = first + 1
    while k < end and stages[work.member_pipeline[k], work.member_stage[k]].machine == machine:
        k += 1
    return k


@numba.njit(cache=True, nogil=True, error_model="numpy")
def measure_ring(tables: Any, work: Any, stages: Any, ring: Any) -> None:
    """The largest degree, machines and lanes of a ring: as many interfaces as each of its machines has at its
    devices."""
    ring.degree, ring.held, ring.machines, lanes = 1, 1, 0, 64
    i = ring.first
    while i < ring.end:
        j = end_of_run(work, stages, i, ring.end)
        machine = tables.machines[stages[work.member_pipeline[i], work.member_stage[i]].machine]
        ring.machines += 1
        ring.held = max(ring.held, j - i)
        taken, count = 0, 0
        for k in range(i, j):
            stage = stages[work.member_pipeline[k], work.member_stage[k]]
            ring.degree = max(ring.degree, stage.degree)
            if machine.num_interfaces > 1 and lanes > 1:
                bit = 1 << (interface_of(machine, lowest_device(stage.mask)) - machine.first_interface)
                if taken & bit == 0:
                    taken |= bit
                    count += 1
        lanes = min(lanes, max(1, count))
        i = j
    ring.lanes = 0 if ring.machines == 1 else (1 if ring.between else lanes)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def add_rings(tables: Any, work: Any, state: Any, first: int, end: int, params: float, last: float, num: int) -> int:
    """Rings number `num` and on, of members `first` to `end`, sorted; how many there are then."""
    rings, stages, by_machine = work.rings, state.stages, state.plan[0].by_machine
    if end - first < 2:
        return num
    if not by_machine:
        ring = rings[num]
        ring.first, ring.end, ring.between, ring.params, ring.last = first, end, 0, params, last
        measure_ring(tables, work, stages, ring)
        return num + 1
    i, machines = first, 0
    while i < end:
        j = end_of_run(work, stages, i, end)
        machines += 1
        if j - i > 1:
            ring = rings[num]
            ring.first, ring.end, ring.between, ring.params, ring.last = i, j, 0, params, last
            measure_ring(tables, work, stages, ring)
            num += 1
        i = j
    if machines > 1:
        ring = rings[num]
        ring.first, ring.end, ring.between, ring.params, ring.last = first, end, 1, params, last
        measure_ring(tables, work, stages, ring)
        num += 1
    return num


@numba.njit(cache=True, nogil=True, error_model="numpy")
def note_shards(tables: Any, work: Any, state: Any, first: int, end: int, layers: int, ends: int) -> None:
    """Add to `sharded` of the members of a segment of `layers`. `ends`: 1 if it is the first one, + 2 if the last."""
    stages, times, by_machine = state.stages, work.times, state.plan[0].by_machine
    i = first
    while i < end:
        j = end_of_run(work, stages, i, end) if by_machine else end
        holders = j - i if state.plan[0].zero_stage else 1
        for k in range(i, j):
            p, s = work.member_pipeline[k], work.member_stage[k]
            group = tables.groups[stages[p, s].group]
            params = layers * group.layer_params
            if ends & 1:
                params += group.embedding_params
            if ends & 2:
                params += group.head_params_beside if s == 0 else group.head_params
            times[p, s].sharded += params / holders
        i = j


@numba.njit(cache=True, nogil=True, error_model="numpy")
def collect_rings(tables: Any, work: Any, state: Any, count: int) -> int:
    """The rings of the `count` active pipelines, and what their devices have of optimiser states; how many rings."""
    problem, stages, cursors, active, order = tables.problem[0], state.stages, work.cursors, work.active, work.order
    pipelines, numbers = work.member_pipeline, work.member_stage
    deep = 0
    for k in range(count):
        p = active[k]
        cursors[p].stage, cursors[p].end, order[k] = 0, stages[p, 0].layers, p
        deep = max(deep, state.pipelines[p].num_stages)
    num, members, at, num_layers = 0, 0, 0, problem.num_layers
    while at < num_layers:
        cut = num_layers
        for k in range(count):
            cut = min(cut, cursors[active[k]].end)
        first, end = members, members + count
        for k in range(count):
            pipelines[first + k], numbers[first + k] = order[k], cursors[order[k]].stage
        sort_members(work, stages, first, end)
        params, last, ends = (cut - at) * problem.layer_params, problem.layer_params, 0
        if at == 0:
            ends = 1
            params += problem.embedding_params
            last = max(last, problem.embedding_params)
            if deep == 1:
                params += problem.tied_params
                last = max(last, problem.tied_params)
        if cut == num_layers:
            ends += 2
            params += problem.head_params
        num = add_rings(tables, work, state, first, end, params, last, num)
        note_shards(tables, work, state, first, end, cut - at, ends)
        for k in range(count):
            p = pipelines[first + k]
            order[k] = p
            if cursors[p].end == cut and cut < num_layers:
                cursors[p].stage += 1
                cursors[p].end += stages[p, cursors[p].stage].layers
        members, at = end, cut
    if problem.tied and deep > 1:
        first = members
        for k in range(count):
            p = active[k]
            pipelines[members], numbers[members] = p, 0
            members += 1
            if state.pipelines[p].num_stages > 1:
                pipelines[members], numbers[members] = p, state.pipelines[p].num_stages - 1
                members += 1
        sort_members(work, stages, first, members)
        num = add_rings(tables, work, state, first, members, problem.tied_params, problem.tied_params, num)
    return num


@numba.njit(cache=True, nogil=True, error_model="numpy")
def on_lane(machine: Any, stage: Any, taken: int) -> int:
    """`taken` with the interface of the stage's first device, if it is not among them; else 0."""
    bit = 1 << (interface_of(machine, lowest_device(stage.mask)) - machine.first_interface)
    return 0 if taken & bit else taken | bit


@numba.njit(cache=True, nogil=True, error_model="numpy")
def load_run(tables: Any, work: Any, stages: Any, ring: Any, first: int, end: int, carried: float) -> None:
    """Load ports and interfaces with what goes through the members `first` to `end` of a ring, which are of one
    machine: `carried` parameters over each edge."""
    pipelines, numbers, times, load = work.member_pipeline, work.member_stage, work.times, work.load
    machine = tables.machines[stages[pipelines[first], numbers[first]].machine]
    s_per_byte, base = tables.s_per_byte, tables.problem[0].num_interfaces
    if ring.between:
        for k in range(first, end):
            stage = stages[pipelines[k], numbers[k]]
            part = carried / (end - first) / stage.degree
            load_interfaces(machine, stage.mask, 0, part, load, s_per_byte)
            load_interfaces(machine, stage.mask, base, part, load, s_per_byte)
        return
    for k in range(first, end - 1 if ring.lanes else end):
        p, s = pipelines[k], numbers[k]
        times[p, s].port += carried / stages[p, s].degree * machine.port_s_per_byte
    if ring.lanes == 0:
        return
    if machine.num_interfaces == 1:
        resource = machine.first_interface
        load[resource] += carried * s_per_byte[resource]
        resource += base
        load[resource] += carried * s_per_byte[resource]
    elif ring.lanes == 1:
        enters, leaves = stages[pipelines[first], numbers[first]], stages[pipelines[end - 1], numbers[end - 1]]
        load_interfaces(machine, leaves.mask, 0, carried / leaves.degree, load, s_per_byte)
        load_interfaces(machine, enters.mask, base, carried / enters.degree, load, s_per_byte)
    else:
        taken, lanes = 0, 0
        for k in range(first, end):
            stage = stages[pipelines[k], numbers[k]]
            now = on_lane(machine, stage, taken)
            if now and lanes < ring.lanes:
                taken = now
                lanes += 1
                part = carried / ring.lanes / stage.degree
                load_interfaces(machine, stage.mask, 0, part, load, s_per_byte)
                load_interfaces(machine, stage.mask, base, part, load, s_per_byte)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def load_crossing(tables: Any, load: Any, a: int, b: int, carried: float) -> None:
    """Load what a transfer of `carried` parameters between machines a and b crosses beside interfaces."""
    here, there = tables.machines[a].place, tables.machines[b].place
    if here != there:
        for k in range(tables.extra.shape[2]):
            resource = tables.extra[here, there, k]
            if resource < 0:
                break
            load[resource] += carried * tables.s_per_byte[resource]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def load_ring(tables: Any, work: Any, stages: Any, ring: Any) -> None:
    """Load ports and network with a pass of a ring; its latency, and the turns that its members wait."""
    pipelines, numbers, times = work.member_pipeline, work.member_stage, work.times
    length = ring.machines if ring.between else ring.end - ring.first
    carried, latency = ring.params * (length - 1) / length, 0.0
    head = stages[pipelines[ring.first], numbers[ring.first]].machine
    before, i = -1, ring.first
    while i < ring.end:
        j = end_of_run(work, stages, i, ring.end)
        machine = stages[pipelines[i], numbers[i]].machine
        load_run(tables, work, stages, ring, i, j, carried)
        if j - i > 1 and not ring.between:
            latency = max(latency, tables.machines[machine].port_latency_s)
        if before >= 0:
            load_crossing(tables, work.load, before, machine, carried)
            latency = max(latency, latency_s(tables.machines, tables.extra_latency_s, before, machine))
        before, i = machine, j
    if ring.machines > 1:
        load_crossing(tables, work.load, before, head, carried)
        latency = max(latency, latency_s(tables.machines, tables.extra_latency_s, before, head))
    latency *= tree_depth(length)
    i = ring.first
    while i < ring.end:
        j = end_of_run(work, stages, i, ring.end)
        for k in range(i, j):
            p, s = pipelines[k], numbers[k]
            slices = max(1, ring.degree // stages[p, s].degree)
            vectors = 1 if ring.degree > 1 else 0
            if ring.between:
                slices *= max(1, ring.held // (j - i))
                times[p, s].between_wait_s += slices * latency
            else:
                times[p, s].wait_s += slices * latency
            stages[p, s].sums += slices + vectors
        i = j


@numba.njit(cache=True, nogil=True, error_model="numpy")
def time_ring(tables: Any, work: Any, stages: Any, ring: Any) -> None:
    """Seconds of a pass of a ring, for a byte of each parameter, and latency, where ports and network are loaded with
    all rings."""
    pipelines, numbers, times, load = work.member_pipeline, work.member_stage, work.times, work.load
    base, machines = tables.problem[0].num_interfaces, tables.machines
    slowest, wait = 0.0, 0.0
    head = stages[pipelines[ring.first], numbers[ring.first]].machine
    before, i = -1, ring.first
    while i < ring.end:
        j = end_of_run(work, stages, i, ring.end)
        number = stages[pipelines[i], numbers[i]].machine
        machine = machines[number]
        taken, lanes = 0, 0
        for k in range(i, j):
            p, s = pipelines[k], numbers[k]
            stage, own = stages[p, s], times[p, s]
            wait = max(wait, own.between_wait_s if ring.between else own.wait_s)
            if not ring.between and (k < j - 1 or ring.lanes == 0):
                slowest = max(slowest, own.port)
            if ring.lanes == 0:
                continue
            sends, receives = k == j - 1, k == i
            if ring.between:
                sends = receives = True
            elif ring.lanes > 1:
                now = on_lane(machine, stage, taken)
                sends = receives = now > 0 and lanes < ring.lanes
                if sends:
                    taken = now
                    lanes += 1
            if sends:
                slowest = max(slowest, fullest_interface(machine, stage.mask, 0, load))
            if receives:
                slowest = max(slowest, fullest_interface(machine, stage.mask, base, load))
        if before >= 0:
            slowest = crossing_load(tables.extra, machines[before].place, machine.place, load, slowest)
        before, i = number, j
    if ring.machines > 1:
        slowest = crossing_load(tables.extra, machines[before].place, machines[head].place, load, slowest)
    ring.s_per_byte, ring.latency_s = slowest, wait


@numba.njit(cache=True, nogil=True, error_model="numpy")
def make_rings(tables: Any, work: Any, state: Any, count: int) -> int:
    """The rings of the active pipelines and how long they take; how many."""
    stages, times, rings = state.stages, work.times, work.rings
    for k in range(count):
        p = work.active[k]
        for s in range(state.pipelines[p].num_stages):
            own = times[p, s]
            own.port = own.wait_s = own.between_wait_s = own.sharded = 0.0
            stages[p, s].sums = 0
    work.load[:] = 0.0
    num = collect_rings(tables, work, state, count)
    for r in range(num):
        load_ring(tables, work, stages, rings[r])
    for r in range(num):
        time_ring(tables, work, stages, rings[r])
    return num
