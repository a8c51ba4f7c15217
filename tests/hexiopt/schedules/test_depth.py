"""Depths of stages: which do not wait for ever, and which the depth rule gives."""

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from hexiopt.schedules.depth import broken_depths, more_messages, other_depths, round_trip_depths
from hexiopt.schedules.graph import pipeline_graph
from hexiopt.schedules.in_flight import holding, in_flight, stages_in_flight
from hexiopt.schedules.registry import ONE_F_ONE_B, SCHEDULES, SPLIT_SCHEDULES
from hexiopt.schedules.schedule import Depths, positions
from tests.stated_pipelines import graph_ends_s
from tests.strategies import depths_of

SECONDS = st.floats(0.01, 10.0)
ENDLESS = (10**6,) * 6


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[tuple[float, float]]]:
    """Seconds of stages, forward and backward together, and of messages there and back."""
    stage_s = draw(st.lists(SECONDS, min_size=1, max_size=6))
    count = len(stage_s) - 1
    message_s = st.floats(0.0, 30.0)
    return stage_s, draw(st.lists(st.tuples(message_s, message_s), min_size=count, max_size=count))


def end_s(
    stage_s: Sequence[float], message_s: Sequence[tuple[float, float]], num_micro_batches: int, depths: Depths
) -> float:
    """When the pipeline ends by the clock; a third of each stage is the forward."""
    last = len(stage_s) - 1
    links = (*((False, s, s + 1) for s in range(last)), *((True, s + 1, s) for s in range(last)))
    chunk_s = tuple([((s / 3, s - s / 3),) for s in stage_s])
    stages = tuple(range(last + 1))
    graph = pipeline_graph(ONE_F_ONE_B, last + 1, num_micro_batches, stages, chunk_s, links, depths=depths)
    return max(graph_ends_s(graph, [*(ahead for ahead, _ in message_s), *(back for _, back in message_s)]))


@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_depths_that_never_rise_end(num_stages: int, count: int, data: st.DataObject) -> None:
    depths = data.draw(depths_of(num_stages, count))
    for schedule in (ONE_F_ONE_B, SPLIT_SCHEDULES[0]):
        assert broken_depths(schedule, num_stages, count, depths) is None
    assert 0 < end_s([1.0] * num_stages, [(0.5, 0.5)] * (num_stages - 1), count, depths) < inf
    held = [in_flight(ONE_F_ONE_B, at) for at in positions(num_stages, count, depths=depths)]
    usual = stages_in_flight(ONE_F_ONE_B, num_stages, count, 1)
    assert held == [was if n is None else holding(n) for was, n in zip(usual, depths, strict=True)]
    assert other_depths(ONE_F_ONE_B, num_stages, count, depths) == [s for s in range(num_stages) if held[s] != usual[s]]


@given(st.integers(2, 5), st.data())
def test_depths_that_rise_wait_for_ever_and_are_refused(num_stages: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 9))
    rising = st.lists(st.none() | st.integers(1, count), min_size=num_stages, max_size=num_stages).filter(
        lambda depths: broken_depths(ONE_F_ONE_B, num_stages, count, tuple(depths)) is not None
    )
    with pytest.raises(InputError, match="operations wait for each other for ever"):
        end_s([1.0] * num_stages, [(0.5, 0.5)] * (num_stages - 1), count, tuple(data.draw(rising)))


def test_what_is_refused_is_said_in_a_line() -> None:
    def refusal(depths: Depths) -> str | None:
        return broken_depths(ONE_F_ONE_B, len(depths), 4, depths)

    assert refusal((9, 1)) == "stage 0 may have 9 of 4 micro-batches in flight; take no more than these"
    rule = "stage 0 has 2 micro-batches in flight, stage 1 waits for 3 before its first backward"
    assert refusal((2, 3)) == refusal((None, 3)) == f"{rule}; state in_flight of 3 or more for stage 0"
    for schedule in {*SCHEDULES, *SPLIT_SCHEDULES} - {ONE_F_ONE_B, SPLIT_SCHEDULES[0]}:
        assert broken_depths(schedule, 2, 4, (2, 1)) == (
            f"stages state in_flight under the {schedule} schedule; take 1f1b or zb, or leave it out"
        )
        assert broken_depths(schedule, 2, 4, ()) is None


