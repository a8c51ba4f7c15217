"""The cluster of a measured run, built from its row, with nominal link rates.

GPUs are types of the catalogue, found by the words of the column `gpu` and by `gpu_mem_gb`; `8xA+16xB` means machines
of each type, `8xA(2x4)` two machines of four. Links inside machines are those usual for the type
(`hexiopt.numbers.links`); a rack whose NVLink joins 72 GPUs (`NVLink-NVL72`) is one machine. `inter_node_link_gbps` is
the rate between machines: up to 100 Gbit/s it is one interface per machine, above that one interface per GPU shares it;
where it is blank, the usual rate of the type is taken (`_USUAL_GBPS`). Where the row states no links and a file of
network fits has its GPU type, the fitted rates are taken instead and count as measured.
"""

import re
from dataclasses import dataclass
from typing import Any

from experiments.validation.rows import Row
from experiments.validation.shapes import InexpressibleError
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.files.link_files import NetworkFits
from hexiopt.numbers.gpus import Gpu, catalogue
from hexiopt.numbers.links import intra_bandwidth_gb_per_s
from hexiopt.numbers.products import same_memory
from hexiopt.problem.cluster import Cluster
from hexiopt.reading import Section
from hexiopt.units import GB

# Gbit/s per machine: 8 x HDR 200, NDR 400 or XDR 800 in NVIDIA's DGX machines and their cloud counterparts, four times
# Slingshot 200 in a GH200 node, NDR 400 in one of GB200, XDR 800 of GB300; 8 x 400 with AMD's. Others: 10 Gbit/s
# Ethernet.
_USUAL_GBPS = {
    "a100": 1600.0, "h100": 3200.0, "h200": 3200.0, "gh200": 800.0, "b200": 3200.0, "gb200": 1600.0,
    "a800": 1600.0, "h800": 3200.0,
    "b300": 6400.0, "gb300": 3200.0, "mi300x": 3200.0, "mi325x": 3200.0, "mi350x": 3200.0, "mi355x": 3200.0,
}  # fmt: skip
_USUAL_ETHERNET_GBPS = 10.0
_ONE_INTERFACE_GBPS = 100.0
_USUAL_MACHINE = 8
_NVL72 = 72  # GPUs that a rack's NVLink joins: one machine to us
_MACHINES = re.compile(r"(?P<first>\d+)x(?:(?P<second>\d+)x)?(?P<gpu>[A-Za-z0-9][\w -]*)")


@dataclass(frozen=True)
class Machines:
    """`count` machines of `num_gpus` GPUs of one type."""

    gpu: Gpu
    num_gpus: int
    count: int


@dataclass(frozen=True)
class Published:
    """A cluster, and whether its link rates were measured rather than nominal."""

    cluster: Cluster
    links_measured: bool


def cluster_of(row: Row, *, fused_attention: bool, fits: NetworkFits | None) -> Published:
    """The cluster of a row; without `fused_attention`, attention materialises its scores. Raises InexpressibleError."""
    parts = machines_of(row)
    unstated = not row.intra_node_link and row.inter_node_link_gbps is None
    measured = fits is not None and unstated and all(machines.gpu.name in fits.between for machines in parts)
    entries: list[dict[str, Any]] = []
    for k, machines in enumerate(parts):
        inside, interfaces, nic_gb_per_s = (
            _fitted_links(machines, fits) if measured and fits else _nominal_links(row, machines)
        )
        entries.append(
            {
                "name": f"m{k}",
                "gpu": machines.gpu.name,
                "num_gpus": machines.num_gpus,
                "count": machines.count,
                "intra_bandwidth_gb_per_s": inside,
                "network_interfaces": interfaces,
                "nic_bandwidth_gb_per_s": nic_gb_per_s,
            }
        )
    content: dict[str, Any] = {"name": "published", "machines": entries}
    if not fused_attention:
        content["gpus"] = {machines.gpu.name: {"flash_attention": False} for machines in parts}
    return Published(cluster_from_section(Section(content, f"line {row.line}")), measured)


