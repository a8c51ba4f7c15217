"""The settings in a trainer's file by dotted names, read with their types; all faults are reported at once."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from hexiopt.errors import InputError, did_you_mean, quoted
from hexiopt.exports.formats import ImportContext
from hexiopt.ledger import Ledger, Reason, Vocabulary
from hexiopt.reading import MAX_DEPTH, as_mapping, parse

AUTO = "auto"  # what a training script fills in when it runs
_MOST = 10**9
OFFLOAD = "keeps states in CPU memory or on NVMe, which is not modelled; import the layout without offload"

T = TypeVar("T")


def unless(values: Iterable[Any], reason: str) -> Reason:
    """The reason why a key is refused with any value but those of `values`."""
    harmless = tuple(values)
    return lambda value: None if value in harmless else reason


def above_one(reason: str) -> Reason:
    """The reason why a degree above 1 is refused."""
    return unless((None, 0, 1), reason)


def other_optimizers(names: str, remedy: str) -> Reason:
    """The reason why an optimizer is refused whose name is none of `names`, which are Adam's."""
    states = "keeps other states than Adam's two moments in FP32, which alone are modelled"
    return lambda value: None if str(value).lower() in names.split() else f"{states}; {remedy}"


def flat(data: Mapping[str, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every setting of nested tables by its dotted name; an empty table is one with the value {}."""
    if depth > MAX_DEPTH:
        raise InputError(f"the file is nested deeper than {MAX_DEPTH} levels; flatten it")
    for key, value in data.items():
        name = prefix + (f'"{key}"' if "." in key else key)
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{name}.", depth + 1)
        else:
            yield name, value


def unknown_key(name: str, known: frozenset[str]) -> str:
    """The reason why a key that is not `known` is refused, with a guess at what is meant."""
    near = did_you_mean(name, known)
    return f"is no key of the format; {near if near.startswith('did you mean') else 'take it out'}"


class FileSettings(Ledger):
    """The settings of a file, with the trainer's defaults.

    Getters do not raise: a value of the wrong kind becomes a fault, and the default is returned. `refuse` raises
    InputError with all faults; `notes` say what was not read and which defaults hold. In a closed format, whose keys
    are `known`, every other key is a fault.
    """

    def __init__(
        self,
        context: ImportContext,
        values: Mapping[str, Any],
        vocabulary: Vocabulary,
        known: frozenset[str] | None = None,
    ) -> None:
        super().__init__(context.where, values, vocabulary)
        self._known = known
        self._wrong: list[tuple[str, str]] = []

    @classmethod
    def of_json(
        cls, text: str, context: ImportContext, vocabulary: Vocabulary, known: frozenset[str] | None = None
    ) -> "FileSettings":
        """The settings of a JSON file. Raises InputError for other text."""
        data = as_mapping(parse(text, context.where, as_json=True), context.where)
        return cls(context, dict(flat(data)), vocabulary, known)

    # ------------------------------------------------------------------------- values

    def whole(self, name: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A whole number from `at_least` on, or `default`, which may be below; without a default it must be stated."""
        value = self._value(name, default)
        if default is not None and type(value) is int and value == default:
            return default
        if type(value) is int and at_least <= value <= _MOST:
            return value
        if name in self:
            self.refuse_value(name, f"is not a whole number from {at_least} on; write one out")
        return at_least if default is None else default

    def flag(self, name: str, default: bool) -> bool:
        """True or false, also as a word, or `default`."""
        return self.word(name, {"true": True, "false": False}, str(default).lower())

    def word(self, name: str, choices: Mapping[str, T], default: str) -> T:
        """The choice under the stated word, in capitals or not, or under `default`."""
        by_word = {word.lower(): choice for word, choice in choices.items()}
        word = str(self._value(name, default)).lower()
        if word not in by_word:
            self.refuse_value(name, f"is not modelled; {did_you_mean(word, choices)}")
            return choices[default]
        return by_word[word]

    def name_in_use(self, *names: str) -> str:
        """The one of a setting's names, newest first, that the file uses; two are a fault."""
        present = [name for name in names if name in self]
        if len(present) > 1:
            self.fault(" and ".join(present), f"are names of one setting; keep {present[0]}")
        return present[0] if present else names[0]

    def _value(self, name: str, default: Any) -> Any:
        if name in self:
            return self[name]
        if default is None:
            self.fault(name, "is missing; state it")
        else:
            self.by_default(name, default)
        return default

    # ------------------------------------------------------------------------- faults and notes

    def fault(self, what: str, rule: str) -> None:
        """Note a fault for `refuse`: `what` breaks `rule`, which ends in the remedy."""
        if (what, rule) not in self._wrong:
            self._wrong.append((what, rule))

    def refuse_value(self, name: str, rule: str) -> None:
        """Note a fault in the value of a setting, as `fault` does."""
        value = self[name]
        if value == AUTO:
            rule = "is filled in when the training script runs; write the value that it takes"
        self.fault(f"{name} {quoted(value)}", rule)

    def wrong(self) -> list[tuple[str, str]]:
        """Every fault: what the vocabulary refuses, values of the wrong kind, and keys that a closed format lacks."""
        return [*super().wrong(), *self._wrong, *self._unknown()]

    def _unknown(self) -> list[tuple[str, str]]:
        if self._known is None:
            return []
        return [(name, unknown_key(name, self._known)) for name in self.unread() if name not in self._known]

    def require(self, sound: bool, what: str, rule: str) -> None:
        """Raise InputError at once, with the other faults, unless the file is `sound`."""
        if not sound:
            self.fault(what, rule)
            self.refuse()


def script_notes(context: ImportContext, **assumed: Any) -> list[str]:
    """The note on values that the training script sets, and that are assumed unless the command line states them."""
    values = ", ".join(f"workload.{key}={value}" for key, value in assumed.items() if key not in context.stated_keys)
    return [f"not in the file but in the training script, so assumed: {values}"] if values else []
