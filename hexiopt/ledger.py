"""What becomes of each key that a user's text states.

A reader has three lists: the keys that it reads, the keys that change nothing that is priced, and the keys that it
refuses with a reason. It reports every other key as not read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from hexiopt.errors import InputError, did_you_mean, quoted

OFF: tuple[Any, ...] = (None, False, 0, 0.0, "", "0", "false", "False", "none", "None", "null", (), [], {})
"""Values by which a key states that its feature is not used."""


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


Reason = str | Callable[[Any], str | None]


@dataclass(frozen=True)
class Vocabulary:
    """The keys of a format that are not read.

    `harmless` keys change nothing that is priced, whatever their value. `refused` keys change it in a way that is not
    modelled: each has a reason with the remedy, or a function from its value to a reason, or to None for a harmless
    value. Where the reason is a text, values that turn the feature `off` are harmless. A name may end in `*`.
    """

    harmless: frozenset[str] = frozenset()
    refused: Mapping[str, Reason] = field(default_factory=dict)
    off: tuple[Any, ...] = OFF

    def is_harmless(self, name: str) -> bool:
        """Whether the key changes nothing that is priced."""
        return name in self.harmless or any(
            fnmatchcase(name, pattern) for pattern in self.harmless if pattern.endswith("*")
        )

    def reason(self, name: str, value: Any) -> str | None:
        """Why the key is refused with `value`; None where it is not."""
        pattern = name if name in self.refused else None
        pattern = pattern or next((p for p in self.refused if p.endswith("*") and fnmatchcase(name, p)), None)
        if pattern is None:
            return None
        reason = self.refused[pattern]
        if isinstance(reason, str):
            return None if value in self.off else reason
        return reason(value)

    def refuses(self, name: str) -> bool:
        """Whether some value of the key is refused."""
        return name in self.refused or any(p.endswith("*") and fnmatchcase(name, p) for p in self.refused)


class Ledger(Mapping[str, Any]):
    """The keys that a text states, as a mapping that remembers which of them were read.

    `where` names the text in messages; `label` turns a key into its name there, such as `"--{}".format`.
    """

    def __init__(
        self, where: str, values: Mapping[str, Any], vocabulary: Vocabulary, label: str | Callable[[str], str] = "{}"
    ) -> None:
        self.where = where
        self._values = dict(values)
        self._vocabulary = vocabulary
        self.label: Callable[[str], str] = label.format if isinstance(label, str) else label
        self._read: set[str] = set()
        self._defaults: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        self._read.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        self._read.add(str(name))
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def wrong(self) -> list[tuple[str, str]]:
        """Every refused key with its value, and the reason."""
        return [
            (f"{self.label(name)}{self._value_text(value)}", reason)
            for name, value in self._values.items()
            if (reason := self._vocabulary.reason(name, value)) is not None
        ]

    def faults(self) -> list[str]:
        """One line for each reason, with all keys and values that it refuses."""
        by_reason: dict[str, list[str]] = {}
        for what, reason in self.wrong():
            by_reason.setdefault(reason, []).append(what)
        return [f"{', '.join(keys)}: {reason}" for reason, keys in by_reason.items()]

    def refuse(self) -> None:
        """Raise InputError with all faults of the text in one line, if it has any."""
        if faults := self.faults():
            raise InputError(f"{self.where}: {'; also '.join(faults)}")

    def unread(self) -> list[str]:
        """The keys that were not read and are neither harmless nor refusable, as the text has them."""
        vocabulary = self._vocabulary
        return [
            self.label(name)
            for name in self._values
            if name not in self._read and not vocabulary.is_harmless(name) and not vocabulary.refuses(name)
        ]

    def by_default(self, name: str, value: Any) -> None:
        """Note that a key is not stated, so that `value` holds by default."""
        self._defaults[name] = value

    def notes(self) -> list[str]:
        """Notes on the keys that were not read and on the defaults; empty where every key was stated and read."""
        unread = self.unread()
        defaults = [f"{self.label(name)} {value}" for name, value in self._defaults.items()]
        return [
            *([f"not read: {', '.join(unread)}"] if unread else []),
            *([f"not stated, so by default: {', '.join(defaults)}"] if defaults else []),
        ]

    def refuse_unread(self, known: Mapping[str, Any] | frozenset[str], remedy: str) -> None:
        """Raise InputError that names all unread keys, for formats whose keys are all known."""
        if unread := self.unread():
            near = did_you_mean(unread[0], known)
            hint = f", {near}" if near.startswith("did you mean") and len(unread) == 1 else ""
            raise InputError(
                f"{self.where}: unknown {'key' if len(unread) == 1 else 'keys'} {', '.join(unread)}{hint}; {remedy}"
            )

    @staticmethod
    def _value_text(value: Any) -> str:
        return "".join(f" {word}" for word in value) if isinstance(value, list) else f" {quoted(value)}"
