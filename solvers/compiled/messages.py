"""Messages as they go alone, and the least seconds in which the network passes those of all pipelines.

Prices let messages share the network while they meet (`hexiopt/cost/clock/`). Most of the time few do: of plans near
the best, a step with messages alone takes 0.3 to 1 % less than its price, and ranks them as prices do.
"""

from typing import Any

from solvers.compiled.kernels import kernel


@kernel
def interface_of(machine: Any, device: int) -> Any:
    """The network interface of a device of a machine, as the number of its transmitting resource."""
    return machine.first_interface + device * machine.num_interfaces // machine.num_gpus


@kernel
def load_interfaces(machine: Any, mask: int, base: int, amount: float, load: Any, s_per_byte: Any) -> None:
    """Load the interfaces of the devices in `mask` with `amount` bytes each; `base`: of the direction."""
    device = 0
    while mask:
        if mask & 1:
            resource = base + interface_of(machine, device)
            load[resource] += amount * s_per_byte[resource]
        mask >>= 1
        device += 1


@kernel
def fullest_interface(machine: Any, mask: int, base: int, load: Any) -> Any:
    """The largest load of the interfaces of the devices in `mask`."""
    most, device = 0.0, 0
    if machine.num_interfaces == 1:
        return load[base + machine.first_interface]
    while mask:
        if mask & 1:
            most = max(most, load[base + interface_of(machine, device)])
        mask >>= 1
        device += 1
    return most


@kernel
def crossing_load(extra: Any, a: int, b: int, load: Any, most: float) -> float:
    """The largest of `most` and the loads of what a transfer between places a and b crosses."""
    if a != b:
        for k in range(extra.shape[2]):
            resource = extra[a, b, k]
            if resource < 0:
                break
            most = max(most, load[resource])
    return most


@kernel
def latency_s(machines: Any, extra_latency_s: Any, a: int, b: int) -> Any:
    """Seconds of latency from machine a to another machine b."""
    here, there = machines[a], machines[b]
    return max(here.nic_latency_s, there.nic_latency_s) + extra_latency_s[here.place, there.place]


@kernel
def rank_device(mask: int, rank: int) -> int:
    """The device of a rank: the position of the `rank`-th set bit of `mask`."""
    device = 0
    while True:
        if mask & 1:
            if rank == 0:
                return device
            rank -= 1
        mask >>= 1
        device += 1


@kernel
def note(load: Any, used: Any, resource: int, seconds: float) -> None:
    """Add to a scratch load, and list the resource."""
    if load[resource] == 0.0:
        used[0] += 1
        used[used[0]] = resource
    load[resource] += seconds


@kernel
def note_message(
    problem: Any, machines: Any, network: Any, sender: Any, receiver: Any, num_bytes: float, ahead: Any, used: Any
) -> None:
    """Note what a message between stages of two machines loads, rank by rank. `network`: `s_per_byte` and `extra` of
    the tables."""
    s_per_byte, extra = network
    here, there = machines[sender.machine], machines[receiver.machine]
    total = num_bytes if problem.divided else num_bytes * receiver.degree
    for rank in range(1 if here.num_interfaces == 1 else sender.degree):
        part, resource = total, here.first_interface
        if here.num_interfaces > 1:
            part, resource = num_bytes / sender.degree, interface_of(here, rank_device(sender.mask, rank))
            if not problem.divided:
                part = 0.0
                for to in range(receiver.degree):
                    part += num_bytes if to * sender.degree // receiver.degree == rank else 0.0
        if part > 0.0:
            note(ahead, used, resource, part * s_per_byte[resource])
    for rank in range(1 if there.num_interfaces == 1 else receiver.degree):
        part, resource = total, problem.num_interfaces + there.first_interface
        if there.num_interfaces > 1:
            part = total / receiver.degree
            resource = problem.num_interfaces + interface_of(there, rank_device(receiver.mask, rank))
        note(ahead, used, resource, part * s_per_byte[resource])
    if here.place != there.place:
        for k in range(extra.shape[2]):
            resource = extra[here.place, there.place, k]
            if resource < 0:
                break
            note(ahead, used, resource, total * s_per_byte[resource])


