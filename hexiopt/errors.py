"""The one error a user may see: a single line with the value, the rule it breaks and the remedy."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any


class InputError(ValueError):
    """Bad input. Its text is one line: where and which value, the rule, the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()).encode("utf-8", "backslashreplace").decode())


MISSING: Any = object()
"""The value of a field that is not stated."""


class FieldError(InputError):
    """The value of a field breaks its rule; `where` names the owner and, after its last colon, the field.

    A rule may be a function of the form in which a file writes such values: `form` is the unit of numbers (1 in
    Python), or the function that names devices (`str` in Python).
    """

    def __init__(self, where: str, value: Any, rule: str | Callable[[Any], str], form: Any = 1.0) -> None:
        self.field, self.value, self.form, self._rule = where.rpartition(": ")[2], value, form, rule
        super().__init__(self.line(where, value, form))

    def line(self, where: str, value: Any, form: Any) -> str:
        """The text of the error for a value called `where` and written as `value`, in that form."""
        rule = self._rule if isinstance(self._rule, str) else self._rule(form)
        return f"{where}: {rule}" if self.value is MISSING else f"{where}: {quoted(value)} {rule}"

    def __reduce__(self) -> tuple[type[InputError], tuple[str]]:
        return InputError, (str(self),)


@contextmanager
def blame(where: str) -> Iterator[None]:
    """Put `where`, the source of the values, in front of an InputError that is raised inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


class RenamedWarning(FutureWarning):
    """An old name was used, which still serves for one release."""


def quoted(value: Any) -> str:
    """The value as a message quotes it, in at most 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer beyond Python's limit of printable digits
        return "a number of thousands of digits"
    except RecursionError:
        return "a value nested hundreds of levels deep"
    return text if len(text) <= 60 else text[:57] + "..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean ...` for the nearest known words, or the list of all known words when none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"


def closest_of_many(word: str, known: Iterable[str]) -> str:
    """`did_you_mean` among the first 2,000 of many or long words, in at most 304 characters."""
    text = did_you_mean(word[:100], islice(known, 2000))
    return text if len(text) <= 300 else text[:300] + " ..."
