"""Shapes of plans with sequence stages: which devices form which stages of which pipelines.

A shape says nothing of layers, layouts and batches: `building.py` finds these.
"""

from dataclasses import dataclass, replace

from hexiopt.problem.problem import Problem
from hexiopt.problem.space import sharding_stages
from solvers.core.zero import LOCKSTEP

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


def may_lockstep(problem: Problem, shape: Shape) -> bool:
    """Whether the pipelines of a shape may gather and scatter together: as many stages and micro-batches in each."""
    batches_even = problem.workload.global_batch % (len(shape.lines) * shape.size) == 0
    return len(shape.lines) == 1 or (batches_even and len(set(map(len, shape.lines))) == 1)


def zero_stages(problem: Problem, shape: Shape) -> tuple[int, ...]:
    """The ZeRO stages that the plan of a shape may have."""
    own = sharding_stages(problem.workload)
    return tuple(stage for stage in own if stage < LOCKSTEP or may_lockstep(problem, shape))


def with_sharding(problem: Problem, shape: Shape) -> Shape | None:
    """The shape, with another ZeRO stage where its own is none of `zero_stages`; None where there are none."""
    allowed = zero_stages(problem, shape)
    if shape.zero in allowed:
        return shape
    return replace(shape, zero=allowed[-1]) if allowed else None
