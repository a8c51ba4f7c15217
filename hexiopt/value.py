"""What the public data classes share: a changed copy, and how a notebook shows them."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, ClassVar, Self

from hexiopt.errors import InputError, did_you_mean


class Value:
    """An immutable value of several fields; a base of frozen data classes."""

    __slots__ = ()

    # How a notebook shows the values of a class: filled by `hexiopt.toolkit.html`, so that no law knows of reports.
    pages: ClassVar[dict[type, Callable[[Any], str]]] = {}

    def replace(self, **changes: Any) -> Self:
        """A copy with other fields, checked like any other. Raises InputError, also for a field that it has not."""
        known = [field.name for field in fields(self) if field.init]  # type: ignore[arg-type]
        for name in changes:
            if name not in known:
                raise InputError(f"{type(self).__name__}.{name}: unknown field; {did_you_mean(name, known)}")
        return replace(self, **changes)  # type: ignore[type-var]

    def _repr_html_(self) -> str | None:
        page = next((Value.pages[kind] for kind in type(self).__mro__ if kind in Value.pages), None)
        return None if page is None else page(self)
