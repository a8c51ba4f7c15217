"""The map of a cluster under a plan, whatever draws it: kinds of machines, and the stage of each of their GPUs."""

from dataclasses import dataclass

from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.problem import Problem
from hexiopt.report.rows import PipelineRow, PlanRows, StageRow
from hexiopt.report.style import clipped, listed, rate

MAX_MACHINES = 15
MAX_SQUARES = 32  # devices drawn per machine
_NO_LIMIT = float("inf")


@dataclass(frozen=True, slots=True)
class Square:
    """A device on the map: its label and colour (None: unused, or in a pipeline that is not shown)."""

    label: str
    colour: str | None
    unused: bool


def machine_kinds(problem: Problem, plan: Plan, rows: PlanRows) -> list[tuple[list[int], tuple[Square, ...]]]:
    """Groups of machines that look alike (each by itself in small clusters), with the squares of their devices."""
    cluster = problem.cluster
    on: dict[int, tuple[PipelineRow, StageRow]] = {}
    for row in rows.pipelines:
        for index in row.members:
            for stage, stage_row in zip(plan.pipelines[index].stages, row.stages, strict=True):
                on.update(dict.fromkeys(stage.devices, (row, stage_row)))
    used = set(plan.devices())
    few = len(cluster.machines) <= MAX_MACHINES
    kinds: dict[object, tuple[list[int], tuple[Square, ...]]] = {}
    for m, machine in enumerate(cluster.machines):
        first = int(cluster.first_device[m])
        squares = []
        for device in range(first, first + min(machine.num_gpus, MAX_SQUARES)):
            if device in on:
                row, stage_row = on[device]
                squares.append(Square(row.stage_name(stage_row), row.stage_colour(stage_row), False))
            else:
                squares.append(Square("", None, device not in used))
        looks = tuple(squares)
        key: object = m if few else (machine.spec_name, looks)
        kinds.setdefault(key, ([], looks))[0].append(m)
    return list(kinds.values())


def most_telling(
    kinds: list[tuple[list[int], tuple[Square, ...]]], most: int
) -> list[tuple[list[int], tuple[Square, ...]]]:
    """At most `most` kinds: those with most devices in use, then the most frequent, in the order of the cluster."""
    kept = sorted(kinds, key=lambda kind: (-sum(s.colour is not None for s in kind[1]), -len(kind[0])))
    return sorted(kept[:most], key=lambda kind: kind[0][0])


def named_by_gpu(machine: Machine) -> bool:
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
    if named_by_gpu(machine):
        return [f"{text} GB/s", text]
    wordings = [f"{gpu}\n{text} GB/s", f"{gpu}\n{text}"] if speeds else []
    return [*wordings, gpu, *(clipped(gpu, limit) for limit in range(len(gpu) - 1, 2, -1))]


def network_notes(cluster: Cluster) -> str:
    """Uplinks and stated links in one line; empty where there are none."""
    parts = [
        f"{group.name} uplink {rate(group.uplink_bytes_per_s)}"
        for group in cluster.groups
        if group.uplink_bytes_per_s < _NO_LIMIT
    ]
    parts += [
        f"{link.source}{'–' if link.both else '→'}{link.target} {rate(link.bandwidth_bytes_per_s)}"
        for link in cluster.links
    ]
    return f"GB/s: {listed(parts, 5)}" if parts else ""
