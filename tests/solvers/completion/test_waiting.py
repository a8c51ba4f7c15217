"""The layers of pipelines that wait for messages, against all splits."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from hexiopt.schedules.schedule import largest_cycle_mean_s
from solvers.completion.allocation import least_bottleneck
from solvers.completion.waiting import least_period
from tests.solvers.completion.test_allocation import compositions, tables


@given(tables(), st.lists(st.one_of(st.sampled_from((0.0, 2.0)), st.floats(0.0, 9.0)), min_size=3, max_size=3))
def test_the_period_is_the_least(table: tuple[list[list[float]], int, list[float]], trips: list[float]) -> None:
    times, total, _ = table
    trips_s = trips[: len(times) - 1]

    def period_s(counts: Sequence[int]) -> float:
        return largest_cycle_mean_s([column[n - 1] for column, n in zip(times, counts, strict=True)], trips_s)

    layers = least_period(times, trips_s, least_bottleneck(times, total))
    assert sum(layers) == total
    assert all(1 <= n <= len(column) for n, column in zip(layers, times, strict=True))
    least_s = min(map(period_s, compositions(total, [len(column) for column in times])))
    assert least_s <= period_s(layers) <= least_s * 1.0011


def test_a_stage_that_is_done_early_makes_room() -> None:
    """Of three stages of 12 layers that take a second each, the first two wait for a trip of 4 s: the last one takes a
    layer of theirs."""
    times = [[float(n) for n in range(1, 13)]] * 3
    assert least_bottleneck(times, 12) == [4, 4, 4]
    assert largest_cycle_mean_s([4.0, 4.0, 4.0], [4.0, 0.0]) == 6.0
    layers = least_period(times, [4.0, 0.0], [4, 4, 4])
    assert layers[2] == 5
    assert largest_cycle_mean_s([float(n) for n in layers], [4.0, 0.0]) == 5.5
