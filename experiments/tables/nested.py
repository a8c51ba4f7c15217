"""Searches of plan spaces that lie inside others: a space counts with the best plan of any search inside it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from experiments.tables.task import Outcome


class Variant(Protocol):
    """A plan space."""

    def holds(self, other: Any) -> bool:
        """Whether every plan of the variant `other` is one of this space too."""


S = TypeVar("S")
V = TypeVar("V", bound=Variant)


@dataclass(frozen=True)
class Nested(Generic[S, V]):
    """A setting: what was found for every variant."""

    setting: S
    runs: Mapping[V, Outcome]

    def best_s(self, variant: V) -> float:
        """The best step time known for a variant's space, infinite if none: of all searches whose plans are in it."""
        return min(run.objective for other, run in self.runs.items() if variant.holds(other))
