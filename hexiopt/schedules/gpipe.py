"""GPipe (Huang et al., arXiv 1811.06965, section 2.3)."""

from dataclasses import dataclass
from typing import ClassVar

from hexiopt.schedules.operation import BACKWARD_TURN, FORWARD_TURN
from hexiopt.schedules.schedule import BoundTerms, Programme, Schedule, StagePosition


@dataclass(frozen=True)
class GPipe(Schedule):
    """All forwards, then all backwards."""

    name: ClassVar[str] = "gpipe"
    lockstep: ClassVar[bool] = True

    def programme(self, at: StagePosition) -> Programme:
        """F, as often as there are micro-batches, then B."""
        return (FORWARD_TURN, at.num_micro_batches), (BACKWARD_TURN, at.num_micro_batches)

    def bound_terms(self, num_after: int, num_stages: int, num_chunks: int) -> BoundTerms:
        """All stages run all forwards first; of these, as many are held as under 1F1B at least."""
        return BoundTerms(0, num_after + 1, num_after + 1)
