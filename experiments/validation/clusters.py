"""The cluster of a measured run, from its row.

GPUs are types of the catalogue, named by the words of the column `gpu` and by `gpu_mem_gb`; `8xA+16xB` makes machines
of each type. Links inside machines are those that the type usually has (`hexiopt.synthetic`), PCIe where the row says
so. Interfaces: one for each GPU, which share `inter_node_link_gbps` of the machine equally, or, where only Ethernet
speeds are stated (at most 100 Gbit/s), one; a blank is what machines of the type are sold with (`_USUAL_GBPS`).
"""

import re
from dataclasses import dataclass

from experiments.validation.rows import Row
from experiments.validation.shapes import InexpressibleError
from hexiopt.gpus import Gpu, catalogue
from hexiopt.synthetic import intra_bandwidth_gb_per_s
from hexiopt.profiles.network import NetworkFits
from hexiopt.units import GB, GIB

# Gbit/s of a machine, both what NVIDIA's DGX of the type has and what clouds sell: 8 x HDR 200, 8 x NDR 400; four
# Slingshot of 200 in a GH200 node. Others: 10 Gbit/s Ethernet.
_USUAL_GBPS = {"a100": 1600.0, "h100": 3200.0, "h200": 3200.0, "gh200": 800.0, "b200": 3200.0}
_ETHERNET_GBPS = 100.0
_USUAL_MACHINE = 8
_SAME_MEMORY = 0.02
_MIXED = re.compile(r"(?P<first>\d+)x(?:(?P<second>\d+)x)?(?P<gpu>[A-Za-z0-9][\w -]*)")


@dataclass(frozen=True)
class Machines:
    """`count` machines of `num_gpus` GPUs of one type."""

    gpu: Gpu
    num_gpus: int
    count: int


def machines_of(row: Row) -> list[Machines]:
    """The machines, in the order of the column `gpu`. Raises InexpressibleError."""
    parts = row.gpu.split("+")
    usual = row.gpus_per_node or _USUAL_MACHINE
    if len(parts) == 1 and not _MIXED.match(row.gpu):
        if row.gpus is None:
            raise InexpressibleError("the number of GPUs is not stated")
        return [_machines(gpu_of(row.gpu, row.gpu_mem_gb), row.gpus, usual)]
    found = []
    for part in parts:
        named = _MIXED.match(part)
        if named is None:
            raise InexpressibleError(f"{row.gpu!r} is not a list of machines")
        gpu, shape = gpu_of(named["gpu"], None), re.search(r"\((\d+)x(\d+)\)", part)
        if named["second"]:
            found.append(Machines(gpu, int(named["second"]), int(named["first"])))
        elif shape:
            found.append(Machines(gpu, int(shape[2]), int(shape[1])))
        else:
            found.append(_machines(gpu, int(named["first"]), usual))
    return found


def _machines(gpu: Gpu, num_gpus: int, usual: int) -> Machines:
    size = min(usual, num_gpus)
    if num_gpus % size:
        raise InexpressibleError("machines of unequal size")
    return Machines(gpu, size, num_gpus // size)


def gpu_of(text: str, memory_gib: float | None) -> Gpu:
    """The type of the catalogue that `text` names, of that memory if any is stated. Raises InexpressibleError."""
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    stated = re.search(r"-(\d+)\s*GB?\b", text)
    if memory_gib is None and stated:
        memory_gib = float(stated[1])
    found = []
    for gpu in catalogue().values():
        words = gpu.name.split("_")
        core = "".join(word for word in words if word not in ("rtx", "sxm", "pcie") and not word.endswith("gb"))
        form = next((word for word in words if word in ("sxm", "pcie")), None)
        if core not in plain or (form is not None and (form == "pcie") != ("pcie" in plain)):
            continue
        if memory_gib is None or abs(gpu.memory_bytes / GIB - memory_gib) <= _SAME_MEMORY * memory_gib:
            found.append((-len(core), gpu.name))
    if not found:
        raise InexpressibleError(f"no type of the catalogue is {text!r}")
    return catalogue()[min(found)[1]]


def links_of(row: Row, machines: Machines, fits: NetworkFits | None = None) -> tuple[float, int, float]:
    """GB/s inside a machine, its interfaces, and GB/s of each of them."""
    name, size = machines.gpu.name, machines.num_gpus
    if fits is not None and name in fits.between and not row.intra_node_link and row.inter_node_link_gbps is None:
        between, inside = fits.between[name], fits.inside[name]
        alone, together = between[min(between)], between[max(n for n in between if n <= size)]
        interfaces = max(1, round(together / alone))
        return inside[max(n for n in inside if n <= size)] / GB, interfaces, alone / GB
    gbps = row.inter_node_link_gbps or _USUAL_GBPS.get(name.split("_")[0], _ETHERNET_GBPS)
    interfaces = 1 if gbps <= _ETHERNET_GBPS else size
    inside_gb = EFF.get(name, EFF.get(machines.gpu.link,1.0))*intra_bandwidth_gb_per_s(machines.gpu)
    return inside_gb, interfaces, EFF["net"]*gbps / 8 / interfaces

EFF={"net":0.9,"nvlink3":0.75,"nvlink4":0.75,"t4":.25,"v100_16gb_sxm":.45}
