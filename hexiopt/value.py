"""The base of the public data classes: `replace` and the HTML that a notebook shows."""

from dataclasses import fields, replace
from importlib import import_module
from typing import Any, Self

from hexiopt.errors import InputError, did_you_mean


class Value:
    """An immutable value of several fields; a base of frozen data classes."""

    __slots__ = ()

    def replace(self, **changes: Any) -> Self:
        """A copy with the fields in `changes` replaced and checked. Raises InputError, also for unknown fields."""
        names = [field.name for field in fields(self) if field.init]  # type: ignore[arg-type]
        for name in changes:
            if name not in names:
                raise InputError(f"{type(self).__name__}.{name}: unknown field; {did_you_mean(name, names)}")
        return replace(self, **changes)  # type: ignore[type-var]

    def _repr_html_(self) -> str | None:
        """The HTML that a notebook shows; imported by name, since no law may depend on what people see."""
        html: str | None = import_module("hexiopt.study.html").to_html(self)
        return html
