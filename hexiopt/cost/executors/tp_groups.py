"""Classes of tensor-parallel groups of a cluster that cost the same."""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from hexiopt.memo import Memo
from hexiopt.numbers.gpus import Gpu
from hexiopt.problem.cluster import Cluster


@dataclass(frozen=True, slots=True, eq=False)
class TpGroup:
    """A class of tensor-parallel groups that cost the same: GPU type, number of devices, slowest ring link.

    `degree` is the TP degree: fewer than the devices where these are replicas that share experts, 0 where a search
    leaves it open. Replicas may stand in several `machines`, each inside one; `bandwidth` is then that inside machines,
    `across_bandwidth` what a device has between them. Interned, so equality is identity and look-ups are fast.
    """

    gpu: Gpu
    tp: int
    bandwidth: float  # slowest link of the TP ring, bytes/s
    latency_s: float
    degree: int
    machines: int = 1
    across_bandwidth: float = float("inf")  # of a device where all send at once, bytes/s

    @property
    def replicas(self) -> int:
        """The number of replicas, each of `degree` devices, that share experts."""
        return self.tp // self.degree


class _Place(NamedTuple):
    """The place of a group: the first machine of the kind of its machine, and the numbers of its devices there."""

    machine: int
    indices: tuple[int, ...]


class _Ring(NamedTuple):
    """What the groups of a class have in common: GPU type, degree, slowest link."""

    gpu: str
    tp: int
    bandwidth: float = float("inf")
    latency_s: float = 0.0
    degree: int | None = None  # None: the number of devices
    machines: int = 1
    across_bandwidth: float = float("inf")


def _ring_of(group: TpGroup) -> _Ring:
    link = group.bandwidth, group.latency_s
    return _Ring(group.gpu.name, group.tp, *link, None, group.machines, group.across_bandwidth)


class TpGroups:
    """The classes of all TP groups of a cluster; `gpus` are its GPU types by name."""

    def __init__(self, cluster: Cluster, shares_experts: bool = False) -> None:
        """`shares_experts`: groups may be replicas that share experts."""
        self._open = shares_experts
        self.gpus = {gpu.name: gpu for gpu in reversed(cluster.types)}
        self._cluster = cluster
        self._machine_of: list[int] = cluster.machine_of.tolist()
        self._index_of: list[int] = cluster.index_in_machine.tolist()
        first_of = dict[Hashable, int]()
        self._first_machine = [first_of.setdefault(machine.kind, m) for m, machine in enumerate(cluster.machines)]
        self._by_devices, self._by_place = Memo(self._of_devices), Memo(self._of_place)
        self._by_ring = Memo(self._of_ring)

    def of(self, devices: tuple[int, ...]) -> TpGroup:
        """The class of a group; its degree is open where experts may be shared. Only replicas that share experts stand
        in several machines, equally many in each."""
        return self._by_devices[devices]

    def with_degree(self, group: TpGroup, degree: int) -> TpGroup:
        """The same devices with a TP degree."""
        return group if group.degree == degree else self._by_ring[_ring_of(group)._replace(degree=degree)]

    def with_every_degree(self, group: TpGroup) -> list[TpGroup]:
        """The same devices with each TP degree that a plan may state; one where no experts are shared."""
        degrees = [t for t in range(1, group.tp + 1) if group.tp % t == 0] if not group.degree else [group.degree]
        return [self.with_degree(group, t) for t in degrees]

    def _of_devices(self, devices: tuple[int, ...]) -> TpGroup:
        if len(devices) == 1:
            return self._by_ring[_Ring(self._cluster.gpu_of(devices[0]).name, 1)]
        parts = dict[int, list[int]]()
        for device in devices:
            parts.setdefault(self._machine_of[device], []).append(device)
        groups = [self._in_machine(machine, part) for machine, part in parts.items()]
        return groups[0] if len(groups) == 1 else self._of_machines(groups, list(parts.values()))

    def _in_machine(self, machine: int, devices: list[int]) -> TpGroup:
        return self._by_place[_Place(self._first_machine[machine], tuple(self._index_of[d] for d in devices))]

    def _of_machines(self, groups: list[TpGroup], devices: list[list[int]]) -> TpGroup:
        """The class of groups in machines of their own: GPU type and links of the slowest."""
        slowest = min(groups, key=lambda group: group.bandwidth)
        gpu = min((group.gpu for group in groups), key=lambda gpu: gpu.flops_fp32).name
        # All devices send at once, each to one of the next machine: they share what their paths have in common.
        paths = [
            self._cluster.network.path(device, there[k % len(there)])[2]
            for here, there in pairwise([*devices, devices[0]])
            for k, device in enumerate(here)
        ]
        users = Counter(resource for path in paths for resource, _ in path)
        across = min(bytes_per_s / users[resource] for path in paths for resource, bytes_per_s in path)
        latency_s = max(group.latency_s for group in groups)
        ring = _Ring(gpu, sum(map(len, devices)), slowest.bandwidth, latency_s, None, len(groups), across)
        return self._by_ring[ring]

    def _of_place(self, place: _Place) -> TpGroup:
        machine, indices = self._cluster.machines[place.machine], place.indices
        return self._by_ring[_Ring(machine.slowest(indices).name, len(indices), *machine.ring(indices))]

    def _of_ring(self, ring: _Ring) -> TpGroup:
        degree = (0 if self._open and ring.tp > 1 else ring.tp) if ring.degree is None else ring.degree
        return TpGroup(self.gpus[ring.gpu], *ring[1:4], degree, *ring[5:])

    def fastest(self, machine: int, degrees: Iterable[int]) -> list[TpGroup]:
        """A class at least as fast as any group of as many devices of machine `machine`, for each of `degrees`."""
        spec = self._cluster.machines[machine]
        pairs = [(i, j) for i in range(spec.num_gpus) for j in range(i)]
        bandwidth = max((spec.pair_bandwidth(i, j) for i, j in pairs), default=float("inf"))
        latency_s = min((spec.pair_latency(i, j) for i, j in pairs), default=0.0)
        return [
            self._by_ring[_Ring(spec.gpu.name, tp, bandwidth, latency_s) if tp > 1 else _Ring(spec.gpu.name, tp)]
            for tp in degrees
        ]

    def fastest_across(self, machine: int, machines: Iterable[int], degree: int, replicas: int, count: int) -> TpGroup:
        """A class at least as fast as any group of `replicas`, each of `degree` devices, that share experts over
        `count` of `machines`, with the GPU of `machine`."""
        specs = [self._cluster.machines[m] for m in machines]
        pairs = [(spec, i, j) for spec in specs for i in range(spec.num_gpus) for j in range(i)]
        bandwidth = max((spec.pair_bandwidth(i, j) for spec, i, j in pairs), default=float("inf"))
        latency_s = min((spec.pair_latency(i, j) for spec, i, j in pairs), default=0.0)
        # Some machine has no fewer devices than the mean one, and they send through its interfaces at once.
        here = ceil(degree * replicas / count)
        across = max(spec.nic_bandwidth_bytes_per_s / ceil(here / spec.num_interfaces) for spec in specs)
        gpu = self._cluster.machines[machine].gpu.name
        link = (bandwidth, latency_s) if degree > 1 or here > 1 else (float("inf"), 0.0)
        return self._by_ring[_Ring(gpu, degree * replicas, *link, degree, count, across)]
