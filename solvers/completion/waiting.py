"""Layers of the stages of a pipeline that waits for messages, under a schedule that `shares_waits`.

A micro-batch's round trip between two stages may be divided between them in any way. With the division that suits them
best, the period of the pipeline is the largest sum of a stage's compute and its two parts: where the mean of every run
of stages with the round trips inside it (`largest_cycle_mean_s`) is no longer, there is room for them (Hall's theorem).
So a stage that is done early makes room for its neighbours' messages, and layers go where they and messages fit best.

Within a period, stages are filled in order. Of the first stages' choices, only their layers and what they leave of the
last round trip to the next stage matter, and of two, one that has more layers and leaves less is better. So whether all
layers find room is exact, and bisection finds the least period.
"""

from bisect import bisect_right
from collections.abc import Sequence

from hexiopt.schedules.schedule import largest_cycle_mean_s
from solvers.completion.allocation import give_back

_NEAR = 1e-3  # of a period: how closely bisection brackets it


def least_period(times: Sequence[Sequence[float]], round_trip_s: Sequence[float], counts: Sequence[int]) -> list[int]:
    """Counts of at least 1 with the sum of `counts` that minimise the period, to `_NEAR` of it.

    `times[s][n - 1]`: seconds of n layers in stage s, which must not decrease with n; `round_trip_s` [stages - 1].
    `counts` must minimise the longest stage; they are the answer where none are better.
    """
    found, total = counts, sum(counts)
    stage_s = [own[n - 1] for own, n in zip(times, counts, strict=True)]
    low, high = max(stage_s), largest_cycle_mean_s(stage_s, round_trip_s)
    while high - low > _NEAR * high:
        middle = 0.5 * (low + high)
        chosen = _most_layers(times, (*round_trip_s, 0.0), middle)
        if sum(chosen) >= total:
            found, high = chosen, middle
        else:
            low = middle
    return give_back(times, found, total)


def _most_layers(times: Sequence[Sequence[float]], round_trip_s: Sequence[float], period_s: float) -> list[int]:
    """Counts of the most layers within a period; none where a stage has no room for one."""
    chosen: list[tuple[int, float, tuple[int, ...]]] = [(0, 0.0, ())]  # layers, seconds left to the next stage, counts
    for own, trip_s in zip(times, round_trip_s, strict=True):
        least_left: dict[int, tuple[float, tuple[int, ...]]] = {}
        for layers, taken_s, counts in chosen:
            room_s = period_s - taken_s
            for n in range(bisect_right(own, room_s), 0, -1):
                left_s = max(0.0, trip_s - (room_s - own[n - 1]))
                if layers + n not in least_left or left_s < least_left[layers + n][0]:
                    least_left[layers + n] = left_s, (*counts, n)
                if not left_s:
                    break
        chosen, least_s = [], float("inf")
        for layers in sorted(least_left, reverse=True):
            left_s, counts = least_left[layers]
            if left_s < least_s:
                chosen.append((layers, left_s, counts))
                least_s = left_s
        if not chosen:
            return []
    return list(chosen[0][2])
