"""1F1B with a flush at the end of the step (Narayanan et al., arXiv 2006.09503, section 3.2: PipeDream-Flush)."""

from dataclasses import dataclass
from typing import ClassVar

from hexiopt.schedules.operation import BACKWARD_TURN, FORWARD_TURN
from hexiopt.schedules.schedule import BoundTerms, Programme, Schedule, StagePosition

_PAIR = FORWARD_TURN + BACKWARD_TURN


@dataclass(frozen=True)
class OneFOneB(Schedule):
    """A forward for every stage after this one, or fewer or more where the plan states a depth; then forward and
    backward alternate; the backwards left."""

    name: ClassVar[str] = "1f1b"
    lockstep: ClassVar[bool] = True
    shares_waits: ClassVar[bool] = True
    takes_depths: ClassVar[bool] = True
    draw_weight: ClassVar[int] = 4  # best for most plans

    def programme(self, at: StagePosition) -> Programme:
        """F for every stage after, or up to one less than the depth; F B in turns; the rest of B."""
        warm_up = min(at.num_micro_batches, at.num_after if at.depth is None else at.depth - 1)
        return ((FORWARD_TURN, warm_up), (_PAIR, at.num_micro_batches - warm_up), (BACKWARD_TURN, warm_up))

    def bound_terms(self, num_after: int, num_stages: int, num_chunks: int) -> BoundTerms:
        """A forward for every stage after, and one more than these before the first backward."""
        return BoundTerms(num_after, num_after + 1, num_after + 1)

    def saturates_at(self, num_stages: int, num_chunks: int) -> int | None:
        """Of the first stage, which has most in flight: as many as there are stages."""
        return num_stages
