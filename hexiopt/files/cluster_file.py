"""The cluster file: reads a cluster from the file format, and writes it so that reading gives an equal cluster."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from hexiopt.checks import is_whole
from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.files.calibration_file import calibration_from_section, calibration_to_dict
from hexiopt.files.machine_entries import finite_gb_per_s, gpus_from_section, machine_to_dict, machines_from_section
from hexiopt.files.profile_files import profile_from_section, profile_to_dict, read_profile
from hexiopt.numbers.gpus import catalogue, gpu_to_dict
from hexiopt.numbers.links import intra_bandwidth_gb_per_s
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.factors import Calibration, calibration_of
from hexiopt.problem.machine import DEFAULT_INTER_LATENCY_US, check_latency, check_rate, spec_spans
from hexiopt.problem.network import Group, Link
from hexiopt.problem.profile import NOTHING_MEASURED, Profile
from hexiopt.reading import Section, read_mapping
from hexiopt.units import GB, MICROSECOND, in_unit

_KEYS = {
    "inter_bandwidth_bytes_per_s": ("inter_machine.bandwidth_gb_per_s",),
    "links[*].source": ("links[*].between", "links[*].from"),
    "links[*].target": ("links[*].between", "links[*].to"),
}


def read_cluster(path: str | Path) -> Cluster:
    """The cluster in a file. Raises InputError naming file and key."""
    return cluster_from_section(Section(read_mapping(path), str(path)), Path(path).parent)


def cluster_from_section(section: Section, folder: Path = Path()) -> Cluster:
    """The cluster that a mapping in the file format describes. Raises InputError naming the key.

    A `profile` and a `calibration` are paths relative to `folder`, or the content of such a file; `calibrated` records
    the calibration that the figures contain already.
    """
    if "synthetic" in section:
        section = resolve_synthetic(section)
    section.refuse_nulls("inter_machine", "machines", "links")
    if is_whole(section.raw("gpus", {})):
        remedy = "state how many GPUs there are by num_gpus and count of each machine (docs/clusters.md)"
        section.fail("gpus", f"is not a mapping of GPU types to their figures; {remedy}")
    name, profile = section.text("name"), _read_profile(section, folder)
    types = gpus_from_section(section.section("gpus", optional=True))
    inter = section.section("inter_machine", optional=True)
    rate = inter.si("bandwidth_gb_per_s", math.inf)
    latency_s = inter.si("latency_us", DEFAULT_INTER_LATENCY_US * MICROSECOND)
    inter.finish()
    with inter.building():  # before machines inherit them
        check_rate(rate, "bandwidth_bytes_per_s")
        check_latency(latency_s, "latency_s")
    machines = machines_from_section(section, types, rate, latency_s)
    links = tuple(_link(entry) for entry in section.sections("links", optional=True))
    groups = tuple(_group(entry) for entry in section.sections("groups", optional=True))
    slow = section.section("slow", optional=True)
    calibration, record = _read_calibration(section, folder), section.section("calibrated", optional=True)
    section.finish()
    with section.building(_KEYS):
        cluster = Cluster(name, machines, rate, latency_s, groups, links, profile)
    cluster = cluster.with_speeds(slow.values(), slow.where)
    if record.keys():
        before = calibration_from_section(record)
        cluster = cluster.replace(calibrated=tuple(before.factors.items()), calibrated_by=before.source)
    return cluster if calibration is None else calibration.apply_to(cluster)


def _read_profile(section: Section, folder: Path) -> Profile:
    source = section.raw("profile", None)
    if source is None:
        return NOTHING_MEASURED
    if isinstance(source, str):
        try:
            return read_profile(folder / source)
        except InputError as error:
            raise InputError(f"{section.at('profile')}: {error}") from None
    return profile_from_section(section.section("profile"))


def _read_calibration(section: Section, folder: Path) -> Calibration | None:
    source = section.raw("calibration", None)
    if source is None:
        return None
    if not isinstance(source, str):
        return calibration_from_section(section.section("calibration"))
    try:
        return calibration_from_section(Section(read_mapping(folder / source), str(folder / source)))
    except InputError as error:
        raise InputError(f"{section.at('calibration')}: {error}") from None


def _group(entry: Section) -> Group:
    name, members = entry.raw("name"), tuple(entry.items("members"))
    uplink, latency_s = entry.si("uplink_gb_per_s", math.inf), entry.si("latency_us", 0.0)
    shared = entry.si("shared_gb_per_s", math.inf)
    entry.finish()
    with entry.building():
        return Group(name, members, uplink, latency_s, shared)


def _link(entry: Section) -> Link:
    both = "between" in entry
    ends = entry.items("between") if both else [entry.raw("from"), entry.raw("to")]
    if len(ends) != 2:
        entry.fail("between", "is not a pair; name two machines")
    source, target = ends
    entry.refuse_null(f"the link of {quoted(source)} and {quoted(target)}")
    rate, latency_s = entry.si("bandwidth_gb_per_s"), entry.si("latency_us", None)
    entry.finish()
    with entry.building():
        return Link(source, target, rate, latency_s, both)


# ------------------------------------------------------------------ writing


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """The cluster in the file format with defaults filled in; reading it gives an equal cluster.

    A memory headroom is omitted: it belongs to the plan space.
    """
    cluster = cluster.with_memory_headroom(0.0)
    inter: dict[str, Any] = {"latency_us": in_unit(cluster.inter_latency_s, MICROSECOND)}
    if math.isfinite(cluster.inter_bandwidth_bytes_per_s):
        inter["bandwidth_gb_per_s"] = in_unit(cluster.inter_bandwidth_bytes_per_s, GB)
    shipped, full_speed = catalogue(), dict.fromkeys(gpu.at(1.0) for gpu in cluster.types)
    return {
        "name": cluster.name,
        "inter_machine": inter,
        "machines": [
            machine_to_dict(cluster.machines[span[0]], len(span)) for span in spec_spans(cluster.machines).values()
        ],
        "groups": [
            {
                "name": group.name,
                "members": list(group.members),
                "latency_us": in_unit(group.latency_s, MICROSECOND),
                **finite_gb_per_s("uplink_gb_per_s", group.uplink_bytes_per_s),
                **finite_gb_per_s("shared_gb_per_s", group.shared_bytes_per_s),
            }
            for group in cluster.groups
        ],
        "links": [_link_to_dict(link) for link in cluster.links],
        "gpus": {gpu.name: gpu_to_dict(gpu) for gpu in full_speed if shipped.get(gpu.name) != gpu},
        **({"slow": speeds} if (speeds := cluster.speeds) else {}),
        **(
            {} if (calibration := calibration_of(cluster)) is None else {"calibrated": calibration_to_dict(calibration)}
        ),
        **({"profile": profile_to_dict(cluster.profile)} if cluster.profile.entries else {}),
    }


def _link_to_dict(link: Link) -> dict[str, Any]:
    ends: dict[str, Any] = (
        {"between": [link.source, link.target]} if link.both else {"from": link.source, "to": link.target}
    )
    ends["bandwidth_gb_per_s"] = in_unit(link.bandwidth_bytes_per_s, GB)
    if link.latency_s is not None:
        ends["latency_us"] = in_unit(link.latency_s, MICROSECOND)
    return ends


MAX_MACHINES = 16_384
_SPEC_KEYS = ("num_machines", "gpus_per_machine", "mix", "inter_bandwidth_gb_per_s", "seed")
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
    elif key in _SPEC_KEYS:
        value_in_words = f"={value}" if isinstance(value, int | float) else ""
        return f"belongs in synthetic; state cluster.synthetic.{key}{value_in_words}"
    else:
        return f"is nothing that a synthetic cluster has; cluster.synthetic has {', '.join(_SPEC_KEYS)}"
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
