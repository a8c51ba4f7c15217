"""Shapes of plans with sequence stages: which devices form which stages of which pipelines.

A shape says nothing of layers, layouts and batches: `building.py` finds these.
"""

from dataclasses import dataclass, replace

Seat = tuple[int, ...]  # a stage's devices, ascending
Line = tuple[Seat, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """Pipelines of seats, their micro-batch size in sequences, the ZeRO stage and its groups."""

    lines: tuple[Line, ...]
    size: int = 1
    zero: int = 1
    groups: str = "all"

    def with_line(self, p: int, *lines: Line) -> "Shape":
        """The shape with others in place of pipeline p."""
        return replace(self, lines=(*self.lines[:p], *lines, *self.lines[p + 1 :]))
