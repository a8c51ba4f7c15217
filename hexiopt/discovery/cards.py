"""A cluster from the names of its cards: `[3090, 4090]` in one PC, `[[3090, 4090], [2x4060ti-16gb]]` in several.

What names do not say is assumed, and said: cards reach each other through host memory over the PCIe of their type; a
host moves so much at once as two channels of DDR4-3200 do, of which each copy takes a write and a read.
"""

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hexiopt.checks import is_whole, number_in
from hexiopt.discovery.lines import Text
from hexiopt.discovery.smi import QUERY, read_table
from hexiopt.errors import InputError, quoted
from hexiopt.numbers.gpus import Gpu
from hexiopt.numbers.links import intra_bandwidth_gb_per_s, through_host_gb_per_s
from hexiopt.numbers.products import find_gpu, match
from hexiopt.problem.machine import MAX_BANDWIDTH_GB_PER_S, MAX_GPUS_PER_MACHINE

AUTO = "auto"
HOST_GB_PER_S = 51.2 / 2  # two channels of DDR4-3200 move 51.2 GB/s (JEDEC JESD79-4)
# Of an Ethernet frame of 1,538 bytes on the wire with a payload of 1,500, TCP with timestamps carries 1,448 (IEEE
# 802.3; RFC 7323).
_ETHERNET_SHARE = 1448 / 1538
_PCIE_LATENCY_US, _ETHERNET_LATENCY_US = 15.0, 100.0  # assumed
_MANY = re.compile(r"(\d{1,4})\s*[x×*]\s*(.+)", re.IGNORECASE), re.compile(r"(.+?)\s*[x×*]\s*(\d{1,4})", re.IGNORECASE)
_ETHERNET = re.compile(r"(\d{1,4}(?:\.\d)?)\s*gb?(?:e|it(?:/s)?|ps)", re.IGNORECASE)
_SMI_S = 20.0


@dataclass(frozen=True)
class CardCluster:
    """A cluster's mapping in the file format, and what was assumed, in words."""

    data: dict[str, Any]
    assumed: str


def cluster_of_cards(gpus: object, network: object = None) -> CardCluster:
    """The cluster of the cards `gpus`: a name, a list of names for one PC, a list of such lists for several, or `auto`
    for those of this machine. `2x3090` is two of a name.

    `network` joins several PCs: `10gbe`, or GB/s per PC and direction. Raises InputError.
    """
    pcs = [_cards(pc) for pc in _pcs(gpus)]
    between = _network(network, len(pcs))
    machines: list[dict[str, Any]] = []
    groups = []
    for number, counts in enumerate(pcs, 1):
        pc = "pc" if len(pcs) == 1 else f"pc{number}"
        parts = [_part(f"{pc}.{gpu.name}", gpu, count) for gpu, count in counts.items()]
        machines += parts
        group: dict[str, Any] = {"name": pc, "members": [part["name"] for part in parts]}
        if between is not None:
            group |= {"uplink_gb_per_s": between, "latency_us": (_ETHERNET_LATENCY_US - _PCIE_LATENCY_US) / 2}
        if len(parts) > 1:
            group["shared_gb_per_s"] = HOST_GB_PER_S
        if len(group) > 2:
            groups.append(group)
    name = ", ".join(" + ".join(f"{n} x {gpu.name}" if n > 1 else gpu.name for gpu, n in pc.items()) for pc in pcs)
    data: dict[str, Any] = {"name": name if len(name) <= 100 else f"{sum(pc.total() for pc in pcs)} cards"}
    if len(machines) > 1:
        slowest = min(part["nic_bandwidth_gb_per_s"] for part in machines)
        data["inter_machine"] = {"bandwidth_gb_per_s": slowest, "latency_us": _PCIE_LATENCY_US}
    return CardCluster(data | {"machines": machines, "groups": groups}, _assumptions(pcs, between, machines))


def _assumptions(pcs: Sequence[Counter[Gpu]], between: float | None, machines: Sequence[dict[str, Any]]) -> str:
    rates = {part.get("intra_bandwidth_gb_per_s", part["nic_bandwidth_gb_per_s"]) for part in machines}
    if pcs[0].total() == len(pcs) == 1:
        return ""
    low, high = min(rates), max(rates)
    links = f"{low:g} GB/s" if low == high else f"{low:g} to {high:g} GB/s"
    words = [f"{links} a card inside a PC"]
    if any(len(pc) > 1 for pc in pcs):
        words.append(f"{HOST_GB_PER_S:g} GB/s through its memory")
    if between is not None:
        words.append(f"{between:.3g} GB/s between PCs")
    return ", ".join(words)


