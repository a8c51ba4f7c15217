"""Clusters: machines of one GPU type each, the links inside them and the network between them."""

import math
import re
from collections.abc import Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hexiopt.errors import InputError, closest
from hexiopt.gpus import Gpu, catalogue, find_gpu, gpu_from_section, gpu_to_dict
from hexiopt.network import Network
from hexiopt.reading import Section, read_mapping
from hexiopt.synthetic import resolve_synthetic
from hexiopt.units import GB, MICROSECOND

MAX_BANDWIDTH_GB_PER_S = 1e5
MAX_LATENCY_US = 1e7
MAX_GPUS_PER_MACHINE = 1024
MAX_INTERFACES = 64
MAX_MACHINES = 100_000
MAX_DEVICES = 1_000_000
MAX_PRICE_PER_HOUR = 1e6
MAX_GROUP_DEPTH = 16
MAX_LINK_PAIRS = 4_000_000
DEFAULT_INTER_LATENCY_US = 20.0
DEFAULT_INTRA_LATENCY_US = 10.0
_EXACT_RING = 12
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_NAME_RULE = "is not a name; use up to 100 letters, digits, '.', '_' and '-', not starting with '.' or '-'"


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


@dataclass(frozen=True)
class Group:
    """Machines behind a common uplink: a rack or a zone. Members are machines, specs and other groups."""

    name: str
    members: tuple[str, ...]
    uplink_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True)
class Link:
    """A stated link from machine (or spec) `source` to `target`, in both directions where `both`.

    `latency_s` None leaves the pair's latency as it is.
    """

    source: str
    target: str
    bandwidth_bytes_per_s: float
    latency_s: float | None
    both: bool

    def directions(self) -> tuple[tuple[str, str], ...]:
        """The ordered pairs of names that the link serves."""
        if self.both and self.source != self.target:
            return (self.source, self.target), (self.target, self.source)
        return ((self.source, self.target),)


@dataclass(frozen=True)
class Cluster:
    """Machines and the network between them. Devices are numbered from 0, machine by machine.

    `inter_bandwidth_bytes_per_s` is what machines without an own figure have per network interface
    (infinite where not stated), `inter_latency_s` the latency between them.
    """

    name: str
    machines: tuple[Machine, ...]
    inter_bandwidth_bytes_per_s: float
    inter_latency_s: float
    groups: tuple[Group, ...] = ()
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        assert self.machines
        for name, span in _spans(self.machines).items():
            expanded = [self.machines[m] for m in span]
            assert len(expanded) == 1 or all(
                machine.name == f"{name}-{i}" and machine.kind == expanded[0].kind for i, machine in enumerate(expanded)
            ), f"machines of {name!r} are not one numbered run of equal machines"

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @cached_property
    def num_devices(self) -> int:
        """The number of devices."""
        return sum(machine.num_gpus for machine in self.machines)

    @cached_property
    def first_device(self) -> NDArray[np.int64]:
        """The first device of each machine [num_machines]."""
        sizes = [machine.num_gpus for machine in self.machines]
        return _frozen(np.cumsum([0, *sizes[:-1]], dtype=np.int64))

    @cached_property
    def machine_of(self) -> NDArray[np.int64]:
        """The machine of each device [num_devices]."""
        sizes = [machine.num_gpus for machine in self.machines]
        return _frozen(np.repeat(np.arange(len(sizes), dtype=np.int64), sizes))

    @cached_property
    def index_in_machine(self) -> NDArray[np.int64]:
        """The index of each device in its machine [num_devices]."""
        return _frozen(np.arange(self.num_devices, dtype=np.int64) - self.first_device[self.machine_of])

    @cached_property
    def types(self) -> tuple[Gpu, ...]:
        """The distinct GPU types, in the order of the machines."""
        return tuple(dict.fromkeys(machine.gpu for machine in self.machines))

    @cached_property
    def network(self) -> Network:
        """Rates, latencies and shared resources between machines."""
        return Network(self)

    @cached_property
    def _names(self) -> dict[str, range]:
        return _all_names(self.machines)

    def machines_named(self, name: str) -> range:
        """The machines called `name`, or all machines of the spec `name`; KeyError for neither."""
        return self._names[name]

    def gpu_of(self, device: int) -> Gpu:
        """The type of a device."""
        return self.machines[int(self.machine_of[device])].gpu

    def device_name(self, device: int) -> str:
        """`machine:index` of a device."""
        return f"{self.machines[int(self.machine_of[device])].name}:{self.index_in_machine[device]}"

    def device_index(self, name: str, where: str = "device") -> int:
        """The number of the device called `machine:index`.

        Raises InputError naming `where` for anything else, with the closest machine.
        """
        machine_name, colon, digits = name.rpartition(":")
        shown = _shown(name)
        if not colon or not re.fullmatch("0|[1-9][0-9]*", digits):
            raise InputError(f"{where}: {shown} is not a device; write machine:index, such as a:0")
        span = self._names.get(machine_name)
        if span is None or self.machines[span[0]].name != machine_name:
            if span is not None:
                hint = f"did you mean {self.machines[span[0]].name}?"
            else:
                hint = _hint(machine_name, (machine.name for machine in self.machines))
            raise InputError(f"{where}: {shown} is on no machine of the cluster; {hint}")
        count = self.machines[span[0]].num_gpus
        if len(digits) > 4 or int(digits) >= count:
            raise InputError(
                f"{where}: {shown} is out of range; {machine_name} has {count} device(s), "
                f"{machine_name}:0 to {machine_name}:{count - 1}"
            )
        return int(self.first_device[span[0]]) + int(digits)

    def devices_named(self, name: str, where: str = "device") -> range:
        """The devices of the machine, the spec or the single device (`machine:index`) called `name`.

        Raises InputError naming `where` for anything else, with the closest machine.
        """
        if ":" in name:
            device = self.device_index(name, where)
            return range(device, device + 1)
        span = self._names.get(name)
        if span is None:
            hint = _hint(name, self._names)
            raise InputError(f"{where}: {_shown(name)} is no machine of the cluster; {hint}")
        first, last = int(self.first_device[span[0]]), int(self.first_device[span[-1]])
        return range(first, last + self.machines[span[-1]].num_gpus)

    def total_peak_flops(self, precision: str) -> float:
        """Σ dense peak of all devices in FLOP/s; devices without the precision count as zero."""
        return math.fsum(machine.num_gpus * (machine.gpu.peak_flops(precision) or 0.0) for machine in self.machines)


