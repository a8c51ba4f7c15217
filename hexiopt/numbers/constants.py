"""Constants fitted on measured runs (`constants.yaml`), by name.

Where a number of `gpus.yaml`, `frameworks.yaml` or `links.yaml` was fitted, the file has the name of its constant
instead. `python -m experiments.calibrate` fits them and writes the file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from hexiopt.errors import InputError, did_you_mean
from hexiopt.reading import Section, read_mapping

CALIBRATION = Path(__file__).with_name("constants.yaml")


@dataclass(frozen=True)
class Constant:
    """A fitted constant: what it is, its unit, and what it was fitted on."""

    name: str
    value: float
    unit: str
    meaning: str
    fitted_on: str


@cache
def constants() -> Mapping[str, Constant]:
    """All fitted constants by name, in the order of the file, read once."""
    table = Section(read_mapping(CALIBRATION), CALIBRATION.name).section("constants")
    return MappingProxyType({name: _read(table.section(name), name) for name in table.keys()})  # noqa: SIM118


def _read(section: Section, name: str) -> Constant:
    fitted = Constant(
        name,
        section.number("value", at_least=0, at_most=1e9),
        section.text("unit"),
        section.text("meaning"),
        section.text("fitted_on"),
    )
    section.finish()
    return fitted


def constant_values() -> dict[str, float]:
    """The values of all constants, by name."""
    return {name: constant.value for name, constant in constants().items()}


def constant(section: Section, key: str, values: Mapping[str, float] | None = None) -> float:
    """The number under `key`, or the value of the constant that it names, in `values` or else in the calibration.

    Raises InputError for an unknown name.
    """
    number_or_name = section.raw(key)
    if not isinstance(number_or_name, str):
        number: float = section.number(key, at_least=0, at_most=1e9)
        return number
    table = constant_values() if values is None else values
    if number_or_name not in table:
        raise InputError(
            f"{section.at(key)}: {number_or_name!r} is no fitted constant; {did_you_mean(number_or_name, table)}"
        )
    return table[number_or_name]
