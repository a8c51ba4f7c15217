"""GPipe (Huang et al., arXiv 1811.06965, section 2.3)."""

from dataclasses import dataclass
from typing import ClassVar

from hexiopt.schedules.schedule import Block, OperationKind, Programme, Schedule, StagePosition, Turn


@dataclass(frozen=True)
class GPipe(Schedule):
    """All forwards, then all backwards."""

    name: ClassVar[str] = "gpipe"
    lockstep: ClassVar[bool] = True

    def programme(self, at: StagePosition) -> Programme:
        """F, as often as there are micro-batches, then B."""
        forward, backward = Turn(OperationKind.FORWARD, 0), Turn(OperationKind.BACKWARD, 0)
        return Block((forward,), at.num_micro_batches), Block((backward,), at.num_micro_batches)