def _frozen(array: NDArray[np.int64]) -> NDArray[np.int64]:
    array.setflags(write=False)
    return array


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _hint(word: str, names: Iterable[str]) -> str:
    """The closest of the first 2,000 names, or some of them."""
    text = closest(word[:100], islice(names, 2000))
    return text if len(text) <= 300 else text[:300] + " ..."


def _spans(machines: Iterable[Machine]) -> dict[str, range]:
    """Spec name -> its machines. The machines of a spec stand together."""
    spans: dict[str, range] = {}
    for m, machine in enumerate(machines):
        span = spans.get(machine.spec_name)
        assert span is None or span.stop == m, f"machines of {machine.spec_name!r} do not stand together"
        spans[machine.spec_name] = range(span.start if span else m, m + 1)
    return spans


def _all_names(machines: tuple[Machine, ...]) -> dict[str, range]:
    """Names of specs and of machines -> the machines they stand for."""
    names = _spans(machines)
    for m, machine in enumerate(machines):
        names.setdefault(machine.name, range(m, m + 1))
    return names


# ------------------------------------------------------------------ reading


def read_cluster(path: str | Path) -> Cluster:
    """The cluster in a file. Raises InputError naming file and key."""
    return cluster_from_section(Section(read_mapping(path), str(path)))


def cluster_from_section(section: Section) -> Cluster:
    """The cluster that a mapping in the file format describes. Raises InputError naming the key."""
    if "synthetic" in section:
        section = resolve_synthetic(section)
    name = section.text("name")
    if len(name) > 100 or not name.isprintable():
        section.fail("name", "is not a name; use up to 100 printable characters")
    if "profile" in section:
        section.fail("profile", "is not read yet; leave it out and state measured values under 'gpus'")
    extra = _read_gpus(section.section("gpus", optional=True))
    inter = section.section("inter_machine", optional=True)
    inter_bandwidth = _bandwidth(inter, "bandwidth_gb_per_s") if "bandwidth_gb_per_s" in inter else math.inf
    inter_latency = _latency(inter, "latency_us", DEFAULT_INTER_LATENCY_US * MICROSECOND)
    inter.done()
    machines = _read_machines(section, extra, inter_bandwidth, inter_latency)
    if len(machines) > 1 and any(math.isinf(machine.nic_bandwidth_bytes_per_s) for machine in machines):
        key = inter.at("bandwidth_gb_per_s")
        raise InputError(f"{key}: is missing; state it, in GB/s per network interface and direction")
    names = _all_names(machines)
    groups = _read_groups(section, machines, names)
    links = _read_links(section, machines, names)
    section.done()
    return Cluster(name, machines, inter_bandwidth, inter_latency, groups, links)


