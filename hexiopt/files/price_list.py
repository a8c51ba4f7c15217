"""The price list: what GPUs cost by the hour, and the machines and network interfaces on offer.

A type costs its rent, or its purchase over the hours for which it is used; energy comes on top of a purchase, or alone
for GPUs that are there already.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from hexiopt.files.machine_entries import gpus_from_section, machines_from_section
from hexiopt.numbers.gpus import Gpu, catalogue
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

    `on_sale` are the types that have a rent or a purchase price of their own. `source` says in words of when and where
    prices are, empty where the list does not. Raises InputError for a price out of range.
    """

    gpu_prices: Mapping[str, float]
    machines: tuple[Machine, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    on_sale: tuple[Gpu, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        for name, price in self.gpu_prices.items():
            check_price(price, f"prices: gpu_price_per_hour.{name}")


NO_PRICES = PriceList({})
HOURS_A_YEAR = 8766  # of 365.25 days
MAX_PURCHASE = 1e9


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
    known_types = dict(types) | gpus_from_section(section.section("gpus", optional=True))
    prices, on_sale = _gpu_prices(section, known_types)
    machines: tuple[Machine, ...] = ()
    if "machines" in section:
        machines = machines_from_section(section, known_types)
        for machine in machines:
            where = f"{section.at('machines')}: {machine.spec_name}"
            if machine.price_per_hour is None:
                raise InputError(f"{where}: price_per_hour is missing; state it, in the currency of the others")
            if machine.nic_bandwidth_bytes_per_s == math.inf:
                raise InputError(f"{where}: nic_bandwidth_gb_per_s is missing; state it, per interface and direction")
    as_of, origin = section.text("as_of", default=None), section.text("source", default=None)
    currency = section.text("currency", default=None)
    source = ", ".join(filter(None, [as_of and f"of {as_of}", currency and f"in {currency}", origin]))
    interfaces = tuple(_interface(entry) for entry in section.sections("interfaces", optional=True))
    section.finish()
    with section.building():
        return PriceList(prices, machines, interfaces, on_sale, source)


def _gpu_prices(section: Section, types: Mapping[str, Gpu]) -> tuple[dict[str, float], tuple[Gpu, ...]]:
    """Prices per hour by type, and the types that are on sale."""
    rent, bought = (
        {
            find_gpu(name, types, part.where).name: part.number(name, above=0, at_most=MAX_PURCHASE)
            for name in part.values()
        }
        for part in (section.section(key, optional=True) for key in ("gpu_price_per_hour", "gpu_purchase"))
    )
    years = section.number("years", above=0, at_most=100.0, default=None)
    use = section.number("use", above=0, at_most=1.0, default=None)
    energy = section.number("energy_price_per_kwh", above=0, at_most=1e6, default=None)
    if bought and (years is None or use is None):
        lacking = "years" if years is None else "use"
        section.refuse_missing(lacking, "purchases cost by the hour: state years, and use as the share of hours in use")
    known = {gpu.name: gpu for gpu in (*catalogue().values(), *types.values())}
    hours = (years or 0.0) * (use or 0.0) * HOURS_A_YEAR
    power = {name: gpu.watts / 1000 * energy for name, gpu in known.items() if gpu.watts and energy}
    owned = {name: price / hours + power.get(name, 0.0) for name, price in bought.items()}
    return power | owned | rent, tuple(known[name] for name in dict.fromkeys([*bought, *rent]))


def _interface(section: Section) -> Interface:
    name, price = section.text("name"), section.raw("price_per_hour")
    rate = section.si("bandwidth_gb_per_s")
    latency_s = section.si("latency_us", DEFAULT_INTER_LATENCY_US * MICROSECOND)
    section.finish()
    with section.building():
        return Interface(name, rate, latency_s, price)
