"""One cluster from the outputs of several tools: machines, their GPUs and links; values that none states are null.

Every machine that any text names is included. Texts that contradict each other are refused.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hexiopt.calibration.gpus import catalogue
from hexiopt.errors import InputError, quoted
from hexiopt.problem.machine import MAX_GPUS_PER_MACHINE, NAME, NAME_RULE
from hexiopt.problem.nodelist import compress, expand
from hexiopt.readers.discovery.hostfile import read_hostfile
from hexiopt.readers.discovery.nvidia_smi import SmiGpu, read_nvidia_smi
from hexiopt.readers.discovery.product import match
from hexiopt.readers.discovery.slurm import Gres, read_features, read_slurm
from hexiopt.readers.discovery.topology import NVLINK_GB_PER_S, Topology, read_topology
from hexiopt.readers.link_files import Channel, read_nccl_tests
from hexiopt.units import GB, GIB

LONE = ""  # key of a path given without a machine
_LOCAL = "local"  # name of a single machine that no text names


@dataclass(frozen=True)
class Texts:
    """Paths of tools' outputs: of nvidia-smi and nccl-tests by machine (or `LONE`), the others of the cluster."""

    nvidia_smi: Mapping[str, str] = field(default_factory=dict)
    topology: Mapping[str, str] = field(default_factory=dict)
    nccl_tests: Mapping[str, str] = field(default_factory=dict)
    slurm: str | None = None
    hostfile: str | None = None


@dataclass(frozen=True)
class Discovery:
    """A cluster in the file format, comments by machine, and the nodes that are left out since they have no GPU."""

    cluster: dict[str, Any]
    notes: dict[str, tuple[str, ...]]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class _Kind:
    """GPUs of one kind in a machine, with their `indices`; None marks what no text states."""

    product: str | None
    memory_bytes: int | None
    indices: tuple[int, ...] | None
    pcie: str | None = None


def discover(name: str, texts: Texts) -> Discovery:
    """The cluster called `name` that the texts describe. Raises InputError naming file and line.

    Nodes of equal GRES and features in Slurm are alike: what was read on one of them stands for those without texts.
    """
    slurm = read_slurm(texts.slurm) if texts.slurm else {}
    hosts = read_hostfile(texts.hostfile) if texts.hostfile else {}
    named = list(dict.fromkeys([*slurm, *hosts, *texts.nvidia_smi, *texts.topology, *texts.nccl_tests]))
    named = [machine for machine in named if machine != LONE]
    smi = {m: read_nvidia_smi(p) for m, p in _by_machine("nvidia_smi", texts.nvidia_smi, named).items()}
    topologies = {m: read_topology(p) for m, p in _by_machine("topology", texts.topology, named).items()}
    buses = {m: read_nccl_tests(Path(p)) for m, p in _by_machine("nccl_tests", texts.nccl_tests, named).items()}
    alike = _alike(slurm, read_features(texts.slurm) if texts.slurm else {}, (smi, topologies, buses))
    topologies |= {machine: topologies[one] for machine, one in alike.items() if one in topologies}
    buses |= {machine: buses[one] for machine, one in alike.items() if one in buses}
    smi |= {  # but for the fabric: which one a machine is on, only its own text says
        machine: tuple(replace(gpu, fabric=None) for gpu in smi[one])
        for machine, one in alike.items()
        if one in smi and machine != one
    }
    entries: list[dict[str, Any]] = []
    notes: dict[str, tuple[str, ...]] = {}
    links: list[dict[str, Any]] = []
    left_out = []
    for machine in dict.fromkeys([*named, *smi, *topologies, *buses]):
        topology = topologies.get(machine)
        count = _count(machine, smi.get(machine), topology, slurm.get(machine), hosts.get(machine))
        if count == 0:
            left_out.append(machine)
            continue
        kinds = _kinds(smi.get(machine), slurm.get(machine), count)
        if len(kinds) > 1 and topology is not None and machine not in smi:
            what = f"has GPUs of {len(kinds)} types, and Slurm does not state which GPU has which"
            raise InputError(f"discover.topology: {machine!r} {what}; give its discover.nvidia_smi too")
        parts = _part_names(machine, kinds)
        for part, kind in zip(parts, kinds, strict=True):
            entry, said = _entry(part, kind, topology)
            if machine in buses and "intra_bandwidth_gb_per_s" in entry:
                said += (_measure(entry, buses[machine]),)
            if machine in alike:
                said += (f"read on {alike[machine]} for all nodes of equal GRES and features",)
            entries.append(entry)
            notes[part] = said
        links += [
            {"between": [a, b], "bandwidth_gb_per_s": None, "latency_us": None}
            for i, b in enumerate(parts)
            for a in parts[:i]
        ]
    if not entries:
        raise InputError(
            "discover: no text names a GPU; give discover.{nvidia_smi,slurm,hostfile} of machines with GPUs"
        )
    _check_names(entries)
    entries, notes = _fabrics(entries, notes, smi)
    cluster: dict[str, Any] = {"name": name}
    if len(entries) > 1:
        cluster["inter_machine"] = {"bandwidth_gb_per_s": None, "latency_us": None}
    cluster["machines"], notes = _counted(entries, notes)
    if links:
        cluster["links"] = links
    return Discovery(cluster, notes, tuple(left_out))