def _bandwidth(section: Section, key: str, default: float | None = None) -> float:
    """Bytes/s from GB/s; `default` (bytes/s) where the key is absent and a default is given."""
    if key not in section and default is not None:
        return default
    value: float = section.number(key, above=0, at_most=MAX_BANDWIDTH_GB_PER_S)
    return value * GB


def _latency(section: Section, key: str, default: float) -> float:
    """Seconds from µs; `default` (seconds) where the key is absent."""
    if key not in section:
        return default
    value: float = section.number(key, at_least=0, at_most=MAX_LATENCY_US)
    return value * MICROSECOND


def _new_name(section: Section, *taken: Container[str]) -> str:
    name: str = section.text("name")
    if not _NAME.fullmatch(name):
        section.fail("name", _NAME_RULE)
    if any(name in names for names in taken):
        section.fail("name", "stands twice; give machines and groups different names")
    return name


def _read_gpus(section: Section) -> dict[str, Gpu]:
    known = catalogue()
    names = section.keys()
    return {name: gpu_from_section(section.section(name), name, known.get(name)) for name in names}


def _read_machines(
    section: Section, extra: Mapping[str, Gpu], inter_bandwidth: float, inter_latency: float
) -> tuple[Machine, ...]:
    machines: list[Machine] = []
    taken: dict[str, bool] = {}
    num_devices = 0
    entries = section.sections("machines")
    if not entries:
        section.fail("machines", "is empty; state at least one machine")
    for entry in entries:
        machine = _read_machine(entry, extra, inter_bandwidth, inter_latency, taken)
        count = entry.integer("count", at_least=1, at_most=MAX_MACHINES, default=1)
        entry.done()
        num_devices += count * machine.num_gpus
        if len(machines) + count > MAX_MACHINES or num_devices > MAX_DEVICES:
            raise InputError(
                f"{entry.at('count')}: makes more than {MAX_MACHINES} machines or {MAX_DEVICES} devices "
                "in all; state fewer"
            )
        taken[machine.spec_name] = True
        if count == 1:
            machines.append(machine)
            continue
        for i in range(count):
            name = f"{machine.name}-{i}"
            if name in taken:
                entry.fail("name", f"with its count makes a second machine {name!r}; give it another name")
            taken[name] = True
            machines.append(replace(machine, name=name))
    return tuple(machines)


def _read_machine(
    entry: Section,
    extra: Mapping[str, Gpu],
    inter_bandwidth: float,
    inter_latency: float,
    taken: Mapping[str, bool],
) -> Machine:
    name = _new_name(entry, taken)
    gpu = find_gpu(entry.text("gpu"), extra, entry.at("gpu"))
    num_gpus = entry.integer("num_gpus", at_least=1, at_most=MAX_GPUS_PER_MACHINE)
    bandwidth = math.inf
    if num_gpus > 1 or "intra_bandwidth_gb_per_s" in entry:
        bandwidth = _bandwidth(entry, "intra_bandwidth_gb_per_s")
    latency = _latency(entry, "intra_latency_us", DEFAULT_INTRA_LATENCY_US * MICROSECOND)
    price = None
    if "price_per_hour" in entry:
        price = entry.number("price_per_hour", above=0, at_most=MAX_PRICE_PER_HOUR)
    return Machine(
        name=name,
        spec_name=name,
        gpu=gpu,
        num_gpus=num_gpus,
        intra_bandwidth_bytes_per_s=bandwidth if num_gpus > 1 else math.inf,
        intra_latency_s=latency,
        intra_links=_read_intra_links(entry, num_gpus, latency),
        num_interfaces=entry.integer("network_interfaces", at_least=1, at_most=MAX_INTERFACES, default=1),
        nic_bandwidth_bytes_per_s=_bandwidth(entry, "nic_bandwidth_gb_per_s", inter_bandwidth),
        nic_latency_s=_latency(entry, "nic_latency_us", inter_latency),
        price_per_hour=price,
    )


def _read_intra_links(entry: Section, num_gpus: int, latency: float) -> tuple[IntraLink, ...]:
    links: dict[tuple[int, int], IntraLink] = {}
    for section in entry.sections("intra_links", optional=True):
        pair = section.items("between")
        whole = [value for value in pair if isinstance(value, int) and not isinstance(value, bool)]
        if len(pair) != 2 or len(whole) != 2 or not all(0 <= value < num_gpus for value in whole):
            section.fail("between", f"is not a pair of the machine's devices; write two of 0 to {num_gpus - 1}")
        a, b = sorted(whole)
        if a == b:
            section.fail("between", "links a device with itself; name two devices")
        if (a, b) in links:
            section.fail("between", "stands twice; keep one")
        bandwidth = _bandwidth(section, "bandwidth_gb_per_s")
        links[a, b] = IntraLink(a, b, bandwidth, _latency(section, "latency_us", latency))
        section.done()
    return tuple(links[pair] for pair in sorted(links))


