"""GPipe (Huang et al., arXiv 1811.06965, section 2.3)."""

from dataclasses import dataclass
from typing import ClassVar

from hexiopt.schedules.schedule import BACKWARD_TURN, FORWARD_TURN, Programme, Schedule, StagePosition


@dataclass(frozen=True)
class GPipe(Schedule):
    """All forwards, then all backwards."""

    name: ClassVar[str] = "gpipe"
    lockstep: ClassVar[bool] = True
    bounded: ClassVar[bool] = True

    def programme(self, at: StagePosition) -> Programme:
        """F, as often as there are micro-batches, then B."""
        return (FORWARD_TURN, at.num_micro_batches), (BACKWARD_TURN, at.num_micro_batches)
