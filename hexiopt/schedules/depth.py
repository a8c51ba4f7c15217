"""How many micro-batches the stages of a pipeline have in flight, where a plan states other numbers than its schedule
has: the rules for them, and the numbers that a period asks for.

A stage that may have n in flight runs n forwards before its first backward, and then one of each in turns. So between
forwards of a micro-batch in stages i < j and its backwards there, the pipeline has room for n_i − n_j + 1 of them.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import ceil, sqrt

from hexiopt.schedules.in_flight import most_in_flight
from hexiopt.schedules.schedule import Depths, Schedule, positions

MESSAGE_BUFFERS = 4  # messages for which every stage has buffers: two each way
_ROUNDING = 1e-9  # share of a period
_CLOSE = 1e-3  # share of a period within which a longer one is looked for


def broken_depths(schedule: Schedule, num_stages: int, num_micro_batches: int, depths: Depths) -> str | None:
    """What keeps a pipeline from having `depths`, with a remedy; None if nothing does."""
    if not depths:
        return None
    if not schedule.takes_depths:
        return f"stages state in_flight under the {schedule} schedule; take 1f1b or zb, or leave it out"
    for s, depth in enumerate(depths):
        if depth is not None and depth > num_micro_batches:
            return f"stage {s} may have {depth} of {num_micro_batches} micro-batches in flight; take no more than these"
    counts = _counts(schedule, num_stages, num_micro_batches, depths)
    for s in range(num_stages - 1):
        if counts[s] < counts[s + 1]:
            what = f"stage {s} has {counts[s]} micro-batches in flight, stage {s + 1} waits for {counts[s + 1]}"
            return f"{what} before its first backward; state in_flight of {counts[s + 1]} or more for stage {s}"
    return None


def other_depths(schedule: Schedule, num_stages: int, num_micro_batches: int, depths: Depths) -> list[int]:
    """The stages that have more or fewer micro-batches in flight than `schedule` gives them."""
    if not depths:
        return []
    counts, usual = (_counts(schedule, num_stages, num_micro_batches, numbers) for numbers in (depths, ()))
    return [s for s in range(num_stages) if counts[s] != usual[s]]


def more_messages(schedule: Schedule, num_stages: int, num_micro_batches: int, depths: Depths) -> list[int]:
    """The messages that each stage may hold beside the most micro-batches in flight [stages], beyond its
    `MESSAGE_BUFFERS` and beyond what it may hold where the schedule has its own depths.

    Of the micro-batches in flight in stage i − 1 all but n_i may wait for the forward in stage i or be on their way
    back; of those in stage i all may still be on their way to the next, if that is slow.
    """
    if not depths:
        return [0] * num_stages
    deeper, usual = (
        _most_messages(_counts(schedule, num_stages, num_micro_batches, numbers)) for numbers in (depths, ())
    )
    return [max(0, count - max(MESSAGE_BUFFERS, other)) for count, other in zip(deeper, usual, strict=True)]


def _most_messages(counts: Sequence[int]) -> list[int]:
    ahead = [0, *[before - after for before, after in pairwise(counts)]]
    return [a + b for a, b in zip(ahead, [*counts[:-1], 0], strict=True)]


def _counts(schedule: Schedule, num_stages: int, num_micro_batches: int, depths: Depths) -> list[int]:
    """The most micro-batches in flight in each stage, which holds one layer range."""
    return [most_in_flight(schedule, at) for at in positions(num_stages, num_micro_batches, depths=depths)]


def round_trip_depths(
    stage_s: Sequence[float],
    weights_s: Sequence[float],
    message_s: Sequence[tuple[float, float]],
    num_micro_batches: int,
    most: Sequence[int],
    share: float = 1.0,
) -> tuple[int, ...]:
    """The fewest micro-batches in flight [stages] with which no round trip takes longer than a `share` of a period.

    `stage_s` [stages] is the forward and backward of a micro-batch, of which nothing waits for `weights_s` [stages]:
    gradients of weights where backwards are split, else 0. `message_s` [stages - 1] has the messages to the next stage
    and back. The period is that of the slowest stage or message; longer where no stage may have more than `most`
    [stages] in flight, at least 1 each. For a share below 1, stages have no more than these either: so many in flight
    pass the time in which a pipeline fills, and messages that others delay.

    A round trip from the forward in stage i to that in stage j and back to the backward in i, C seconds in all, recurs
    at most n_i − n_j + 1 times at once, so n_i must be n_j − 1 + C / period or more; the last stage has one in flight.
    The numbers never rise from a stage to the next, so that no stage waits for ever.
    """
    num_stages = len(stage_s)
    waited_s = [total - late for total, late in zip(stage_s, weights_s, strict=True)]
    trips_s = []  # [stages i][stages j > i]
    for i in range(num_stages):
        trip_s, row = waited_s[i], []
        for j in range(i + 1, num_stages):
            trip_s += waited_s[j] + sum(message_s[j - 1])
            row.append(trip_s)
        trips_s.append(row)

    def depths(period_s: float) -> list[int]:
        counts = [1] * num_stages
        for i in reversed(range(num_stages - 1)):
            # The next stage is among those behind: a trip takes one period at least.
            needs = (counts[i + 1 + k] - 1 + _periods(trip_s, period_s) for k, trip_s in enumerate(trips_s[i]))
            counts[i] = min(num_micro_batches, max(needs))
        return counts

    def fits(counts: Sequence[int]) -> bool:
        return all(count <= limit for count, limit in zip(counts, most, strict=True))

    def within_room(period_s: float) -> tuple[int, ...]:
        return tuple(accumulate(map(min, depths(period_s), most), min))

    period_s = max([*stage_s, *[s for both in message_s for s in both]])
    if fits(depths(period_s)):
        return within_room(share * period_s)
    longest_s = max(trip_s for row in trips_s for trip_s in row)  # with one in flight everywhere
    while longest_s > period_s * (1 + _CLOSE):
        middle_s = sqrt(period_s * longest_s)
        if fits(depths(middle_s)):
            longest_s = middle_s
        else:
            period_s = middle_s
    return within_room(share * longest_s)


def _periods(trip_s: float, period_s: float) -> int:
    return max(1, ceil(trip_s / period_s - _ROUNDING)) if period_s > 0.0 else 1