def _read_groups(section: Section, machines: tuple[Machine, ...], names: Mapping[str, range]) -> tuple[Group, ...]:
    entries = section.sections("groups", optional=True)
    numbers: dict[str, int] = {}
    for g, entry in enumerate(entries):
        numbers[_new_name(entry, names, numbers)] = g
    groups = []
    parent_of_machine: dict[int, str] = {}
    parent: dict[str, str] = {}
    for name, entry in zip(numbers, entries, strict=True):
        members = entry.items("members")
        if not members:
            entry.fail("members", "is empty; name machines or groups")
        for member in members:
            if not isinstance(member, str) or not (member in names or member in numbers):
                hint = _hint(member, [*names, *numbers]) if isinstance(member, str) else "write its name"
                entry.fail("members", f"has {_shown(member)}, which is no machine or group; {hint}")
            if member in numbers:
                if member in parent:
                    entry.fail("members", f"has {member!r}, which is in {parent[member]!r} too; keep it in one group")
                parent[member] = name
            for m in names.get(member, ()):
                if m in parent_of_machine:
                    entry.fail(
                        "members",
                        f"has {machines[m].name!r}, which is in {parent_of_machine[m]!r} too; "
                        "keep it in one group (the inner one of nested groups)",
                    )
                parent_of_machine[m] = name
        uplink = _bandwidth(entry, "uplink_gb_per_s", math.inf)
        groups.append(Group(name, tuple(members), uplink, _latency(entry, "latency_us", 0.0)))
        entry.done()
    for name, entry in zip(numbers, entries, strict=True):
        chain = [name]
        while (above := parent.get(chain[-1])) is not None:
            if above in chain:
                entry.fail("members", f"makes the group {above!r} contain itself; untie the groups")
            chain.append(above)
            if len(chain) > MAX_GROUP_DEPTH:
                entry.fail("members", f"stands in more than {MAX_GROUP_DEPTH} nested groups; nest fewer")
    return tuple(groups)


def _read_links(section: Section, machines: tuple[Machine, ...], names: Mapping[str, range]) -> tuple[Link, ...]:
    links = []
    covered = _Covered(machines)
    num_pairs = 0
    for entry in section.sections("links", optional=True):
        both = "between" in entry
        if both:
            ends = entry.items("between")
            if len(ends) != 2:
                entry.fail("between", "is not a pair; name two machines")
            keys = ["between", "between"]
        else:
            keys = ["from", "to"]
            ends = [entry.raw(key) for key in keys]
        for key, end in zip(keys, ends, strict=True):
            if not isinstance(end, str) or end not in names:
                hint = _hint(end, names) if isinstance(end, str) else "write its name"
                entry.fail(key, f"names {_shown(end)}, which is no machine; {hint}")
        if names[ends[0]] == names[ends[1]] and len(names[ends[0]]) == 1:
            entry.fail(keys[1], "links a machine with itself; name two machines")
        latency = _latency(entry, "latency_us", math.nan)
        link = Link(
            ends[0],
            ends[1],
            _bandwidth(entry, "bandwidth_gb_per_s"),
            None if math.isnan(latency) else latency,
            both,
        )
        entry.done()
        for source, target in link.directions():
            num_pairs += len(names[source]) * len(names[target])
            if num_pairs > MAX_LINK_PAIRS:
                entry.fail(keys[0], f"makes more than {MAX_LINK_PAIRS} linked machine pairs; use groups")
            if covered.add(source, target):
                entry.fail(keys[0], "covers a pair of machines that has a link already; keep one link")
        links.append(link)
    return tuple(links)


