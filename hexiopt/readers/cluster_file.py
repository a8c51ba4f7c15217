"""The cluster file: reads a cluster from the file format, and writes it so that reading gives an equal cluster."""

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hexiopt.calibration.gpus import Gpu, catalogue, find_gpu, gpu_from_section, gpu_to_dict
from hexiopt.errors import InputError, quoted
from hexiopt.problem.calibration import Calibration, calibration_of
from hexiopt.problem.cluster import MAX_TITLE, TITLE_RULE, Cluster
from hexiopt.problem.machine import (
    DEFAULT_INTER_LATENCY_US,
    DEFAULT_INTRA_LATENCY_US,
    MAX_BANDWIDTH_GB_PER_S,
    MAX_GPUS_PER_MACHINE,
    MAX_INTERFACES,
    MAX_LATENCY_US,
    MAX_PRICE_PER_HOUR,
    NAME,
    NAME_RULE,
    IntraLink,
    Machine,
    broken_pair,
    machine_names,
    spec_spans,
)
from hexiopt.problem.network import Group, Link, broken_end, broken_group
from hexiopt.problem.profile import NOTHING_MEASURED, Profile
from hexiopt.readers.calibration_file import calibration_from_section, calibration_to_dict
from hexiopt.readers.nodelist import expand
from hexiopt.readers.profile_files import profile_from_section, profile_to_dict, read_profile
from hexiopt.readers.synthetic import resolve_synthetic
from hexiopt.reading import Section, read_mapping
from hexiopt.units import GB, MICROSECOND, in_unit

MAX_MACHINES = 100_000
MAX_DEVICES = 1_000_000
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
    extra = gpus_from_section(section.section("gpus", optional=True))
    inter = section.section("inter_machine", optional=True)
    inter_bandwidth = _bandwidth(inter, "bandwidth_gb_per_s") if "bandwidth_gb_per_s" in inter else math.inf
    inter_latency = _latency(inter, "latency_us", DEFAULT_INTER_LATENCY_US * MICROSECOND)
    inter.finish()
    machines = _read_machines(section, extra, inter_bandwidth, inter_latency)
    if len(machines) > 1 and any(math.isinf(machine.nic_bandwidth_bytes_per_s) for machine in machines):
        key = inter.at("bandwidth_gb_per_s")
        raise InputError(f"{key}: is missing; state it, in GB/s per network interface and direction")
    names = machine_names(machines)
    groups = _read_groups(section, machines, names)
    links = _read_links(section, machines, names)
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


def _bandwidth(section: Section, key: str, default: float | None = None) -> float:
    """Bytes/s from GB/s; `default` (bytes/s) where the key is absent and a default is given."""
    if key not in section and default is not None:
        return default
    value: float = section.number(key, above=0, at_most=MAX_BANDWIDTH_GB_PER_S)
    return value * GB


def _latency(section: Section, key: str, default: float) -> float:
    """Seconds from µs; `default` (seconds) where the key is absent."""
    if key not in section:
        return default
    value: float = section.number(key, at_least=0, at_most=MAX_LATENCY_US)
    return value * MICROSECOND


def _new_name(section: Section, *taken: Container[str]) -> str:
    name: str = section.text("name")
    if not NAME.fullmatch(name):
        section.fail("name", NAME_RULE)
    if any(name in names for names in taken):
        section.fail("name", "appears twice; give machines and groups different names")
    return name


def gpus_from_section(section: Section) -> dict[str, Gpu]:
    """The GPU types that a mapping from name to figures defines or changes. Raises InputError naming the key."""
    known = catalogue()
    names = section.keys()
    return {name: gpu_from_section(section.section(name), name, known.get(name)) for name in names}


def machines_from_section(
    section: Section,
    extra: Mapping[str, Gpu],
    inter_bandwidth_bytes_per_s: float = math.inf,
    inter_latency_s: float = DEFAULT_INTER_LATENCY_US * MICROSECOND,
) -> tuple[Machine, ...]:
    """The machines of a list outside a cluster, with the network that is given where they state none.

    Raises InputError naming the key.
    """
    return _read_machines(section, extra, inter_bandwidth_bytes_per_s, inter_latency_s)


