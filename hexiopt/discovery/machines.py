"""One cluster from the outputs of several tools: machines, their GPUs and links; values that no text states are null.

Every machine in service that any text names is included. Texts that contradict each other are refused.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hexiopt.discovery.entries import entry_of, kinds_of, measure, part_names, paths_between
from hexiopt.discovery.inventory import Inventory, Node
from hexiopt.discovery.kinds import read, read_all
from hexiopt.discovery.smi import SmiGpu, SmiGpus
from hexiopt.discovery.topology import Topology
from hexiopt.errors import InputError, quoted
from hexiopt.files.link_files import Channel, read_nccl_tests
from hexiopt.numbers.products import match
from hexiopt.problem.machine import MAX_GPUS_PER_MACHINE, NAME, NAME_RULE
from hexiopt.problem.nodelist import compress, expand

LONE = ""  # key of a path given without a machine
_LOCAL = "local"  # name of a single machine that no text names
_INVENTORIES = {"slurm": "Slurm", "kubernetes": "Kubernetes", "hostfile": "the hostfile"}


@dataclass(frozen=True)
class Texts:
    """Paths of tools' outputs: by machine (or `LONE`) for nvidia-smi, rocm-smi, their topologies and nccl-tests, one
    for the cluster for the others."""

    nvidia_smi: Mapping[str, str] = field(default_factory=dict)
    rocm_smi: Mapping[str, str] = field(default_factory=dict)
    topology: Mapping[str, str] = field(default_factory=dict)
    nccl_tests: Mapping[str, str] = field(default_factory=dict)
    slurm: str | None = None
    kubernetes: str | None = None
    hostfile: str | None = None


@dataclass(frozen=True)
class Discovery:
    """A cluster in the file format, with comments by machine.

    Nodes `without_gpus` and nodes `out_of_service`, with their states, are not in it. `remarks` name what was not read.
    """

    cluster: dict[str, Any]
    notes: dict[str, tuple[str, ...]]
    without_gpus: tuple[str, ...] = ()
    out_of_service: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Read:
    """The contents of the texts: inventories by option, the others by machine."""

    inventories: Mapping[str, Inventory]
    smi: Mapping[str, SmiGpus]
    topologies: Mapping[str, Topology]
    buses: Mapping[str, Channel]
    remarks: tuple[str, ...]

    @property
    def machine_names(self) -> list[str]:
        """All machines that any text names."""
        named = [name for inventory in self.inventories.values() for name in inventory.nodes]
        return list(dict.fromkeys([*named, *self.smi, *self.topologies, *self.buses]))

    def nodes_of(self, machine: str) -> dict[str, Node]:
        """The node of a machine in each inventory, by option."""
        return {
            option: inventory.nodes[machine]
            for option, inventory in self.inventories.items()
            if machine in inventory.nodes
        }


def discover(name: str, texts: Texts) -> Discovery:
    """The cluster called `name` that the texts describe. Raises InputError naming file and line.

    Nodes with equal GPUs and features in an inventory are taken as equal: the texts of one hold for those without.
    """
    texts_read = _read(texts)
    nodes = {machine: _node(machine, texts_read.nodes_of(machine)) for machine in texts_read.machine_names}
    twins = _twins(nodes, (texts_read.smi, texts_read.topologies, texts_read.buses))
    texts_read = _spread(texts_read, twins)
    entries: list[dict[str, Any]] = []
    notes: dict[str, tuple[str, ...]] = {}
    links: list[dict[str, Any]] = []
    without_gpus: list[str] = []
    out_of_service: dict[str, str] = {}
    for machine, node in nodes.items():
        count = _count(machine, texts_read)
        if count == 0:
            without_gpus.append(machine)
        elif node is not None and node.outage is not None:
            out_of_service[machine] = node.outage
        else:
            like = (f"read on {twins[machine]} for all nodes of equal GPUs and features",) if machine in twins else ()
            parts, between = _parts(machine, count, node, texts_read)
            entries += [entry for entry, _ in parts]
            notes |= {entry["name"]: (*comments, *like) for entry, comments in parts}
            links += between
    if not entries:
        _refuse_nothing(out_of_service, without_gpus)
    _check_names(entries)
    boxes = len(nodes) - len(without_gpus) - len(out_of_service)
    entries, notes = _fabrics(entries, notes, {machine: smi.gpus for machine, smi in texts_read.smi.items()})
    cluster: dict[str, Any] = {"name": name}
    if boxes > 1 and len(entries) > 1:
        cluster["inter_machine"] = {"bandwidth_gb_per_s": None, "latency_us": None}
    cluster["machines"], notes = _merge_entries(entries, notes)
    if links:
        cluster["links"] = links
    return Discovery(cluster, notes, tuple(without_gpus), out_of_service, texts_read.remarks)


def _parts(
    machine: str, count: int | None, node: Node | None, texts_read: _Read
) -> tuple[list[tuple[dict[str, Any], tuple[str, ...]]], list[dict[str, Any]]]:
    """The entries of a machine with their comments, one for each GPU type, and the links between them.

    No text states the rates of these links. Raises InputError.
    """
    smi, topology = texts_read.smi.get(machine), texts_read.topologies.get(machine)
    kinds = kinds_of(None if smi is None else smi.gpus, node)
    if smi is not None and node is not None:
        _check_types(machine, smi, node)
    if len(kinds) == 1 and kinds[0].count is None and not kinds[0].is_sliced and count is not None:
        kinds = [replace(kinds[0], count=count, indices=tuple(range(count)))]
    if len(kinds) > 1 and topology is not None and smi is None:
        what = f"has GPUs of {len(kinds)} types, and no text states which GPU has which"
        raise InputError(f"discover.topology: {machine!r} {what}; give its discover.nvidia_smi too")
    names = part_names(machine, kinds)
    parts, links = [], []
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        entry, comments = entry_of(name, kind, topology)
        if machine in texts_read.buses and "intra_bandwidth_gb_per_s" in entry:
            comments += (measure(entry, texts_read.buses[machine]),)
        for other, other_kind in zip(names[:i], kinds, strict=False):
            links.append({"between": [other, name], "bandwidth_gb_per_s": None, "latency_us": None})
            if (paths := paths_between(other_kind, kind, topology)) is not None:
                comments += (f"to {other}: {paths}",)
        parts.append((entry, (*comments, *(() if node is None else node.notes))))
    return parts, links


def _check_types(machine: str, smi: SmiGpus, node: Node) -> None:
    """Raise InputError where the driver names a type that the inventory's name does not stand for."""
    matches = [match(group.product or "") for group in node.gpus]
    candidates = {gpu for candidate in matches for gpu in ((candidate.gpu,) if candidate.gpu else candidate.choices)}
    if not all(candidate.gpu or candidate.choices for candidate in matches):
        return
    for gpu in smi.gpus:
        kind = match(gpu.name, gpu.memory_bytes).gpu
        if kind is not None and kind not in candidates:
            products = " and ".join(group.product or "?" for group in node.gpus)
            what = f"GPU {gpu.index} is a {gpu.name}, and its scheduler has {products}"
            raise InputError(f"{machine}: {what}; give texts that agree, or leave one out")


