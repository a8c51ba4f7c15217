"""Clusters: machines, the network between them, and their devices by number and by name."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hexiopt.checks import number_in, whole_in
from hexiopt.errors import MISSING, FieldError, InputError, closest_of_many, quoted
from hexiopt.numbers.gpus import Gpu
from hexiopt.numbers.links import intra_bandwidth_gb_per_s
from hexiopt.numbers.products import find_gpu
from hexiopt.problem.linked import check_links, rates_of_links, unlinked_pair
from hexiopt.problem.machine import (
    DEFAULT_INTER_LATENCY_US,
    DEFAULT_INTRA_LATENCY_US,
    MAX_BANDWIDTH_GB_PER_S,
    MAX_GPUS_PER_MACHINE,
    MIN_SPEED,
    Machine,
    check_latency,
    check_rate,
    machine_names,
    spec_spans,
)
from hexiopt.problem.network import Group, Link, Network, check_groups
from hexiopt.problem.nodelist import expand
from hexiopt.problem.profile import NOTHING_MEASURED, Profile
from hexiopt.units import GB, MICROSECOND
from hexiopt.value import Value

MAX_TITLE = 100
TITLE_RULE = f"is not a name; use up to {MAX_TITLE} printable characters"


@dataclass(frozen=True, repr=False)
class Cluster(Value):
    """Machines and the network between them. Devices are numbered from 0, machine by machine.

    `inter_bandwidth_bytes_per_s` is the rate per network interface of machines that state none (infinite: not stated),
    `inter_latency_s` the latency between them. `profile` has measured layer times. `calibrated` has the factors, by
    name, that a `Calibration` put into GPU types and rates, `calibrated_by` what they were fitted to. Raises InputError
    where a value breaks its rule.
    """

    name: str
    machines: tuple[Machine, ...]
    inter_bandwidth_bytes_per_s: float
    inter_latency_s: float
    groups: tuple[Group, ...] = ()
    links: tuple[Link, ...] = ()
    profile: Profile = NOTHING_MEASURED
    calibrated: tuple[tuple[str, float], ...] = ()
    calibrated_by: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or len(self.name) > MAX_TITLE or not self.name.isprintable():
            raise FieldError("cluster: name", self.name, TITLE_RULE)
        where = f"cluster {self.name}"
        check_rate(self.inter_bandwidth_bytes_per_s, f"{where}: inter_bandwidth_bytes_per_s")
        check_latency(self.inter_latency_s, f"{where}: inter_latency_s")
        if not self.machines:
            raise FieldError(f"{where}: machines", [], "is empty; state at least one machine")
        self._check_names(where)
        check_groups(self.groups, self.machines, self._names, where)
        check_links(self.links, self.machines, self._names, where)
        if len(self.machines) > 1 and any(machine.nic_bandwidth_bytes_per_s == math.inf for machine in self.machines):
            self._join_by_links(where)

    def _join_by_links(self, where: str) -> None:
        """Give machines without a network rate interfaces as fast as all their links together.

        This suits the parts of one box, which links join in pairs. Raises FieldError where a pair has no link.
        """
        if (pair := unlinked_pair(self.machines, self._names, self.links)) is not None:
            or_link = f", or the link from {pair[0]} to {pair[1]}" if self.links else ""

            def rule(unit: float) -> str:
                words = "GB/s" if unit == GB else "bytes/s"
                return f"is missing; state it, in {words} per network interface and direction{or_link}"

            raise FieldError(f"{where}: inter_bandwidth_bytes_per_s", MISSING, rule)
        rates = rates_of_links(self.machines, self._names, self.links)
        machines = tuple(
            machine.replace(nic_bandwidth_bytes_per_s=min(rates[machine.spec_name], MAX_BANDWIDTH_GB_PER_S * GB))
            if machine.nic_bandwidth_bytes_per_s == math.inf
            else machine
            for machine in self.machines
        )
        object.__setattr__(self, "machines", machines)

    def _check_names(self, where: str) -> None:
        """Check that machines of a spec are consecutive, equal and numbered, and that all names differ."""
        names = set[str]()
        for name, span in spec_spans(self.machines).items():
            first = self.machines[span[0]]
            for i, m in enumerate(span):
                machine = self.machines[m]
                if len(span) > 1 and (machine.name != f"{name}-{i}" or not _equal_at_full_speed(machine, first)):
                    shared = f"{where}: machine {machine.name}: spec_name: {name!r} is shared by {len(span)} machines"
                    raise InputError(f"{shared}; make them equal but for the names {name}-0, {name}-1, ...")
            spec_names = {name, *(self.machines[m].name for m in span)}
            if not names.isdisjoint(spec_names):
                raise InputError(
                    f"{where}: machine {min(names & spec_names)}: appears twice; give machines different names"
                )
            names |= spec_names
        for g, group in enumerate(self.groups):
            if group.name in names:
                rule = "appears twice; give machines and groups different names"
                raise FieldError(f"{where}: groups[{g}].name", group.name, rule)
            names.add(group.name)

    @classmethod
    def of(
        cls,
        gpus: Mapping[str, int],
        inter_gb_per_s: float = math.inf,
        *,
        intra_gb_per_s: float | None = None,
        gpus_per_machine: int = 8,
        name: str = "by_hand",
    ) -> "Cluster":
        """A cluster from the number of GPUs of each type, in machines of `gpus_per_machine` and a smaller last one.

        Bandwidths are in GB/s per direction: `inter_gb_per_s` per machine, required for several machines, and
        `intra_gb_per_s` between two GPUs of a machine, by default the usual one of their type. Raises InputError.
        """
        per_machine = whole_in(gpus_per_machine, "cluster: gpus_per_machine", at_least=1, at_most=MAX_GPUS_PER_MACHINE)
        for key, rate in (("inter_gb_per_s", inter_gb_per_s), ("intra_gb_per_s", intra_gb_per_s)):
            if rate not in (None, math.inf):
                number_in(rate, f"cluster: {key}", above=0, at_most=MAX_BANDWIDTH_GB_PER_S)
        if not isinstance(gpus, Mapping):
            raise InputError(f"cluster: gpus: {quoted(gpus)} is not a mapping; write {{'rtx_4090': 8}}")
        machines: list[Machine] = []
        for kind, count in gpus.items():
            gpu = find_gpu(str(kind), {}, "cluster: gpus")
            full, rest = divmod(whole_in(count, f"cluster: gpus: {kind}", at_least=1, at_most=10**6), per_machine)
            inside = intra_bandwidth_gb_per_s(gpu) if intra_gb_per_s is None else intra_gb_per_s
            sizes = [(gpu.name, per_machine, full)] if full else []
            if rest:
                sizes.append((f"{gpu.name}-rest" if full else gpu.name, rest, 1))
            for spec, size, number in sizes:
                machine = Machine(
                    name=spec,
                    spec_name=spec,
                    gpu=gpu,
                    num_gpus=size,
                    intra_bandwidth_bytes_per_s=inside * GB if size > 1 else math.inf,
                    intra_latency_s=DEFAULT_INTRA_LATENCY_US * MICROSECOND,
                    intra_links=(),
                    num_interfaces=1,
                    nic_bandwidth_bytes_per_s=inter_gb_per_s * GB,
                    nic_latency_s=DEFAULT_INTER_LATENCY_US * MICROSECOND,
                )
                names = [f"{spec}-{i}" for i in range(number)] if number > 1 else [spec]
                machines += [machine.replace(name=machine_name) for machine_name in names]
        if len(machines) > 1 and inter_gb_per_s == math.inf:
            missing = f"cluster: inter_gb_per_s: is missing for {len(machines)} machines"
            raise InputError(f"{missing}; state GB/s per machine and direction")
        return cls(name, tuple(machines), inter_gb_per_s * GB, DEFAULT_INTER_LATENCY_US * MICROSECOND)

    def __repr__(self) -> str:
        counts = Counter[str]()
        for machine in self.machines:
            counts[machine.gpu.name] += machine.num_gpus
        gpus = " + ".join(f"{count:,} {gpu}" for gpu, count in counts.items())
        number = len(self.machines)
        return f"Cluster({self.name}: {gpus} in {number:,} machine{'s' if number > 1 else ''})"

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
        return _freeze(np.cumsum([0, *sizes[:-1]], dtype=np.int64))

    @cached_property
    def machine_of(self) -> NDArray[np.int64]:
        """The machine of each device [num_devices]."""
        sizes = [machine.num_gpus for machine in self.machines]
        return _freeze(np.repeat(np.arange(len(sizes), dtype=np.int64), sizes))

    @cached_property
    def index_in_machine(self) -> NDArray[np.int64]:
        """The index of each device in its machine [num_devices]."""
        return _freeze(np.arange(self.num_devices, dtype=np.int64) - self.first_device[self.machine_of])

    @cached_property
    def types(self) -> tuple[Gpu, ...]:
        """The distinct GPU types in the order of the machines; a slow GPU has a type of its own."""
        return tuple(dict.fromkeys(gpu for machine in self.machines for gpu in machine.types))

    @cached_property
    def type_of(self) -> NDArray[np.int64]:
        """The number in `types` of each device's type [num_devices]."""
        number = {gpu: k for k, gpu in enumerate(self.types)}
        types = np.array([number[machine.gpu] for machine in self.machines], dtype=np.int64)[self.machine_of]
        for m, machine in enumerate(self.machines):
            for index, _ in machine.slow:
                types[self.first_device[m] + index] = number[machine.gpus[index]]
        return _freeze(types)

    @cached_property
    def is_linked(self) -> bool:
        """Whether stated links join all pairs of machines, so that the rates of interfaces do not matter."""
        return unlinked_pair(self.machines, self._names, self.links) is None

    @cached_property
    def network(self) -> Network:
        """Rates, latencies and shared resources between machines."""
        return Network(self.name, self.machines, self._names, self.groups, self.links)

    @cached_property
    def _names(self) -> dict[str, range]:
        return machine_names(self.machines)

    def gpu_of(self, device: int) -> Gpu:
        """The type of a device."""
        return self.types[int(self.type_of[device])]

    def computer_of(self, device: int) -> str:
        """The computer of a device: a machine that stands for the cards of one type in a PC is a part of one, by the
        host that it states or the group whose members share its memory."""
        machine = self.machines[int(self.machine_of[device])]
        around = (group for group in self.groups if machine.spec_name in group.members)
        inside = (group.name for group in around if group.shared_bytes_per_s < math.inf)
        return machine.host or next(inside, machine.name)

    def device_name(self, device: int) -> str:
        """`machine:index` of a device."""
        return f"{self.machines[int(self.machine_of[device])].name}:{self.index_in_machine[device]}"

    def device_index(self, name: str, where: str = "device") -> int:
        """The number of the device called `machine:index`.

        Raises InputError naming `where` for anything else, with the closest machine.
        """
        machine_name, colon, digits = name.rpartition(":")
        if not colon or not re.fullmatch("0|[1-9][0-9]*", digits):
            raise InputError(f"{where}: {quoted(name)} is not a device; write machine:index, such as a:0")
        span = self._names.get(machine_name)
        if span is None or self.machines[span[0]].name != machine_name:
            if span is not None:
                hint = f"did you mean {self.machines[span[0]].name}?"
            else:
                hint = closest_of_many(machine_name, (machine.name for machine in self.machines))
            raise InputError(f"{where}: {quoted(name)} is on no machine of the cluster; {hint}")
        count = self.machines[span[0]].num_gpus
        if len(digits) > 4 or int(digits) >= count:
            raise InputError(
                f"{where}: {quoted(name)} is out of range; {machine_name} has {count} device(s), "
                f"{machine_name}:0 to {machine_name}:{count - 1}"
            )
        return int(self.first_device[span[0]]) + int(digits)

    def devices_named(self, name: str, where: str = "device") -> Sequence[int]:
        """The devices of the machine or the spec called `name`, or of the machines in a node list, as cluster files and
        tables write them: `a`, `gpu-[01-04,07]`; with indices after a colon only these devices: `a:3`,
        `gpu-[01-04]:0-3,6`.

        Raises InputError naming `where` for anything else, with the closest machine.
        """
        if set(name) & set("[],") or "-" in name.partition(":")[2]:
            return self._expand_names(name, where)
        if ":" in name:
            device = self.device_index(name, where)
            return range(device, device + 1)
        span = self._names.get(name)
        if span is None:
            hint = closest_of_many(name, self._names)
            raise InputError(f"{where}: {quoted(name)} is not a machine of the cluster; {hint}")
        first, last = int(self.first_device[span[0]]), int(self.first_device[span[-1]])
        return range(first, last + self.machines[span[-1]].num_gpus)

    def _expand_names(self, text: str, where: str) -> list[int]:
        machines, colon, indices = text.partition(":")
        try:
            names = expand(machines)
            suffixes = [f":{int(index)}" for index in expand(f"[{indices}]")] if colon else [""]
        except ValueError as error:
            raise InputError(f"{where}: {quoted(text)} {error}") from None
        return [d for name in names for suffix in suffixes for d in self.devices_named(name + suffix, where)]

    @property
    def speeds(self) -> dict[str, float]:
        """The shares of their type's speed at which slow machines and devices run, by their names."""
        slow_machines = {
            machine.name: machine.gpu.speed for machine in self.machines if machine.gpu.full_speed is not None
        }
        return slow_machines | {f"{machine.name}:{i}": speed for machine in self.machines for i, speed in machine.slow}

    def with_speeds(self, speeds: Mapping[str, float], where: str = "slow") -> "Cluster":
        """The cluster with these machines and devices (`machine:index`) at these shares of their type's full speed.

        Raises InputError naming `where` for unknown names, and for shares outside 0.01 to 1.
        """
        by_machine: dict[int, dict[int, float]] = {}
        for name, share in sorted(speeds.items(), key=lambda item: ":" in item[0]):  # single devices prevail
            speed = number_in(share, f"{where}: {name}", at_least=MIN_SPEED, at_most=1.0)
            for device in self.devices_named(name, where):
                machine = by_machine.setdefault(int(self.machine_of[device]), {})
                machine[int(self.index_in_machine[device])] = speed
        if not by_machine:
            return self
        machines = (m.with_speeds(by_machine[k]) if k in by_machine else m for k, m in enumerate(self.machines))
        return self.replace(machines=tuple(machines))

    def with_memory_headroom(self, share: float) -> "Cluster":
        """The cluster with a memory headroom of `share` on all GPUs: see `Gpu.leaving`."""
        types = dict.fromkeys(machine.gpu for machine in self.machines)
        if all(gpu.memory_headroom == share for gpu in types):
            return self
        changed = {gpu: gpu.leaving(share) for gpu in types}
        return self.replace(machines=tuple(machine.replace(gpu=changed[machine.gpu]) for machine in self.machines))

    def total_peak_flops(self, precision: str) -> float:
        """Σ dense peak of all devices in FLOP/s; devices without the precision count as zero."""
        return math.fsum(machine.num_gpus * (machine.gpu.peak_flops(precision) or 0.0) for machine in self.machines)


def _equal_at_full_speed(first: Machine, second: Machine) -> bool:
    """Whether two machines are equal except for their names and the speed of their devices."""
    return first.kind == second.kind or _at_full_speed(first).kind == _at_full_speed(second).kind


def _at_full_speed(machine: Machine) -> Machine:
    return machine.with_speeds(dict.fromkeys(range(machine.num_gpus), 1.0))


def _freeze(array: NDArray[np.int64]) -> NDArray[np.int64]:
    array.setflags(write=False)
    return array
