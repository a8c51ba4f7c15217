"""Slurm's node lists: `gpu[01-04,07],login` names gpu01 to gpu04, gpu07 and login."""

import re
from collections.abc import Iterable
from itertools import product

MAX_NODES = 100_000
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})")


def expand(text: str) -> list[str]:
    """The nodes that a list names, in its order. Numbers are padded to the width of a range's first number.

    Raises ValueError with the rule that the text breaks.
    """
    names: list[str] = []
    for entry in _entries(text):
        parts, at, most = [], 0, MAX_NODES - len(names)
        while at < len(entry):
            piece = _PIECE.match(entry, at)
            if piece is None:
                raise ValueError("has unbalanced brackets; write, for example, gpu[01-04,07]")
            parts.append([piece[2]] if piece[1] is None else _numbers(piece[1], most))
            at = piece.end()
        count = 1
        for part in parts:
            count *= len(part)
        if count > most:
            raise ValueError(f"names more than {MAX_NODES:,} nodes; name fewer")
        names += ["".join(words) for words in product(*parts)]
    return names


def compress(names: Iterable[str]) -> list[str]:
    """The names as node lists; names that differ only in the number at their end share one: `gpu[01-04,07]`."""
    numbers: dict[tuple[str, bool], list[str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        prefix, number = (name, "") if match is None else (match[1], match[2])
        numbers.setdefault((prefix, match is None), []).append(number)
    return [prefix + (ends[0] if len(ends) == 1 else f"[{_ranges(ends)}]") for (prefix, _), ends in numbers.items()]


def _ranges(numbers: Iterable[str]) -> str:
    """Distinct numbers as ranges that `_numbers` expands to the same digits, leading zeros included."""
    runs: list[tuple[str, str]] = []
    for number in sorted(numbers, key=lambda digits: (int(digits), digits)):
        if runs and number == f"{int(runs[-1][1]) + 1:0{len(runs[-1][0])}d}":
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(first if first == last else f"{first}-{last}" for first, last in runs)


def _entries(text: str) -> list[str]:
    """The entries separated by commas outside brackets."""
    entries = re.split(r",(?![^\[\]]*\])", text)
    if not all(entries):
        raise ValueError("has an empty name; write, for example, gpu[01-04,07]")
    return entries


def _numbers(text: str, most: int) -> list[str]:
    numbers: list[str] = []
    for entry in text.split(","):
        match = _RANGE.fullmatch(entry)
        if match is None:
            raise ValueError(f"has {entry!r} in brackets, which is not a range; write, for example, gpu[01-04,07]")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise ValueError(f"has the range {entry}, which descends; write the lower number first")
        if len(numbers) + int(last) - int(first) >= most:
            raise ValueError(f"names more than {MAX_NODES:,} nodes; name fewer")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