def _alike(slurm: Mapping[str, Gres], features: Mapping[str, str], read: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The node whose texts stand for each node of its kind: the only one of them with any.

    Nodes whose GRES has no type and that have no features are not taken to be alike.
    """
    kinds: dict[Any, list[str]] = {}
    for node, gres in slurm.items():
        if gres and (node in features or all(product for product, _ in gres)):
            kinds.setdefault((gres, features.get(node)), []).append(node)
    found: dict[str, str] = {}
    for nodes in kinds.values():
        had = [node for node in nodes if any(node in texts for texts in read)]
        if len(had) == 1 and len(nodes) > 1:
            found |= dict.fromkeys(nodes, had[0])
    return found


def _by_machine(option: str, paths: Mapping[str, str], named: Sequence[str]) -> dict[str, str]:
    """Paths by machine; a path without a machine belongs to the only machine."""
    for machine in paths:
        if machine != LONE and not NAME.fullmatch(machine):
            raise InputError(f"discover.{option}: {quoted(machine)} {NAME_RULE}")
    if LONE not in paths:
        return dict(paths)
    if len(named) > 1:
        which = f"{paths[LONE]!r} belongs to one of {len(named)} machines"
        raise InputError(f"discover.{option}: {which}; state which: discover.{option}={{{named[0]}: {paths[LONE]}}}")
    return {named[0] if named else _LOCAL: paths[LONE]}


def _count(
    machine: str, smi: Sequence[SmiGpu] | None, topology: Topology | None, gres: Gres | None, slots: int | None
) -> int | None:
    """The number of GPUs of a machine; None where no text states it. Raises InputError where texts differ."""
    said: dict[str, int] = {}
    if smi is not None:
        said["nvidia-smi"] = len(smi)
    if topology is not None:
        said["the topology"] = topology.num_gpus
    if gres is not None:
        said["Slurm"] = sum(count for _, count in gres)
    if slots is not None:
        said["the hostfile"] = slots
    if len(set(said.values())) > 1:
        counts = ", ".join(f"{count} by {source}" for source, count in said.items())
        raise InputError(f"{machine}: has {counts}; give texts that agree, or leave one out")
    count = next(iter(said.values()), None)
    if count is not None and count > MAX_GPUS_PER_MACHINE:
        raise InputError(f"{machine}: has {count} GPUs; a machine has up to {MAX_GPUS_PER_MACHINE}, split it by hand")
    return count


def _kinds(smi: Sequence[SmiGpu] | None, gres: Gres | None, count: int | None) -> list[_Kind]:
    if smi is not None:
        by_kind: dict[tuple[str, Any], list[SmiGpu]] = {}
        for gpu in smi:  # ECC may change the memory of a product, but not its type
            by_kind.setdefault((gpu.name, match(gpu.name, gpu.memory_bytes)), []).append(gpu)
        return [
            _Kind(gpus[0].name, gpus[0].memory_bytes, tuple(gpu.index for gpu in gpus), _pcie(gpus))
            for gpus in by_kind.values()
        ]
    if gres:
        kinds, first = [], 0
        for product, number in gres:
            kinds.append(_Kind(product, None, tuple(range(first, first + number))))
            first += number
        return kinds
    return [_Kind(None, None, None if count is None else tuple(range(count)))]


def _pcie(gpus: Sequence[SmiGpu]) -> str | None:
    found = {(gpu.pcie_gen, gpu.pcie_width) for gpu in gpus}
    if len(found) != 1 or None in (pair := next(iter(found))):
        return None
    return f"PCIe {pair[0]} x{pair[1]} at most"


def _part_names(machine: str, kinds: Sequence[_Kind]) -> list[str]:
    """The name of each part of a machine: its own, or with several GPU types, its name, a dot and the type."""
    if len(kinds) == 1:
        return [machine]
    names = []
    for k, kind in enumerate(kinds):
        said = match(kind.product or "", kind.memory_bytes).gpu or kind.product or "gpu"
        name = f"{machine}.{re.sub(r'[^a-z0-9]+', '_', said.lower()).strip('_')}"
        names.append(name if name not in names else f"{name}.{k}")
    return names


def _entry(name: str, kind: _Kind, topology: Topology | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A machine in the file format, and its comments."""
    found = match(kind.product or "", kind.memory_bytes)
    notes = []
    if kind.product is None:
        notes.append("GPU type: not said")
    elif found.gpu is None:
        memory = "" if kind.memory_bytes is None else f" of {kind.memory_bytes / GIB:.1f} GiB"
        means = (
            f"may be {', '.join(found.choices)}" if found.choices else "is not in the catalogue; describe it under gpus"
        )
        notes.append(f"GPU type: {kind.product}{memory} {means}")
    else:
        notes.append(f"GPU type: {kind.product}")
    num_gpus = None if kind.indices is None else len(kind.indices)
    entry: dict[str, Any] = {"name": name, "gpu": found.gpu, "num_gpus": num_gpus}
    if num_gpus != 1:
        entry |= {"intra_bandwidth_gb_per_s": None, "intra_latency_us": None}
    if topology is not None and kind.indices is not None:
        notes += _join(entry, kind.indices, topology)
        if len(topology.cards) > 1:  # no text states which of them training uses
            entry["network_interfaces"] = None
            notes.append(f"network cards: {', '.join(topology.cards)}; state how many of them training uses")
    if kind.pcie is not None:
        notes.append(kind.pcie)
    return entry, tuple(notes)


def _measure(entry: dict[str, Any], bus: Channel) -> str:
    """Write the rate measured by nccl-tests into a machine: that of every link of a ring, in place of a datasheet's."""
    entry["intra_bandwidth_gb_per_s"] = float(f"{bus.bytes_per_s / GB:.4g}")
    entry.pop("intra_links", None)
    return f"nccl-tests: {entry['intra_bandwidth_gb_per_s']:g} GB/s on the bus of large messages"


def _join(entry: dict[str, Any], indices: Sequence[int], topology: Topology) -> list[str]:
    """Write the links between GPUs into a machine: NVLink at the rate of its generation, PCIe as unknown."""
    pairs = [(a, b) for b in range(len(indices)) for a in range(b)]
    if not pairs:
        return []
    paths = {(a, b): topology.paths[indices[a], indices[b]] for a, b in pairs}
    links = {(a, b): topology.nvlinks(indices[a], indices[b]) for a, b in pairs}
    gpu = catalogue().get(entry["gpu"] or "")
    each = NVLINK_GB_PER_S.get(gpu.link) if gpu else None

    def rate(number: int) -> float | None:
        return None if each is None or not number else number * each

    counts = Counter(links.values())
    usual = 0 if 0 in counts else max(counts, key=lambda number: (counts[number], -number))
    entry["intra_bandwidth_gb_per_s"] = rate(usual)
    others = [{"between": [a, b], "bandwidth_gb_per_s": rate(n)} for (a, b), n in links.items() if n != usual]
    if others:
        entry["intra_links"] = others
    said = ", ".join(f"{path} {number}×" for path, number in sorted(Counter(paths.values()).items()))
    of_link = f"; {each:g} GB/s per NVLink and direction" if each is not None and usual + len(others) else ""
    return [f"pairs of GPUs: {said}{of_link}"]


def _check_names(entries: Sequence[Mapping[str, Any]]) -> None:
    names = Counter(entry["name"] for entry in entries)
    for name, number in names.items():
        if not NAME.fullmatch(name):
            raise InputError(f"{quoted(name)} {NAME_RULE}")
        if number > 1:
            raise InputError(f"{name}: is a machine and a part of another; rename the machine")


def _fabrics(
    entries: Sequence[dict[str, Any]], notes: dict[str, tuple[str, ...]], smi: Mapping[str, Sequence[SmiGpu]]
) -> tuple[list[dict[str, Any]], dict[str, tuple[str, ...]]]:
    """The entries, where machines that one NVLink fabric joins are one machine, named for the first of them."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        found = {gpu.fabric for gpu in smi.get(entry["name"], ())}
        fabric = next(iter(found)) if len(found) == 1 else None
        groups.setdefault(fabric or f"of {entry['name']}", []).append(entry)
    joined = []
    for group in groups.values():
        first, count = group[0], len(group)
        if count > 1:
            if len({repr(entry | {"name": ""}) for entry in group}) > 1:
                names = " and ".join(entry["name"] for entry in group[:2])
                raise InputError(f"{names}: are on one NVLink fabric and differ; give texts of machines that are alike")
            total = count * first["num_gpus"]
            if total > MAX_GPUS_PER_MACHINE:
                raise InputError(
                    f"{first['name']}: its NVLink fabric has {total} GPUs; give up to {MAX_GPUS_PER_MACHINE}"
                )
            names = ", ".join(entry["name"] for entry in group)
            notes[first["name"]] += (f"one NVLink fabric of {count} machines: {names}",)
            first = first | {"num_gpus": total, "network_interfaces": count * first.get("network_interfaces", 1)}
        joined.append(first)
    return joined, {entry["name"]: notes[entry["name"]] for entry in joined}


def _counted(
    entries: Sequence[dict[str, Any]], notes: Mapping[str, tuple[str, ...]]
) -> tuple[list[dict[str, Any]], dict[str, tuple[str, ...]]]:
    """The entries with like machines merged: all that are named d-0, d-1, ... into one entry d with a count, others
    whose names differ in the number at their end into one with a node list as its name."""
    taken, kinds = {entry["name"] for entry in entries}, dict[str, list[dict[str, Any]]]()
    bases = Counter(base for name in taken if (base := name.rpartition("-")[0]))
    for entry in entries:
        kinds.setdefault(repr((entry | {"name": ""}, notes[entry["name"]])), []).append(entry)
    out, comments = [], {}
    for alike in kinds.values():
        for listed in compress(entry["name"] for entry in alike):
            names, merged = expand(listed), alike[0] | {"name": listed}
            count, base = len(names), names[0].removesuffix("-0")
            if count > 1 and bases[base] == count and base not in taken and names[-1] == f"{base}-{count - 1}":
                merged |= {"name": base, "count": count}
            out.append(merged)
            comments[merged["name"]] = notes[names[0]]
    return out, comments
