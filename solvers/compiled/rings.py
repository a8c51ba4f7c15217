"""The rings that sum gradients, as `hexiopt/cost/rings.py` has them.

Every segment of layers that no pipeline cuts is one ring over the stages that hold it: all slices of its parameters go
over the same machines, so they are not listed one by one. Where sharding groups are machines, a segment has a ring in
every machine, and one between machines.
"""

from typing import Any

from solvers.compiled.kernels import kernel
from solvers.compiled.messages import (
    crossing_load,
    fullest_interface,
    interface_of,
    latency_s,
    load_interfaces,
    rank_device,
)


@kernel
def tree_depth(ranks: int) -> int:
    """Messages one after another in a pass over `ranks`, as of `hexiopt/cost/executors/collectives.py`."""
    depth, reach = 0, 1
    while reach < ranks:
        reach *= 2
        depth += 1
    return depth


@kernel
def set_member(member: Any, stages: Any, p: int, s: int) -> None:
    """Make a member of a stage."""
    stage = stages[p, s]
    mask, device = stage.mask, 0
    while mask & 1 == 0:
        mask >>= 1
        device += 1
    member.pipeline, member.stage = p, s
    member.machine, member.mask, member.degree = stage.machine, stage.mask, stage.degree
    member.key = stage.machine * 64 + device


@kernel
def copy_member(source: Any, target: Any) -> None:
    """Copy a member."""
    target.pipeline, target.stage, target.machine = source.pipeline, source.stage, source.machine
    target.mask, target.degree, target.key = source.mask, source.degree, source.key


@kernel
def sort_members(members: Any, first: int, end: int) -> None:
    """Sort members `first` to `end` by machine and device; they nearly are. The one at `end` is scratch."""
    held = members[end]
    for k in range(first + 1, end):
        key = members[k].key
        j = k - 1
        if members[j].key <= key:
            continue
        copy_member(members[k], held)
        while j >= first and members[j].key > key:
            copy_member(members[j], members[j + 1])
            j -= 1
        copy_member(held, members[j + 1])


@kernel
def end_of_run(members: Any, first: int, end: int) -> int:
    """Where the members of the machine of member `first` end."""
    machine, k = members[first].machine, first + 1
    while k < end and members[k].machine == machine:
        k += 1
    return k


@kernel
def interface_bit(machine: Any, member: Any) -> Any:
    """The interface of a member's first device, as a bit."""
    return 1 << (interface_of(machine, member.key & 63) - machine.first_interface)


@kernel
def measure_ring(machines: Any, members: Any, ring: Any) -> None:
    """The largest degree, machines and lanes of a ring: each machine's interfaces at its devices, at the least one."""
    ring.degree, ring.held, ring.machines, lanes = 1, 1, 0, 64
    i = ring.first
    while i < ring.end:
        j = end_of_run(members, i, ring.end)
        machine = machines[members[i].machine]
        ring.machines += 1
        ring.held = max(ring.held, j - i)
        taken, count = 0, 0
        for k in range(i, j):
            member = members[k]
            ring.degree = max(ring.degree, member.degree)
            if machine.num_interfaces > 1 and lanes > 1:
                bit = interface_bit(machine, member)
                count += 0 if taken & bit else 1
                taken |= bit
        lanes = min(lanes, max(1, count))
        i = j
    ring.lanes = 0 if ring.machines == 1 else (1 if ring.between else lanes)


@kernel
def add_ring(machines: Any, members: Any, ring: Any, bounds: Any, params: float, last: float) -> None:
    """A ring of the members of `bounds`: first, end, and 1 if it is one between machines."""
    ring.first, ring.end, ring.between = bounds
    ring.params, ring.last = params, last
    measure_ring(machines, members, ring)


@kernel
def ring_of(members: Any, rings: Any, times: Any, first: int, end: int) -> Any:
    """The ring of the same stages in a machine as members `first` to `end`, of layers before; -1 if there is none."""
    found = times[members[first].pipeline, members[first].stage].ring
    if found < 0 or rings[found].end - rings[found].first != end - first:
        return -1
    start = rings[found].first
    for k in range(end - first):
        a, b = members[start + k], members[first + k]
        if a.pipeline != b.pipeline or a.stage != b.stage:
            return -1
    return found


