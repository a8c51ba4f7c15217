"""The numbered lines of a tool's output, so that errors can state the line, and all faults of a text in one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from hexiopt.errors import InputError, quoted
from hexiopt.problem.machine import NAME, NAME_RULE
from hexiopt.problem.nodelist import expand
from hexiopt.reading import read_text

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the header of a topology
# Lines that people copy along: the prompt with its command, and the date above tables of nvidia-smi and sinfo -l.
_COPIED = re.compile(
    r"^(\S*[\w\]~:/-]*\s?\S*[$#%>]\s+(sudo\s+)?(sinfo|scontrol|nvidia-smi|rocm-smi|kubectl|cat|srun|ssh)\b.*"
    r"|[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d( [A-Z]+)? \d{4}\s*)$",
    re.MULTILINE,
)
_MAX_BYTES = 2**26  # scontrol show nodes --json takes some 5 KB a node
_MOST_FAULTS = 4  # that one line names


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file, without colour codes and trailing blanks, or the text of `place` in one of JSON or YAML."""

    path: str
    number: int
    text: str
    place: str = ""

    def refuse(self, rule: str, value: str | None = None) -> NoReturn:
        """Raise InputError with file, line, `value` (by default the line) and `rule`, which includes the remedy."""
        text = quoted(self.text.strip() if value is None else value)
        place = self.place or f"line {self.number}"
        raise InputError(f"{self.path}, {place}: {text} {rule}")

    def name(self, text: str) -> str:
        """`text` as a machine's name. Raises InputError."""
        if not NAME.fullmatch(text):
            self.refuse(NAME_RULE, text)
        return text

    def names(self, text: str) -> list[str]:
        """The machines of a node list such as `gpu[01-04]`. Raises InputError."""
        try:
            names = expand(text)
        except ValueError as error:
            self.refuse(str(error), text)
        return [self.name(name) for name in names]


@dataclass(frozen=True)
class Text:
    """The text of a file, without colour codes."""

    path: str
    content: str

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """The non-blank lines."""
        stripped = (text.rstrip() for text in self.content.splitlines())
        return tuple(Line(self.path, number, text) for number, text in enumerate(stripped, 1) if text)

    @property
    def first(self) -> str:
        """The first non-blank line, '' in an empty text."""
        return self.lines[0].text if self.lines else ""

    def has(self, pattern: str) -> bool:
        """Whether the regular expression matches in some line, `^` and `$` at its ends."""
        return re.search(pattern, self.content, re.MULTILINE) is not None


def open_text(path: str) -> Text:
    """The text of a file of at most 64 MiB, without lines that no tool wrote; the other lines keep their numbers.

    Raises InputError where it cannot be read.
    """
    return Text(path, _COPIED.sub("", _COLOURS.sub("", read_text(Path(path), max_bytes=_MAX_BYTES))))


class Faults:
    """The faults of a text, refused together."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._faults: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect the InputError that the block raises, if any."""
        try:
            yield
        except InputError as error:
            self._faults.append(str(error))

    def refuse(self) -> None:
        """Raise InputError with all faults in one line, if there are any; equal faults of several lines appear once."""
        places_of: dict[str, list[str]] = {}
        for fault in self._faults:
            place, _, rule = fault.removeprefix(self._path).removeprefix(", ").partition(": ")
            places_of.setdefault(rule, []).append(place)
        faults = [
            f"{places[0]}: {rule}" + (f" (so {len(places) - 1} more)" if len(places) > 1 else "")
            for rule, places in places_of.items()
        ]
        if not faults:
            return
        more = len(faults) - _MOST_FAULTS
        rest = [f"{more:,} more faults"] if more > 0 else []
        raise InputError(f"{self._path}, " + "; also ".join(faults[:_MOST_FAULTS] + rest))
