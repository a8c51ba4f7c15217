"""Schedules whose backwards are split (Qi et al., arXiv 2401.10241, section 2): a backward computes the gradients of
its input alone, which the stage before waits for; those of weights fill what would be idle (`split.py`)."""

from dataclasses import dataclass
from typing import ClassVar

from hexiopt.schedules.interleaved import Interleaved
from hexiopt.schedules.one_f_one_b import OneFOneB
from hexiopt.schedules.operation import OperationKind
from hexiopt.schedules.schedule import BoundTerms, Schedule

_KINDS = (OperationKind.FORWARD, OperationKind.BACKWARD, OperationKind.WEIGHTS)


@dataclass(frozen=True)
class ZeroBubble(OneFOneB):
    """The forwards and backwards of 1F1B, split."""

    name: ClassVar[str] = "zb"
    lockstep: ClassVar[bool] = False
    shares_waits: ClassVar[bool] = False
    draw_weight: ClassVar[int] = 1
    kinds: ClassVar[tuple[OperationKind, ...]] = _KINDS

    def bound_terms(self, num_after: int, num_stages: int, num_chunks: int) -> BoundTerms:
        """As of 1F1B, whose forwards and backwards are in the same order; what is put off takes memory beside."""
        return super().bound_terms(num_after, num_stages, num_chunks)._replace(split=True)


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