def _read(texts: Texts) -> _Read:
    paths = {option: path for option in _INVENTORIES if (path := getattr(texts, option)) is not None}
    inventories: dict[str, Inventory] = {option: read(option, path) for option, path in paths.items()}
    by_machine = {option: getattr(texts, option) for option in ("nvidia_smi", "rocm_smi", "topology", "nccl_tests")}
    machines = [name for inventory in inventories.values() for name in inventory.nodes]
    machines = list(dict.fromkeys([*machines, *(machine for part in by_machine.values() for machine in part)]))
    machines = [machine for machine in machines if machine != LONE]
    by_machine = {option: _by_machine(option, part, machines) for option, part in by_machine.items()}
    smi: dict[str, SmiGpus] = read_all("nvidia_smi", by_machine["nvidia_smi"])
    rocm: dict[str, SmiGpus] = read_all("rocm_smi", by_machine["rocm_smi"])
    if both := smi.keys() & rocm.keys():
        raise InputError(f"discover.rocm_smi: {min(both)!r} has discover.nvidia_smi too; give one of them")
    remarks = [f"{paths[option]}: {note}" for option, part in inventories.items() for note in part.notes]
    remarks += [f"{by_machine['nvidia_smi'][machine]}: {note}" for machine, part in smi.items() for note in part.notes]
    return _Read(
        inventories,
        smi | rocm,
        read_all("topology", by_machine["topology"]),
        {machine: read_nccl_tests(Path(path)) for machine, path in by_machine["nccl_tests"].items()},
        tuple(remarks),
    )


