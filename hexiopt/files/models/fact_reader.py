"""Reads the facts of a row from a `config.json`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from hexiopt.errors import InputError
from hexiopt.files.models.facts import REQUIRED, Fact, Joint, Key
from hexiopt.ledger import Ledger
from hexiopt.problem.architectures import MAX_NORM_EPS, MAX_ROPE_THETA, RANGES
from hexiopt.reading import Section

_COUNTS = ("norms", "norm_vectors", "qk_norm_vectors", "activation_params", "extra_positions")
_WORDS = ("activation", "norm", "qk_norm", "positions")
_MAY_BE_NULL = ("num_kv_heads", "attention_window")
_MOST = RANGES["vocab_size"][1]  # of a number that no range is stated for


class FactReader:
    """The facts of one file; a `ConfigFile` for the functions of a row. It collects the faults that it meets."""

    def __init__(self, where: str, ledger: Ledger) -> None:
        self.section = Section(ledger, where)
        self.faults: list[str] = []
        self._ledger = ledger
        self._where = where

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Collect the InputError that the block raises, if any, as a fault of the file."""
        try:
            yield
        except InputError as error:
            self.faults.append(str(error).removeprefix(self._where).lstrip(":. "))

    # What the functions of a row ask

    def size(self, name: str, default: int | None = None) -> int | None:
        """A whole number; `default` where it is absent or null."""
        value: int | None = self.section.integer(name, at_least=0, at_most=_MOST, default=None)
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        """A number above 0; `default` where it is absent or null."""
        return number(self.section, name, 1e6, default)

    def flag(self, name: str, default: bool) -> bool:
        """A switch; `default` where it is absent."""
        if name in self.section and self.section.raw(name, None) is None:
            self.section.fail(name, "is not true or false; write one of them")
        return bool(self.section.flag(name, default))

    def word(self, name: str) -> str | None:
        """A text; None where it is absent or something else."""
        value = self.section.raw(name, None)
        return value if isinstance(value, str) else None

    def inner(self, name: str) -> Mapping[str, Any]:
        """The mapping under a key; an empty one where it is absent or null."""
        inner = self.section.raw(name, None)
        return {} if inner is None else self.section.section(name).values()

    def refuse(self, name: str, rule: str) -> NoReturn:
        """Raise InputError for the value of a key."""
        self.section.fail(name, rule)

    # Facts

    def row(self, facts: Mapping[str, Fact], values: dict[str, Any], part: bool = False) -> dict[str, Any]:
        """Add the values of a row to `values`, which its functions may read, and give it; faults are collected.

        With `part` the row is of a part of a layer: its numbers may be 0 or null, which is the same.
        """
        for field, fact in facts.items():
            with self.collecting():
                values[field] = self.fact(field, fact, values, part)
        return values

    def fact(self, field: str, fact: Fact, values: dict[str, Any], part: bool = False) -> Any:
        """The value of a fact. Raises InputError."""
        if isinstance(fact, Joint):
            return fact.join(*(self.fact("", key, values, True) for key in fact.keys))
        if not isinstance(fact, Key):
            return fact(self, values) if callable(fact) else fact
        present = [name for name in fact.names if name in self._ledger]
        name = (*present, fact.names[0])[0]
        if len({repr(self._ledger[other]) for other in present}) > 1:
            raise InputError(f"{self.section.at(name)}: differs from {present[1]}, its other name; state one of them")
        if isinstance(fact.default, bool):
            switch = self.flag(name, fact.default)
            return switch if fact.then is None else fact.then[switch]
        if part:
            return self._number_of_part(fact, name)
        value = self._value(field, name)
        if value is not None or (present and field in _MAY_BE_NULL):
            return value
        if fact.default is REQUIRED or (present and field == "head_dim" and fact.default is not None):
            self.section.refuse_missing(name)
        return fact.default

    def _number_of_part(self, fact: Key, name: str) -> int:
        """A whole number, which a file may state once for each layer; 0 where it is null."""
        value = self.section.raw(name, None)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            self.section.valid_items(name, lambda item: type(item) is int and 0 <= item <= _MOST, "is not a number")
            return int(value[0])
        number = self.size(name)
        if number is not None:
            return number
        if fact.default is REQUIRED:
            self.section.refuse_missing(name)
        return 0 if name in self._ledger else fact.default

    def _value(self, field: str, name: str) -> Any:
        """The value of the key `name`, read as `field` requires; None where it is absent or null."""
        if field in RANGES or field in _COUNTS:
            low, high = RANGES.get(field, (0, 1024))
            return self.section.integer(name, at_least=low, at_most=high, default=None)
        if field in _WORDS:
            return self.section.text(name, default=None)
        if field == "output_bias":
            return self.section.flag(name, None)
        most = MAX_NORM_EPS if field == "norm_eps" else MAX_ROPE_THETA
        return self.section.number(name, above=0, at_most=most, default=None)


def number(section: Section, key: str, at_most: float, default: float) -> float:
    """The number above 0 under `key`; `default` where it is absent or null. Raises InputError for others."""
    value: float | None = section.number(key, above=0, at_most=at_most, default=None)
    return default if value is None else value
