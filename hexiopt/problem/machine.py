"""Machines: devices of one GPU type, the links inside them, and their names in files."""

import math
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import pairwise

from hexiopt.checks import is_whole, number_in, whole_in
from hexiopt.errors import FieldError, InputError, quoted
from hexiopt.numbers.gpus import Gpu
from hexiopt.units import GB, MICROSECOND
from hexiopt.value import Value

MAX_BANDWIDTH_GB_PER_S = 1e5
MAX_LATENCY_US = 1e7
DEFAULT_INTER_LATENCY_US = 20.0
DEFAULT_INTRA_LATENCY_US = 10.0
MAX_GPUS_PER_MACHINE = 1024
MAX_INTERFACES = 1024
MAX_PRICE_PER_HOUR = 1e6
MIN_SPEED = 0.01  # of a type's
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")  # of a machine or group
HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
NAME_RULE = "is not a name; use up to 100 letters, digits, '.', '_' and '-', not starting with '.' or '-'"
_NAMES = ("name", "spec_name", "host")
_EXACT_RING = 12


def check_name(name: object, where: str) -> None:
    """Raises FieldError where `name` is not a valid name of a machine or group."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise FieldError(f"{where}: name", name, NAME_RULE)


def check_rate(bytes_per_s: object, where: str) -> None:
    """Raises FieldError where `bytes_per_s` is not a bandwidth: above 0, infinite where unlimited."""
    if bytes_per_s != math.inf:
        number_in(bytes_per_s, where, above=0, at_most=MAX_BANDWIDTH_GB_PER_S * GB)


def check_latency(seconds: object, where: str) -> None:
    """Raises FieldError where `seconds` is not a latency."""
    number_in(seconds, where, at_least=0, at_most=MAX_LATENCY_US * MICROSECOND)


def check_price(per_hour: object, where: str) -> None:
    """Raises FieldError where `per_hour` is not a price."""
    number_in(per_hour, where, above=0, at_most=MAX_PRICE_PER_HOUR)


@dataclass(frozen=True)
class IntraLink:
    """A link inside a machine between its devices `a` < `b`, given in either order, that differs from the usual one."""

    a: int
    b: int
    bandwidth_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        where = f"link of devices {quoted(self.a)} and {quoted(self.b)}"
        check_rate(self.bandwidth_bytes_per_s, f"{where}: bandwidth_bytes_per_s")
        check_latency(self.latency_s, f"{where}: latency_s")
        if is_whole(self.a) and is_whole(self.b) and self.a > self.b:
            a, b = self.b, self.a
            object.__setattr__(self, "a", a)
            object.__setattr__(self, "b", b)


@dataclass(frozen=True, repr=False)
class Machine(Value):
    """Devices of one type that share network interfaces. Raises InputError where a value breaks its rule.

    Bandwidths are per direction: inside the machine per device, point to point (infinite with one device); between
    machines per network interface. `spec_name` is the name in the file, which `count` extends by a number. `host`, if
    stated, is the machine's host name: no price depends on it, but training refuses another host. `slow` has the
    devices that run at a share of the speed of `gpu`, and that share; see `with_speeds`.
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
    host: str | None = None
    slow: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name, "machine")
        where = f"machine {self.name}"
        check_name(self.spec_name, where)
        for name, most in (("num_gpus", MAX_GPUS_PER_MACHINE), ("num_interfaces", MAX_INTERFACES)):
            value = whole_in(getattr(self, name), f"{where}: {name}", at_least=1, at_most=most)
            object.__setattr__(self, name, value)
        check_rate(self.intra_bandwidth_bytes_per_s, f"{where}: intra_bandwidth_bytes_per_s")
        check_latency(self.intra_latency_s, f"{where}: intra_latency_s")
        check_rate(self.nic_bandwidth_bytes_per_s, f"{where}: nic_bandwidth_bytes_per_s")
        check_latency(self.nic_latency_s, f"{where}: nic_latency_s")
        if self.price_per_hour is not None:
            check_price(self.price_per_hour, f"{where}: price_per_hour")
        if self.host is not None and (not isinstance(self.host, str) or not HOST.fullmatch(self.host)):
            rule = "is not a host name; write what `hostname` prints there"
            raise FieldError(f"{where}: host", self.host, rule)
        for index, speed in self.slow:
            whole_in(index, f"{where}: slow", at_least=0, at_most=self.num_gpus - 1)
            number_in(speed, f"{where}: slow: {index}", at_least=MIN_SPEED, at_most=1.0)
        if self.num_gpus == 1:
            object.__setattr__(self, "intra_bandwidth_bytes_per_s", math.inf)
        if self.intra_links:
            self._check_intra_links(where)

    def _check_intra_links(self, where: str) -> None:
        """Refuse links of anything but two devices, and a second link of a pair; sort the links."""
        seen = set[tuple[int, int]]()
        for i, link in enumerate(self.intra_links):
            pair, rule = (link.a, link.b), None
            if not all(is_whole(device) and 0 <= device < self.num_gpus for device in pair):
                rule = f"is not a pair of the machine's devices; write two of 0 to {self.num_gpus - 1}"
            elif link.a == link.b:
                rule = "links a device with itself; name two devices"
            elif pair in seen:
                rule = "appears twice; keep one"
            if rule is not None:
                raise FieldError(f"{where}: intra_links[{i}]", list(pair), rule)
            seen.add(pair)
        object.__setattr__(self, "intra_links", tuple(sorted(self.intra_links, key=lambda link: (link.a, link.b))))

    def __repr__(self) -> str:
        return f"Machine({self.name}: {self.num_gpus} × {self.gpu.name})"

    @cached_property
    def kind(self) -> Hashable:
        """All fields of a machine except its names; equal for machines that are interchangeable by themselves."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in _NAMES)

    @cached_property
    def _pairs(self) -> dict[tuple[int, int], IntraLink]:
        return {pair: link for link in self.intra_links for pair in ((link.a, link.b), (link.b, link.a))}

    @property
    def is_uniform(self) -> bool:
        """Whether its devices are interchangeable: they have equal speeds and links, and share one interface."""
        return not self.intra_links and not self.slow and self.num_interfaces == 1

    @cached_property
    def gpus(self) -> tuple[Gpu, ...]:
        """The type of each device, at its speed."""
        slow = dict(self.slow)
        return tuple(self.gpu.at(slow[i]) if i in slow else self.gpu for i in range(self.num_gpus))

    @property
    def types(self) -> tuple[Gpu, ...]:
        """The distinct types of its devices and `gpu`; a slow GPU has a type of its own."""
        return tuple(dict.fromkeys((self.gpu, *self.gpus))) if self.slow else (self.gpu,)

    def with_speeds(self, speeds: Mapping[int, float]) -> "Machine":
        """The machine with the devices in `speeds` at these shares of their type's full speed, the others unchanged.

        If all devices are equally slow, `gpu` is that slow type; else `slow` says which devices are slow.
        """
        new = [speeds.get(i, gpu.speed) for i, gpu in enumerate(self.gpus)]
        if len(set(new)) == 1:
            return replace(self, gpu=self.gpu.at(new[0]), slow=())
        return replace(
            self, gpu=self.gpu.at(1.0), slow=tuple((i, speed) for i, speed in enumerate(new) if speed != 1.0)
        )

    def slowest(self, indices: Iterable[int]) -> Gpu:
        """The type of the slowest of some devices, which sets the speed of a group that computes together."""
        return self.gpu if not self.slow else min((self.gpus[i] for i in indices), key=lambda gpu: gpu.speed)

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

        The best ring has the fastest slowest link, then the least latency. It is exact for up to 12 devices; beyond,
        it is the better of two simple rings. One device gives (infinity, 0).
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
    """The ring of `Machine.ring` for at least three devices."""
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
        unvisited = set(range(1, size))
        while unvisited:
            here = rings[1][-1]
            rings[1].append(min(unvisited, key=lambda k: (-bandwidths[here][k], latencies[here][k], k)))
            unvisited.remove(rings[1][-1])
        scores = []
        for order in rings:
            routes = list(pairwise([*order, order[0]]))
            scores.append((min(bandwidths[a][b] for a, b in routes), -max(latencies[a][b] for a, b in routes)))
        slowest, negated = max(scores)
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
    """The machines of each spec by its name. Raises InputError unless they are consecutive."""
    spans: dict[str, range] = {}
    for m, machine in enumerate(machines):
        span = spans.get(machine.spec_name)
        if span is not None and span.stop != m:
            apart = f"machine {machine.name}: spec_name: {machine.spec_name!r} is that of earlier machines"
            raise InputError(f"{apart}; put machines of one spec together")
        spans[machine.spec_name] = range(span.start if span else m, m + 1)
    return spans


def machine_names(machines: Sequence[Machine]) -> dict[str, range]:
    """The machines that each name of a spec or of a machine stands for."""
    names = spec_spans(machines)
    for m, machine in enumerate(machines):
        names.setdefault(machine.name, range(m, m + 1))
    return names
