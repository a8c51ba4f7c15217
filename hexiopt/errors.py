"""The one error a user may see: a single line with the value, the rule it breaks and the remedy."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input. Its text is one line: where and which value, the rule, the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()).encode("utf-8", "backslashreplace").decode())


def closest(word: str, known: Iterable[str]) -> str:
    """`did you mean ...` for the nearest known words, or the list of all of them when none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
