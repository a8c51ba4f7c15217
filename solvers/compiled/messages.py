"""Messages of all pipelines share the network statically, as `hexiopt/cost/sharing.py` has it."""

from typing import Any

import numba
import numpy as np

_STALE = 0.012  # of a period: messages that change less leave a pipeline as it was timed


@numba.njit(cache=True, nogil=True, error_model="numpy")
def interface_of(machine: Any, device: int) -> Any:
    """The network interface of a device of a machine, as the number of its transmitting resource."""
    return machine.first_interface + device * machine.num_interfaces // machine.num_gpus


@numba.njit(cache=True, nogil=True, error_model="numpy")
def load_interfaces(machine: Any, mask: int, base: int, amount: float, load: Any, s_per_byte: Any) -> None:
    """Load the interfaces of the devices in `mask` with `amount` bytes each; `base`: of the direction."""
    device = 0
    while mask:
        if mask & 1:
            resource = base + interface_of(machine, device)
            load[resource] += amount * s_per_byte[resource]
        mask >>= 1
        device += 1


@numba.njit(cache=True, nogil=True, error_model="numpy")
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


@numba.njit(cache=True, nogil=True, error_model="numpy")
def crossing_load(extra: Any, a: int, b: int, load: Any, most: float) -> float:
    """The largest of `most` and the loads of what a transfer between places a and b crosses."""
    if a != b:
        for k in range(extra.shape[2]):
            resource = extra[a, b, k]
            if resource < 0:
                break
            most = max(most, load[resource])
    return most


@numba.njit(cache=True, nogil=True, error_model="numpy")
def latency_s(machines: Any, extra_latency_s: Any, a: int, b: int) -> Any:
    """Seconds of latency from machine a to another machine b."""
    here, there = machines[a], machines[b]
    return max(here.nic_latency_s, there.nic_latency_s) + extra_latency_s[here.place, there.place]


@numba.njit(cache=True, nogil=True, error_model="numpy")
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


@numba.njit(cache=True, nogil=True, error_model="numpy")
def note(load: Any, used: Any, resource: int, seconds: float) -> None:
    """Add to a scratch load, and list the resource."""
    if load[resource] == 0.0:
        used[0] += 1
        used[used[0]] = resource
    load[resource] += seconds


@numba.njit(cache=True, nogil=True, error_model="numpy")
def note_message(tables: Any, sender: Any, receiver: Any, num_bytes: float, load: Any, used: Any) -> None:
    """Note what a message between stages of two machines loads, rank by rank."""
    problem, s_per_byte = tables.problem[0], tables.s_per_byte
    here, there = tables.machines[sender.machine], tables.machines[receiver.machine]
    total = num_bytes if problem.divided else num_bytes * receiver.degree
    if here.num_interfaces == 1:
        resource = here.first_interface
        note(load, used, resource, total * s_per_byte[resource])
    else:
        for rank in range(sender.degree):
            part = num_bytes / sender.degree
            if not problem.divided:
                part = 0.0
                for to in range(receiver.degree):
                    part += num_bytes if to * sender.degree // receiver.degree == rank else 0.0
            resource = interface_of(here, rank_device(sender.mask, rank))
            if part > 0.0:
                note(load, used, resource, part * s_per_byte[resource])
    base = problem.num_interfaces
    if there.num_interfaces == 1:
        resource = base + there.first_interface
        note(load, used, resource, total * s_per_byte[resource])
    else:
        for rank in range(receiver.degree):
            resource = base + interface_of(there, rank_device(receiver.mask, rank))
            note(load, used, resource, total / receiver.degree * s_per_byte[resource])
    if here.place != there.place:
        extra = tables.extra
        for k in range(extra.shape[2]):
            resource = extra[here.place, there.place, k]
            if resource < 0:
                break
            note(load, used, resource, total * s_per_byte[resource])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def load_stage(tables: Any, work: Any, stages: Any, p: int, s: int, count: int, num_bytes: float) -> None:
    """Load the network with what stage s sends: of its two directions, which alternate, the slower at each resource."""
    stage, load, ahead, back, used = stages[p, s], work.load, work.ahead, work.back, work.used
    used[0] = 0
    if s < count - 1 and stages[p, s + 1].machine != stage.machine:
        note_message(tables, stage, stages[p, s + 1], num_bytes, ahead, used)
    if s > 0 and stages[p, s - 1].machine != stage.machine:
        note_message(tables, stage, stages[p, s - 1], num_bytes, back, used)
    for k in range(1, used[0] + 1):
        resource = used[k]
        load[resource] += max(ahead[resource], back[resource])
        ahead[resource] = back[resource] = 0.0


