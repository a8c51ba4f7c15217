"""Messages between consecutive stages, and how they share network interfaces.

Activations at a boundary are split along the sequence over the TP ranks (sequence parallelism), so receiver j
needs the part [j/n, (j+1)/n) and takes it from the senders whose parts overlap it: one copy crosses in all.
Whatever crosses an interface, an uplink or a stated link at once shares it: the load of a resource is the sum
over stages of the seconds their messages need it alone; forward and backward messages of one stage alternate,
so the larger counts. A message takes as long as the most loaded resource on its way, plus the latency.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from hexiopt.cluster import Cluster

Load = dict[int, float]  # shared resource → seconds (per byte of the message, or in all)


@dataclass(frozen=True, slots=True)
class Hop:
    """One direction of a boundary, per byte of the whole message."""

    shared: tuple[tuple[int, float], ...]  # (resource of the network, seconds a byte needs it alone)
    port_s_per_byte: float  # the busiest sender inside a machine
    latency_s: float

    def seconds(self, num_bytes: float, load_s: Load) -> float:
        """Seconds of a message of `num_bytes` while the resources are loaded with `load_s` (its own included)."""
        slowest = self.port_s_per_byte * num_bytes
        for resource, _ in self.shared:
            if load_s[resource] > slowest:
                slowest = load_s[resource]
        return slowest + self.latency_s

    def alone_s(self, num_bytes: float) -> float:
        """Seconds of a message of `num_bytes` when nothing else uses the network."""
        slowest = max((s for _, s in self.shared), default=0.0)
        return max(slowest, self.port_s_per_byte) * num_bytes + self.latency_s


def overlaps(senders: int, receivers: int) -> Iterable[tuple[int, int, float]]:
    """(sender, receiver, share of the message) for parts of equal length at both ends, in rank order."""
    i = j = 0
    at = 0  # in units of 1 / (senders · receivers)
    while i < senders and j < receivers:
        end = min((i + 1) * receivers, (j + 1) * senders)
        yield i, j, (end - at) / (senders * receivers)
        i, j, at = i + (end == (i + 1) * receivers), j + (end == (j + 1) * senders), end


def hop(cluster: Cluster, senders: tuple[int, ...], receivers: tuple[int, ...]) -> Hop:
    """The way from the devices of one stage to those of the next."""
    network, machine_of = cluster.network, cluster.machine_of
    shared: Load = {}
    ports: Load = {}
    latency_s = 0.0
    for i, j, share in overlaps(len(senders), len(receivers)):
        a, b = senders[i], receivers[j]
        latency_s = max(latency_s, network.pair_latency(a, b))
        if machine_of[a] == machine_of[b]:
            ports[a] = ports.get(a, 0.0) + share / network.pair_bandwidth(a, b)
        else:
            for resource in network.route(a, b):
                shared[resource] = shared.get(resource, 0.0) + share / float(network.capacity[resource])
    return Hop(tuple(shared.items()), max(ports.values(), default=0.0), latency_s)


def stage_load(sends: Iterable[tuple[Hop, float]]) -> Load:
    """Seconds that one stage's messages (hop, bytes) need each shared resource: the larger of its directions."""
    load: Load = {}
    for way, num_bytes in sends:
        for resource, s_per_byte in way.shared:
            seconds = s_per_byte * num_bytes
            if seconds >= load.get(resource, 0.0):
                load[resource] = seconds
    return load
