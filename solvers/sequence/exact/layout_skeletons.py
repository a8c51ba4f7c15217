"""Skeletons: the parts of a sequence layout other than tokens and heads: its groups, their order, its policy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product

from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from solvers.sequence.grouping import DeviceGroups, Signatures


@dataclass(frozen=True)
class LayoutSkeleton:
    """Ordered groups of devices, the token order, and a recompute policy."""

    groups: DeviceGroups
    order: str
    policy: str

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of all groups, in order."""
        return tuple(d for own in self.groups for d in own)

    def layout(self, tokens: Sequence[int], heads: Sequence[int]) -> SequenceParallel:
        """The layout with these tokens and heads, in the order of `devices`."""
        each = iter(zip(tokens, heads, strict=True))
        found = []
        for own in self.groups:
            mine = [next(each) for _ in own]
            found.append(SequenceGroup(own, tuple(t for t, _ in mine), tuple(h for _, h in mine)))
        return SequenceParallel(tuple(found), self.order)


def alike(problem: Problem, a: int, b: int) -> bool:
    """Whether exchanging two devices changes nothing: equal GPUs that share an interface of a machine."""
    cluster = problem.cluster
    m, index = int(cluster.machine_of[a]), cluster.index_in_machine
    machine = cluster.machines[m]
    if m != int(cluster.machine_of[b]) or machine.intra_links or cluster.type_of[a] != cluster.type_of[b]:
        return False
    return machine.interface(int(index[a])) == machine.interface(int(index[b]))


def group_orders(signatures: Signatures, devices: Sequence[int], most: int) -> list[DeviceGroups]:
    """All ordered divisions of `devices` into groups of at most `most`; one representative of equivalent divisions."""
    found: dict[object, DeviceGroups] = {}
    for groups in _ordered(tuple(devices), most):
        key = (tuple(map(len, groups)), signatures.of([d for own in groups for d in own]))
        found.setdefault(key, groups)
    return list(found.values())


def _ordered(devices: tuple[int, ...], most: int) -> Iterator[DeviceGroups]:
    if not devices:
        yield ()
        return
    for size in range(1, min(most, len(devices)) + 1):
        for own in combinations(devices, size):
            rest = tuple(d for d in devices if d not in own)
            for others in _ordered(rest, most):
                yield (own, *others)


def alignments(
    model: ModelSpec, signatures: Signatures, groups: DeviceGroups, heads: Sequence[int]
) -> list[tuple[DeviceGroups, tuple[int, ...]]]:
    """The orders of devices within their groups, which determine who holds which heads, with the heads of each device.

    One representative of equivalent orders. In a single group where every query head has its own key-value head, the
    order does not matter.
    """
    if len(groups) == 1 and model.num_kv_heads == model.num_heads:
        return [(groups, tuple(heads))]
    held = dict(zip((d for own in groups for d in own), heads, strict=True))
    found: dict[object, tuple[DeviceGroups, tuple[int, ...]]] = {}
    for turned in product(*map(permutations, groups)):
        row = [d for own in turned for d in own]
        key = (signatures.of(row), tuple(held[d] for d in row))
        found.setdefault(key, (turned, key[1]))
    return list(found.values())


def device_sets(signatures: Signatures, devices: Sequence[int], count: int, most: int) -> list[DeviceGroups]:
    """All unordered choices of `count` disjoint sets of at most `most` devices; one representative of equivalent
    choices.
    """
    found: dict[object, DeviceGroups] = {}
    for chosen in _disjoint(tuple(devices), count, most):
        sets = tuple(sorted(chosen, key=len))
        key = (tuple(map(len, sets)), signatures.of([d for own in sets for d in own]))
        found.setdefault(key, sets)
    return list(found.values())


def _disjoint(devices: tuple[int, ...], count: int, most: int) -> Iterator[DeviceGroups]:
    """Disjoint sets in ascending order of their first devices."""
    if not count:
        yield ()
        return
    for k, first in enumerate(devices):
        rest = devices[k + 1 :]
        for size in range(min(most, len(rest) + 1)):
            for others in combinations(rest, size):
                left = tuple(d for d in rest if d not in others)
                for more in _disjoint(left, count - 1, most):
                    yield ((first, *others), *more)