@kernel
def add_rings(
    machines: Any, members: Any, rings: Any, times: Any, bounds: Any, params: float, last: float, num: int
) -> int:
    """Rings number `num` and on, of members `bounds[0]` to `bounds[1]`, sorted, where sharding groups are machines if
    `bounds[2]`; how many there are then."""
    first, end, by_machine = bounds
    if end - first < 2:
        return num
    if not by_machine:
        add_ring(machines, members, rings[num], (first, end, 0), params, last)
        return num + 1
    i = first
    while i < end:
        j = end_of_run(members, i, end)
        if j - i > 1:
            same = ring_of(members, rings, times, i, j)
            if same >= 0:
                rings[same].params += params
                rings[same].last = max(rings[same].last, last)
            else:
                add_ring(machines, members, rings[num], (i, j, 0), params, last)
                for k in range(i, j):
                    times[members[k].pipeline, members[k].stage].ring = num
                num += 1
        i = j
    if members[first].machine != members[end - 1].machine:
        add_ring(machines, members, rings[num], (first, end, 1), params, last)
        num += 1
    return num


@kernel
def note_shards(groups: Any, members: Any, state: Any, times: Any, bounds: Any, layers: int, ends: int) -> None:
    """Add to `step_s` of the members of a segment of `layers`, whose states are spread inside machines. `bounds`:
    first, end. `ends`: 1 if it is the first segment, + 2 if the last, + 4 if `note_tied` adds a tied matrix."""
    first, end = bounds
    i = first
    while i < end:
        j = end_of_run(members, i, end)
        for k in range(i, j):
            p, s = members[k].pipeline, members[k].stage
            group = groups[state.stages[p, s].group, state.pipelines[p].size]
            seconds = layers * group.layer_step_s
            if ends & 1:
                seconds += group.embedding_step_s
            if ends & 2:
                seconds += group.head_step_s_beside if s == 0 else group.head_step_s
            if ends & 4 and (ends & 1 or (ends & 2 and s > 0)):
                seconds -= group.tied_step_s
            times[p, s].step_s += seconds / (j - i)
        i = j


@kernel
def note_tied(groups: Any, members: Any, state: Any, times: Any, first: int, end: int) -> None:
    """Add to `tied_s` of the members that hold a tied matrix, whose states are spread inside machines."""
    i = first
    while i < end:
        j = end_of_run(members, i, end)
        for k in range(i, j):
            p, s = members[k].pipeline, members[k].stage
            times[p, s].tied_s += groups[state.stages[p, s].group, state.pipelines[p].size].tied_step_s / (j - i)
        i = j


@kernel
def tie_ends(members: Any, stages: Any, pipelines: Any, active: Any, count: int, first: int) -> int:
    """Members from `first` on: first and last stages of the active pipelines, sorted; where they end."""
    end = first
    for k in range(count):
        p = active[k]
        last = pipelines[p].num_stages - 1
        set_member(members[end], stages, p, 0)
        end += 1
        if last > 0:
            set_member(members[end], stages, p, last)
            end += 1
    sort_members(members, first, end)
    return end


@kernel
def collect_rings(tables: Any, work: Any, state: Any, count: int) -> int:
    """The rings of the `count` active pipelines, and what their devices have of optimiser states; how many rings."""
    problem, machines, groups, stages = tables.problem[0], tables.machines, tables.groups, state.stages
    cursors, active, members, rings, times = work.cursors, work.active, work.members, work.rings, work.times
    by_machine, deep = state.plan[0].by_machine, 0
    for k in range(count):
        p = active[k]
        cursors[p].stage, cursors[p].end = 0, stages[p, 0].layers
        deep = max(deep, state.pipelines[p].num_stages)
        set_member(members[k], stages, p, 0)
    num, first, at, num_layers = 0, 0, 0, problem.num_layers
    while at < num_layers:
        end, cut = first + count, num_layers
        sort_members(members, first, end)
        for k in range(first, end):
            cut = min(cut, cursors[members[k].pipeline].end)
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
        num = add_rings(machines, members, rings, times, (first, end, by_machine), params, last, num)
        if by_machine:
            note_shards(groups, members, state, times, (first, end), cut - at, ends + (4 if deep > 1 else 0))
        at = cut
        for k in range(first, end if at < num_layers else first):
            p = members[k].pipeline
            if cursors[p].end == cut:
                cursors[p].stage += 1
                cursors[p].end += stages[p, cursors[p].stage].layers
                set_member(members[k + count], stages, p, cursors[p].stage)
            else:
                copy_member(members[k], members[k + count])
        first = end
    if problem.tied and deep > 1:
        end = tie_ends(members, stages, state.pipelines, active, count, first)
        num = add_rings(
            machines, members, rings, times, (first, end, by_machine), problem.tied_params, problem.tied_params, num
        )
        if by_machine:
            note_tied(groups, members, state, times, first, end)
    return num


