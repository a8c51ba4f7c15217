"""Stage I of HexiSeq (arXiv 2605.07569): which devices form the all-to-all groups of a sequence layout.

Either a group stays within fast links: part of a machine, a machine, or a union of machines of one or several types. Or
every group has a part of each machine. Different GPU types may have different group sizes.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations, islice, pairwise, product, zip_longest

import numpy as np

from hexiopt.problem.problem import Problem
from solvers.core.partition import devices_by_machine

DeviceGroups = tuple[tuple[int, ...], ...]

_MOST_GROUPS = 256  # unless more devices need more
_LARGEST = 32  # devices that a group is expected to have at most
_MIXED = 16  # clusterings with a size of groups for each type
_FEW = 64  # devices up to which types get sizes of their own


def by_machine(problem: Problem, devices: Sequence[int]) -> list[tuple[int, ...]]:
    """`devices` grouped by machine, the fastest GPU type first."""
    machines, precision = problem.cluster.machines, problem.workload.precision
    groups = devices_by_machine(problem.cluster, sorted(devices))
    order = sorted(groups, key=lambda m: (-(machines[m].gpu.peak_flops(precision) or 0.0), machines[m].gpu.name, m))
    return [tuple(groups[m]) for m in order]


def by_type(problem: Problem, machines: Sequence[tuple[int, ...]]) -> list[DeviceGroups]:
    """Machines grouped by GPU type, in the order in which the types first occur."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for own in machines:
        found.setdefault(problem.cluster.gpu_of(own[0]).name, []).append(own)
    return list(map(tuple, found.values()))


def clusterings(problem: Problem, devices: Sequence[int]) -> list[DeviceGroups]:
    """Ways to divide all of `devices` into groups of at most as many devices as the model has heads, the plainest
    first.
    """
    most, count = problem.model.num_heads, len(devices)
    limit = max(_MOST_GROUPS, count // 8) if count > _MOST_GROUPS else count
    machines = by_machine(problem, devices)
    found = dict.fromkeys(
        groups for groups in _all(problem, machines) if len(groups) <= limit and all(len(own) <= most for own in groups)
    )
    if not found:  # groups as large as possible
        whole = [device for own in machines for device in own]
        found[_parts(whole, -(-count // most))] = None
    return list(found)


def _all(problem: Problem, machines: Sequence[tuple[int, ...]]) -> Iterator[DeviceGroups]:
    types = by_type(problem, machines)
    mixed = tuple(own for row in zip_longest(*types) for own in row if own is not None)
    sizes = sorted({1 << k for own in machines for k in range(len(own).bit_length())}, reverse=True)
    shortest = min(map(len, machines))
    yield tuple(machines)
    yield _unions(machines, len(machines))
    yield _cut(machines, 1)
    if len(machines) > 1:
        yield _across(machines, shortest)
        yield tuple(group for own in types for group in _unions(own, len(own)))
        yield tuple(group for own in types for group in _across(own, min(map(len, own))))
    for size in sizes:
        yield _cut(machines, size)
    for joined in _powers(len(machines)):
        yield _unions(machines, joined)
        if len(types) > 1:
            yield tuple(group for own in types for group in _unions(own, joined))
            yield _unions(mixed, joined)
    if len(machines) > 1:
        for parts in _powers(shortest):
            yield _across(machines, parts)
    if len(types) > 1 and sum(map(len, machines)) <= _FEW:
        ways = ([*(_cut(own, size) for size in sizes), _unions(own, len(own))] for own in types)
        yield from islice((tuple(g for part in way for g in part) for way in product(*ways)), _MIXED)


def _across(machines: Sequence[tuple[int, ...]], parts: int) -> DeviceGroups:
    """Groups that each have a part of every machine."""
    cut = [_parts(own, parts) for own in machines]
    return tuple(tuple(d for own in cut for d in own[k]) for k in range(parts))


def _powers(most: int) -> list[int]:
    """2, 4, 8, ... below `most`, and `most` itself if above 1."""
    return [*(1 << k for k in range(1, most.bit_length()) if 1 << k < most), *([most] if most > 1 else [])]


def _unions(machines: Sequence[tuple[int, ...]], joined: int) -> DeviceGroups:
    """Unions of every `joined` consecutive machines."""
    return tuple(tuple(d for own in machines[k : k + joined] for d in own) for k in range(0, len(machines), joined))


def _cut(machines: Sequence[tuple[int, ...]], size: int) -> DeviceGroups:
    """Every machine cut into parts of about `size` devices."""
    return tuple(part for own in machines for part in _parts(own, -(-len(own) // size)))


def _parts(devices: Sequence[int], count: int) -> DeviceGroups:
    """`count` consecutive parts, as equal as possible."""
    ends = [len(devices) * k // count for k in range(count + 1)]
    return tuple(tuple(devices[a:b]) for a, b in pairwise(ends) if a < b)


MachineDevices = tuple[tuple[int, ...], ...]  # devices machine by machine
_FEW_TYPES = 4  # types of GPUs of which all sets are tried


def machine_orders(problem: Problem) -> list[MachineDevices]:
    """Orders of the machines of all types, and of subsets of the types: fast ones first, or types mixed.

    For all types also the fast ones last.
    """
    rows = by_type(problem, by_machine(problem, problem.usable_devices))
    orders = (order for some in _subsets(rows) for order in _arranged(some, whole=len(some) == len(rows)))
    return list(dict.fromkeys(orders))


def _subsets(rows: list[MachineDevices]) -> Iterator[list[MachineDevices]]:
    """All subsets of types, the largest first; of many types only those without one type, the fastest ones, and single
    ones.
    """
    if len(rows) <= _FEW_TYPES:
        for count in range(len(rows), 0, -1):
            yield from map(list, combinations(rows, count))
        return
    yield rows
    for k in range(len(rows) - 1, -1, -1):
        yield rows[:k] + rows[k + 1 :]
    for k in range(len(rows) - 1, 0, -1):
        yield rows[:k]
    for row in rows:
        yield [row]


def _arranged(rows: list[MachineDevices], *, whole: bool) -> Iterator[MachineDevices]:
    yield tuple(own for row in rows for own in row)
    if whole:
        yield tuple(own for row in reversed(rows) for own in row)
    # Types mixed in proportion: each prefix has an equal fraction of every type.
    places = [((k + 0.5) / len(row), at, own) for at, row in enumerate(rows) for k, own in enumerate(row)]
    yield tuple(own for _, _, own in sorted(places))


class Signatures:
    """Keys of lists of devices: equal for lists in which equal layouts, position by position, have equal prices."""

    def __init__(self, problem: Problem) -> None:
        cluster = problem.cluster
        kinds: dict[object, int] = {}
        number = np.array([kinds.setdefault(machine.kind, len(kinds)) for machine in cluster.machines])
        place = [
            i if machine.intra_links or machine.slow else machine.interface(i)
            for machine in cluster.machines
            for i in range(machine.num_gpus)
        ]
        self._machine_of = cluster.machine_of
        self._trait = number[cluster.machine_of] * (max(place) + 1) + np.array(place)
        self._unlike = bool(cluster.groups or cluster.links)  # machines of a kind are not alike to the network

    def of(self, devices: Sequence[int]) -> bytes:
        """The key."""
        own = np.array(devices, np.int64)
        if self._unlike:
            return own.tobytes()
        _, first, which = np.unique(self._machine_of[own], return_index=True, return_inverse=True)
        return np.concatenate([self._trait[own], first[which]]).tobytes()
