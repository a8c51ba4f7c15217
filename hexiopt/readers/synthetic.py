"""Synthetic clusters: an ordinary cluster mapping, made deterministically from a few numbers."""

from typing import Any

import numpy as np

from hexiopt.calibration.gpus import Gpu, catalogue
from hexiopt.errors import did_you_mean
from hexiopt.reading import Section

MAX_MACHINES = 16_384
DEFAULT_MIX = {"h100_80gb_sxm": 1, "a100_80gb_sxm": 1, "rtx_4090": 1, "rtx_3090": 1}

# GB/s per GPU, per direction, by the catalogue's `link`. NVLink: half of the datasheets' bidirectional
# figures (P100 160, V100 300, A100 600, H100 900, B200 1,800). PCIe with peer-to-peer copies: about 75 % of
# the raw 15.8, 31.5 and 63 GB/s of 16 lanes; bridges connect only pairs, so they count as PCIe 4. `memory`:
# copies on one CPU, nominal.
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
    "memory": 2.0,
}
# GeForce drivers do not allow peer-to-peer copies: data crosses PCIe twice, through host memory.
_STAGED_SHARE = 0.5
# Export versions with NVLink cut to 400 GB/s bidirectional (NVIDIA A800 and H800 datasheets).
_TYPE_GB_PER_S = {"a800_80gb_sxm": 200.0, "h800_80gb_sxm": 200.0}


def intra_bandwidth_gb_per_s(gpu: Gpu) -> float:
    """Usual GB/s between two GPUs of a type in one machine, per direction. KeyError for an unknown link."""
    stated = _TYPE_GB_PER_S.get(gpu.name)
    if stated is not None:
        return stated
    return _LINK_GB_PER_S[gpu.link] * (1.0 if gpu.peer_to_peer else _STAGED_SHARE)


def resolve_synthetic(section: Section) -> Section:
    """The ordinary cluster mapping for one with the key `synthetic`. Raises InputError naming the key.

    Machine types get shares of `num_machines` in proportion to their weights in `mix`, rounded to whole machines by
    largest remainders. `seed` determines the order of the types and breaks ties between equal remainders.
    """
    resolved = {"name": section.raw("name"), **_expand(section.section("synthetic"))}
    if "gpus" in section:
        resolved["gpus"] = section.raw("gpus")
    section.finish()
    return Section(resolved, section.where)


def _expand(section: Section) -> dict[str, Any]:
    num_machines = section.integer("num_machines", at_least=1, at_most=MAX_MACHINES)
    gpus_per_machine = section.integer("gpus_per_machine", at_least=1, at_most=1024, default=8)
    inter = section.number("inter_bandwidth_gb_per_s", above=0, at_most=1e5, default=12.5)
    seed = section.integer("seed", at_least=0, at_most=2**32 - 1, default=0)
    mix = section.section("mix") if "mix" in section else Section(DEFAULT_MIX, section.at("mix"))
    known = catalogue()
    weights = {name: mix.number(name, at_least=0, at_most=1e6) for name in sorted(mix.keys())}
    for name in weights:
        if name not in known:
            mix.fail(name, f"is the weight of an unknown GPU; {did_you_mean(name[:100], known)}")
    if not sum(weights.values()) > 0:
        section.fail("mix", "has no weight above 0; give one type a weight")
    section.finish()

    order = np.random.default_rng(seed).permutation(len(weights))
    names = [list(weights)[k] for k in order]
    counts = _rounded_shares(num_machines, [weights[name] for name in names])
    return {
        "inter_machine": {"bandwidth_gb_per_s": inter, "latency_us": 20.0},
        "machines": [
            {
                "name": name,
                "gpu": name,
                "num_gpus": gpus_per_machine,
                "intra_bandwidth_gb_per_s": intra_bandwidth_gb_per_s(known[name]),
                "count": count,
            }
            for name, count in zip(names, counts, strict=True)
            if count
        ],
    }


def _rounded_shares(total: int, weights: list[float]) -> list[int]:
    """Whole shares of `total` in proportion to weights, by the largest-remainder method."""
    whole = sum(weights)
    shares = [total * weight / whole for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: counts[k] - shares[k])
    for k in by_remainder[: total - sum(counts)]:
        counts[k] += 1
    return counts