@kernel
def alone_s(
    problem: Any, machines: Any, network: Any, sender: Any, receiver: Any, num_bytes: float, scratch: Any
) -> Any:
    """Seconds of a message between stages of two machines that nothing else delays. `network`: `s_per_byte`, `extra`
    and `extra_latency_s` of the tables; `scratch`: `ahead` and `used` of the work."""
    s_per_byte, extra, extra_latency_s = network
    ahead, used = scratch
    used[0] = 0
    note_message(problem, machines, (s_per_byte, extra), sender, receiver, num_bytes, ahead, used)
    slowest = 0.0
    for k in range(1, used[0] + 1):
        slowest = max(slowest, ahead[used[k]])
        ahead[used[k]] = 0.0
    return slowest + latency_s(machines, extra_latency_s, sender.machine, receiver.machine)


@kernel
def network_s(tables: Any, work: Any, state: Any, count: int) -> float:
    """The most seconds that a resource of the network needs for the messages of all pipelines that fit, one after
    another: no step is shorter."""
    problem, machines, sizes, load, used = tables.problem[0], tables.machines, tables.sizes, work.load, work.used
    network, most = (tables.s_per_byte, tables.extra), 0.0
    load[:] = 0.0
    for k in range(count):
        p = work.active[k]
        stages, num_bytes = state.stages[p], sizes[state.pipelines[p].size] * problem.sample_bytes * work.batches[k]
        for s in range(state.pipelines[p].num_stages - 1):
            if stages[s].machine != stages[s + 1].machine:
                used[0] = 0
                note_message(problem, machines, network, stages[s], stages[s + 1], num_bytes, load, used)
                used[0] = 0
                note_message(problem, machines, network, stages[s + 1], stages[s], num_bytes, load, used)
    for seconds in load:
        most = max(most, seconds)
    return most


@kernel
def inside_s(problem: Any, machine: Any, links: Any, sender: Any, receiver: Any, num_bytes: float) -> Any:
    """Seconds of a message between stages of a machine: that of the busiest sender, and the largest latency. `links`:
    `pair_s_per_byte` and `pair_latency_s` of the tables."""
    divided = problem.divided
    if machine.uneven < 0 or not problem.uneven_links:
        share = 1.0 / sender.degree if divided else float((receiver.degree + sender.degree - 1) // sender.degree)
        return num_bytes * share * machine.port_s_per_byte + machine.port_latency_s
    rates, latencies = links
    slowest, latency, ranks, row = 0.0, 0.0, sender.degree * receiver.degree, machine.uneven
    for rank in range(sender.degree):
        port, i = 0.0, rank_device(sender.mask, rank)
        for to in range(receiver.degree):
            if divided:
                share = min((rank + 1) * receiver.degree, (to + 1) * sender.degree)
                share -= max(rank * receiver.degree, to * sender.degree)
                part = share / ranks
            else:
                part = 1.0 if to * sender.degree // receiver.degree == rank else 0.0
            if part > 0.0:
                j = rank_device(receiver.mask, to)
                port += part * rates[row, i, j]
                latency = max(latency, latencies[row, i, j])
        slowest = max(slowest, port)
    return slowest * num_bytes + latency


@kernel
def send_messages(tables: Any, work: Any, state: Any) -> None:
    """Seconds of the messages of touched pipelines that fit; these are to be timed (`touched` 2)."""
    problem, machines, scratch = tables.problem[0], tables.machines, (work.ahead, work.used)
    network, links = (
        (tables.s_per_byte, tables.extra, tables.extra_latency_s),
        (tables.pair_s_per_byte, tables.pair_latency_s),
    )
    for k in range(work.listed[0]):
        p = work.listed[1 + k]
        if p >= state.plan[0].num_pipelines or not state.pipelines[p].fits:
            continue
        work.touched[p] = 2
        num_bytes = tables.sizes[state.pipelines[p].size] * problem.sample_bytes
        for s in range(state.pipelines[p].num_stages - 1):
            stage, after = state.stages[p, s], state.stages[p, s + 1]
            if stage.machine == after.machine:
                machine = machines[stage.machine]
                stage.send_s = inside_s(problem, machine, links, stage, after, num_bytes)
                stage.return_s = inside_s(problem, machine, links, after, stage, num_bytes)
            else:
                stage.send_s = alone_s(problem, machines, network, stage, after, num_bytes, scratch)
                stage.return_s = alone_s(problem, machines, network, after, stage, num_bytes, scratch)
