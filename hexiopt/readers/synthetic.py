"""Synthetic clusters: an ordinary cluster mapping, made deterministically from a few numbers."""

from typing import Any

import numpy as np

from hexiopt.calibration.gpus import catalogue
from hexiopt.calibration.links import intra_bandwidth_gb_per_s
from hexiopt.errors import did_you_mean
from hexiopt.reading import Section

MAX_MACHINES = 16_384
DEFAULT_MIX = {"h100_80gb_sxm": 1, "a100_80gb_sxm": 1, "rtx_4090": 1, "rtx_3090": 1}


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