def _read_machines(
    section: Section, extra: Mapping[str, Gpu], inter_bandwidth: float, inter_latency: float
) -> tuple[Machine, ...]:
    machines: list[Machine] = []
    taken: dict[str, bool] = {}
    num_devices = 0
    entries = section.sections("machines")
    if not entries:
        section.fail("machines", "is empty; state at least one machine")
    for entry in entries:
        names = _names(entry, taken)
        machine = _read_machine(entry, names[0], extra, inter_bandwidth, inter_latency)
        count = entry.integer("count", at_least=1, at_most=MAX_MACHINES, default=1)
        entry.finish()
        if len(names) > 1:
            if "count" in entry:
                entry.fail("count", f"stands beside a name that lists {len(names)} machines; remove it")
            count = len(names)
        num_devices += count * machine.num_gpus
        if len(machines) + count > MAX_MACHINES or num_devices > MAX_DEVICES:
            raise InputError(
                f"{entry.at('count')}: makes more than {MAX_MACHINES} machines or {MAX_DEVICES} devices "
                "in all; state fewer"
            )
        if count > 1 and machine.host is not None:
            entry.fail("host", f"is one host for {count} machines; write an entry for each")
        taken |= dict.fromkeys(names, True)
        if count == len(names):
            machines += [replace(machine, name=name, spec_name=name) for name in names]
            continue
        for i in range(count):
            name = f"{machine.name}-{i}"
            if name in taken:
                entry.fail("name", f"with its count makes a second machine {name!r}; give it another name")
            taken[name] = True
            machines.append(replace(machine, name=name))
    return tuple(machines)


def _names(entry: Section, taken: Container[str]) -> list[str]:
    """The name of the machine, or of each like machine in a node list such as `gpu[01-04,07]`."""
    text: str = entry.text("name")
    if not set(text) & set("[],"):
        return [_new_name(entry, taken)]
    try:
        names = expand(text)
    except ValueError as error:
        entry.fail("name", str(error))
    for name in names:
        if not NAME.fullmatch(name):
            entry.fail("name", f"lists {quoted(name)}, which {NAME_RULE}")
        if name in taken or names.count(name) > 1:
            entry.fail("name", f"lists {name!r}, which appears twice; give machines different names")
    return names


def _read_machine(
    entry: Section, name: str, extra: Mapping[str, Gpu], inter_bandwidth: float, inter_latency: float
) -> Machine:
    entry.known(f"machine {name!r}")
    gpu = find_gpu(entry.text("gpu"), extra, entry.at("gpu"))
    num_gpus = entry.integer("num_gpus", at_least=1, at_most=MAX_GPUS_PER_MACHINE)
    bandwidth = math.inf
    if num_gpus > 1 or "intra_bandwidth_gb_per_s" in entry:
        bandwidth = _bandwidth(entry, "intra_bandwidth_gb_per_s")
    latency = _latency(entry, "intra_latency_us", DEFAULT_INTRA_LATENCY_US * MICROSECOND)
    price = None
    if "price_per_hour" in entry:
        price = entry.number("price_per_hour", above=0, at_most=MAX_PRICE_PER_HOUR)
    return Machine(
        name=name,
        spec_name=name,
        gpu=gpu,
        num_gpus=num_gpus,
        intra_bandwidth_bytes_per_s=bandwidth if num_gpus > 1 else math.inf,
        intra_latency_s=latency,
        intra_links=_read_intra_links(entry, num_gpus, latency),
        num_interfaces=entry.integer("network_interfaces", at_least=1, at_most=MAX_INTERFACES, default=1),
        nic_bandwidth_bytes_per_s=_bandwidth(entry, "nic_bandwidth_gb_per_s", inter_bandwidth),
        nic_latency_s=_latency(entry, "nic_latency_us", inter_latency),
        price_per_hour=price,
        host=entry.text("host", default=None),
    )


