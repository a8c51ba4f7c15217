"""A machine of the cluster file from texts about its GPUs: a part for each GPU type, and the links inside."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hexiopt.discovery.inventory import Node
from hexiopt.discovery.smi import SmiGpu
from hexiopt.discovery.topology import Topology, nvlink_gb_per_s
from hexiopt.files.link_files import Channel
from hexiopt.numbers.gpus import catalogue
from hexiopt.numbers.products import Match, match, mig_profile
from hexiopt.units import GB, GIB

_MIG_NOTE = (
    "MIG slices, which have no NVLink and no peer access to each other: describe the slice under gpus, with "
    "peer_to_peer: false"
)


@dataclass(frozen=True)
class Kind:
    """GPUs of one kind in a machine: their number, and their `indices` in the tools' numbering (None: not stated).

    `is_sliced` GPUs are MIG slices.
    """

    product: str | None
    memory_bytes: int | None
    count: int | None
    indices: tuple[int, ...] | None = None
    pcie: str | None = None
    is_sliced: bool = False


def kinds_of(smi: Sequence[SmiGpu] | None, node: Node | None) -> list[Kind]:
    """The kinds of GPUs of a machine, as its driver names them, else as its scheduler does."""
    if smi is not None:
        return _driver_kinds(smi)
    if node is None or not node.gpus:
        return [Kind(None, None, None)]
    kinds: list[Kind] = []
    first = 0
    for group in node.gpus:
        product, count = group.product, group.count
        sliced = product is not None and mig_profile(product) is not None
        indices = None if count is None or sliced else tuple(range(first, first + count))
        kinds.append(Kind(product, group.memory_bytes, count, indices, is_sliced=sliced))
        first += count or 0
    return kinds


def _driver_kinds(smi: Sequence[SmiGpu]) -> list[Kind]:
    by_kind: dict[tuple[str, Match, bool], list[SmiGpu]] = {}
    for gpu in smi:  # ECC may change the memory of a product, but not its type
        by_kind.setdefault((gpu.name, match(gpu.name, gpu.memory_bytes), gpu.is_sliced), []).append(gpu)
    kinds: list[Kind] = []
    for (name, _, sliced), gpus in by_kind.items():
        if not sliced:
            indices = tuple(gpu.index for gpu in gpus)
            kinds.append(Kind(name, gpus[0].memory_bytes, len(gpus), indices, _pcie(gpus)))
            continue
        profiles = Counter(profile for gpu in gpus for profile in gpu.slices)
        kinds += [Kind(f"{name} {profile}", None, count, is_sliced=True) for profile, count in profiles.items()]
        if not profiles:  # nvidia-smi -L states the slices, --query-gpu only that there are some
            kinds.append(Kind(f"{name} in MIG mode", None, None, is_sliced=True))
    return kinds


def _pcie(gpus: Sequence[SmiGpu]) -> str | None:
    pairs = {(gpu.pcie_gen, gpu.pcie_width) for gpu in gpus}
    if len(pairs) != 1 or None in (pair := next(iter(pairs))):
        return None
    return f"PCIe {pair[0]} x{pair[1]} at most"


def part_names(machine: str, kinds: Sequence[Kind]) -> list[str]:
    """The name of each part of a machine: the machine's name, followed by a dot and the type if there are several."""
    if len(kinds) == 1:
        return [machine]
    names: list[str] = []
    for k, kind in enumerate(kinds):
        title = match(kind.product or "", kind.memory_bytes).gpu or kind.product or "gpu"
        name = f"{machine}.{re.sub(r'[^a-z0-9]+', '_', title.lower()).strip('_')}"
        names.append(name if name not in names else f"{name}.{k}")
    return names


