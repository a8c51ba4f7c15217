"""The map of a cluster under a plan, whatever draws it: kinds of machines, and the stage of each of their GPUs."""

from dataclasses import dataclass

from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.report.facts import PlanFacts
from hexiopt.report.rows import PlanRows
from hexiopt.report.style import clip, join_names, rate

MAX_MACHINES = 15
MAX_SQUARES = 32  # devices drawn per machine
_NO_LIMIT = float("inf")


@dataclass(frozen=True, slots=True)
class Square:
    """A device on the map: its label and colour (None: unused, or in a pipeline that is not shown)."""

    label: str
    colour: str | None
    unused: bool


@dataclass(frozen=True, slots=True)
class MachineKind:
    """Machines that look the same on the map: the first of them, their number, and the squares of their devices."""

    machine: Machine
    number: int
    squares: tuple[Square, ...]

    @property
    def name(self) -> str:
        """The name of the machine, or of the entry in the cluster file for several machines."""
        return self.machine.spec_name if self.number > 1 else self.machine.name


def machine_map(facts: PlanFacts, rows: PlanRows, most: int) -> tuple[list[MachineKind], int]:
    """At most `most` kinds of machines (each machine by itself in small clusters) in the order of the cluster, and the
    number of machines left out. Kinds with most devices in use are kept first, then the most frequent ones."""
    cluster, unused = facts.problem.cluster, set(facts.unused_devices)
    on: dict[int, Square] = {}
    for row in rows.pipelines:
        for index in row.members:
            for stage, shown in zip(facts.plan.pipelines[index].stages, row.stages, strict=True):
                on.update(dict.fromkeys(stage.devices, Square(shown.name, row.stage_colour(shown), False)))
    few = len(cluster.machines) <= MAX_MACHINES
    kinds: dict[tuple[int | str, tuple[Square, ...]], list[int]] = {}
    for m, machine in enumerate(cluster.machines):
        first = int(cluster.first_device[m])
        devices = range(first, first + min(machine.num_gpus, MAX_SQUARES))
        squares = tuple(on.get(device) or Square("", None, device in unused) for device in devices)
        kinds.setdefault((m if few else machine.spec_name, squares), []).append(m)
    ranked = sorted(
        kinds.items(), key=lambda kind: (-sum(square.colour is not None for square in kind[0][1]), -len(kind[1]))
    )
    shown_kinds = sorted(ranked[:most], key=lambda kind: kind[1][0])
    map_kinds = [
        MachineKind(cluster.machines[members[0]], len(members), squares) for (_, squares), members in shown_kinds
    ]
    return map_kinds, len(cluster.machines) - sum(kind.number for kind in map_kinds)


def name_has_gpu(machine: Machine) -> bool:
    """Whether the machine's name contains its GPU type."""
    return machine.spec_name == machine.gpu.name and machine.num_gpus <= MAX_SQUARES


def machine_notes(machine: Machine) -> list[str]:
    """GPU type and link rates, the longest wording first."""
    gpu = machine.gpu.name + (f" · {machine.num_gpus} GPUs" if machine.num_gpus > MAX_SQUARES else "")
    inside = [rate(machine.intra_bandwidth_bytes_per_s)] if machine.num_gpus > 1 else []
    inside += sorted({rate(link.bandwidth_bytes_per_s) for link in machine.intra_links}, key=float)
    interfaces = f"{machine.num_interfaces} × " if machine.num_interfaces > 1 else ""
    networked = machine.nic_bandwidth_bytes_per_s < _NO_LIMIT
    outside = interfaces + rate(machine.nic_bandwidth_bytes_per_s) if networked else ""
    speeds = [f"{name} {value}" for name, value in (("in", " / ".join(inside)), ("out", outside)) if value]
    text = " · ".join(speeds)
    if name_has_gpu(machine):
        return [f"{text} GB/s", text]
    wordings = [f"{gpu}\n{text} GB/s", f"{gpu}\n{text}"] if speeds else []
    return [*wordings, gpu, *(clip(gpu, limit) for limit in range(len(gpu) - 1, 2, -1))]


def network_notes(cluster: Cluster) -> str:
    """Uplinks and stated links in one line; empty where there are none."""
    parts = [
        f"{group.name} uplink {rate(group.uplink_bytes_per_s)}"
        for group in cluster.groups
        if group.uplink_bytes_per_s < _NO_LIMIT
    ]
    parts += [
        f"{group.name} shares {rate(group.shared_bytes_per_s)}"
        for group in cluster.groups
        if group.shared_bytes_per_s < _NO_LIMIT
    ]
    parts += [
        f"{link.source}{'–' if link.both else '→'}{link.target} {rate(link.bandwidth_bytes_per_s)}"
        for link in cluster.links
    ]
    return f"GB/s: {join_names(parts, 5)}" if parts else ""
