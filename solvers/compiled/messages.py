"""Messages of all pipelines share the network about as much as they meet.

Prices let messages share the network while they are under way at once (`hexiopt/cost/clock/`). Here a message meets
the others in proportion to how much of a period its resource is busy: of n seconds alone, on a resource that all load
with L seconds, it takes n + (L − n) · min(1, L/T) for a period of T, that of the slowest stage. Of a few hundred plans
within 1.5 times the best of six problems with slow networks, the best by this estimate is 0 to 5 % behind the best by
price; with messages alone 5 to 37 %, where all share all the time 0 to 8 %.
"""

from typing import Any

import numpy as np

from solvers.compiled.kernels import kernel

_STALE = 0.012  # of a period: messages that change less leave a pipeline as it was timed


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
def load_pipeline(
    problem: Any, machines: Any, network: Any, stages: Any, p: int, count: int, num_bytes: float, loads: Any
) -> None:
    """Load the network with what the stages of pipeline p send: of the two directions of a stage, which alternate, the
    slower at each resource; where depth is free, both. `network` as of `note_message`; `loads`: `load`, `ahead`, `back`
    and `used` of the work."""
    load, ahead, back, used = loads
    for s in range(count):
        stage = stages[p, s]
        used[0] = 0
        if s < count - 1 and stages[p, s + 1].machine != stage.machine:
            note_message(problem, machines, network, stage, stages[p, s + 1], num_bytes, ahead, used)
        if s > 0 and stages[p, s - 1].machine != stage.machine:
            note_message(problem, machines, network, stage, stages[p, s - 1], num_bytes, back, used)
        for k in range(1, used[0] + 1):
            resource = used[k]
            load[resource] += max(ahead[resource], back[resource])
            if problem.deep:
                load[resource] += min(ahead[resource], back[resource])
            ahead[resource] = back[resource] = 0.0


@kernel
def message_s(
    problem: Any, machines: Any, network: Any, sender: Any, receiver: Any, num_bytes: float, period: float, loads: Any
) -> Any:
    """Seconds of a message between stages of two machines. `network`: `s_per_byte`, `extra` and `extra_latency_s` of
    the tables; `loads` as of `load_pipeline`."""
    s_per_byte, extra, extra_latency_s = network
    load, alone, _, used = loads
    used[0] = 0
    note_message(problem, machines, (s_per_byte, extra), sender, receiver, num_bytes, alone, used)
    slowest = 0.0
    for k in range(1, used[0] + 1):
        resource = used[k]
        others = max(0.0, load[resource] - alone[resource])
        slowest = max(slowest, alone[resource] + others * min(1.0, load[resource] / period))
        alone[resource] = 0.0
    return slowest + latency_s(machines, extra_latency_s, sender.machine, receiver.machine)


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
def measure_messages(tables: Any, work: Any, state: Any, p: int) -> float:
    """Write the seconds of the messages of pipeline p to the columns, while the network has its load; by how much the
    one that differs most differs from what its stages have."""
    problem, machines, columns, stages = tables.problem[0], tables.machines, work.columns, state.stages[p]
    pipeline, loads = state.pipelines[p], (work.load, work.ahead, work.back, work.used)
    links, network = (
        (tables.pair_s_per_byte, tables.pair_latency_s),
        (tables.s_per_byte, tables.extra, tables.extra_latency_s),
    )
    num_bytes, change, slowest = tables.sizes[pipeline.size] * problem.sample_bytes, 0.0, 0.0
    for s in range(pipeline.num_stages):
        slowest = max(slowest, stages[s].forward_s + stages[s].backward_s)
    for s in range(pipeline.num_stages - 1):
        stage, after, column = stages[s], stages[s + 1], columns[s]
        if stage.machine == after.machine:
            machine = machines[stage.machine]
            column.send_s = inside_s(problem, machine, links, stage, after, num_bytes)
            column.return_s = inside_s(problem, machine, links, after, stage, num_bytes)
        else:
            column.send_s = message_s(problem, machines, network, stage, after, num_bytes, slowest, loads)
            column.return_s = message_s(problem, machines, network, after, stage, num_bytes, slowest, loads)
        change = max(change, abs(column.send_s - stage.send_s) + abs(column.return_s - stage.return_s))
    return change


@kernel
def set_messages(work: Any, state: Any, p: int) -> None:
    """Messages of pipeline p take what the columns have."""
    for s in range(state.pipelines[p].num_stages - 1):
        state.stages[p, s].send_s, state.stages[p, s].return_s = work.columns[s].send_s, work.columns[s].return_s


@kernel
def send_messages(tables: Any, work: Any, state: Any) -> None:
    """Seconds of the messages of all pipelines that fit; mark those to be timed again (`touched` 2): that have changed,
    or whose messages have by more than a share of their period."""
    pipelines, touched, listed, load = state.pipelines, work.touched, work.listed, work.load
    network, loads = (tables.s_per_byte, tables.extra), (load, work.ahead, work.back, work.used)
    load[:] = 0.0
    for p in range(state.plan[0].num_pipelines):
        pipeline = pipelines[p]
        if pipeline.fits and pipeline.num_stages > 1:
            num_bytes = tables.sizes[pipeline.size] * tables.problem[0].sample_bytes
            load_pipeline(
                tables.problem[0], tables.machines, network, state.stages, p, pipeline.num_stages, num_bytes, loads
            )
    for p in range(state.plan[0].num_pipelines):
        if not pipelines[p].fits:
            continue
        change = measure_messages(tables, work, state, p)
        if touched[p] or change > _STALE * pipelines[p].period_s:
            if touched[p] == 0:
                listed[0] += 1
                listed[listed[0]] = p
            touched[p] = 2
            set_messages(work, state, p)


@kernel
def forget_messages(state: Any) -> None:
    """Forget what messages took, so that they are up to date after the next `send_messages`."""
    for p in range(state.plan[0].num_pipelines):
        state.pipelines[p].period_s = 0.0
        for s in range(state.pipelines[p].num_stages):
            state.stages[p, s].send_s = np.inf
