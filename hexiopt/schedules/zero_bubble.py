"""Schedules whose backwards are split (Qi et al., arXiv 2401.10241, section 2): a backward computes the gradients of
its input alone, which the stage before waits for; those of weights fill what would be idle (`split.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hexiopt.schedules.interleaved import Interleaved
from hexiopt.schedules.one_f_one_b import OneFOneB
from hexiopt.schedules.operation import OperationKind
from hexiopt.schedules.schedule import BoundTerms, Schedule

_AHEAD = 2 / 3  # of a layer's products: those of the forward and of the input's gradients, which others wait for


class _Split(Schedule):
    """What split backwards add to a schedule that comes after it among the bases."""

    kinds: ClassVar[tuple[OperationKind, ...]] = (OperationKind.FORWARD, OperationKind.BACKWARD, OperationKind.WEIGHTS)

    def bound_terms(self, num_after: int, num_stages: int, num_chunks: int) -> BoundTerms:
        """As of whole backwards: forwards and backwards have the same order, and what is put off takes memory
        beside."""
        terms = super().bound_terms(num_after, num_stages, num_chunks)
        assert terms is not None, "what is split is bounded where it is whole"
        return terms._replace(split=True)

    def cycle_s(self, stage_s: Sequence[float], round_trip_s: Sequence[float], num_chunks: int) -> float:
        """As of `Schedule`: of what neighbours wait for, or of the slowest stage with all that it computes."""
        return max(*stage_s, super().cycle_s([_AHEAD * s for s in stage_s], round_trip_s, num_chunks))

    def fill_s(
        self, stage_s: Sequence[float], round_trip_s: Sequence[float], num_chunks: int, period_s: float
    ) -> float:
        """As of `Schedule`, of what neighbours wait for."""
        return max(0.0, _AHEAD * (sum(stage_s) - period_s) / num_chunks + sum(round_trip_s))


@dataclass(frozen=True)
class ZeroBubble(_Split, OneFOneB):
    """The forwards and backwards of 1F1B, split."""

    name: ClassVar[str] = "zb"
    lockstep: ClassVar[bool] = False
    shares_waits: ClassVar[bool] = False

    def whole(self) -> Schedule:
        """1F1B."""
        return OneFOneB()


@dataclass(frozen=True)
class InterleavedZeroBubble(_Split, Interleaved):
    """The forwards and backwards of interleaved 1F1B, split."""

    name: ClassVar[str] = "zb_interleaved"

    def plain(self) -> Schedule:
        """1F1B, split."""
        return ZeroBubble()

    def whole(self) -> Schedule:
        """Interleaved 1F1B."""
        return Interleaved()