@kernel
def edge_s_per_byte(machine: Any, rates: Any, sender: Any, receiver: Any) -> Any:
    """Seconds per byte of what the busiest device of a member sends to a member of its machine. `rates`:
    `pair_s_per_byte` of the tables."""
    if machine.uneven < 0:
        return machine.port_s_per_byte / sender.degree
    slices, slowest = max(sender.degree, receiver.degree), 0.0
    for rank in range(sender.degree):
        i, port = rank_device(sender.mask, rank), 0.0
        for part in range(rank * slices // sender.degree, (rank + 1) * slices // sender.degree):
            j = rank_device(receiver.mask, part * receiver.degree // slices)
            port += rates[machine.uneven, i, j]
        slowest = max(slowest, port)
    return slowest / slices


@kernel
def edge_latency_s(machine: Any, latencies: Any, sender: Any, receiver: Any) -> Any:
    """The largest latency of messages from a member to a member of its machine. `latencies`: `pair_latency_s`."""
    if machine.uneven < 0:
        return machine.port_latency_s
    slices, latency = max(sender.degree, receiver.degree), 0.0
    for part in range(slices):
        i = rank_device(sender.mask, part * sender.degree // slices)
        j = rank_device(receiver.mask, part * receiver.degree // slices)
        latency = max(latency, latencies[machine.uneven, i, j])
    return latency


@kernel
def load_ports(machine: Any, links: Any, members: Any, times: Any, ring: Any, bounds: Any) -> Any:
    """Load ports with what members of one machine send to each other in a pass of a ring; the largest latency.
    `links`: `pair_s_per_byte` and `pair_latency_s` of the tables; `bounds`: first, end, parameters over each edge."""
    first, end, carried = bounds
    latency = 0.0
    for k in range(first, end - 1 if ring.lanes else end):
        sender, receiver = members[k], members[k + 1 if k + 1 < end else first]
        seconds = carried * edge_s_per_byte(machine, links[0], sender, receiver)
        times[sender.pipeline, sender.stage].port += seconds
        latency = max(latency, edge_latency_s(machine, links[1], sender, receiver))
    return latency


@kernel
def load_run(machine: Any, members: Any, load: Any, network: Any, ring: Any, bounds: Any) -> None:
    """Load interfaces with what goes through members of a ring that are of one machine. `network`: `s_per_byte`, and
    the number of transmitting resources; `bounds`: first, end, parameters over each edge."""
    s_per_byte, base = network
    first, end, carried = bounds
    if ring.between:
        for k in range(first, end):
            part = carried / (end - first) / members[k].degree
            load_interfaces(machine, members[k].mask, 0, part, load, s_per_byte)
            load_interfaces(machine, members[k].mask, base, part, load, s_per_byte)
        return
    if ring.lanes == 0:
        return
    if machine.num_interfaces == 1:
        resource = machine.first_interface
        load[resource] += carried * s_per_byte[resource]
        load[base + resource] += carried * s_per_byte[base + resource]
    elif ring.lanes == 1:
        enters, leaves = members[first], members[end - 1]
        load_interfaces(machine, leaves.mask, 0, carried / leaves.degree, load, s_per_byte)
        load_interfaces(machine, enters.mask, base, carried / enters.degree, load, s_per_byte)
    else:
        taken, lanes = 0, 0
        for k in range(first, end):
            bit = interface_bit(machine, members[k])
            if taken & bit == 0 and lanes < ring.lanes:
                taken |= bit
                lanes += 1
                part = carried / ring.lanes / members[k].degree
                load_interfaces(machine, members[k].mask, 0, part, load, s_per_byte)
                load_interfaces(machine, members[k].mask, base, part, load, s_per_byte)


@kernel
def load_crossing(extra: Any, s_per_byte: Any, load: Any, a: int, b: int, carried: float) -> None:
    """Load what a transfer of `carried` parameters between places a and b crosses beside interfaces."""
    if a != b:
        for k in range(extra.shape[2]):
            resource = extra[a, b, k]
            if resource < 0:
                break
            load[resource] += carried * s_per_byte[resource]


@kernel
def sum_degrees(members: Any, first: int, end: int) -> Any:
    """Devices of members `first` to `end`."""
    total = 0
    for k in range(first, end):
        total += members[k].degree
    return total


@kernel
def note_turns(members: Any, stages: Any, times: Any, ring: Any, latency: float) -> None:
    """Add a ring's latency to what its members wait, once for each slice that they hold, and count its groups."""
    i, vectors, most = ring.first, 1 if ring.degree > 1 else 0, 1
    while i < ring.end and vectors and ring.between:
        j = end_of_run(members, i, ring.end)
        most = max(most, sum_degrees(members, i, j))
        i = j
    i = ring.first
    while i < ring.end:
        j, beside = end_of_run(members, i, ring.end), vectors
        if (
            vectors and ring.between
        ):  # norms and biases are shared out among all devices of a machine, also of one stage
            beside = (most - 1) // sum_degrees(members, i, j) + 1 + (1 if j - i == 1 else 0)
        for k in range(i, j):
            p, s = members[k].pipeline, members[k].stage
            slices = max(1, ring.degree // members[k].degree)
            if ring.between:
                slices *= max(1, (ring.held - 1) // (j - i) + 1)
                times[p, s].between_wait_s += slices * latency
            else:
                times[p, s].wait_s += slices * latency
            stages[p, s].sums += slices + beside
        i = j


@kernel
def load_ring(machines: Any, members: Any, stages: Any, times: Any, load: Any, network: Any, ring: Any) -> None:
    """Load ports and network with a pass of a ring; note its latency. `network`: `s_per_byte`, the number of
    transmitting resources, `extra`, `extra_latency_s`, and links as of `load_ports`."""
    s_per_byte, base, extra, extra_latency_s, links = network
    length = ring.machines if ring.between else ring.end - ring.first
    carried, latency = ring.params * (length - 1) / length, 0.0
    before, i = members[ring.end - 1].machine, ring.first
    while i < ring.end:
        j, number = end_of_run(members, i, ring.end), members[i].machine
        machine = machines[number]
        load_run(machine, members, load, (s_per_byte, base), ring, (i, j, carried))
        if not ring.between:
            latency = max(latency, load_ports(machine, links, members, times, ring, (i, j, carried)))
        if before != number:
            load_crossing(extra, s_per_byte, load, machines[before].place, machine.place, carried)
            latency = max(latency, latency_s(machines, extra_latency_s, before, number))
        before, i = number, j
    note_turns(members, stages, times, ring, latency * tree_depth(length))


@kernel
def slowest_of_run(machine: Any, members: Any, times: Any, load: Any, base: int, ring: Any, bounds: Any) -> Any:
    """The largest load of ports and interfaces that a ring uses at members of one machine, and their latest turn.
    `bounds`: first, end."""
    first, end = bounds
    slowest, wait, taken, lanes = 0.0, 0.0, 0, 0
    for k in range(first, end):
        member = members[k]
        own = times[member.pipeline, member.stage]
        wait = max(wait, own.between_wait_s if ring.between else own.wait_s)
        if not ring.between and (k < end - 1 or ring.lanes == 0):
            slowest = max(slowest, own.port)
        if ring.lanes == 0:
            continue
        sends, receives = ring.between or k == end - 1, ring.between or k == first
        if ring.lanes > 1:
            bit = interface_bit(machine, member)
            sends = receives = taken & bit == 0 and lanes < ring.lanes
            if sends:
                taken |= bit
                lanes += 1
        if sends:
            slowest = max(slowest, fullest_interface(machine, member.mask, 0, load))
        if receives:
            slowest = max(slowest, fullest_interface(machine, member.mask, base, load))
    return slowest, wait


@kernel
def time_ring(machines: Any, members: Any, times: Any, load: Any, base: int, extra: Any, ring: Any) -> None:
    """Seconds of a pass of a ring, for a byte of each parameter, and latency, where ports and network are loaded with
    all rings. `base`: the number of transmitting resources."""
    slowest, wait = 0.0, 0.0
    before, i = members[ring.end - 1].machine, ring.first
    while i < ring.end:
        j, number = end_of_run(members, i, ring.end), members[i].machine
        machine = machines[number]
        load_s, turn_s = slowest_of_run(machine, members, times, load, base, ring, (i, j))
        slowest, wait = max(slowest, load_s), max(wait, turn_s)
        if before != number:
            slowest = crossing_load(extra, machines[before].place, machine.place, load, slowest)
        before, i = number, j
    ring.s_per_byte, ring.latency_s = slowest, wait


@kernel
def make_rings(tables: Any, work: Any, state: Any, count: int) -> int:
    """The rings of the active pipelines and how long they take; how many."""
    stages, times = state.stages, work.times
    for k in range(count):
        p = work.active[k]
        for s in range(state.pipelines[p].num_stages):
            own = times[p, s]
            own.port = own.wait_s = own.between_wait_s = own.step_s = own.tied_s = 0.0
            own.ring = -1
            stages[p, s].sums = 0
    work.load[:] = 0.0
    num = collect_rings(tables, work, state, count)
    machines, members, load, base, extra = (
        tables.machines,
        work.members,
        work.load,
        tables.problem[0].num_interfaces,
        tables.extra,
    )
    links = tables.pair_s_per_byte, tables.pair_latency_s
    network = tables.s_per_byte, base, extra, tables.extra_latency_s, links
    for r in range(num):
        load_ring(machines, members, stages, times, load, network, work.rings[r])
    for r in range(num):
        time_ring(machines, members, times, load, base, extra, work.rings[r])
    return num