class _Covered:
    """The ordered machine pairs that have a stated link, kept as pairs of names.

    Names are whole specs or single machines, so that two pairs of names meet where both their ends do. A spec
    linked with one of its own machines leaves out that machine's pair with itself, where nothing can meet.
    """

    def __init__(self, machines: tuple[Machine, ...]) -> None:
        self._spec = {machine.name: machine.spec_name for machine in machines}
        self._noted: dict[tuple[str, str], _Noted] = {}

    def add(self, source: str, target: str) -> bool:
        """Note the pair of names; whether a machine pair of it was noted before."""
        specs = self._spec.get(source, source), self._spec.get(target, target)
        noted = self._noted.setdefault(specs, _Noted())
        ends = source, target
        whole = source == specs[0], target == specs[1]
        if all(whole):
            clash = bool(noted.pairs)
        elif not any(whole):
            clash = not noted.pairs.isdisjoint({specs, ends, (specs[0], target), (source, specs[1])})
        else:
            single = 1 if whole[0] else 0
            other = noted.against_spec[1 - single]
            harmless = specs[0] == specs[1] and ends[single] in other
            clash = specs in noted.pairs or ends[single] in noted.singles[single] or len(other) > harmless
        noted.pairs.add(ends)
        for end in (0, 1):
            if not whole[end]:
                noted.singles[end].add(ends[end])
                if whole[1 - end]:
                    noted.against_spec[end].add(ends[end])
        return clash


class _Noted:
    """Pairs of names between two specs; single machines at each end, and those paired with a whole spec."""

    def __init__(self) -> None:
        self.pairs: set[tuple[str, str]] = set()
        self.singles: tuple[set[str], set[str]] = (set(), set())
        self.against_spec: tuple[set[str], set[str]] = (set(), set())


# ------------------------------------------------------------------ writing


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """The cluster in the file format, defaults filled in; reading it gives an equal cluster."""
    inter: dict[str, Any] = {"latency_us": _in_file(cluster.inter_latency_s, MICROSECOND)}
    if math.isfinite(cluster.inter_bandwidth_bytes_per_s):
        inter["bandwidth_gb_per_s"] = _in_file(cluster.inter_bandwidth_bytes_per_s, GB)
    known = catalogue()
    return {
        "name": cluster.name,
        "inter_machine": inter,
        "machines": [
            _machine_to_dict(cluster.machines[span[0]], len(span)) for span in _spans(cluster.machines).values()
        ],
        "groups": [
            {
                "name": group.name,
                "members": list(group.members),
                "latency_us": _in_file(group.latency_s, MICROSECOND),
                **_finite("uplink_gb_per_s", group.uplink_bytes_per_s),
            }
            for group in cluster.groups
        ],
        "links": [_link_to_dict(link) for link in cluster.links],
        "gpus": {gpu.name: gpu_to_dict(gpu) for gpu in cluster.types if known.get(gpu.name) != gpu},
    }


def _machine_to_dict(machine: Machine, count: int) -> dict[str, Any]:
    return {
        "name": machine.spec_name,
        "gpu": machine.gpu.name,
        "num_gpus": machine.num_gpus,
        "count": count,
        **_finite("intra_bandwidth_gb_per_s", machine.intra_bandwidth_bytes_per_s),
        "intra_latency_us": _in_file(machine.intra_latency_s, MICROSECOND),
        "intra_links": [
            {
                "between": [link.a, link.b],
                "bandwidth_gb_per_s": _in_file(link.bandwidth_bytes_per_s, GB),
                "latency_us": _in_file(link.latency_s, MICROSECOND),
            }
            for link in machine.intra_links
        ],
        "network_interfaces": machine.num_interfaces,
        **_finite("nic_bandwidth_gb_per_s", machine.nic_bandwidth_bytes_per_s),
        "nic_latency_us": _in_file(machine.nic_latency_s, MICROSECOND),
        **({} if machine.price_per_hour is None else {"price_per_hour": machine.price_per_hour}),
    }


def _link_to_dict(link: Link) -> dict[str, Any]:
    ends: dict[str, Any] = (
        {"between": [link.source, link.target]} if link.both else {"from": link.source, "to": link.target}
    )
    ends["bandwidth_gb_per_s"] = _in_file(link.bandwidth_bytes_per_s, GB)
    if link.latency_s is not None:
        ends["latency_us"] = _in_file(link.latency_s, MICROSECOND)
    return ends


def _finite(key: str, bytes_per_s: float) -> dict[str, float]:
    return {key: _in_file(bytes_per_s, GB)} if math.isfinite(bytes_per_s) else {}


def _in_file(value: float, unit: float) -> float:
    """The number in a file that reads back, times `unit`, as exactly `value`; a short one where it can be."""
    quotient = value / unit
    below, above = math.nextafter(quotient, 0.0), math.nextafter(quotient, math.inf)
    outer = math.nextafter(below, 0.0), math.nextafter(above, math.inf)
    for candidate in (float(f"{quotient:.12g}"), quotient, below, above, *outer):
        if candidate * unit == value:
            return candidate
    return quotient