def machines_of(row: Row) -> list[Machines]:
    """The machines, in the order of the column `gpu`. Raises InexpressibleError."""
    parts = row.gpu.split("+")
    usual = row.gpus_per_node or _USUAL_MACHINE
    if len(parts) == 1 and not _MACHINES.match(row.gpu):
        if row.gpus is None:
            raise InexpressibleError("the number of GPUs is not stated")
        if _in_racks(row):  # the same number of GPUs in each
            usual = max(n for n in range(1, min(_NVL72, row.gpus) + 1) if row.gpus % n == 0)
        return [_machines(gpu_of(row.gpu, row.gpu_mem_gb), row.gpus, usual)]
    entries = []
    for part in parts:
        named = _MACHINES.match(part)
        if named is None:
            raise InexpressibleError(f"{row.gpu!r} is not a list of machines")
        gpu, shape = gpu_of(named["gpu"], None), re.search(r"\((\d+)x(\d+)\)", part)
        if named["second"]:
            entries.append(Machines(gpu, int(named["second"]), int(named["first"])))
        elif shape:
            entries.append(Machines(gpu, int(shape[2]), int(shape[1])))
        else:
            entries.append(_machines(gpu, int(named["first"]), usual))
    return entries


def _in_racks(row: Row) -> bool:
    """Whether NVLink joins the machines of a rack."""
    return row.intra_node_link.endswith("NVL72")


def _machines(gpu: Gpu, num_gpus: int, usual: int) -> Machines:
    size = min(usual, num_gpus)
    if num_gpus % size:
        raise InexpressibleError("machines of unequal size")
    return Machines(gpu, size, num_gpus // size)


def gpu_of(text: str, memory_gib: float | None) -> Gpu:
    """The catalogue's type that `text` names, with the stated memory if any. Raises InexpressibleError."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    memory_match = re.search(r"[\s_-](\d+)\s*G(?:i?B)?\b", text, re.IGNORECASE)
    if memory_gib is None and memory_match:
        memory_gib = float(memory_match[1])
    entries = []
    for gpu in catalogue().values():
        words = gpu.name.split("_")
        core = "".join(word for word in words if word not in ("rtx", "sxm", "pcie") and not word.endswith("gb"))
        form = next((word for word in words if word in ("sxm", "pcie")), None)
        if core not in plain or (form is not None and (form == "pcie") != ("pcie" in plain)):
            continue
        if memory_gib is None or same_memory(gpu, memory_gib):
            entries.append((-len(core), gpu.name))
    if not entries:
        raise InexpressibleError(f"no type of the catalogue is {text!r}")
    return catalogue()[min(entries)[1]]


def _nominal_links(row: Row, machines: Machines) -> tuple[float, int, float]:
    """GB/s inside a machine, its interfaces, and GB/s of each."""
    usual = _USUAL_GBPS.get(machines.gpu.name.split("_")[0], _USUAL_ETHERNET_GBPS)
    gbps = row.inter_node_link_gbps or usual
    if _in_racks(row) and row.gpus_per_node:
        gbps *= machines.num_gpus / row.gpus_per_node
    interfaces = 1 if gbps <= _ONE_INTERFACE_GBPS else machines.num_gpus
    return intra_bandwidth_gb_per_s(machines.gpu), interfaces, gbps / 8 / interfaces


def _fitted_links(machines: Machines, fits: NetworkFits) -> tuple[float, int, float]:
    """`_nominal_links` by fits; the number of interfaces is the rate of all GPUs together over that of one."""
    between, inside = fits.between[machines.gpu.name], fits.inside[machines.gpu.name]

    def at_most(rates: dict[int, float]) -> float:
        return rates[max((n for n in rates if n <= machines.num_gpus), default=min(rates))]

    alone = between[min(between)]
    return at_most(dict(inside)) / GB, max(1, round(at_most(dict(between)) / alone)), alone / GB
