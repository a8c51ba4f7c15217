"""Machines and links of measured devices, in the cluster file's format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from experiments.lab.profile.fit import fit_channel, usual
from experiments.lab.profile.points import MeasuredPoint, Measurement, of_kind
from experiments.lab.profile.types import Type, digits
from hexiopt.files.link_files import Channel
from hexiopt.units import GB, MICROSECOND

UNUSUAL = 0.15  # share by which a link's rate differs from the usual one, to be stated on its own

Pair = tuple[int, int]


@dataclass(frozen=True)
class NetworkPart:
    """The devices of one type in a machine, by rank; `name` is the machine's own where it has one type only."""

    name: str
    machine: str
    type: Type
    ranks: tuple[int, ...]


def parts_of(measured: Measurement, types: Sequence[Type]) -> list[NetworkPart]:
    """A part for each machine and type, in the order of ranks."""
    type_of = {rank: device_type for device_type in types for rank in device_type.ranks}
    ranks_by_part: dict[tuple[str, str], list[int]] = {}
    for rank, device in enumerate(measured.devices):
        ranks_by_part.setdefault((device.machine, type_of[rank].name), []).append(rank)
    machines = [machine for machine, _ in ranks_by_part]
    return [
        NetworkPart(
            machine if machines.count(machine) == 1 else f"{machine}.{name}", machine, type_of[ranks[0]], tuple(ranks)
        )
        for (machine, name), ranks in ranks_by_part.items()
    ]


def channels(measured: Measurement) -> dict[Pair, Channel]:
    """Every link measured, by ranks: from the first to the second."""
    rank_of = {device.name: rank for rank, device in enumerate(measured.devices)}
    by_pair: dict[Pair, list[MeasuredPoint]] = {}
    for point in of_kind(measured.points, "message"):
        sender, receiver = point.of
        by_pair.setdefault((rank_of[sender], rank_of[receiver]), []).append(point)
    return {pair: fit_channel(points) for pair, points in by_pair.items()}


def machine_entry(part: NetworkPart, links: Mapping[Pair, Channel]) -> dict[str, Any]:
    """A machine: its usual link, and those that differ from it by more than `UNUSUAL`."""
    entry: dict[str, Any] = {"name": part.name, "gpu": part.type.name, "num_gpus": len(part.ranks)}
    inside = {(i, j): links[a, b] for (i, a), (j, b) in combinations(enumerate(part.ranks), 2) if (a, b) in links}
    if not inside:
        return entry
    common = usual(list(inside.values()))
    entry |= {
        "intra_bandwidth_gb_per_s": digits(common.bytes_per_s / GB),
        "intra_latency_us": digits(common.latency_s / MICROSECOND),
    }
    others = [{"between": list(pair), **_link_entry(link)} for pair, link in inside.items() if _differs(link, common)]
    if others:
        entry["intra_links"] = others
    return entry


def pair_of(part: NetworkPart, pair: Sequence[int], links: Mapping[Pair, Channel]) -> dict[str, float] | None:
    """The link of two devices of a machine by their indices; None where it was not measured."""
    a, b = sorted(pair)
    if not 0 <= a < b < len(part.ranks):
        return None
    link = links.get((part.ranks[a], part.ranks[b]))
    return None if link is None else _link_entry(link)


def between_parts(part: NetworkPart, other: NetworkPart, links: Mapping[Pair, Channel]) -> dict[str, float] | None:
    """The usual link of the devices of two parts, both ways; None where none was measured."""
    part_links = [links[pair] for a in part.ranks for b in other.ranks for pair in ((a, b), (b, a)) if pair in links]
    return _link_entry(usual(part_links)) if part_links else None


def inter_machine(
    parts: Sequence[NetworkPart], links: Mapping[Pair, Channel]
) -> tuple[dict[str, float] | None, list[dict[str, Any]]]:
    """The usual link between machines, None with one machine; and the links that are not usual."""
    machine_links = {
        (part.name, other.name): links[part.ranks[0], other.ranks[0]]
        for part in parts
        for other in parts
        if part.machine != other.machine and (part.ranks[0], other.ranks[0]) in links
    }
    if not machine_links:
        return None, []
    common = usual(list(machine_links.values()))
    unusual = []
    for (a, b), there in machine_links.items():
        back = machine_links.get((b, a))
        if back is not None and not _differs(there, back):
            both = usual([there, back])
            if a < b and _differs(both, common):
                unusual.append({"between": [a, b], **_link_entry(both)})
        elif _differs(there, common):
            unusual.append({"from": a, "to": b, **_link_entry(there)})
    return _link_entry(common), unusual


def _link_entry(link: Channel) -> dict[str, float]:
    return {"bandwidth_gb_per_s": digits(link.bytes_per_s / GB), "latency_us": digits(link.latency_s / MICROSECOND)}


def _differs(link: Channel, common: Channel) -> bool:
    return abs(link.bytes_per_s / common.bytes_per_s - 1.0) > UNUSUAL
