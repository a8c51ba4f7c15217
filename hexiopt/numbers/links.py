"""The usual bandwidths between the GPUs of a machine, by GPU type."""

from hexiopt.numbers.gpus import Gpu

# GB/s per GPU, per direction, by the catalogue's `link`. NVLink: half of the datasheets' bidirectional
# figures (P100 160, V100 300, A100 600, H100 900, B200 1,800). Infinity Fabric: seven links of 64 and 76.8 GB/s. PCIe
# with peer-to-peer copies: about 75 % of the raw 15.8, 31.5 and 63 GB/s of 16 lanes; bridges connect only pairs, so
# they count as PCIe 4. `memory`: copies on one CPU, nominal.
_LINK_GB_PER_S = {
    "nvlink1": 80.0,
    "nvlink2": 150.0,
    "nvlink3": 300.0,
    "nvlink4": 450.0,
    "nvlink5": 900.0,
    "nvlink_bridge": 24.0,
    "pcie3": 12.0,
    "pcie4": 24.0,
    "pcie5": 48.0,
    "infinity_fabric3": 448.0,
    "infinity_fabric4": 537.6,
    "memory": 2.0,
}
# GeForce drivers do not allow peer-to-peer copies: data crosses PCIe twice, through host memory.
_STAGED_SHARE = 0.5
# Export versions with NVLink cut to 400 GB/s bidirectional (NVIDIA A800 and H800 datasheets). MI250: between dies of
# different modules one link of 50 GB/s or two (AMD CDNA 2 whitepaper); the least counts. MI300A: 128 GB/s to each of
# three others (AMD CDNA 3 whitepaper).
_TYPE_GB_PER_S = {"a800_80gb_sxm": 200.0, "h800_80gb_sxm": 200.0, "mi250": 50.0, "mi250x": 50.0, "mi300a": 384.0}


def intra_bandwidth_gb_per_s(gpu: Gpu) -> float:
    """Usual GB/s between two GPUs of a type in one machine, per direction. KeyError for an unknown link."""
    gb_per_s = _TYPE_GB_PER_S.get(gpu.name)
    if gb_per_s is not None:
        return gb_per_s
    return _LINK_GB_PER_S[gpu.link] * (1.0 if gpu.peer_to_peer else _STAGED_SHARE)


def through_host_gb_per_s(gpu: Gpu) -> float:
    """GB/s from a GPU to one of another type in its machine, per direction: over PCIe (4 for GPUs whose own link is
    another), through host memory, as only equal GPUs copy from each other."""
    return _LINK_GB_PER_S[gpu.link if gpu.link.startswith("pcie") else "pcie4"] * _STAGED_SHARE
