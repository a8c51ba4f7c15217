"""The numbered lines of a tool's output, so that errors can state the line."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from hexiopt.errors import InputError, quoted
from hexiopt.problem.machine import NAME, NAME_RULE
from hexiopt.reading import read_text

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines the header of a topology


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a file, without colour codes and trailing blanks."""

    path: str
    number: int
    text: str

    def refuse(self, rule: str, value: str | None = None) -> NoReturn:
        """Raise InputError with file, line, `value` (by default the line) and `rule`, which includes the remedy."""
        text = quoted(self.text.strip() if value is None else value)
        raise InputError(f"{self.path}, line {self.number}: {text} {rule}")

    def name(self, text: str) -> str:
        """`text` as a machine's name. Raises InputError."""
        if not NAME.fullmatch(text):
            self.refuse(NAME_RULE, text)
        return text


def read_lines(path: str) -> Iterator[Line]:
    """The non-blank lines of a file. Raises InputError where it cannot be read."""
    for number, text in enumerate(read_text(Path(path)).splitlines(), 1):
        plain = _COLOURS.sub("", text).rstrip()
        if plain:
            yield Line(path, number, plain)
