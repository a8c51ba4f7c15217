"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from hexiopt.schedules.one_f_one_b import OneFOneB
from hexiopt.schedules.operation import OperationKind, Turn
from hexiopt.schedules.schedule import BoundTerms, Programme, Schedule, StagePosition


@dataclass(frozen=True)
class Interleaved(Schedule):
    """1F1B of stages with several layer ranges; with one range a stage it is 1F1B.

    Layer range c of stage s is virtual stage c · p + s of p stages. Ranges take turns, each for as many micro-batches
    as there are stages: forwards from the first range to the last, backwards from the last to the first.
    """

    name: ClassVar[str] = "interleaved"
    chunked: ClassVar[bool] = True

    def programme(self, at: StagePosition) -> Programme:
        """Two forwards for every stage after and one turn of each range but the last; F B in turns; the rest of B."""
        if at.num_chunks == 1:
            return OneFOneB().programme(at)
        size = at.num_stages * at.num_chunks
        total = at.num_micro_batches * at.num_chunks
        warm_up = min(total, 2 * at.num_after + size - at.num_stages)
        rounds, extra = divmod(total - warm_up, size)
        start, pairs, rest = _turns(at.num_stages, at.num_chunks, warm_up, extra)
        return (start, 1), (pairs, rounds), (rest, 1)

    def broken_rule(self, num_stages: int, num_chunks: int, num_micro_batches: int) -> str | None:
        """Stages with several ranges need a neighbour, and micro-batches in whole turns of all stages."""
        if num_chunks == 1:
            return None
        if num_stages == 1:
            return f"{num_chunks} layer ranges on the only stage; interleave two stages or more"
        if num_micro_batches % num_stages:
            what = f"{num_micro_batches} micro-batches for {num_stages} interleaved stages"
            return f"{what}; take a multiple of {num_stages}"
        return None

    def micro_batch_multiple(self, num_stages: int, num_chunks: int) -> int:
        """Of the stages, where they have several ranges."""
        return num_stages if num_chunks > 1 else 1

    def bound_terms(self, num_after: int, num_stages: int, num_chunks: int) -> BoundTerms:
        """Before its first backward a stage has run a turn of each range but the last, 2 · after + 1 forwards or a turn
        of that one, and the rest of these of the first range again."""
        if num_chunks == 1:
            return OneFOneB().bound_terms(num_after, num_stages, num_chunks)
        begun = 2 * num_after + 1
        return BoundTerms(2 * num_after, num_stages, min(num_stages, begun), max(0, begun - num_stages))

    def saturates_at(self, num_stages: int, num_chunks: int) -> int | None:
        """The warm-up of the first stage and a whole period of ranges fit three micro-batches a stage."""
        return num_stages if num_chunks == 1 else 3 * num_stages

    def plain(self) -> Schedule:
        """1F1B."""
        return OneFOneB()


@lru_cache(maxsize=4096)
def _turns(num_stages: int, num_chunks: int, warm_up: int, extra: int) -> tuple[tuple[Turn, ...], ...]:
    """The turns before the first backward; of a round in which forwards and backwards alternate; and those left, after
    `extra` such pairs."""
    period = [chunk for chunk in range(num_chunks) for _ in range(num_stages)]
    size = len(period)
    forwards = [Turn(OperationKind.FORWARD, chunk) for chunk in period]
    backwards = [Turn(OperationKind.BACKWARD, chunk) for chunk in reversed(period)]
    pairs = [turn for k in range(size) for turn in (forwards[(warm_up + k) % size], backwards[k])]
    left = [backwards[k % size] for k in range(extra, extra + warm_up)]
    return tuple(forwards[k % size] for k in range(warm_up)), tuple(pairs), (*pairs[: 2 * extra], *left)
