"""Synthetic clusters: an ordinary cluster mapping, made deterministically from a few numbers."""

from typing import Any

import numpy as np

from hexiopt.checks import is_whole
from hexiopt.errors import did_you_mean
from hexiopt.numbers.gpus import catalogue
from hexiopt.numbers.links import intra_bandwidth_gb_per_s
from hexiopt.reading import Section

MAX_MACHINES = 16_384
_KEYS = ("num_machines", "gpus_per_machine", "mix", "inter_bandwidth_gb_per_s", "seed")
_GPU_COUNTS, _MACHINE_COUNTS = ("gpus", "num_gpus", "devices"), ("machines", "nodes", "num_nodes")  # as users say it
DEFAULT_MIX = {"h100_80gb_sxm": 1, "a100_80gb_sxm": 1, "rtx_4090": 1, "rtx_3090": 1}


def resolve_synthetic(section: Section) -> Section:
    """The ordinary cluster mapping for one with the key `synthetic`. Raises InputError naming the key.

    Machine types get shares of `num_machines` in proportion to their weights in `mix`, rounded to whole machines by
    largest remainders. `seed` determines the order of the types and breaks ties between equal remainders.
    """
    inner = section.section("synthetic")
    for key in section.keys():  # noqa: SIM118
        value = section.raw(key)
        if key not in ("name", "synthetic") and (key != "gpus" or _is_count(value)):
            section.fail(key, _remedy(key, value, inner))
    resolved = {"name": section.raw("name"), **_expand(inner)}
    if "gpus" in section:
        resolved["gpus"] = section.raw("gpus")
    return Section(resolved, section.where)


def _is_count(value: Any) -> bool:
    return is_whole(value) and value > 0


def _remedy(key: str, value: Any, inner: Section) -> str:
    """Why `key` is refused next to the section `inner`, synthetic, and what to state instead."""
    if _is_count(value) and key in _GPU_COUNTS:
        size = inner.integer("gpus_per_machine", at_least=1, at_most=1024, default=8)
        count, rule = -(-value // size), f"is not how a synthetic cluster is stated, which has machines of {size} GPUs"
    elif _is_count(value) and key in _MACHINE_COUNTS:
        count, rule = value, "is not how the machines of a synthetic cluster are stated"
    elif key in _KEYS:
        value_in_words = f"={value}" if isinstance(value, int | float) else ""
        return f"belongs in synthetic; state cluster.synthetic.{key}{value_in_words}"
    else:
        return f"is nothing that a synthetic cluster has; cluster.synthetic has {', '.join(_KEYS)}"
    return f"{rule}; state cluster.synthetic.num_machines={count}"


def _expand(section: Section) -> dict[str, Any]:
    num_machines = section.integer("num_machines", at_least=1, at_most=MAX_MACHINES)
    gpus_per_machine = section.integer("gpus_per_machine", at_least=1, at_most=1024, default=8)
    inter = section.number("inter_bandwidth_gb_per_s", above=0, at_most=1e5, default=12.5)
    seed = section.integer("seed", at_least=0, at_most=2**32 - 1, default=0)
    mix = section.section("mix") if "mix" in section else Section(DEFAULT_MIX, section.at("mix"))
    types = catalogue()
    weights = {name: mix.number(name, at_least=0, at_most=1e6) for name in sorted(mix.keys())}
    for name in weights:
        if name not in types:
            mix.fail(name, f"is the weight of an unknown GPU; {did_you_mean(name[:100], types)}")
    if not sum(weights.values()) > 0:
        section.fail("mix", "has no weight above 0; give one type a weight")
    section.finish()

    order = np.random.default_rng(seed).permutation(len(weights))
    names = [list(weights)[k] for k in order]
    counts = _round_shares(num_machines, [weights[name] for name in names])
    return {
        "inter_machine": {"bandwidth_gb_per_s": inter, "latency_us": 20.0},
        "machines": [
            {
                "name": name,
                "gpu": name,
                "num_gpus": gpus_per_machine,
                "intra_bandwidth_gb_per_s": intra_bandwidth_gb_per_s(types[name]),
                "count": count,
            }
            for name, count in zip(names, counts, strict=True)
            if count
        ],
    }


def _round_shares(total: int, weights: list[float]) -> list[int]:
    """Whole shares of `total` in proportion to weights, by the largest-remainder method."""
    whole = sum(weights)
    shares = [total * weight / whole for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda k: counts[k] - shares[k])
    for k in by_remainder[: total - sum(counts)]:
        counts[k] += 1
    return counts
