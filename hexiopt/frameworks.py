"""What training frameworks do differently on the same hardware (`frameworks.yaml`).

Plans are found for our own runtime, `hexiopt`; the others are there to predict runs that were made with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from hexiopt.reading import Section, read_mapping
from hexiopt.units import MICROSECOND

_TABLE = Path(__file__).with_name("frameworks.yaml")


@dataclass(frozen=True)
class Framework:
    """How a framework executes; the file says what each value means. Seconds, factors, shares."""

    name: str
    sequence_parallel: bool
    recompute_stops_early: bool
    overlaps_gradients: bool
    overlaps_weights: bool
    memory_traffic: float
    attention_speed: float
    tp_exposed: float
    contention: float
    layer_host_s: float
    holder_s: float


@cache
def frameworks() -> Mapping[str, Framework]:
    """All frameworks by name, read once."""
    table = Section(read_mapping(_TABLE), _TABLE.name).section("frameworks")
    return MappingProxyType({name: _read(table.section(name), name) for name in table.keys()})  # noqa: SIM118


def _read(section: Section, name: str) -> Framework:
    found = Framework(
        name,
        section.flag("sequence_parallel"),
        section.flag("recompute_stops_early"),
        section.flag("overlaps_gradients"),
        section.flag("overlaps_weights"),
        section.number("memory_traffic", above=0, at_most=100),
        section.number("attention_speed", above=0, at_most=2),
        section.number("tp_exposed", at_least=0, at_most=1),
        section.number("contention", at_least=0, at_most=1),
        section.number("layer_host_us", at_least=0, at_most=1e6) * MICROSECOND,
        section.number("holder_us", at_least=0, at_most=1e6) * MICROSECOND,
    )
    section.done()
    return found


def default_framework() -> Framework:
    """Our own runtime."""
    return frameworks()["hexiopt"]