@numba.njit(cache=True, nogil=True, error_model="numpy")
def inside_s(tables: Any, sender: Any, receiver: Any, num_bytes: float) -> Any:
    """Seconds of a message between stages of a machine: that of the busiest sender, and the largest latency."""
    machine, divided = tables.machines[sender.machine], tables.problem[0].divided
    if machine.uneven < 0 or not tables.problem[0].uneven_links:
        share = 1.0 / sender.degree if divided else (receiver.degree + sender.degree - 1) // sender.degree
        return num_bytes * share * machine.port_s_per_byte + machine.port_latency_s
    rates, latencies = tables.pair_s_per_byte[machine.uneven], tables.pair_latency_s[machine.uneven]
    slowest, latency, ranks = 0.0, 0.0, sender.degree * receiver.degree
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
                port += part * rates[i, j]
                latency = max(latency, latencies[i, j])
        slowest = max(slowest, port)
    return slowest * num_bytes + latency


@numba.njit(cache=True, nogil=True, error_model="numpy")
def message_s(tables: Any, load: Any, sender: Any, receiver: Any, num_bytes: float) -> Any:
    """Seconds of a message while the network has its load."""
    if sender.machine == receiver.machine:
        return inside_s(tables, sender, receiver, num_bytes)
    machines = tables.machines
    here, there = machines[sender.machine], machines[receiver.machine]
    slowest = max(
        fullest_interface(here, sender.mask, 0, load),
        fullest_interface(there, receiver.mask, tables.problem[0].num_interfaces, load),
    )
    slowest = crossing_load(tables.extra, here.place, there.place, load, slowest)
    return slowest + latency_s(machines, tables.extra_latency_s, sender.machine, receiver.machine)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def send_messages(tables: Any, work: Any, state: Any) -> None:
    """Seconds of the messages of all pipelines that fit; mark those to be timed again (`touched` 2): that have changed,
    or whose messages have by more than a share of their period."""
    pipelines, stages, columns, touched = state.pipelines, state.stages, work.columns, work.touched
    listed, load, sample_bytes = work.listed, work.load, tables.problem[0].sample_bytes
    load[:] = 0.0
    num_pipelines = state.plan[0].num_pipelines
    for p in range(num_pipelines):
        count = pipelines[p].num_stages
        if pipelines[p].fits and count > 1:
            num_bytes = tables.sizes[pipelines[p].size] * sample_bytes
            for s in range(count):
                load_stage(tables, work, stages, p, s, count, num_bytes)
    for p in range(num_pipelines):
        pipeline = pipelines[p]
        if not pipeline.fits:
            continue
        num_bytes = tables.sizes[pipeline.size] * sample_bytes
        change = 0.0
        for s in range(pipeline.num_stages - 1):
            stage, after, column = stages[p, s], stages[p, s + 1], columns[s]
            column.send_s = message_s(tables, load, stage, after, num_bytes)
            column.return_s = message_s(tables, load, after, stage, num_bytes)
            change = max(change, abs(column.send_s - stage.send_s) + abs(column.return_s - stage.return_s))
        if touched[p] or change > _STALE * pipeline.period_s:
            if touched[p] == 0:
                listed[0] += 1
                listed[listed[0]] = p
            touched[p] = 2
            for s in range(pipeline.num_stages - 1):
                stages[p, s].send_s, stages[p, s].return_s = columns[s].send_s, columns[s].return_s


@numba.njit(cache=True, nogil=True, error_model="numpy")
def forget_messages(state: Any) -> None:
    """Forget what messages took, so that they are up to date after the next `send_messages`."""
    for p in range(state.plan[0].num_pipelines):
        state.pipelines[p].period_s = 0.0
        for s in range(state.pipelines[p].num_stages):
            state.stages[p, s].send_s = np.inf
