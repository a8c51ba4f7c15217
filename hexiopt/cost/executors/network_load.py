"""The load of network resources by transfers, and the seconds of transfers that share them.

Between machines a transfer loads every interface, uplink and listed link that it crosses, inside a machine the ports of
its devices. Concurrent transfers share statically: the load of a resource is the sum of the seconds for which each of
its users needs it alone, and a transfer takes as long as the most loaded resource on its route, plus the latency.
Messages between stages, gradient rings, links of sequence layouts and moves of states all follow this rule.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hexiopt.memo import Memo
from hexiopt.plan.messages import Message
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.network import Network

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Users = tuple[tuple[int, int], ...]
NetworkLoad = dict[int, float]  # resource → seconds (per byte of a message, or in all)
Crossing = tuple[float, tuple[tuple[int, float], ...]]  # of a transfer: its latency_s, and (resource, bytes/s)


def load_of(
    network: Network, transfers: Iterable[tuple[int, int, float]], *, receivers: bool
) -> tuple[NetworkLoad, list[Crossing]]:
    """The load of each resource by `transfers` (sender, receiver, amount), and the crossing of each transfer.

    Amounts are bytes and the load seconds, or bytes and seconds per unit. Inside a machine the port of device d is
    resource −1 − 2d as a sender and, where `receivers` are charged too, −2 − 2d as a receiver.
    """
    load: NetworkLoad = {}
    crossings: list[Crossing] = []
    path = network.path
    for a, b, amount in transfers:
        latency_s, port_bytes_per_s, resources = path(a, b)
        if not resources:
            resources = ((-1 - 2 * a, port_bytes_per_s),)
            if receivers:
                resources = (*resources, (-2 - 2 * b, port_bytes_per_s))
        for resource, bytes_per_s in resources:
            load[resource] = load.get(resource, 0.0) + amount / bytes_per_s
        crossings.append((latency_s, resources))
    return load, crossings


def total_load(parts: Iterable[tuple[int, float]]) -> NetworkLoad:
    """The sum of the loads `parts` (resource, seconds)."""
    load: NetworkLoad = {}
    for resource, seconds in parts:
        load[resource] = load.get(resource, 0.0) + seconds
    return load


# ------------------------------------------------------------------ messages between stages


@dataclass(frozen=True, slots=True)
class Route:
    """One direction of a boundary, per byte of the whole message."""

    shared: tuple[tuple[int, float], ...]  # (resource of the network, seconds a byte needs it alone)
    port_s_per_byte: float  # the busiest sender inside a machine; with sequence layouts, receiver too
    latency_s: float

    def alone_s(self, num_bytes: float) -> float:
        """Seconds of a message of `num_bytes` when nothing else uses the network."""
        slowest = max((s for _, s in self.shared), default=0.0)
        return max(slowest, self.port_s_per_byte) * num_bytes + self.latency_s


class PlacedMessage(NamedTuple):
    """A message of a pipeline, its route, and its size in bytes."""

    message: Message
    route: Route
    num_bytes: float

    def seconds(self, load_s: NetworkLoad) -> float:
        """Seconds from its start to its end where resources have the load `load_s`, the message's part included."""
        _, route, num_bytes = self
        slowest = route.port_s_per_byte * num_bytes
        for resource, _ in route.shared:
            if load_s[resource] > slowest:
                slowest = load_s[resource]
        return slowest + route.latency_s


def executor_loads(messages: Iterable[PlacedMessage]) -> tuple[tuple[int, float], ...]:
    """(network resource, seconds per micro-batch for which the messages of an executor occupy it), for all executors.

    Forward and backward messages of an executor alternate, so the slower direction counts.
    """
    load_s: dict[tuple[int, int, int], list[float]] = {}
    for message, route, num_bytes in messages:
        for resource, s_per_byte in route.shared:
            both = load_s.setdefault((message.stage, message.sender, resource), [0.0, 0.0])
            both[message.backward] += s_per_byte * num_bytes
    return tuple([(resource, max(both)) for (_, _, resource), both in load_s.items()])


# ------------------------------------------------------------------ many transfers at once


