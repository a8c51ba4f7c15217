"""Schedules whose backwards are split (Qi et al., arXiv 2401.10241, section 2): a backward computes the gradients of
its input alone, which the stage before waits for; those of weights fill what would be idle (`split.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hexiopt.schedules.interleaved import Interleaved
from hexiopt.schedules.one_f_one_b import OneFOneB
from hexiopt.schedules.operation import OperationKind
from hexiopt.schedules.schedule import BoundTerms, Schedule

_KINDS = (OperationKind.FORWARD, OperationKind.BACKWARD, OperationKind.WEIGHTS)
_AHEAD = 2 / 3  # of a layer's products: those of the forward and of the input's gradients, which others wait for


def _cycle_s(schedule: Schedule, stage_s: Sequence[float], round_trip_s: Sequence[float], num_chunks: int) -> float:
    """As `Schedule.cycle_s`: of what neighbours wait for, or of the slowest stage with all that it computes."""
    return max(*stage_s, schedule.whole().cycle_s([_AHEAD * s for s in stage_s], round_trip_s, num_chunks))


def _fill_s(stage_s: Sequence[float], round_trip_s: Sequence[float], num_chunks: int, period_s: float) -> float:
    """As `Schedule.fill_s`, of what neighbours wait for."""
    return max(0.0, _AHEAD * (sum(stage_s) - period_s) / num_chunks + sum(round_trip_s))


@dataclass(frozen=True)
class ZeroBubble(OneFOneB):
    """The forwards and backwards of 1F1B, split."""

    name: ClassVar[str] = "zb"
    lockstep: ClassVar[bool] = False
    shares_waits: ClassVar[bool] = False
    draw_weight: ClassVar[int] = 4  # as 1F1B, which it hardly ever is behind
    kinds: ClassVar[tuple[OperationKind, ...]] = _KINDS

    def bound_terms(self, num_after: int, num_stages: int, num_chunks: int) -> BoundTerms:
        """As of 1F1B, whose forwards and backwards are in the same order; what is put off takes memory beside."""
        return super().bound_terms(num_after, num_stages, num_chunks)._replace(split=True)

    def whole(self) -> Schedule:
        """1F1B."""
        return OneFOneB()

    def cycle_s(self, stage_s: Sequence[float], round_trip_s: Sequence[float], num_chunks: int) -> float:
        """As of `Schedule`."""
        return _cycle_s(self, stage_s, round_trip_s, num_chunks)

    def fill_s(
        self, stage_s: Sequence[float], round_trip_s: Sequence[float], num_chunks: int, period_s: float
    ) -> float:
        """As of `Schedule`."""
        return _fill_s(stage_s, round_trip_s, num_chunks, period_s)


@dataclass(frozen=True)
class InterleavedZeroBubble(Interleaved):
    """The forwards and backwards of interleaved 1F1B, split."""

    name: ClassVar[str] = "zb_interleaved"
    kinds: ClassVar[tuple[OperationKind, ...]] = _KINDS

    def bound_terms(self, num_after: int, num_stages: int, num_chunks: int) -> BoundTerms:
        """As of interleaved 1F1B, split."""
        return super().bound_terms(num_after, num_stages, num_chunks)._replace(split=True)

    def plain(self) -> Schedule:
        """1F1B, split."""
        return ZeroBubble()

    def whole(self) -> Schedule:
        """Interleaved 1F1B."""
        return Interleaved()

    def cycle_s(self, stage_s: Sequence[float], round_trip_s: Sequence[float], num_chunks: int) -> float:
        """As of `Schedule`."""
        return _cycle_s(self, stage_s, round_trip_s, num_chunks)

    def fill_s(
        self, stage_s: Sequence[float], round_trip_s: Sequence[float], num_chunks: int, period_s: float
    ) -> float:
        """As of `Schedule`."""
        return _fill_s(stage_s, round_trip_s, num_chunks, period_s)
