"""What a stage has in flight: micro-batches whose activations it holds, layer range by layer range."""

from collections.abc import Sequence
from functools import lru_cache

from hexiopt.schedules.schedule import Depths, Schedule, StagePosition, positions

Counts = tuple[int, ...]  # micro-batches in flight, by layer range
InFlight = tuple[Counts, ...]  # at every moment when it may be most


def holding(num_micro_batches: int) -> InFlight:
    """What a stage with one layer range has in flight that holds so many micro-batches at most."""
    return ((num_micro_batches,),)


@lru_cache(maxsize=65_536)
def in_flight(schedule: Schedule, at: StagePosition) -> InFlight:
    """What a stage has in flight at every moment that is no less in some layer range than at all others: the
    Pareto-maximal ones.

    At which of them the stage holds most depends on the bytes that its ranges store (`largest`).
    """
    held = [0] * at.num_chunks
    moments: dict[Counts, None] = {}  # in order
    for turns, repeats in schedule.programme(at):
        change = [0] * at.num_chunks
        for kind, chunk in turns:
            change[chunk] += schedule.change_in_flight(kind)
        numbers: Sequence[int] = range(repeats)
        if min(change) >= 0 or max(change) <= 0:  # most is held the first time or the last
            numbers = sorted({0, repeats - 1}) if repeats else ()
        before = tuple(held)
        for number in numbers:
            held = [n + number * more for n, more in zip(before, change, strict=True)]
            rises = False
            for kind, chunk in turns:
                more = schedule.change_in_flight(kind)
                if rises and more < 0:
                    moments[tuple(held)] = None
                held[chunk] += more
                rises = more > 0 or (rises and more == 0)
            if rises:
                moments[tuple(held)] = None
    return tuple(a for a in moments if not any(a != b and _within(a, b) for b in moments))


def stages_in_flight(
    schedule: Schedule, num_stages: int, num_micro_batches: int, num_chunks: int, depths: Depths = ()
) -> tuple[InFlight, ...]:
    """`in_flight` of every stage of a pipeline."""
    enough = num_micro_batches
    if not depths:
        enough = schedule.distinct_micro_batches(num_micro_batches, num_stages, num_chunks)
    return _stages_in_flight(schedule, num_stages, enough, num_chunks, depths)


@lru_cache(maxsize=65_536)
def _stages_in_flight(
    schedule: Schedule, num_stages: int, num_micro_batches: int, num_chunks: int, depths: Depths
) -> tuple[InFlight, ...]:
    return tuple([in_flight(schedule, at) for at in positions(num_stages, num_micro_batches, num_chunks, depths)])


def most_in_flight(schedule: Schedule, at: StagePosition) -> int:
    """The most micro-batches in flight in a stage that holds one layer range."""
    ((count,),) = in_flight(schedule, at)
    return count


def most_in_flight_before(schedule: Schedule, num_after: int, num_micro_batches: int) -> int:
    """The most micro-batches in flight in any stage that has `num_after` stages behind it and holds one layer range:
    that of the shortest such pipeline, whose first stage it is."""
    return most_in_flight(schedule, positions(num_after + 1, num_micro_batches)[0])


def _within(counts: Counts, other: Counts) -> bool:
    return all(a <= b for a, b in zip(counts, other, strict=True))


def largest(held: InFlight, chunk_bytes: Sequence[float]) -> Counts:
    """Of the moments `held`, the first whose Σ count · bytes is largest."""
    if len(held) == 1:
        return held[0]
    return max(held, key=lambda counts: sum(n * b for n, b in zip(counts, chunk_bytes, strict=True)))
