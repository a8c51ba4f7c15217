"""The machines of a cluster file or of another list: reads them, and writes them so that reading gives equal ones."""

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from hexiopt.checks import is_whole
from hexiopt.errors import InputError
from hexiopt.numbers.gpus import Gpu, catalogue, gpu_from_section
from hexiopt.numbers.products import find_gpu
from hexiopt.problem.machine import DEFAULT_INTER_LATENCY_US, DEFAULT_INTRA_LATENCY_US, IntraLink, Machine
from hexiopt.problem.nodelist import expand
from hexiopt.reading import Section
from hexiopt.units import GB, MICROSECOND, in_unit

MAX_MACHINES = 100_000
MAX_DEVICES = 1_000_000
_KEYS = {"num_interfaces": ("network_interfaces",), "intra_links[*]": ("intra_links[*].between",)}


def gpus_from_section(section: Section) -> dict[str, Gpu]:
    """The GPU types that a mapping from name to figures defines or changes. Raises InputError naming the key."""
    types = catalogue()
    names = section.keys()
    return {name: gpu_from_section(section.section(name), name, types.get(name)) for name in names}


def machines_from_section(
    section: Section,
    extra: Mapping[str, Gpu],
    inter_bandwidth_bytes_per_s: float = math.inf,
    inter_latency_s: float = DEFAULT_INTER_LATENCY_US * MICROSECOND,
) -> tuple[Machine, ...]:
    """The machines of the list `machines`; the arguments are the network of machines that state none.

    Raises InputError naming the key.
    """
    machines: list[Machine] = []
    in_use: set[str] = set()
    num_devices = 0
    entries = section.sections("machines")
    if not entries:
        section.fail("machines", "is empty; state at least one machine")
    for entry in entries:
        names = _names(entry, in_use)
        entry.refuse_null(f"machine {names[0]!r}")
        count = entry.integer("count", at_least=1, at_most=MAX_MACHINES, default=len(names))
        machine = _read_machine(entry, names[0], extra, inter_bandwidth_bytes_per_s, inter_latency_s)
        if len(names) > 1 and "count" in entry:
            entry.fail("count", f"stands beside a name that lists {len(names)} machines; remove it")
        num_devices += count * machine.num_gpus
        if len(machines) + count > MAX_MACHINES or num_devices > MAX_DEVICES:
            raise InputError(
                f"{entry.at('count')}: makes more than {MAX_MACHINES} machines or {MAX_DEVICES} devices "
                "in all; state fewer"
            )
        if count > 1 and machine.host is not None:
            entry.fail("host", f"is one host for {count} machines; write an entry for each")
        in_use.update(names)
        if count == len(names):
            with entry.building():
                machines += [replace(machine, name=name, spec_name=name) for name in names]
            continue
        numbered = [f"{machine.name}-{i}" for i in range(count)]
        if (twice := next((name for name in numbered if name in in_use), None)) is not None:
            entry.fail("name", f"with its count makes a second machine {twice!r}; give it another name")
        in_use.update(numbered)
        machines += [replace(machine, name=name) for name in numbered]
    return tuple(machines)


def _names(entry: Section, in_use: Container[str]) -> list[str]:
    """The name of the machine, or the names in a node list such as `gpu[01-04,07]`, whose machines are equal.

    Names identify machines in the file, so that no name may appear twice. Raises InputError.
    """
    text: str = entry.text("name")
    names = [text]
    if set(text) & set("[],"):
        try:
            names = expand(text)
        except ValueError as error:
            entry.fail("name", str(error))
    for name in names:
        if name in in_use or names.count(name) > 1:
            if name == text:
                entry.fail("name", "appears twice; give machines and groups different names")
            entry.fail("name", f"lists {name!r}, which appears twice; give machines different names")
    return names


def _read_machine(
    entry: Section, name: str, extra: Mapping[str, Gpu], inter_bandwidth: float, inter_latency: float
) -> Machine:
    num_gpus, latency = entry.raw("num_gpus"), entry.si("intra_latency_us", DEFAULT_INTRA_LATENCY_US * MICROSECOND)
    lone = {"default": math.inf} if num_gpus == 1 else {}
    values = {
        "gpu": find_gpu(_gpu_name(entry), extra, entry.at("gpu")),
        "num_gpus": num_gpus,
        "intra_bandwidth_bytes_per_s": entry.si("intra_bandwidth_gb_per_s", **lone),
        "intra_latency_s": latency,
        "intra_links": tuple(_intra_link(link, latency) for link in entry.sections("intra_links", optional=True)),
        "num_interfaces": entry.raw("network_interfaces", 1),
        "nic_bandwidth_bytes_per_s": entry.si("nic_bandwidth_gb_per_s", inter_bandwidth),
        "nic_latency_s": entry.si("nic_latency_us", inter_latency),
        "price_per_hour": entry.raw("price_per_hour", None),
        "host": entry.raw("host", None),
    }
    entry.finish()
    with entry.building(_KEYS):
        return Machine(name, name, **values)


def _gpu_name(entry: Section) -> str:
    """The name of a type, of which YAML reads `3090` as a number."""
    name = entry.raw("gpu")
    return str(name) if is_whole(name) else entry.text("gpu")


def _intra_link(section: Section, default_latency_s: float) -> IntraLink:
    pair, rate = section.items("between"), section.si("bandwidth_gb_per_s")
    latency_s = section.si("latency_us", default_latency_s)
    if len(pair) != 2:
        section.fail("between", "is not a pair; name two devices of the machine")
    section.finish()
    a, b = pair
    with section.building():
        return IntraLink(a, b, rate, latency_s)


# ------------------------------------------------------------------ writing


def machine_to_dict(machine: Machine, count: int) -> dict[str, Any]:
    """The entry of `count` equal machines, with defaults filled in."""
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
    """A bandwidth under its key; empty for an infinite one, which files omit."""
    return {key: in_unit(bytes_per_s, GB)} if math.isfinite(bytes_per_s) else {}
