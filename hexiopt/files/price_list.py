"""The price list: what GPUs cost by the hour, and the machines and network interfaces on offer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from hexiopt.files.machine_entries import gpus_from_section, machines_from_section
from hexiopt.numbers.gpus import Gpu, find_gpu
from hexiopt.problem.machine import (
    DEFAULT_INTER_LATENCY_US,
    MAX_BANDWIDTH_GB_PER_S,
    MAX_LATENCY_US,
    MAX_PRICE_PER_HOUR,
    Machine,
)
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section, read_mapping
from hexiopt.units import GB, MICROSECOND


@dataclass(frozen=True)
class Interface:
    """A network interface on offer; its rate is per direction, its price is for one interface."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    price_per_hour: float


@dataclass(frozen=True)
class PriceList:
    """Prices per hour of GPUs by type, and machines and network interfaces on offer, with their prices."""

    gpu_prices: Mapping[str, float]
    machines: tuple[Machine, ...] = ()
    interfaces: tuple[Interface, ...] = ()


NO_PRICES = PriceList({})


def prices_for(problem: Problem, source: str | Path | Mapping[str, Any] | None) -> PriceList:
    """The price list in a file or a mapping, for a problem; an empty one where there is none. Raises InputError."""
    if source is None:
        return NO_PRICES
    types = {gpu.type_name: gpu.at(1.0) for gpu in problem.cluster.types}
    read, where = (source, "prices") if isinstance(source, Mapping) else (read_mapping(source), str(source))
    return price_list(Section(read, where), types)


def price_list(section: Section, types: Mapping[str, Gpu]) -> PriceList:
    """The price list that a mapping describes (docs/questions.md). `types` are the cluster's own GPU types by name.

    Raises InputError naming the key.
    """
    stated = section.section("gpu_price_per_hour", optional=True)
    names = stated.keys()
    prices = {name: stated.number(name, above=0, at_most=MAX_PRICE_PER_HOUR) for name in names}
    known = dict(types) | gpus_from_section(section.section("gpus", optional=True))
    for name in prices:
        find_gpu(name, known, stated.where)
    machines: tuple[Machine, ...] = ()
    if "machines" in section:
        machines = machines_from_section(section, known)
        for machine in machines:
            said = f"{section.at('machines')}: {machine.spec_name}"
            if machine.price_per_hour is None:
                raise InputError(f"{said}: price_per_hour is missing; state it, in the currency of the others")
            if machine.nic_bandwidth_bytes_per_s == math.inf:
                raise InputError(f"{said}: nic_bandwidth_gb_per_s is missing; state it, per interface and direction")
    interfaces = tuple(_interface(one) for one in section.sections("interfaces", optional=True))
    section.finish()
    return PriceList(prices, machines, interfaces)


def _interface(section: Section) -> Interface:
    usual = DEFAULT_INTER_LATENCY_US
    found = Interface(
        name=section.text("name"),
        bandwidth_bytes_per_s=GB * section.number("bandwidth_gb_per_s", above=0, at_most=MAX_BANDWIDTH_GB_PER_S),
        latency_s=MICROSECOND * section.number("latency_us", at_least=0, at_most=MAX_LATENCY_US, default=usual),
        price_per_hour=section.number("price_per_hour", above=0, at_most=MAX_PRICE_PER_HOUR),
    )
    section.finish()
    return found
