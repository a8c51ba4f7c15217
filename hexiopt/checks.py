"""Checks of single values, by constructors and by readers of files: each raises FieldError where a rule is broken."""

import math
from collections.abc import Iterable
from typing import Any

from hexiopt.errors import FieldError, did_you_mean


def is_number(value: Any) -> bool:
    """Whether `value` is an int or a float; True and False are not numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: Any) -> bool:
    """Whether `value` is an int; True and False are not numbers."""
    return isinstance(value, int) and not isinstance(value, bool)


def number_in(
    value: Any, where: str, *, above: float | None = None, at_least: float | None = None, at_most: float
) -> float:
    """`value` as a finite number within the given range. Raises FieldError naming `where` otherwise."""

    def span(unit: float) -> str:
        bounds = [("above", above), ("at least", at_least), ("at most", at_most)]
        return " and ".join(f"{word} {bound / unit:.12g}" for word, bound in bounds if bound is not None)

    if not is_number(value):
        raise FieldError(where, value, lambda unit: f"is not a number; state one {span(unit)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise FieldError(where, value, lambda unit: f"is not finite; state a number {span(unit)}")
    if (above is not None and value <= above) or (at_least is not None and value < at_least) or value > at_most:
        raise FieldError(where, value, lambda unit: f"is out of range; it must be {span(unit)}")
    return float(value)


def whole_in(value: Any, where: str, *, at_least: int, at_most: int) -> int:
    """`value` as a whole number within the given range. Raises FieldError naming `where` otherwise."""
    number = number_in(value, where, at_least=at_least, at_most=at_most)
    if number != int(number):
        raise FieldError(where, value, f"is not a whole number; state one at least {at_least} and at most {at_most}")
    return int(number)


def word_in(value: Any, where: str, choices: Iterable[str] | None = None) -> str:
    """`value` as text, one of `choices` where given. Raises FieldError naming `where` otherwise."""
    if not isinstance(value, str) or not value:
        raise FieldError(where, value, "is not text; write a word")
    if choices is not None and value not in (allowed := sorted(choices)):
        raise FieldError(where, value, f"is not known; {did_you_mean(value, allowed)}")
    return value


def flag_in(value: Any, where: str) -> bool:
    """`value` as True or False. Raises FieldError naming `where` otherwise."""
    if not isinstance(value, bool):
        raise FieldError(where, value, "is not true or false; write one of them")
    return value


def list_in(value: Any, where: str) -> list[Any]:
    """The items of a list or a tuple. Raises FieldError naming `where` for anything else."""
    if not isinstance(value, list | tuple):
        raise FieldError(where, value, "is not a list; write [...]")
    return list(value)
