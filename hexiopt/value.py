"""The base of the public data classes: `replace` and the HTML that a notebook shows."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar, Self

from hexiopt.errors import InputError, did_you_mean


class Value:
    """An immutable value of several fields; a base of frozen data classes."""

    __slots__ = ()

    # The HTML of each class. `hexiopt.study.html` fills it, so that this module need not import reports.
    pages: ClassVar[dict[type, Callable[[Any], str]]] = {}

    def replace(self, **changes: Any) -> Self:
        """A copy with the given fields changed and checked. Raises InputError, also for unknown fields."""
        known = [field.name for field in fields(self) if field.init]  # type: ignore[arg-type]
        for name in changes:
            if name not in known:
                raise InputError(f"{type(self).__name__}.{name}: unknown field; {did_you_mean(name, known)}")
        return replace(self, **changes)  # type: ignore[type-var]

    def _repr_html_(self) -> str | None:
        page = next((Value.pages[kind] for kind in type(self).__mro__ if kind in Value.pages), None)
        return None if page is None else page(self)
