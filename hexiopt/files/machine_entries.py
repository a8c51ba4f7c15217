"""The machines of a cluster file, and of lists outside one: read, and written so that reading gives equal ones."""

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from hexiopt.errors import InputError, quoted
from hexiopt.numbers.gpus import Gpu, catalogue, find_gpu, gpu_from_section
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
)
from hexiopt.problem.nodelist import expand
from hexiopt.reading import Section
from hexiopt.units import GB, MICROSECOND, in_unit

MAX_MACHINES = 100_000
MAX_DEVICES = 1_000_000


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
    """The machines of the list `machines`, with the network that is given where they state none.

    Raises InputError naming the key.
    """
    machines: list[Machine] = []
    taken: dict[str, bool] = {}
    num_devices = 0
    entries = section.sections("machines")
    if not entries:
        section.fail("machines", "is empty; state at least one machine")
    for entry in entries:
        names = _names(entry, taken)
        machine = _read_machine(entry, names[0], extra, inter_bandwidth_bytes_per_s, inter_latency_s)
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
        return [new_name(entry, taken)]
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
        bandwidth = bandwidth_bytes_per_s(entry, "intra_bandwidth_gb_per_s")
    latency = latency_s(entry, "intra_latency_us", DEFAULT_INTRA_LATENCY_US * MICROSECOND)
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
        nic_bandwidth_bytes_per_s=bandwidth_bytes_per_s(entry, "nic_bandwidth_gb_per_s", inter_bandwidth),
        nic_latency_s=latency_s(entry, "nic_latency_us", inter_latency),
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
        bandwidth = bandwidth_bytes_per_s(section, "bandwidth_gb_per_s")
        links[a, b] = IntraLink(a, b, bandwidth, latency_s(section, "latency_us", latency))
        section.finish()
    return tuple(links[pair] for pair in sorted(links))


def bandwidth_bytes_per_s(section: Section, key: str, default: float | None = None) -> float:
    """Bytes/s from GB/s; `default` (bytes/s) where the key is absent and a default is given."""
    if key not in section and default is not None:
        return default
    value: float = section.number(key, above=0, at_most=MAX_BANDWIDTH_GB_PER_S)
    return value * GB


def latency_s(section: Section, key: str, default: float) -> float:
    """Seconds from µs; `default` (seconds) where the key is absent."""
    if key not in section:
        return default
    value: float = section.number(key, at_least=0, at_most=MAX_LATENCY_US)
    return value * MICROSECOND


def new_name(section: Section, *taken: Container[str]) -> str:
    """The `name` of a machine or a group, which none has yet. Raises InputError."""
    name: str = section.text("name")
    if not NAME.fullmatch(name):
        section.fail("name", NAME_RULE)
    if any(name in names for names in taken):
        section.fail("name", "appears twice; give machines and groups different names")
    return name


# ------------------------------------------------------------------ writing


def machine_to_dict(machine: Machine, count: int) -> dict[str, Any]:
    """An entry of `count` like machines, with defaults filled in."""
    return {
        "name": machine.spec_name,
        "gpu": machine.gpu.type_name,
        "num_gpus": machine.num_gpus,
        "count": count,
        **finite_gb_per_s("intra_bandwidth_gb_per_s", machine.intra_bandwidth_bytes_per_s),
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
        **finite_gb_per_s("nic_bandwidth_gb_per_s", machine.nic_bandwidth_bytes_per_s),
        "nic_latency_us": in_unit(machine.nic_latency_s, MICROSECOND),
        **({} if machine.price_per_hour is None else {"price_per_hour": machine.price_per_hour}),
        **({} if machine.host is None else {"host": machine.host}),
    }


def finite_gb_per_s(key: str, bytes_per_s: float) -> dict[str, float]:
    """A bandwidth under its key, unless it is infinite, which files leave out."""
    return {key: in_unit(bytes_per_s, GB)} if math.isfinite(bytes_per_s) else {}
