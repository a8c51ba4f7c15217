"""Machines: devices of one GPU type, the links inside them, and the names by which files call them."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise

from hexiopt.calibration.gpus import Gpu

_EXACT_RING = 12


@dataclass(frozen=True)
class IntraLink:
    """A link inside a machine between its devices `a` < `b`, other than the machine's usual one."""

    a: int
    b: int
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Machine:
    """Devices of one type behind common network interfaces.

    Bandwidths are per direction: inside the machine per device, point to point (infinite with one device);
    outside per network interface. `spec_name` is the name in the file, before `count` numbers the machines.
    """

    name: str
    spec_name: str
    gpu: Gpu
    num_gpus: int
    intra_bandwidth_bytes_per_s: float
    intra_latency_s: float
    intra_links: tuple[IntraLink, ...]
    num_interfaces: int
    nic_bandwidth_bytes_per_s: float
    nic_latency_s: float
    price_per_hour: float | None = None

    @cached_property
    def kind(self) -> Hashable:
        """Equal for machines that are interchangeable in themselves: all but the names."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in ("name", "spec_name"))

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], IntraLink]:
        return {pair: link for link in self.intra_links for pair in ((link.a, link.b), (link.b, link.a))}

    @property
    def is_uniform(self) -> bool:
        """Whether its devices are interchangeable: none has a faster link, or another interface."""
        return not self.intra_links and self.num_interfaces == 1

    def interface(self, index: int) -> int:
        """The network interface that the device `index` uses."""
        return index * self.num_interfaces // self.num_gpus

    def pair_bandwidth(self, i: int, j: int) -> float:
        """Bytes/s from device i to device j of this machine; infinite from a device to itself."""
        if i == j:
            return math.inf
        link = self._pairs.get((i, j))
        return link.bandwidth_bytes_per_s if link else self.intra_bandwidth_bytes_per_s

    def pair_latency(self, i: int, j: int) -> float:
        """Seconds from device i to device j of this machine; zero from a device to itself."""
        if i == j:
            return 0.0
        link = self._pairs.get((i, j))
        return link.latency_s if link else self.intra_latency_s

    def ring(self, indices: tuple[int, ...]) -> tuple[float, float]:
        """Bytes/s of the slowest link and seconds of the largest latency on the best ring through devices.

        Best is the order whose slowest link is fastest, then that of least latency: exact for up to 12
        devices, the better of two simple orders beyond. One device gives (infinity, 0).
        """
        if len(indices) < 2:
            return math.inf, 0.0
        if len(indices) == 2:
            return self.pair_bandwidth(*indices), self.pair_latency(*indices)
        if not self.intra_links:
            return self.intra_bandwidth_bytes_per_s, self.intra_latency_s
        inside = set(indices)
        links = tuple(link for link in self.intra_links if link.a in inside and link.b in inside)
        if not links:
            return self.intra_bandwidth_bytes_per_s, self.intra_latency_s
        return _best_ring(self.intra_bandwidth_bytes_per_s, self.intra_latency_s, links, tuple(sorted(indices)))


@lru_cache(maxsize=65536)
def _best_ring(
    bandwidth: float, latency: float, links: tuple[IntraLink, ...], indices: tuple[int, ...]
) -> tuple[float, float]:
    """See `Machine.ring`; at least three devices."""
    size = len(indices)
    position = {index: k for k, index in enumerate(indices)}
    bandwidths = [[bandwidth] * size for _ in range(size)]
    latencies = [[latency] * size for _ in range(size)]
    for link in links:
        a, b = position[link.a], position[link.b]
        bandwidths[a][b] = bandwidths[b][a] = link.bandwidth_bytes_per_s
        latencies[a][b] = latencies[b][a] = link.latency_s

    if size > _EXACT_RING:
        rings = [list(range(size)), [0]]
        left = set(range(1, size))
        while left:
            here = rings[1][-1]
            rings[1].append(min(left, key=lambda k: (-bandwidths[here][k], latencies[here][k], k)))
            left.remove(rings[1][-1])
        found = []
        for order in rings:
            hops = list(pairwise([*order, order[0]]))
            found.append((min(bandwidths[a][b] for a, b in hops), -max(latencies[a][b] for a, b in hops)))
        slowest, negated = max(found)
        return slowest, -negated

    def closes(least: float, most_latency: float) -> bool:
        return _has_ring(
            [
                sum(
                    1 << b
                    for b in range(size)
                    if b != a and bandwidths[a][b] >= least and latencies[a][b] <= most_latency
                )
                for a in range(size)
            ]
        )

    off_diagonal = [(a, b) for a in range(size) for b in range(a)]
    slowest = next(
        value for value in sorted({bandwidths[a][b] for a, b in off_diagonal}, reverse=True) if closes(value, math.inf)
    )
    return slowest, next(
        value for value in sorted({latencies[a][b] for a, b in off_diagonal}) if closes(slowest, value)
    )


def _has_ring(neighbours: list[int]) -> bool:
    """Whether the graph of at least three nodes, given as neighbour bit masks, has a Hamiltonian cycle.

    `ends[visited]` is the set of nodes at which a path from node 0 over exactly `visited` can end.
    """
    size = len(neighbours)
    ends = [0] * (1 << size)
    ends[1] = 1
    for visited in range(1, 1 << size, 2):
        if ends[visited]:
            for node in range(1, size):
                if not visited >> node & 1 and neighbours[node] & ends[visited]:
                    ends[visited | 1 << node] |= 1 << node
    return bool(ends[-1] & neighbours[0])


def spec_spans(machines: Iterable[Machine]) -> dict[str, range]:
    """Spec name -> its machines. The machines of a spec stand together."""
    spans: dict[str, range] = {}
    for m, machine in enumerate(machines):
        span = spans.get(machine.spec_name)
        assert span is None or span.stop == m, f"machines of {machine.spec_name!r} do not stand together"
        spans[machine.spec_name] = range(span.start if span else m, m + 1)
    return spans


def machine_names(machines: Sequence[Machine]) -> dict[str, range]:
    """Names of specs and of machines -> the machines they stand for."""
    names = spec_spans(machines)
    for m, machine in enumerate(machines):
        names.setdefault(machine.name, range(m, m + 1))
    return names