@given(pipelines(), st.integers(1, 40), st.data())
def test_the_rule_keeps_to_its_limits(
    pipeline: tuple[list[float], list[tuple[float, float]]], count: int, data: st.DataObject
) -> None:
    stage_s, message_s = pipeline
    room = data.draw(st.lists(st.integers(1, 12), min_size=len(stage_s), max_size=len(stage_s)))
    weights_s = [data.draw(st.floats(0.0, 0.5)) * s for s in stage_s]
    depths = round_trip_depths(stage_s, weights_s, message_s, count, room)
    assert broken_depths(ONE_F_ONE_B, len(stage_s), count, depths) is None
    assert all(1 <= n <= limit for n, limit in zip(depths, room, strict=True))
    free = round_trip_depths(stage_s, weights_s, message_s, count, ENDLESS[: len(stage_s)])
    assert all(n <= most for n, most in zip(depths, free, strict=True))
    if all(most <= limit for most, limit in zip(free, room, strict=True)):
        assert depths == free
    for share in (0.9, 0.5, 0.1):  # of the period
        deeper = round_trip_depths(stage_s, weights_s, message_s, count, room, share)
        assert broken_depths(ONE_F_ONE_B, len(stage_s), count, deeper) is None
        assert all(n <= more <= limit for n, more, limit in zip(depths, deeper, room, strict=True))
        depths = deeper


@given(pipelines())
@example(([1.0, 1.0, 1.0, 1.0], [(0.0, 0.0)] * 3))
@example(([3.0, 1.0, 2.0], [(5.0, 0.0), (0.5, 4.0)]))
def test_without_limits_a_period_is_that_of_the_slowest_stage_or_message(
    pipeline: tuple[list[float], list[tuple[float, float]]],
) -> None:
    """By the clock, far from both ends; and the first stage needs no fewer, were it not for what is behind it."""
    stage_s, message_s = pipeline
    period_s = max([*stage_s, *(s for both in message_s for s in both)])
    depths = round_trip_depths(stage_s, [0.0] * len(stage_s), message_s, 10**6, ENDLESS[: len(stage_s)])
    few = 4 * depths[0] + 20
    few, many = few, 3 * few
    per_batch_s = (end_s(stage_s, message_s, many, depths) - end_s(stage_s, message_s, few, depths)) / (many - few)
    assert per_batch_s == pytest.approx(period_s, rel=1e-6)
    trip_s = sum(stage_s) + sum(map(sum, message_s))
    assert depths[0] * period_s >= trip_s * (1 - 1e-6)
    if len(stage_s) == 2 and depths[0] > 1:
        fewer = (depths[0] - 1, 1)
        slower_s = (end_s(stage_s, message_s, many, fewer) - end_s(stage_s, message_s, few, fewer)) / (many - few)
        assert slower_s > period_s * (1 + 1e-12)


@given(st.integers(1, 8), st.integers(1, 12), SECONDS)
def test_equal_stages_and_free_messages_have_1f1bs_depths(num_stages: int, count: int, seconds: float) -> None:
    free = [(0.0, 0.0)] * (num_stages - 1)
    depths = round_trip_depths([seconds] * num_stages, [0.0] * num_stages, free, count, (99,) * num_stages)
    assert depths == tuple(min(count, num_stages - s) for s in range(num_stages))


def test_gradients_of_weights_keep_nobody_waiting() -> None:
    """Half of each stage is put off: a trip takes half as many periods."""
    assert round_trip_depths([2.0] * 4, [1.0] * 4, [(0.0, 0.0)] * 3, 20, (9,) * 4) == (2, 2, 1, 1)


def test_short_memory_stretches_the_period_for_all() -> None:
    """Messages of a period each way: 3 and 2 more in flight than 1F1B has, were there room."""
    pipeline = [1.0] * 3, [0.0] * 3, [(1.0, 1.0)] * 2, 30
    assert round_trip_depths(*pipeline, (9, 9, 9)) == (7, 4, 1)
    assert round_trip_depths(*pipeline, (4, 9, 9)) == (4, 2, 1)
    assert round_trip_depths(*pipeline, (9, 2, 9)) == (4, 2, 1)
    assert round_trip_depths(*pipeline, (9, 1, 1)) == (2, 1, 1)
    assert round_trip_depths(*pipeline, (1, 1, 1)) == (1, 1, 1)


def test_half_a_period_asks_for_twice_the_round_trips() -> None:
    """As far as memory has room, and no stage for more than the one before."""
    pipeline = [1.0] * 3, [0.0] * 3, [(1.0, 1.0)] * 2, 30
    assert round_trip_depths(*pipeline, (30, 30, 30), 0.5) == (15, 8, 1)
    assert round_trip_depths(*pipeline, (9, 30, 30), 0.5) == (9, 8, 1)
    assert round_trip_depths(*pipeline, (7, 30, 30), 0.5) == (7, 7, 1)


def test_deeper_stages_may_hold_more_messages() -> None:
    """The first stage those that it has sent, the others also those that wait for it; 1F1B's are in all buffers."""

    def more(*depths: int | None) -> list[int]:
        return more_messages(ONE_F_ONE_B, len(depths), 20, depths)

    assert more(8, 3, 1) == [4, 4, 0]
    assert more(8, 1, 1) == [4, 4, 0]
    assert more(7, 6, 5, 4, 3, 2, 1) == more(1, 1, 1, 1, 1, 1, 1) == [0] * 7
    assert more(9, 6, 5, 4, 3, 2, 1) == [2, 2, 0, 0, 0, 0, 0]
