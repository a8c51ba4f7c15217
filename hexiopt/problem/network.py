"""The network between machines: groups, stated links, rates, latencies, and the resources that transfers share.

All values are stored per machine, network interface, group or stated link, never per pair of devices.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, permutations
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from hexiopt.errors import FieldError, InputError, closest_of_many, quoted
from hexiopt.memo import Memo
from hexiopt.problem.machine import Machine, check_latency, check_name, check_rate

MAX_TABLE_MACHINES = 16_384
MAX_GROUP_DEPTH = 16


@dataclass(frozen=True)
class Group:
    """Machines that share an uplink, such as a rack or a zone, or what lies between them (`shared_bytes_per_s`, both
    directions together), such as the memory of a host through which its cards copy. Members are machines, specs and
    other groups."""

    name: str
    members: tuple[str, ...]
    uplink_bytes_per_s: float
    latency_s: float
    shared_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        check_name(self.name, "group")
        check_rate(self.uplink_bytes_per_s, f"group {self.name}: uplink_bytes_per_s")
        check_rate(self.shared_bytes_per_s, f"group {self.name}: shared_bytes_per_s")
        check_latency(self.latency_s, f"group {self.name}: latency_s")


@dataclass(frozen=True)
class Link:
    """A stated link from the machine or spec `source` to `target`, in both directions if `both`.

    `latency_s` None leaves the pair's latency unchanged.
    """

    source: str
    target: str
    bandwidth_bytes_per_s: float
    latency_s: float | None
    both: bool

    def __post_init__(self) -> None:
        where = f"link of {quoted(self.source)} and {quoted(self.target)}"
        check_rate(self.bandwidth_bytes_per_s, f"{where}: bandwidth_bytes_per_s")
        if self.latency_s is not None:
            check_latency(self.latency_s, f"{where}: latency_s")

    def directions(self) -> tuple[tuple[str, str], ...]:
        """The ordered pairs of names that the link serves."""
        if self.both and self.source != self.target:
            return (self.source, self.target), (self.target, self.source)
        return ((self.source, self.target),)


def check_groups(groups: Sequence[Group], machines: Sequence[Machine], names: Mapping[str, range], where: str) -> None:
    """Refuse members other than machines, specs (`names`) and groups, members of two groups, and cycles of groups.

    Raises FieldError.
    """

    def refuse(g: int, rule: str) -> NoReturn:
        raise FieldError(f"{where}: groups[{g}].members", groups[g].members, rule)

    numbers = {group.name: g for g, group in enumerate(groups)}
    parent_of_machine: dict[int, str] = {}
    parent: dict[str, str] = {}
    for g, group in enumerate(groups):
        if not group.members:
            refuse(g, "is empty; name machines or groups")
        for member in group.members:
            if not isinstance(member, str) or not (member in names or member in numbers):
                hint = closest_of_many(member, [*names, *numbers]) if isinstance(member, str) else "write its name"
                refuse(g, f"has {quoted(member)}, which is not a machine or group; {hint}")
            if member in numbers:
                if member in parent:
                    refuse(g, f"has {member!r}, which is in {parent[member]!r} too; keep it in one group")
                parent[member] = group.name
            for m in names.get(member, ()):
                if m in parent_of_machine:
                    what = f"has {machines[m].name!r}, which is in {parent_of_machine[m]!r} too"
                    refuse(g, f"{what}; keep it in one group (the inner one of nested groups)")
                parent_of_machine[m] = group.name
    for g, group in enumerate(groups):
        chain = [group.name]
        while (above := parent.get(chain[-1])) is not None:
            if above in chain:
                refuse(g, f"makes the group {above!r} contain itself; remove the cycle")
            chain.append(above)
            if len(chain) > MAX_GROUP_DEPTH:
                refuse(g, f"is in more than {MAX_GROUP_DEPTH} nested groups; nest fewer")


class _Crossing(NamedTuple):
    """What a transfer crosses outwards (uplinks, and what the members of the group around both ends share) and
    inwards, the least bytes/s of it and its total latency in seconds."""

    out: tuple[int, ...]
    into: tuple[int, ...]
    bandwidth_bytes_per_s: float
    latency_s: float


class Network:
    """Rates and routes between the machines of a cluster called `name`.

    `names` has the machines that each name in groups and links stands for. Resources are numbered in this order:
    transmitting interfaces, receiving interfaces, uplinks (out and in for each group that states one), what members of
    a group share (one for each that states it), stated links (one per ordered machine pair). `capacity` [resources] is
    in bytes/s.
    """

    def __init__(
        self,
        name: str,
        machines: Sequence[Machine],
        names: Mapping[str, range],
        groups: Sequence[Group],
        links: Sequence[Link],
    ) -> None:
        self._name, self._machines, self._groups = name, machines, groups
        counts = [machine.num_interfaces for machine in machines]
        self._num_interfaces = sum(counts)
        # For each device: its machine, its index in it, and its network interface.
        self._machine_of = [m for m, machine in enumerate(machines) for _ in range(machine.num_gpus)]
        self._index = [i for machine in machines for i in range(machine.num_gpus)]
        first_interface = accumulate([0, *counts[:-1]])
        self._interface = [
            first + machine.interface(i)
            for machine, first in zip(machines, first_interface, strict=True)
            for i in range(machine.num_gpus)
        ]
        nics = np.repeat([machine.nic_bandwidth_bytes_per_s for machine in machines], counts)
        parts = [nics, nics]
        size = 2 * self._num_interfaces

        # For every group: the chain of groups around it, innermost first; for every machine: its innermost group.
        numbers = {group.name: g for g, group in enumerate(groups)}
        parents: list[int | None] = [None] * len(numbers)
        self._group_of: list[int | None] = [None] * len(machines)
        for g, group in enumerate(groups):
            for member in group.members:
                if member in numbers:
                    parents[numbers[member]] = g
                else:
                    for m in names[member]:
                        self._group_of[m] = g
        self._chains: dict[int | None, tuple[int, ...]] = {None: ()}
        for start in range(len(numbers)):
            chain, above = [], parents[start]
            while above is not None:
                chain.append(above)
                above = parents[above]
            self._chains[start] = (start, *chain)
        self._uplink: dict[int, int] = {}
        for g, group in enumerate(groups):
            if np.isfinite(group.uplink_bytes_per_s):
                self._uplink[g] = size
                parts.append(np.full(2, group.uplink_bytes_per_s))
                size += 2
        self._shared: dict[int, int] = {}
        for g, group in enumerate(groups):
            if np.isfinite(group.shared_bytes_per_s):
                self._shared[g] = size
                parts.append(np.array([group.shared_bytes_per_s]))
                size += 1
        self._crossing = Memo(self._cross)

        # For each stated link between two ranges of machines: its first resource and both ranges.
        self._links: dict[tuple[range, range], tuple[int, Link]] = {}
        for link in links:
            for source, target in link.directions():
                sources, targets = names[source], names[target]
                self._links[sources, targets] = (size, link)
                parts.append(np.full(len(sources) * len(targets), link.bandwidth_bytes_per_s))
                size += len(sources) * len(targets)
        self._runs = [(range(m, m + 1), names[machine.spec_name]) for m, machine in enumerate(machines)]
        self._plain = not links and not groups

        self.capacity: NDArray[np.float64] = np.concatenate(parts).astype(np.float64)
        self.capacity.setflags(write=False)
        self._capacities: list[float] = self.capacity.tolist()
        # Of each device: its interface as a resource, and the capacity.
        self._transmit = [(interface, self._capacities[interface]) for interface in self._interface]
        self._receive = [
            (interface, self._capacities[interface])
            for interface in (self._num_interfaces + i for i in self._interface)
        ]

    @property
    def num_resources(self) -> int:
        """The number of shared resources."""
        return len(self.capacity)

    @cached_property
    def transmitters(self) -> NDArray[np.int64]:
        """`transmit_interface` of every device."""
        return np.array(self._interface)

    @cached_property
    def receivers(self) -> NDArray[np.int64]:
        """`receive_interface` of every device."""
        return self._num_interfaces + self.transmitters

    def transmit_interface(self, device: int) -> int:
        """The resource through which a device sends to other machines."""
        return self._interface[device]

    def receive_interface(self, device: int) -> int:
        """The resource through which a device receives from other machines."""
        return self._num_interfaces + self._interface[device]

    @property
    def shares_inside(self) -> bool:
        """Whether transfers between the members of some group share something."""
        return bool(self._shared)

    def group_of(self, machine: int) -> int | None:
        """The number of the innermost group of a machine; None where it is in none."""
        return self._group_of[machine]

    def path(self, a: int, b: int) -> tuple[float, float, tuple[tuple[int, float], ...]]:
        """The path of a transfer from device a to device b: seconds of latency, bytes/s of the link inside a machine
        (infinite between machines), and the shared resources that it crosses, each with its bytes/s."""
        first, second = self._machine_of[a], self._machine_of[b]
        if first == second:
            machine, i, j = self._machines[first], self._index[a], self._index[b]
            return machine.pair_latency(i, j), machine.pair_bandwidth(i, j), ()
        ends: tuple[tuple[int, float], ...] = (self._transmit[a], self._receive[b])
        if not self._plain:
            between = [(resource, self._capacities[resource]) for resource in self.route(a, b)[1:-1]]
            ends = ends[0], *between, ends[1]
        return self.pair_latency(a, b), math.inf, ends

    def route(self, a: int, b: int) -> tuple[int, ...]:
        """The resources that a transfer from device a to device b of another machine crosses, in order."""
        transmit, receive = self._interface[a], self._num_interfaces + self._interface[b]
        if self._plain:
            return transmit, receive
        first, second = self._machine_of[a], self._machine_of[b]
        assert first != second, "no route inside a machine"
        crossing = self._crossing[self._group_of[first], self._group_of[second]]
        entry = self._link(first, second)
        link = () if entry is None else (entry[0],)
        return (transmit, *crossing.out, *link, *crossing.into, receive)

    def pair_bandwidth(self, a: int, b: int) -> float:
        """Bytes/s from device a to device b without other traffic; infinite from a device to itself."""
        machine = self._machine_of[a]
        if machine == self._machine_of[b]:
            return self._machines[machine].pair_bandwidth(self._index[a], self._index[b])
        machines = self._machines
        second = self._machine_of[b]
        rate = min(machines[machine].nic_bandwidth_bytes_per_s, machines[second].nic_bandwidth_bytes_per_s)
        if self._plain:
            return rate
        entry = self._link(machine, second)
        if entry is not None:
            rate = min(rate, entry[1].bandwidth_bytes_per_s)
        crossing = self._crossing[self._group_of[machine], self._group_of[second]]
        return min(rate, crossing.bandwidth_bytes_per_s)

    def pair_latency(self, a: int, b: int) -> float:
        """Seconds of latency from device a to device b; zero from a device to itself."""
        first, second = self._machine_of[a], self._machine_of[b]
        machines = self._machines
        if first == second:
            return machines[first].pair_latency(self._index[a], self._index[b])
        latency = max(machines[first].nic_latency_s, machines[second].nic_latency_s)
        if self._plain:
            return latency
        entry = self._link(first, second)
        if entry is not None and entry[1].latency_s is not None:
            latency = entry[1].latency_s
        return latency + self._crossing[self._group_of[first], self._group_of[second]].latency_s

    @cached_property
    def bandwidth(self) -> NDArray[np.float64]:
        """Bytes/s between one interface of machine a and one of machine b, unshared [machines, machines].

        The diagonal is the machine's usual internal link (infinite with one device).
        Raises InputError beyond 16,384 machines.
        """
        self._check_table()
        machines = self._machines
        nic = np.array([machine.nic_bandwidth_bytes_per_s for machine in machines])
        table: NDArray[np.float64] = np.minimum(nic[:, None], nic[None, :])
        for (sources, targets), (_, link) in self._links.items():
            block = table[sources.start : sources.stop, targets.start : targets.stop]
            np.minimum(block, link.bandwidth_bytes_per_s, out=block)
        for g, inside, outside in self._sides():
            uplink = self._groups[g].uplink_bytes_per_s
            for cells in (np.ix_(inside, outside), np.ix_(outside, inside)):
                table[cells] = np.minimum(table[cells], uplink)
        for a, b in self._pairs_inside():
            table[a, b] = min(table[a, b], self._crossing[self._group_of[a], self._group_of[b]].bandwidth_bytes_per_s)
        np.fill_diagonal(table, [machine.intra_bandwidth_bytes_per_s for machine in machines])
        table.setflags(write=False)
        return table

    @cached_property
    def latency_s(self) -> NDArray[np.float64]:
        """Seconds between machine a and machine b [machines, machines]; the diagonal is the internal latency.

        Raises InputError beyond 16,384 machines.
        """
        self._check_table()
        machines = self._machines
        nic = np.array([machine.nic_latency_s for machine in machines])
        table: NDArray[np.float64] = np.maximum(nic[:, None], nic[None, :])
        for (sources, targets), (_, link) in self._links.items():
            if link.latency_s is not None:
                table[sources.start : sources.stop, targets.start : targets.stop] = link.latency_s
        for g, inside, outside in self._sides():
            for cells in (np.ix_(inside, outside), np.ix_(outside, inside)):
                table[cells] += self._groups[g].latency_s
        np.fill_diagonal(table, [machine.intra_latency_s for machine in machines])
        table.setflags(write=False)
        return table

    def resource_name(self, resource: int) -> str:
        """The name of a resource, in words."""
        count = self._num_interfaces
        if resource < 2 * count:
            direction = "transmit" if resource < count else "receive"
            index = resource % count
            for machine in self._machines:
                if index < machine.num_interfaces:
                    return f"{machine.name} interface {index} {direction}"
                index -= machine.num_interfaces
        for g, first in self._uplink.items():
            if first <= resource < first + 2:
                return f"{self._groups[g].name} uplink {'in' if resource > first else 'out'}"
        for g, only in self._shared.items():
            if resource == only:
                return f"{self._groups[g].name} inside"
        for (sources, targets), (first, _) in self._links.items():
            if first <= resource < first + len(sources) * len(targets):
                ends = divmod(resource - first, len(targets))
                source, target = (self._machines[run[k]].name for run, k in zip((sources, targets), ends, strict=True))
                return f"link {source} to {target}"
        raise IndexError(resource)

    def _check_table(self) -> None:
        count = len(self._machines)
        if count > MAX_TABLE_MACHINES:
            raise InputError(
                f"cluster {self._name}: {count} machines are more than the {MAX_TABLE_MACHINES} that "
                "can be planned at once; plan a part of the cluster"
            )

    def _pairs_inside(self) -> Iterator[tuple[int, int]]:
        """The ordered pairs of machines between which something is shared inside a group."""
        members = [np.flatnonzero([g in self._chains[of] for of in self._group_of]).tolist() for g in self._shared]
        return chain.from_iterable(permutations(inside, 2) for inside in members)

    def _sides(self) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """For each group: its index, the machines in it at any depth, and the machines outside."""
        inside: list[list[int]] = [[] for _ in self._groups]
        for m, group in enumerate(self._group_of):
            for g in self._chains[group]:
                inside[g].append(m)
        every = np.arange(len(self._group_of))
        return [(g, np.array(members), np.delete(every, members)) for g, members in enumerate(inside)]

    def _cross(self, ends: tuple[int | None, int | None]) -> _Crossing:
        """What is crossed between machines whose innermost groups are a and b."""
        a, b = ends
        groups = self._groups
        out = [g for g in self._chains[a] if g not in self._chains[b]]
        into = [g for g in reversed(self._chains[b]) if g not in self._chains[a]]
        around = next((g for g in self._chains[a] if g in self._chains[b]), None)
        rates = [groups[g].uplink_bytes_per_s for g in (*out, *into)]
        shared = () if around is None or around not in self._shared else (self._shared[around],)
        rates += [groups[around].shared_bytes_per_s for _ in shared if around is not None]
        return _Crossing(
            out=(*(self._uplink[g] for g in out if g in self._uplink), *shared),
            into=tuple(self._uplink[g] + 1 for g in into if g in self._uplink),
            bandwidth_bytes_per_s=min(rates, default=math.inf),
            latency_s=sum(groups[g].latency_s for g in (*out, *into)),
        )

    def _link(self, first: int, second: int) -> tuple[int, Link] | None:
        """The resource of the stated link from machine `first` to machine `second`, and the link."""
        if not self._links:
            return None
        for sources in self._runs[first]:
            for targets in self._runs[second]:
                entry = self._links.get((sources, targets))
                if entry is not None:
                    start, link = entry
                    offset = (first - sources.start) * len(targets) + second - targets.start
                    return start + offset, link
        return None
