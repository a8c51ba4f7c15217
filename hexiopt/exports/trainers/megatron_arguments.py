"""Arguments of Megatron-LM as stated, and what becomes of those that are not read (`megatron_arguments.yaml`).

Megatron-Bridge and FlagScale state the same ones by other names.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import yaml

from hexiopt.errors import InputError, did_you_mean
from hexiopt.exports.formats import ImportContext
from hexiopt.exports.shell.scripts import Words
from hexiopt.exports.shell.values import Unknown
from hexiopt.ledger import Ledger, Reason, Vocabulary

_TABLE = Path(__file__).with_name("megatron_arguments.yaml")


@cache
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = yaml.safe_load(_TABLE.read_text(encoding="utf-8"))
    return table


@cache
def vocabulary() -> Vocabulary:
    """The arguments that are not read: harmless ones, and refused ones with the reason."""
    table = _table()
    off = [[value] for value in table["unused"]]

    def unless(values: list[list[str]], reason: str) -> Reason:
        return lambda value: None if value in values else reason

    refused: dict[str, Reason] = {name: unless([*off, ["1"]], reason) for name, reason in table["degrees"].items()}
    refused |= {name: unless(off, reason) for name, reason in table["refused"].items()}
    return Vocabulary(frozenset((*table["flags"], *table["options"])), refused)


def harmless_values(name: str) -> list[list[str]]:
    """The values with which an argument that is not read changes nothing that is priced."""
    return [[value] for value in _table()["values"].get(name, ())]


class MegatronArguments(Ledger):
    """Arguments by Megatron-LM's names without dashes; flags have no value.

    `label` turns a name into the text's name; arguments in `others` are read elsewhere. `states_recompute` is whether
    the user says what to price as recompute. Raises InputError that names all refused arguments.
    """

    def __init__(
        self,
        context: ImportContext,
        values: Mapping[str, Words],
        label: Callable[[str], str] = "--{}".format,
        others: Iterable[str] = (),
    ) -> None:
        relevant = {name: words for name, words in values.items() if words not in harmless_values(name)}
        super().__init__(context.where, relevant, vocabulary(), label)
        self._strays: list[Unknown] = []
        self.states_recompute = "recompute" in context.stated_keys
        self._read.update(others)
        self.refuse()

    def fail(self, name: str, what: str) -> NoReturn:
        """Refuse the argument; `what` ends in the remedy."""
        raise InputError(f"{self.where}: {self.label(name)}: {what}")

    def words(self, name: str) -> list[str]:
        """The values of an argument. Raises InputError where the text does not state them."""
        values: Words = self[name]
        for value in values:
            if isinstance(value, Unknown):
                self.fail(name, f"is {value}, and that {value.why}; state it")
        return [str(value) for value in values]

    def flag(self, name: str) -> bool:
        """Whether a flag is stated. Words after it, which it does not take, are noted."""
        if name not in self:
            return False
        for value in self[name]:
            if isinstance(value, Unknown) and not value.undecided:
                self._strays.append(value)
            elif isinstance(value, Unknown):
                self.words(name)
        return True

    def whole(self, name: str, default: int | None = None, *, noted: bool = True) -> int:
        """A whole number. Raises InputError where it is none, or missing without a default; see `word`."""
        text = self.word(name, None if default is None else str(default), noted=noted)
        if not text.isdecimal() or len(text) > 9:
            self.fail(name, f"{text!r} is not a whole number; write one out")
        return int(text)

    def number(self, name: str, default: str, *, noted: bool = True) -> float:
        """A number. Raises InputError as `whole`."""
        text = self.word(name, default, noted=noted)
        try:
            return float(text)
        except ValueError:
            self.fail(name, f"{text!r} is not a number; write one out")

    def word(self, name: str, default: str | None = None, choices: tuple[str, ...] = (), *, noted: bool = True) -> str:
        """One value, of `choices` where they are given. Raises InputError as `whole`.

        That a default is taken is `noted`, unless it says that a feature is not used.
        """
        if name not in self:
            if default is None:
                self.fail(name, "is missing; state it")
            if noted and default not in ("0", "none"):
                self.by_default(name, default)
            return default
        values = self.words(name)
        if len(values) != 1:
            self.fail(name, f"{' '.join(values)!r} is not one value; state one")
        if choices and values[0] not in choices:
            self.fail(name, f"{values[0]!r} is not read; {did_you_mean(values[0], choices)}")
        return values[0]

    def notes(self) -> list[str]:
        """Notes on what was not read, and on defaults."""
        flags = frozenset(_table()["flags"])
        for name in self:
            self._strays += [
                v for v in self._values[name] if name in flags and isinstance(v, Unknown) and not v.undecided
            ]
        return [*super().notes(), *(f"not read: {value}, which {value.why}" for value in dict.fromkeys(self._strays))]
