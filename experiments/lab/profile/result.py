"""The cluster file of a measurement: of its own, or a given one whose nulls are filled for the machines measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from experiments.lab.profile.network import (
    NetworkPart,
    Pair,
    between_parts,
    channels,
    inter_machine,
    machine_entry,
    pair_of,
    parts_of,
)
from experiments.lab.profile.points import Device, Measurement
from experiments.lab.profile.types import CPU, Type, types_of
from hexiopt.errors import InputError, closest_of_many, quoted
from hexiopt.files.cluster_file import cluster_from_section
from hexiopt.files.cluster_yaml import cluster_text, unknowns
from hexiopt.files.link_files import Channel
from hexiopt.numbers.products import match
from hexiopt.problem.nodelist import expand
from hexiopt.reading import Section


@dataclass(frozen=True)
class MeasuredCluster:
    """A cluster in the file format, the types in it that were measured, and the links by ranks."""

    cluster: dict[str, Any]
    types: tuple[Type, ...]
    links: Mapping[Pair, Channel]

    def unknowns(self) -> list[tuple[str, str]]:
        """Whose values are still null, and their keys."""
        return list(unknowns(self.cluster))

    def text(self, head: str) -> str:
        """The cluster file, `head` its first comment. Raises InputError where the measured values are out of range."""
        if self.unknowns():
            return cluster_text(self.cluster, (head, "null is what was not measured."), {})
        cluster_from_section(Section(self.cluster, "cluster.yaml"))
        return cluster_text(self.cluster, (head,), {})


def result_of(measured: Measurement, name: str, base: Mapping[str, Any] | None) -> MeasuredCluster:
    """The cluster called `name`, or `base` with its nulls filled. Raises InputError where they do not agree."""
    types, links = types_of(measured), channels(measured)
    parts = parts_of(measured, types)
    entries = {part.name: machine_entry(part, links) for part in parts}
    across, unusual = inter_machine(parts, links)
    gpus = {device_type.name: device_type.entry for device_type in types}
    inside = [
        {"between": [part.name, other.name], **link}
        for part, other in combinations(parts, 2)
        if part.machine == other.machine and (link := between_parts(part, other, links)) is not None
    ]
    if base is None:
        cluster: dict[str, Any] = {"name": name}
        if len(parts) > 1:
            cluster["inter_machine"] = across or {key: value for key, value in inside[0].items() if key != "between"}
        cluster |= {"machines": list(entries.values()), "gpus": gpus}
        if inside or unusual:
            cluster["links"] = inside + unusual
        return MeasuredCluster(cluster, tuple(types), links)
    return MeasuredCluster(_fill_base(base, parts, entries, across, inside + unusual, gpus, links), tuple(types), links)


def check_base(base: Mapping[str, Any] | None, devices: Sequence[Device]) -> None:
    """Refuse a base file, if any, that has no place for the devices, before anything is measured. Raises InputError."""
    if base is None:
        return
    machines: dict[str, list[Device]] = {}
    for device in devices:
        machines.setdefault(device.machine, []).append(device)
    for machine, machine_devices in machines.items():
        kinds: dict[str | None, int] = {}
        for device in machine_devices:
            kind = match(device.product, device.total_bytes).gpu if device.is_gpu else CPU
            kinds[kind] = kinds.get(kind, 0) + 1
        if len(kinds) == 1:  # the parts of a machine of several types are looked up when their names are known
            ((kind, count),) = kinds.items()
            _agree(_entry_of(base, machine), machine, kind, count)


def _entry_of(base: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The entry of the machine `name`, which may be one of a count or of a node list. Raises InputError."""
    known: list[str] = []
    for entry in base["machines"]:
        count = entry.get("count", 1)
        prefix, _, number = name.rpartition("-")
        counted = prefix == entry["name"] and number.isdecimal() and int(number) < count
        if counted or name in expand(entry["name"]):
            return entry  # type: ignore[no-any-return]
        known.append(entry["name"])
    hint = closest_of_many(name, known)
    raise InputError(f"profile.base: has no machine {quoted(name)}; {hint} State profile.machine=NAME")


def _agree(entry: Mapping[str, Any], name: str, gpu: str | None, num_gpus: int) -> None:
    for key, measured in (("gpu", gpu), ("num_gpus", num_gpus)):
        value = entry.get(key)
        if value is not None and measured is not None and value != measured:
            raise InputError(f"profile.base: {name} has {key} {value}, measured {measured}; correct it, or measure all")


def _fill_base(
    base: Mapping[str, Any],
    parts: Sequence[NetworkPart],
    entries: Mapping[str, Mapping[str, Any]],
    across: Mapping[str, float] | None,
    links: Sequence[dict[str, Any]],
    gpus: Mapping[str, Any],
    channels_by_rank: Mapping[Pair, Channel],
) -> dict[str, Any]:
    """`base` with what was measured in place of its nulls; whatever it states stays."""
    machines = [dict(entry) for entry in base["machines"]]
    cluster = {**base, "machines": machines}
    for part in parts:
        entry, measured = _entry_of(cluster, part.name), entries[part.name]
        _agree(entry, part.name, measured["gpu"], measured["num_gpus"])
        open_rate = "intra_bandwidth_gb_per_s" in entry and entry["intra_bandwidth_gb_per_s"] is None
        _fill(entry, measured)
        if measured["num_gpus"] == 1:
            for key in ("intra_bandwidth_gb_per_s", "intra_latency_us"):
                if entry.get(key, 0) is None:
                    del entry[key]
        intra_links = [dict(link) for link in entry.get("intra_links", ())]
        for link in intra_links:
            _fill(link, pair_of(part, link["between"], channels_by_rank) or {})
        if open_rate:  # then what is not usual counts against the rate that was measured
            known = [sorted(link["between"]) for link in intra_links]
            intra_links += [link for link in measured.get("intra_links", ()) if link["between"] not in known]
        if intra_links:
            entry["intra_links"] = intra_links
    cluster["gpus"] = _gpus(base.get("gpus", {}), gpus)
    inter = dict(base.get("inter_machine", {}))
    if inter:
        _fill(inter, across or {})
        cluster["inter_machine"] = inter
    base_links = [dict(link) for link in base.get("links", ())]
    ends = [_ends(link) for link in base_links]
    for link in links:
        if _ends(link) in ends:
            _fill(base_links[ends.index(_ends(link))], link)
        elif base.get("inter_machine", {}).get("bandwidth_gb_per_s", 0) is None:
            base_links.append(dict(link))
    if base_links:
        cluster["links"] = base_links
    return cluster


def _gpus(base: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Measured types; what the file states of them stays."""
    merged = dict(base)
    for name, entry in measured.items():
        stated_entry = dict(base.get(name, {}))
        efficiency = {**entry["efficiency"], **stated_entry.get("efficiency", {})}
        merged[name] = {**entry, **stated_entry, "efficiency": efficiency}
    return merged


def _fill(entry: dict[str, Any], measured: Mapping[str, Any]) -> None:
    for key, value in entry.items():
        if value is None and measured.get(key) is not None:
            entry[key] = measured[key]


def _ends(link: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted(link["between"])) if "between" in link else (link["from"], "to", link["to"])
