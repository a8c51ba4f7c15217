"""The price list: what GPUs cost by the hour, and the machines and network interfaces on offer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from hexiopt.files.machine_entries import gpus_from_section, machines_from_section
from hexiopt.numbers.gpus import Gpu
from hexiopt.numbers.products import find_gpu
from hexiopt.problem.machine import DEFAULT_INTER_LATENCY_US, Machine, check_latency, check_price, check_rate
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section, read_mapping
from hexiopt.units import MICROSECOND


@dataclass(frozen=True)
class Interface:
    """A network interface on offer: its rate per direction and its price. Raises InputError for values out of range."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    price_per_hour: float

    def __post_init__(self) -> None:
        check_rate(self.bandwidth_bytes_per_s, f"interface {self.name}: bandwidth_bytes_per_s")
        check_latency(self.latency_s, f"interface {self.name}: latency_s")
        check_price(self.price_per_hour, f"interface {self.name}: price_per_hour")


@dataclass(frozen=True)
class PriceList:
    """Prices per hour of GPUs by type, and machines and network interfaces on offer, with their prices.

    Raises InputError for a price out of range.
    """

    gpu_prices: Mapping[str, float]
    machines: tuple[Machine, ...] = ()
    interfaces: tuple[Interface, ...] = ()

    def __post_init__(self) -> None:
        for name, price in self.gpu_prices.items():
            check_price(price, f"prices: gpu_price_per_hour.{name}")


NO_PRICES = PriceList({})


def prices_for(problem: Problem, source: str | Path | Mapping[str, Any] | None) -> PriceList:
    """The price list in a file or a mapping, with the GPU types of `problem`; empty for None. Raises InputError."""
    if source is None:
        return NO_PRICES
    types = {gpu.type_name: gpu.at(1.0) for gpu in problem.cluster.types}
    read, where = (source, "prices") if isinstance(source, Mapping) else (read_mapping(source), str(source))
    return price_list(Section(read, where), types)


def price_list(section: Section, types: Mapping[str, Gpu]) -> PriceList:
    """The price list that a mapping describes (docs/questions.md). `types` are the cluster's own GPU types by name.

    Raises InputError naming the key.
    """
    by_type = section.section("gpu_price_per_hour", optional=True)
    prices = by_type.values()
    known_types = dict(types) | gpus_from_section(section.section("gpus", optional=True))
    for name in prices:
        find_gpu(name, known_types, by_type.where)
    machines: tuple[Machine, ...] = ()
    if "machines" in section:
        machines = machines_from_section(section, known_types)
        for machine in machines:
            where = f"{section.at('machines')}: {machine.spec_name}"
            if machine.price_per_hour is None:
                raise InputError(f"{where}: price_per_hour is missing; state it, in the currency of the others")
            if machine.nic_bandwidth_bytes_per_s == math.inf:
                raise InputError(f"{where}: nic_bandwidth_gb_per_s is missing; state it, per interface and direction")
    interfaces = tuple(_interface(entry) for entry in section.sections("interfaces", optional=True))
    section.finish()
    with section.building():
        return PriceList(prices, machines, interfaces)


def _interface(section: Section) -> Interface:
    name, price = section.text("name"), section.raw("price_per_hour")
    rate = section.si("bandwidth_gb_per_s")
    latency_s = section.si("latency_us", DEFAULT_INTER_LATENCY_US * MICROSECOND)
    section.finish()
    with section.building():
        return Interface(name, rate, latency_s, price)
