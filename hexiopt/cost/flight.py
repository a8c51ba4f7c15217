"""What a stage has in flight: micro-batches whose activations it holds, range by range where it is interleaved."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hexiopt.cost.schedule import forward_chunk, num_warm_up

Counts = tuple[int, ...]  # micro-batches in flight, by layer range


class Turns(NamedTuple):
    """Where a stage of several layer ranges stands in its interleaved pipeline: that says how many micro-batches of
    each range it holds (`peaks`). Its layers are divided as `hexiopt.space.layer_ranges` does."""

    position: int
    num_stages: int
    num_micro_batches: int
    num_chunks: int


Flight = int | Turns  # what a stage holds at its peak: so many micro-batches, or those of each range


def flight(schedule: str, position: int, num_stages: int, num_micro_batches: int, num_chunks: int) -> Flight:
    """What stage `position` of a pipeline holds at its peak, with `num_chunks` layer ranges a stage."""
    if num_chunks == 1:
        return in_flight(schedule, position, num_stages, num_micro_batches)
    # Repeats from three micro-batches a stage on, and micro-batches come in whole turns of all stages.
    return Turns(position, num_stages, num_stages * min(3, -(-num_micro_batches // num_stages)), num_chunks)


def in_flight(schedule: str, position: int, num_stages: int, num_micro_batches: int) -> int:
    """Micro-batches whose activations stage `position` holds at its peak, with one layer range."""
    if schedule == "gpipe":
        return num_micro_batches
    return min(num_micro_batches, num_stages - position)


def peaks(held: Flight) -> tuple[Counts, ...]:
    """All that a stage holds at a time, range by range, but what is no more in any range than at another time: where
    it holds most depends on what its ranges store."""
    if not isinstance(held, Turns):
        return ((held,),)
    # From the first backward on, what it holds repeats after every `num_stages` micro-batches.
    return _peaks(held._replace(num_micro_batches=min(held.num_micro_batches, 3 * held.num_stages)))


@lru_cache(maxsize=4096)
def _peaks(turns: Turns) -> tuple[Counts, ...]:
    position, stages, batches, chunks = turns
    total, period = batches * chunks, stages * chunks
    warm_up = num_warm_up("interleaved", position, stages, chunks, batches)
    held = [0] * chunks
    for k in range(warm_up):
        held[forward_chunk(k, stages, chunks)] += 1
    found = {tuple(held): None}
    for k in range(min(total - warm_up, period)):
        held[forward_chunk(warm_up + k, stages, chunks)] += 1
        found[tuple(held)] = None
        held[chunks - 1 - forward_chunk(k, stages, chunks)] -= 1
    return tuple(one for one in found if not any(one != other and _within(one, other) for other in found))


def _within(one: Counts, other: Counts) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))


def largest(held: Flight, chunk_bytes: Sequence[float]) -> Counts:
    """Of `peaks`, the first whose Σ count · bytes is largest."""
    each = peaks(held)
    if len(each) == 1:
        return each[0]
    return max(each, key=lambda counts: sum(n * b for n, b in zip(counts, chunk_bytes, strict=True)))