@dataclass(frozen=True)
class LinkLoads:
    """The routes of pairs of devices as of `load_of`, receivers charged.

    Route p crosses `resource` [pairs, steps], numbered from 0, and a byte loads each by `s_per_byte` [pairs, steps],
    0 for steps beyond its last; `latency_s` [pairs]. `network` [resources] is a resource's number in the network, or -1
    for a port.
    """

    resource: Ints
    s_per_byte: Floats
    latency_s: Floats
    network: Ints

    @classmethod
    def of(cls, cluster: Cluster, senders: Ints, receivers: Ints) -> "LinkLoads":
        """The routes from `senders` to `receivers` [pairs]."""
        network, machines = cluster.network, cluster.machines
        machine_of = cluster.machine_of
        here, there = machine_of[senders], machine_of[receivers]
        inside = here == there
        size, ports = cluster.num_devices, network.num_resources
        resource = np.empty((len(senders), 2), np.int64)
        resource[:, 0] = np.where(inside, ports + senders, network.transmitters[senders])
        resource[:, 1] = np.where(inside, ports + size + receivers, network.receivers[receivers])
        codes, where = np.unique(here * len(machines) + there, return_inverse=True)
        between: list[tuple[float, float]] = []
        extra: list[tuple[int, ...]] = []
        most = 0
        for code in codes.tolist():
            a, b = divmod(code, len(machines))
            if a == b:
                between.append((machines[a].intra_bandwidth_bytes_per_s, machines[a].intra_latency_s))
                extra.append(())
            else:
                first, second = int(cluster.first_device[a]), int(cluster.first_device[b])
                between.append((np.inf, network.pair_latency(first, second)))
                extra.append(network.route(first, second)[1:-1])
                most = max(most, len(extra[-1]))
        rate, latency_s = np.array(between).reshape(-1, 2)[where].T
        capacity = np.append(network.capacity, np.inf)
        s_per_byte = 1.0 / np.where(inside[:, None], rate[:, None], capacity[np.where(inside[:, None], -1, resource)])
        if most:
            none = ports + 2 * size
            steps = np.array([[*route, *[none] * (most - len(route))] for route in extra])[where]
            resource = np.concatenate([resource, steps], axis=1)
            more = np.where(steps == none, 0.0, 1.0 / capacity[np.where(steps == none, -1, steps)])
            s_per_byte = np.concatenate([s_per_byte, more], axis=1)
        for m in {int(m) for m in here[inside]} if any(machine.intra_links for machine in machines) else ():
            if machines[m].intra_links:
                for k in np.flatnonzero(inside & (here == m)).tolist():
                    a, b = int(senders[k]), int(receivers[k])
                    s_per_byte[k, :2] = 1.0 / network.pair_bandwidth(a, b)
                    latency_s[k] = network.pair_latency(a, b)
        numbers, compact = np.unique(resource, return_inverse=True)
        return cls(
            compact.reshape(resource.shape), s_per_byte, latency_s.copy(), np.where(numbers < ports, numbers, -1)
        )

    def split(self, users: Mapping[int, int]) -> "LinkLoads":
        """The same routes where `users[resource]` users each have an equal share of a network resource."""
        if not users:
            return self
        factor = np.array([users.get(number, 1) for number in self.network.tolist()], float)
        return replace(self, s_per_byte=self.s_per_byte * factor[self.resource])

    def seconds(self, num_bytes: Floats) -> Floats:
        """Seconds of messages of `num_bytes` [times, pairs], those of one time at once; 0 for a message of 0 bytes."""
        times_s = np.zeros(num_bytes.shape)
        for amounts, seconds in zip(num_bytes, times_s, strict=True):
            load_s = np.bincount(self.resource.ravel(), (amounts[:, None] * self.s_per_byte).ravel(), len(self.network))
            np.copyto(seconds, load_s[self.resource].max(axis=1, initial=0.0) + self.latency_s, where=amounts > 0.0)
        return times_s


