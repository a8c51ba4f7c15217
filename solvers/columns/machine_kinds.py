"""Machines that a chain may take for one another: equal hardware, as many usable devices, behind the same uplinks."""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hexiopt.problem.problem import Problem
from solvers.frame.starts import kinds

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Uplink:
    """What joins some machines with the others, in bytes/s and direction."""

    machines: frozenset[int]
    bytes_per_s: float


class MachineKinds:
    """The kinds of the machines with usable devices, slowest first.

    `machines[k]` are those of kind k, `supply[k]` says how many they are, `num_gpus[k]` how many usable devices each
    has, `nic_bytes_per_s[k]` what all its interfaces send, `inside_bytes_per_s[k]` what a device sends to another in
    its machine. `places` says, of all places with machines, behind which uplinks they are.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.devices = problem, problem.usable_by_machine
        self.uplinks = _uplinks(problem)
        found: list[tuple[int, ...]] = []
        for equal in kinds(problem):
            behind: dict[tuple[bool, ...], list[int]] = defaultdict(list)
            for machine in equal:
                behind[tuple(machine in uplink.machines for uplink in self.uplinks)].append(machine)
            found += map(tuple, behind.values())
        self.machines = tuple(found)
        self.kind_of = {machine: k for k, own in enumerate(found) for machine in own}
        self.places = sorted({self.place_of(kind) for kind in range(len(found))})
        self.supply: Floats = np.array([len(own) for own in found], float)
        self.num_gpus = tuple(len(self.devices[own[0]]) for own in found)
        specs = [problem.cluster.machines[own[0]] for own in found]
        self.nic_bytes_per_s: Floats = np.array([m.num_interfaces * m.nic_bandwidth_bytes_per_s for m in specs])
        self.inside_bytes_per_s: Floats = np.array([m.intra_bandwidth_bytes_per_s for m in specs])

    @property
    def widths(self) -> list[int]:
        """How many pipelines are laid side by side through machines: powers of two, and what divides a machine."""
        powers = {1 << j for gpus in self.num_gpus for j in range(gpus.bit_length())}
        return sorted(powers | {width for gpus in self.num_gpus for width in range(1, gpus + 1) if gpus % width == 0})

    def place_of(self, kind: int) -> tuple[bool, ...]:
        """Behind which uplinks the machines of a kind are."""
        return tuple(self.machines[kind][0] in uplink.machines for uplink in self.uplinks)

    def interface_bytes_per_s(self, machine: int) -> float:
        """What one interface of a machine sends."""
        return self.problem.cluster.machines[machine].nic_bandwidth_bytes_per_s

    def __len__(self) -> int:
        return len(self.machines)


def _uplinks(problem: Problem) -> tuple[Uplink, ...]:
    """Every uplink with usable machines on both sides."""
    cluster, used = problem.cluster, set(problem.usable_by_machine)
    groups = {group.name: group for group in cluster.groups}

    def inside(name: str) -> set[int]:
        if name in groups:
            return set[int]().union(*map(inside, groups[name].members))
        return {m for m, machine in enumerate(cluster.machines) if name in (machine.name, machine.spec_name)}

    found = ((used & inside(name), group.uplink_bytes_per_s) for name, group in groups.items())
    return tuple(Uplink(frozenset(own), rate) for own, rate in found if own and own != used and np.isfinite(rate))