def _read_intra_links(entry: Section, num_gpus: int, latency: float) -> tuple[IntraLink, ...]:
    links: dict[tuple[int, int], IntraLink] = {}
    for section in entry.sections("intra_links", optional=True):
        pair = section.items("between")
        wrong = broken_pair(pair, num_gpus, links)
        if wrong is not None:
            section.fail("between", wrong)
        a, b = sorted(pair)
        bandwidth = _bandwidth(section, "bandwidth_gb_per_s")
        links[a, b] = IntraLink(a, b, bandwidth, _latency(section, "latency_us", latency))
        section.finish()
    return tuple(links[pair] for pair in sorted(links))


def _read_groups(section: Section, machines: tuple[Machine, ...], names: Mapping[str, range]) -> tuple[Group, ...]:
    entries = section.sections("groups", optional=True)
    numbers: dict[str, int] = {}
    for g, entry in enumerate(entries):
        numbers[_new_name(entry, names, numbers)] = g
    named = [(name, entry.items("members")) for name, entry in zip(numbers, entries, strict=True)]
    wrong = broken_group(named, machines, names)
    if wrong is not None:
        entries[wrong[0]].fail("members", wrong[1])
    groups = []
    for (name, members), entry in zip(named, entries, strict=True):
        uplink = _bandwidth(entry, "uplink_gb_per_s", math.inf)
        groups.append(Group(name, tuple(members), uplink, _latency(entry, "latency_us", 0.0)))
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
        latency = _latency(entry, "latency_us", math.nan)
        link = Link(
            ends[0],
            ends[1],
            _bandwidth(entry, "bandwidth_gb_per_s"),
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
            _machine_to_dict(cluster.machines[span[0]], len(span)) for span in spec_spans(cluster.machines).values()
        ],
        "groups": [
            {
                "name": group.name,
                "members": list(group.members),
                "latency_us": in_unit(group.latency_s, MICROSECOND),
                **_finite("uplink_gb_per_s", group.uplink_bytes_per_s),
            }
            for group in cluster.groups
        ],
        "links": [_link_to_dict(link) for link in cluster.links],
        "gpus": {gpu.name: gpu_to_dict(gpu) for gpu in full_speed if known.get(gpu.name) != gpu},
        **({"slow": speeds} if (speeds := cluster.speeds) else {}),
        **({} if (had := calibration_of(cluster)) is None else {"calibrated": calibration_to_dict(had)}),
        **({"profile": profile_to_dict(cluster.profile)} if cluster.profile.entries else {}),
    }


def _machine_to_dict(machine: Machine, count: int) -> dict[str, Any]:
    return {
        "name": machine.spec_name,
        "gpu": machine.gpu.type_name,
        "num_gpus": machine.num_gpus,
        "count": count,
        **_finite("intra_bandwidth_gb_per_s", machine.intra_bandwidth_bytes_per_s),
        "intra_latency_us": in_unit(machine.intra_latency_s, MICROSECOND),
        "intra_links": [
            {
                "between": [link.a, link.b],
                "bandwidth_gb_per_s": in_unit(link.bandwidth_bytes_per_s, GB),
                "latency_us": in_unit(link.latency_s, MICROSECOND),
            }
            for link in machine.intra_links
        ],
        "network_interfaces": machine.num_interfaces,
        **_finite("nic_bandwidth_gb_per_s", machine.nic_bandwidth_bytes_per_s),
        "nic_latency_us": in_unit(machine.nic_latency_s, MICROSECOND),
        **({} if machine.price_per_hour is None else {"price_per_hour": machine.price_per_hour}),
        **({} if machine.host is None else {"host": machine.host}),
    }


def _link_to_dict(link: Link) -> dict[str, Any]:
    ends: dict[str, Any] = (
        {"between": [link.source, link.target]} if link.both else {"from": link.source, "to": link.target}
    )
    ends["bandwidth_gb_per_s"] = in_unit(link.bandwidth_bytes_per_s, GB)
    if link.latency_s is not None:
        ends["latency_us"] = in_unit(link.latency_s, MICROSECOND)
    return ends


def _finite(key: str, bytes_per_s: float) -> dict[str, float]:
    return {key: in_unit(bytes_per_s, GB)} if math.isfinite(bytes_per_s) else {}
