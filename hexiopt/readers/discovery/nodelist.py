"""Slurm's node lists: `gpu[01-04,07],login` names gpu01 to gpu04, gpu07 and login."""

import re
from itertools import product

MAX_NODES = 100_000
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")


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


def _entries(text: str) -> list[str]:
    """The entries separated by commas outside brackets."""
    entries = re.split(r",(?![^\[\]]*\])", text)
    if not all(entries):
        raise ValueError("has an empty name; write, for example, gpu[01-04,07]")
    return entries


def _numbers(text: str, most: int) -> list[str]:
    numbers: list[str] = []
    for entry in text.split(","):
        found = _RANGE.fullmatch(entry)
        if found is None:
            raise ValueError(f"has {entry!r} in brackets, which is not a range; write, for example, gpu[01-04,07]")
        first, last = found[1], found[2] or found[1]
        if int(last) < int(first):
            raise ValueError(f"has the range {entry}, which descends; write the lower number first")
        if len(numbers) + int(last) - int(first) >= most:
            raise ValueError(f"names more than {MAX_NODES:,} nodes; name fewer")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
