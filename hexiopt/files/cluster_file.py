"""The cluster file: reads a cluster from the file format, and writes it so that reading gives an equal cluster."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from hexiopt.files.calibration_file import calibration_from_section, calibration_to_dict
from hexiopt.files.machine_entries import (
    bandwidth_bytes_per_s,
    finite_gb_per_s,
    gpus_from_section,
    latency_s,
    machine_to_dict,
    machines_from_section,
    new_name,
)
from hexiopt.files.profile_files import profile_from_section, profile_to_dict, read_profile
from hexiopt.files.synthetic import resolve_synthetic
from hexiopt.numbers.gpus import catalogue, gpu_to_dict
from hexiopt.problem.cluster import MAX_TITLE, TITLE_RULE, Cluster
from hexiopt.problem.factors import Calibration, calibration_of
from hexiopt.problem.linked import rates_of_links, unlinked_pair
from hexiopt.problem.machine import DEFAULT_INTER_LATENCY_US, MAX_BANDWIDTH_GB_PER_S, Machine, machine_names, spec_spans
from hexiopt.problem.network import Group, Link, broken_end, broken_group
from hexiopt.problem.profile import NOTHING_MEASURED, Profile
from hexiopt.reading import Section, read_mapping
from hexiopt.units import GB, MICROSECOND, in_unit

MAX_LINK_PAIRS = 4_000_000


def read_cluster(path: str | Path) -> Cluster:
    """The cluster in a file. Raises InputError naming file and key."""
    return cluster_from_section(Section(read_mapping(path), str(path)), Path(path).parent)


def cluster_from_section(section: Section, folder: Path = Path()) -> Cluster:
    """The cluster that a mapping in the file format describes. Raises InputError naming the key.

    A `profile` and a `calibration` are paths relative to `folder`, or the content of such a file; `calibrated` is a
    record of the calibration that the figures have in them already.
    """
    if "synthetic" in section:
        section = resolve_synthetic(section)
    section.all_known("inter_machine", "machines", "links")
    name = section.text("name")
    if len(name) > MAX_TITLE or not name.isprintable():
        section.fail("name", TITLE_RULE)
    profile = _read_profile(section, folder)
    if isinstance(section.raw("gpus", {}), int):
        remedy = "state how many GPUs there are by num_gpus and count of each machine (docs/clusters.md)"
        section.fail("gpus", f"is not a mapping of GPU types to their figures; {remedy}")
    extra = gpus_from_section(section.section("gpus", optional=True))
    inter = section.section("inter_machine", optional=True)
    inter_bandwidth = bandwidth_bytes_per_s(inter, "bandwidth_gb_per_s") if "bandwidth_gb_per_s" in inter else math.inf
    inter_latency = latency_s(inter, "latency_us", DEFAULT_INTER_LATENCY_US * MICROSECOND)
    inter.finish()
    machines = machines_from_section(section, extra, inter_bandwidth, inter_latency)
    names = machine_names(machines)
    links = _read_links(section, machines, names)
    machines = _with_interfaces(machines, names, links, inter.at("bandwidth_gb_per_s"))
    groups = _read_groups(section, machines, names)
    slow = section.section("slow", optional=True)
    calibration, record = _read_calibration(section, folder), section.section("calibrated", optional=True)
    section.finish()
    found = Cluster(name, machines, inter_bandwidth, inter_latency, groups, links, profile)
    found = found.with_speeds({device: slow.raw(device) for device in slow.keys()}, slow.where)  # noqa: SIM118
    if record.keys():
        had = calibration_from_section(record)
        found = found.replace(calibrated=tuple(had.factors.items()), calibrated_by=had.source)
    return found if calibration is None else calibration.applied(found)


def _read_profile(section: Section, folder: Path) -> Profile:
    found = section.raw("profile", None)
    if found is None:
        return NOTHING_MEASURED
    if isinstance(found, str):
        try:
            return read_profile(folder / found)
        except InputError as error:
            raise InputError(f"{section.at('profile')}: {error}") from None
    return profile_from_section(section.section("profile"))


def _read_calibration(section: Section, folder: Path) -> Calibration | None:
    found = section.raw("calibration", None)
    if found is None:
        return None
    if not isinstance(found, str):
        return calibration_from_section(section.section("calibration"))
    try:
        return calibration_from_section(Section(read_mapping(folder / found), str(folder / found)))
    except InputError as error:
        raise InputError(f"{section.at('calibration')}: {error}") from None


def _read_groups(section: Section, machines: tuple[Machine, ...], names: Mapping[str, range]) -> tuple[Group, ...]:
    entries = section.sections("groups", optional=True)
    numbers: dict[str, int] = {}
    for g, entry in enumerate(entries):
        numbers[new_name(entry, names, numbers)] = g
    named = [(name, entry.items("members")) for name, entry in zip(numbers, entries, strict=True)]
    wrong = broken_group(named, machines, names)
    if wrong is not None:
        entries[wrong[0]].fail("members", wrong[1])
    groups = []
    for (name, members), entry in zip(named, entries, strict=True):
        uplink = bandwidth_bytes_per_s(entry, "uplink_gb_per_s", math.inf)
        groups.append(Group(name, tuple(members), uplink, latency_s(entry, "latency_us", 0.0)))
        entry.finish()
    return tuple(groups)


def _read_links(section: Section, machines: tuple[Machine, ...], names: Mapping[str, range]) -> tuple[Link, ...]:
    links = []
    covered = _Covered(machines)
    num_pairs = 0
    for entry in section.sections("links", optional=True):
        both = "between" in entry
        if both:
            ends = entry.items("between")
            if len(ends) != 2:
                entry.fail("between", "is not a pair; name two machines")
            keys = ["between", "between"]
        else:
            keys = ["from", "to"]
            ends = [entry.raw(key) for key in keys]
        wrong = broken_end(ends, names)
        if wrong is not None:
            entry.fail(keys[wrong[0]], wrong[1])
        entry.known(f"the link of {ends[0]!r} and {ends[1]!r}")
        latency = latency_s(entry, "latency_us", math.nan)
        link = Link(
            ends[0],
            ends[1],
            bandwidth_bytes_per_s(entry, "bandwidth_gb_per_s"),
            None if math.isnan(latency) else latency,
            both,
        )
        entry.finish()
        for source, target in link.directions():
            num_pairs += len(names[source]) * len(names[target])
            if num_pairs > MAX_LINK_PAIRS:
                entry.fail(keys[0], f"makes more than {MAX_LINK_PAIRS} linked machine pairs; use groups")
            if covered.add(source, target):
                entry.fail(keys[0], "covers a pair of machines that already has a link; keep one link")
        links.append(link)
    return tuple(links)


def _with_interfaces(
    machines: tuple[Machine, ...], names: Mapping[str, range], links: Sequence[Link], where: str
) -> tuple[Machine, ...]:
    """The machines, where those whose network nothing states have interfaces that all their links fill together.

    That suits the parts of one box, which links join in pairs. Raises InputError where a pair has no link.
    """
    if len(machines) == 1 or all(math.isfinite(machine.nic_bandwidth_bytes_per_s) for machine in machines):
        return machines
    pair = unlinked_pair(machines, names, links)
    if pair is not None:
        or_link = f", or the link from {pair[0]} to {pair[1]}" if links else ""
        raise InputError(f"{where}: is missing; state it, in GB/s per network interface and direction{or_link}")
    rates = rates_of_links(machines, names, links)
    most = MAX_BANDWIDTH_GB_PER_S * GB
    return tuple(
        machine
        if math.isfinite(machine.nic_bandwidth_bytes_per_s)
        else replace(machine, nic_bandwidth_bytes_per_s=min(rates[machine.spec_name], most))
        for machine in machines
    )


class _Covered:
    """The ordered machine pairs that have a stated link, stored as pairs of names.

    Names are whole specs or single machines, so two pairs of names overlap where both of their ends do. A link between
    a spec and one of its own machines does not cover that machine's pair with itself, so nothing can overlap there.
    """

    def __init__(self, machines: tuple[Machine, ...]) -> None:
        self._spec = {machine.name: machine.spec_name for machine in machines}
        self._noted: dict[tuple[str, str], _Noted] = {}

    def add(self, source: str, target: str) -> bool:
        """Add the pair of names; returns whether any of its machine pairs has been added before."""
        specs = self._spec.get(source, source), self._spec.get(target, target)
        noted = self._noted.setdefault(specs, _Noted())
        ends = source, target
        whole = source == specs[0], target == specs[1]
        if all(whole):
            clash = bool(noted.pairs)
        elif not any(whole):
            clash = not noted.pairs.isdisjoint({specs, ends, (specs[0], target), (source, specs[1])})
        else:
            single = 1 if whole[0] else 0
            other = noted.against_spec[1 - single]
            harmless = specs[0] == specs[1] and ends[single] in other
            clash = specs in noted.pairs or ends[single] in noted.singles[single] or len(other) > harmless
        noted.pairs.add(ends)
        for end in (0, 1):
            if not whole[end]:
                noted.singles[end].add(ends[end])
                if whole[1 - end]:
                    noted.against_spec[end].add(ends[end])
        return clash


class _Noted:
    """The stored pairs of names between two specs: of single machines, and of single machines with a whole spec."""

    def __init__(self) -> None:
        self.pairs: set[tuple[str, str]] = set()
        self.singles: tuple[set[str], set[str]] = (set(), set())
        self.against_spec: tuple[set[str], set[str]] = (set(), set())


# ------------------------------------------------------------------ writing


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """The cluster in the file format with defaults filled in; reading it gives an equal cluster.
    A memory headroom is left out: it belongs to the plan space."""
    cluster = cluster.with_memory_headroom(0.0)
    inter: dict[str, Any] = {"latency_us": in_unit(cluster.inter_latency_s, MICROSECOND)}
    if math.isfinite(cluster.inter_bandwidth_bytes_per_s):
        inter["bandwidth_gb_per_s"] = in_unit(cluster.inter_bandwidth_bytes_per_s, GB)
    known, full_speed = catalogue(), dict.fromkeys(gpu.at(1.0) for gpu in cluster.types)
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
            }
            for group in cluster.groups
        ],
        "links": [_link_to_dict(link) for link in cluster.links],
        "gpus": {gpu.name: gpu_to_dict(gpu) for gpu in full_speed if known.get(gpu.name) != gpu},
        **({"slow": speeds} if (speeds := cluster.speeds) else {}),
        **({} if (had := calibration_of(cluster)) is None else {"calibrated": calibration_to_dict(had)}),
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