def entry_of(name: str, kind: Kind, topology: Topology | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The entry of a machine in the file format, and comments on it."""
    matched = Match(None) if kind.is_sliced else match(kind.product or "", kind.memory_bytes)
    notes = [_type_note(kind, matched)]
    entry: dict[str, Any] = {"name": name, "gpu": matched.gpu, "num_gpus": kind.count}
    if kind.count != 1:
        entry |= {"intra_bandwidth_gb_per_s": None, "intra_latency_us": None}
    if kind.is_sliced:
        notes.append(_MIG_NOTE)
    elif topology is not None and kind.indices is not None:
        notes += _join(entry, kind.indices, topology)
    if topology is not None and len(topology.cards) > 1:  # no text states which of them training uses
        entry["network_interfaces"] = None
        notes.append(f"network cards: {', '.join(topology.cards)}; state how many of them training uses")
    if kind.pcie is not None:
        notes.append(kind.pcie)
    return entry, tuple(notes)


def _type_note(kind: Kind, matched: Match) -> str:
    """A comment with the GPU type in the words of its text, and the candidates if that is ambiguous."""
    if kind.product is None:
        return "GPU type: not stated"
    if kind.is_sliced or matched.gpu is not None:
        return f"GPU type: {kind.product}"
    memory = "" if kind.memory_bytes is None else f" of {kind.memory_bytes / GIB:.1f} GiB"
    if not re.search(r"[0-9]", kind.product):
        return f"GPU type: {kind.product} names a series, not a product; state gpu"
    if not matched.choices:
        return f"GPU type: {kind.product}{memory} is not in the catalogue; describe it under gpus"
    *some, last = matched.choices
    choices = f"{', '.join(some)} or {last}" if some else last
    if matched.others is None:
        choices += ", or another product of that name"
    elif matched.others:
        choices += f"; not in the catalogue: {', '.join(matched.others)}"
    return f"GPU type: {kind.product}{memory} may be {choices}"


def measure(entry: dict[str, Any], bus: Channel) -> str:
    """Write the rate that nccl-tests measured for every link of a ring into a machine, in place of the datasheet's."""
    entry["intra_bandwidth_gb_per_s"] = float(f"{bus.bytes_per_s / GB:.4g}")
    entry.pop("intra_links", None)
    return f"nccl-tests: {entry['intra_bandwidth_gb_per_s']:g} GB/s on the bus of large messages"


def _join(entry: dict[str, Any], indices: Sequence[int], topology: Topology) -> list[str]:
    """Write the links between GPUs into a machine, NVLinks at their datasheet's rate, others as unknown."""
    pairs = [(a, b) for b in range(len(indices)) for a in range(b)]
    if not pairs:
        return []
    paths = {(a, b): topology.paths[indices[a], indices[b]] for a, b in pairs}
    links = {(a, b): topology.nvlinks(indices[a], indices[b]) for a, b in pairs}
    gpu = catalogue().get(entry["gpu"] or "")
    nvlink_rate = None if gpu is None else nvlink_gb_per_s(gpu)

    def rate(number: int) -> float | None:
        return None if nvlink_rate is None or not number else number * nvlink_rate

    counts = Counter(links.values())
    usual = 0 if 0 in counts else max(counts, key=lambda number: (counts[number], -number))
    entry["intra_bandwidth_gb_per_s"] = rate(usual)
    others = [{"between": [a, b], "bandwidth_gb_per_s": rate(n)} for (a, b), n in links.items() if n != usual]
    if others:
        entry["intra_links"] = others
    paths_in_words = ", ".join(f"{path} {number}×" for path, number in sorted(Counter(paths.values()).items()))
    of_link = (
        f"; {nvlink_rate:g} GB/s per NVLink and direction" if nvlink_rate is not None and usual + len(others) else ""
    )
    return [f"pairs of GPUs: {paths_in_words}{of_link}"]


def paths_between(a: Kind, b: Kind, topology: Topology | None) -> str | None:
    """The paths between the GPUs of two kinds in a machine, such as `NODE, PHB`; None if not stated."""
    if topology is None or a.indices is None or b.indices is None:
        return None
    return ", ".join(sorted({topology.paths[min(i, j), max(i, j)] for i in a.indices for j in b.indices}))