def _node(machine: str, by_option: Mapping[str, Node]) -> Node | None:
    """One node from all inventories: the GPUs of the first that names their types, and any outage.

    Raises InputError where two inventories name different types.
    """
    if not by_option:
        return None
    typed = {option: node for option, node in by_option.items() if any(group.product for group in node.gpus)}
    types = {option: [match(group.product or "").gpu for group in node.gpus] for option, node in typed.items()}
    types_by_option = {option: sorted(map(str, gpus)) for option, gpus in types.items() if None not in gpus}
    if len({repr(gpus) for gpus in types_by_option.values()}) > 1:
        which = ", ".join(f"{' and '.join(gpus)} by {_INVENTORIES[option]}" for option, gpus in types_by_option.items())
        raise InputError(f"{machine}: has {which}; give texts that agree, or leave one out")
    chosen = next(iter(typed.values()), next(iter(by_option.values())))
    outage = next((node.outage for node in by_option.values() if node.outage is not None), None)
    return replace(chosen, outage=outage)


def _twins(nodes: Mapping[str, Node | None], texts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """For each node, the node of its kind whose texts hold for it: the only one of the kind with texts.

    Nodes without GPU types and features are never of one kind.
    """
    kinds: dict[Any, list[str]] = {}
    for name, node in nodes.items():
        if node is not None and node.gpus and (node.features or all(group.product for group in node.gpus)):
            kinds.setdefault((node.gpus, node.features), []).append(name)
    twins: dict[str, str] = {}
    for names in kinds.values():
        with_texts = [name for name in names if any(name in by_machine for by_machine in texts)]
        if len(with_texts) == 1 and len(names) > 1:
            twins |= dict.fromkeys(names, with_texts[0])
    return twins


def _spread(texts_read: _Read, twins: Mapping[str, str]) -> _Read:
    """Copy the texts of each twin to the nodes that it stands for, except the NVLink fabric, which only a machine's own
    text can tell."""
    smi = {
        machine: replace(
            texts_read.smi[twin], gpus=tuple(replace(gpu, fabric=None) for gpu in texts_read.smi[twin].gpus)
        )
        for machine, twin in twins.items()
        if twin in texts_read.smi and machine != twin
    }
    return replace(
        texts_read,
        smi={**texts_read.smi, **smi},
        topologies={
            **texts_read.topologies,
            **{m: texts_read.topologies[twin] for m, twin in twins.items() if twin in texts_read.topologies},
        },
        buses={
            **texts_read.buses,
            **{m: texts_read.buses[twin] for m, twin in twins.items() if twin in texts_read.buses},
        },
    )


def _refuse_nothing(out_of_service: Mapping[str, str], without_gpus: Sequence[str]) -> None:
    if out_of_service:
        name, state = next(iter(out_of_service.items()))
        raise InputError(
            f"discover: no node in service has GPUs; {len(out_of_service)} with GPUs cannot run jobs, such as {name} "
            f"({state}); give a text without their state"
        )
    nodes = f"; {len(without_gpus)} nodes have none" if without_gpus else ""
    raise InputError(f"discover: no text names a GPU{nodes}; give texts of machines with GPUs")


def _by_machine(option: str, paths: Mapping[str, str], machines: Sequence[str]) -> dict[str, str]:
    """Paths by machine; a path without a machine belongs to the only one. Raises InputError if there are several."""
    for machine in paths:
        if machine != LONE and not NAME.fullmatch(machine):
            raise InputError(f"discover.{option}: {quoted(machine)} {NAME_RULE}")
    if LONE not in paths:
        return dict(paths)
    if len(machines) > 1:
        which = f"{paths[LONE]!r} belongs to one of {len(machines)} machines"
        raise InputError(f"discover.{option}: {which}; state which: discover.{option}={{{machines[0]}: {paths[LONE]}}}")
    return {machines[0] if machines else _LOCAL: paths[LONE]}


def _count(machine: str, texts_read: _Read) -> int | None:
    """The number of GPUs of a machine; None where no text states it. Raises InputError where texts differ."""
    counts: dict[str, int] = {}
    if machine in texts_read.smi:
        gpus = texts_read.smi[machine].gpus
        slices = sum(len(gpu.slices) for gpu in gpus)
        if slices or not any(gpu.is_sliced for gpu in gpus):
            counts["nvidia-smi"] = slices + sum(not gpu.is_sliced for gpu in gpus)
    if machine in texts_read.topologies:
        counts["the topology"] = texts_read.topologies[machine].num_gpus
    for option, node in texts_read.nodes_of(machine).items():
        if node.num_gpus is not None:
            counts[_INVENTORIES[option]] = node.num_gpus
    if len(set(counts.values())) > 1:
        counts_in_words = ", ".join(f"{count} by {source}" for source, count in counts.items())
        raise InputError(f"{machine}: has {counts_in_words}; give texts that agree, or leave one out")
    count = next(iter(counts.values()), None)
    if count is not None and count > MAX_GPUS_PER_MACHINE:
        raise InputError(f"{machine}: has {count} GPUs; a machine has up to {MAX_GPUS_PER_MACHINE}, split it by hand")
    return count


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
    """Merge machines that one NVLink fabric joins into one machine, named after the first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        fabrics = {gpu.fabric for gpu in smi.get(entry["name"], ())}
        fabric = next(iter(fabrics)) if len(fabrics) == 1 else None
        groups.setdefault(fabric or f"of {entry['name']}", []).append(entry)
    merged = []
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
        merged.append(first)
    return merged, {entry["name"]: notes[entry["name"]] for entry in merged}


def _merge_entries(
    entries: Sequence[dict[str, Any]], notes: Mapping[str, tuple[str, ...]]
) -> tuple[list[dict[str, Any]], dict[str, tuple[str, ...]]]:
    """Merge equal machines: those named d-0, d-1, ... into one entry d with a count, others whose names differ only in
    the number at their end into one entry with a node list as its name."""
    names_in_use, kinds = {entry["name"] for entry in entries}, dict[str, list[dict[str, Any]]]()
    bases = Counter(base for name in names_in_use if (base := name.rpartition("-")[0]))
    for entry in entries:
        kinds.setdefault(repr((entry | {"name": ""}, notes[entry["name"]])), []).append(entry)
    out, comments = [], {}
    for same in kinds.values():
        for node_list in compress(entry["name"] for entry in same):
            names, merged = expand(node_list), same[0] | {"name": node_list}
            count, base = len(names), names[0].removesuffix("-0")
            if count > 1 and bases[base] == count and base not in names_in_use and names[-1] == f"{base}-{count - 1}":
                merged |= {"name": base, "count": count}
            out.append(merged)
            comments[merged["name"]] = notes[names[0]]
    return out, comments
