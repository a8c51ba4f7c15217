"""Nodes of the configuration that have the fields of a dataclass, with its types and defaults: stated there alone."""

from collections.abc import Collection
from dataclasses import field, fields, make_dataclass
from typing import Any, get_type_hints


def node_of(kind: Any, names: Collection[str]) -> Any:
    """A mutable dataclass with the fields `names` of the dataclass `kind`: Hydra makes the nodes of frozen dataclasses
    read-only."""
    hints = get_type_hints(kind)
    chosen = [(one.name, hints[one.name], field(default=one.default)) for one in fields(kind) if one.name in names]
    return make_dataclass(f"{kind.__name__}Node", chosen)
