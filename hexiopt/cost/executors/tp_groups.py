"""Classes of tensor-parallel groups of a cluster that cost the same."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hexiopt.memo import Memo
from hexiopt.numbers.gpus import Gpu
from hexiopt.problem.cluster import Cluster


@dataclass(frozen=True, slots=True, eq=False)
class TpGroup:
    """A class of tensor-parallel groups that cost the same: GPU type, number of devices, slowest ring link.

    `degree` is the TP degree: fewer than the devices where these are replicas that share experts, 0 where a search
    leaves it open. Interned, so equality is identity and look-ups are fast.
    """

    gpu: Gpu
    tp: int
    bandwidth: float  # slowest link of the TP ring, bytes/s
    latency_s: float
    degree: int

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


def _ring_of(group: TpGroup) -> _Ring:
    return _Ring(group.gpu.name, group.tp, group.bandwidth, group.latency_s)


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
        """The class of a group, whose devices are of one machine; its degree is open where experts may be shared."""
        return self._by_devices[devices]

    def with_degree(self, group: TpGroup, degree: int) -> TpGroup:
        """The same devices with a TP degree."""
        return group if group.degree == degree else self._by_ring[_ring_of(group)._replace(degree=degree)]

    def _of_devices(self, devices: tuple[int, ...]) -> TpGroup:
        if len(devices) == 1:
            return self._by_ring[_Ring(self._cluster.gpu_of(devices[0]).name, 1)]
        machine = self._first_machine[self._machine_of[devices[0]]]
        return self._by_place[_Place(machine, tuple(self._index_of[d] for d in devices))]

    def _of_place(self, place: _Place) -> TpGroup:
        machine, indices = self._cluster.machines[place.machine], place.indices
        return self._by_ring[_Ring(machine.slowest(indices).name, len(indices), *machine.ring(indices))]

    def _of_ring(self, ring: _Ring) -> TpGroup:
        degree = (0 if self._open and ring.tp > 1 else ring.tp) if ring.degree is None else ring.degree
        return TpGroup(self.gpus[ring.gpu], *ring[1:4], degree)

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