class RingLinks:
    """The routes along sub-rings, from each group of a layout to the next.

    In a turn all messages of a group carry the same tokens, for as many heads as their ring has. So the load of a port
    is proportional to the tokens of a single group, that of a network resource to those of the groups whose messages
    cross it, and many messages take equally long: `kind` [groups · rings] numbers the classes of equal ones.
    """

    def __init__(self, loads: LinkLoads, heads: Ints, groups: int) -> None:
        rings = len(heads)
        group, s_per_byte = np.repeat(np.arange(groups), rings), np.tile(heads, groups)[:, None] * loads.s_per_byte
        shared = loads.network[loads.resource] >= 0
        load = np.bincount(loads.resource.ravel(), s_per_byte.ravel(), len(loads.network))
        port_s = np.where(shared, 0.0, load[loads.resource] * (loads.s_per_byte > 0.0)).max(axis=1, initial=0.0)
        crossed = np.where(shared, loads.resource, -1)
        kind = group
        for column in (*crossed.T, port_s, loads.latency_s):
            _, number = np.unique(column, return_inverse=True)
            kind = np.unique(kind * (number.max(initial=0) + 1) + number, return_inverse=True)[1]
        self.kind: Ints = kind
        self.network: Ints = loads.network
        _, first = np.unique(kind, return_index=True)
        self._group, self._port_s, self._latency_s = group[first], port_s[first], loads.latency_s[first]
        # Of network resources: by resource and group, seconds for a byte of every head.
        used, place = np.unique(crossed[shared], return_inverse=True)
        groups_of = np.broadcast_to(group[:, None], shared.shape)[shared]
        codes, where = np.unique(place * groups + groups_of, return_inverse=True)
        self._loads = np.bincount(where, s_per_byte[shared]) if len(codes) else np.zeros(0)
        self._loading = codes % groups
        self._starts = np.flatnonzero(np.diff(codes // groups, prepend=-1))
        self._crossed = np.where(crossed[first] >= 0, np.searchsorted(used, crossed[first]), len(used))

    def seconds(self, num_bytes: Floats) -> Floats:
        """Seconds of each kind of message [times, kinds], where a group's messages carry `num_bytes` [times, groups]
        per head; -inf where that is 0."""
        amounts = num_bytes[:, self._group]
        slowest = amounts * self._port_s
        if len(self._starts):
            load_s = np.add.reduceat(num_bytes[:, self._loading] * self._loads, self._starts, axis=1)
            load_s = np.concatenate([load_s, np.zeros((len(load_s), 1))], axis=1)
            for step in self._crossed.T:
                np.maximum(slowest, load_s[:, step], out=slowest)
        return np.where(amounts > 0.0, slowest + self._latency_s, -np.inf)


class LinkTable:
    """The links of a cluster, memoised by lists of pairs. `users` as of `LinkLoads.split`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._loads = Memo(self._new_loads, 1024)
        self._rings = Memo(self._new_rings, 1024)

    def loads(self, senders: Ints, receivers: Ints, users: Mapping[int, int]) -> LinkLoads:
        """As `LinkLoads.of`."""
        return self._loads[senders.tobytes(), receivers.tobytes(), tuple(sorted(users.items()))]

    def rings(self, holders: Ints, heads: Ints, users: Mapping[int, int]) -> RingLinks:
        """The links of rings through the devices `holders` [groups, rings], whose messages carry `heads` [rings]."""
        return self._rings[holders.tobytes(), heads.tobytes(), tuple(sorted(users.items()))]

    def _new_loads(self, key: tuple[bytes, bytes, Users]) -> LinkLoads:
        senders, receivers = (np.frombuffer(raw, np.int64) for raw in key[:2])
        return LinkLoads.of(self._cluster, senders, receivers).split(dict(key[2]))

    def _new_rings(self, key: tuple[bytes, bytes, Users]) -> RingLinks:
        holders, heads = (np.frombuffer(raw, np.int64) for raw in key[:2])
        holders = holders.reshape(-1, len(heads))
        after = np.concatenate([holders[1:], holders[:1]])
        loads = LinkLoads.of(self._cluster, holders.ravel(), after.ravel()).split(dict(key[2]))
        return RingLinks(loads, heads, len(holders))