def _part(name: str, gpu: Gpu, count: int) -> dict[str, Any]:
    """The cards of one type in a PC."""
    part: dict[str, Any] = {"name": name, "gpu": gpu.name, "num_gpus": count}
    if count > 1:
        part["intra_bandwidth_gb_per_s"] = intra_bandwidth_gb_per_s(gpu)
    return part | {"nic_bandwidth_gb_per_s": through_host_gb_per_s(gpu)}


def _pcs(gpus: object) -> list[list[object]]:
    if gpus == AUTO:
        return [list(_here())]
    if isinstance(gpus, str) or is_whole(gpus):
        return [[gpus]]
    if not isinstance(gpus, Sequence) or not gpus:
        raise InputError(f"gpus: {quoted(gpus)} is no list of cards; write gpus=[3090,4090]")
    nested = [isinstance(item, Sequence) and not isinstance(item, str) for item in gpus]
    if any(nested) and not all(nested):
        raise InputError(f"gpus: {quoted(gpus)} has cards beside PCs; write a list of lists, a PC each")
    return [list(pc) for pc in gpus] if nested[0] else [list(gpus)]


def _cards(names: Sequence[object]) -> Counter[Gpu]:
    """The number of cards of each type in a PC."""
    counts = Counter[Gpu]()
    for name in names:
        if not (isinstance(name, str) or is_whole(name)):
            raise InputError(f"gpus: {quoted(name)} is not the name of a card; write it as 3090, or 2x3090")
        number, product = _number_of(str(name).strip())
        counts[find_gpu(product, {}, "gpus")] += number
    if not 1 <= counts.total() <= MAX_GPUS_PER_MACHINE or min(counts.values()) < 1:
        raise InputError(f"gpus: a PC has {counts.total()} cards; name 1 to {MAX_GPUS_PER_MACHINE:,} of them")
    return counts


def _number_of(text: str) -> tuple[int, str]:
    """How many cards `2x3090` or `3090x2` are, and of which name: that of a card, if either is."""
    before, after = (pattern.fullmatch(text) for pattern in _MANY)
    readings = [(1, text)]  # first, as a 7900 XT is not 7,900 of T
    readings += [(int(before[1]), before[2])] if before else []
    readings += [(int(after[2]), after[1])] if after else []
    known = (reading for reading in readings if (named := match(reading[1])).gpu or named.choices)
    return next(known, (1, text))


def _network(network: object, pcs: int) -> float | None:
    """GB/s between PCs in each direction; None for one PC."""
    if pcs == 1:
        if network is not None:
            raise InputError(
                f"network: {quoted(network)} joins several PCs; write gpus=[[3090],[4090]], or leave it out"
            )
        return None
    if network is None:
        raise InputError(f"network: is missing for {pcs} PCs; state network=1gbe, or GB/s per PC and direction")
    if isinstance(network, str) and (ethernet := _ETHERNET.fullmatch(network.strip())):
        return float(ethernet[1]) / 8 * _ETHERNET_SHARE
    if isinstance(network, str):
        raise InputError(f"network: {quoted(network)} is not known; write 1gbe, 10gbe, or GB/s as a number")
    return float(number_in(network, "network", above=0, at_most=MAX_BANDWIDTH_GB_PER_S))


def _here() -> list[str]:
    """The types of this machine's GPUs, as its driver names them."""
    if shutil.which("nvidia-smi") is None:
        raise InputError("gpus: auto needs nvidia-smi, which is not here; name the cards, as gpus=[3090,4090]")
    try:
        run = subprocess.run(QUERY.split(), capture_output=True, text=True, timeout=_SMI_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"gpus: auto: nvidia-smi failed ({str(error)[:100]}); name the cards") from None
    names = []
    for gpu in read_table(Text("nvidia-smi", run.stdout)).gpus:
        named = match(gpu.name, gpu.memory_bytes)
        if named.gpu is None:
            which = f"may be {' or '.join(named.choices)}" if named.choices else "is not in the catalogue"
            raise InputError(f"gpus: auto: {gpu.name!r} {which}; name the cards, or describe them in a cluster file")
        names.append(named.gpu)
    return names
