"""The recurrence of plain pipelines: against the event simulation and against a longest path written here."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hexiopt.plan.messages import messages
from hexiopt.plan.plan import Pipeline, Stage
from hexiopt.schedules.operation import Operation, OperationKind
from hexiopt.schedules.registry import GPIPE, ONE_F_ONE_B, SCHEDULES
from hexiopt.schedules.schedule import (
    Schedule,
    StagePosition,
    largest_cycle_mean_s,
    operations,
    positions,
    stage_orders,
)
from hexiopt.simulation.engine import Step, link_of
from tests.stated_pipelines import chain_ends_s

Times = tuple[list[float], list[float], list[float], list[float]]


def stated_order(schedule: Schedule, stage: int, num_stages: int, num_micro_batches: int) -> list[tuple[str, int]]:
    """What a stage runs, forwards and backwards of micro-batches, as its schedule states it."""
    letters = {OperationKind.FORWARD: "f", OperationKind.BACKWARD: "b"}
    order = operations(schedule, StagePosition(stage, num_stages, num_micro_batches))
    return [(letters[one.kind], one.micro_batch) for one in order]


def plain(schedule: Schedule, times: Times, num_micro_batches: int) -> list[float]:
    """When each stage ends: the longest path through all operations and messages, none left out."""
    forward, backward, ahead, back = times
    p, m = len(forward), num_micro_batches
    orders = [stated_order(schedule, i, p, m) for i in range(p)]
    came: dict[tuple[str, int, int], float] = {("f", 0, k): 0.0 for k in range(m)}
    ends, at = [0.0] * p, [0] * p
    link = {("f", i): 0.0 for i in range(p)} | {("b", i): 0.0 for i in range(p)}
    moved = True
    while moved:
        moved = False
        for i in range(p):
            while at[i] < 2 * m:
                kind, k = orders[i][at[i]]
                local = kind == "b" and i == p - 1
                if not local and (kind, i, k) not in came:
                    break
                start = ends[i] if local else max(ends[i], came[kind, i, k])
                ends[i] = start + (forward if kind == "f" else backward)[i]
                target = i + 1 if kind == "f" else i - 1
                if 0 <= target < p:
                    seconds = ahead[i] if kind == "f" else back[target]
                    link[kind, i] = came[kind, target, k] = max(link[kind, i], ends[i]) + seconds
                at[i] += 1
                moved = True
    assert at == [2 * m] * p
    return ends


def simulated(schedule: Schedule, times: Times, num_micro_batches: int) -> list[float]:
    """When each stage ends in the event simulation."""
    forward, backward, ahead, back = times
    stages = [(((f, b),),) for f, b in zip(forward, backward, strict=True)]
    p = len(forward)
    pipeline = Pipeline(tuple(Stage.of((i,), i, i + 1) for i in range(p)), num_micro_batches)
    message_s = tuple(s for pair in zip(ahead, back, strict=True) for s in pair)
    ends = [0.0] * p
    count = 0
    links = [link_of(0, *timed, p) for timed in zip(messages(pipeline), message_s, strict=True)]
    order = stage_orders(schedule, positions(p, num_micro_batches))
    for span in Step({0: stages}, schedule, links, {0: order}).spans():
        if not span.is_message:
            ends[span.stage] = max(ends[span.stage], span.end_s)
            count += 1
    assert count == 2 * p * num_micro_batches
    return ends


def of(schedule: Schedule, times: Times, num_micro_batches: int) -> list[float]:
    return list(chain_ends_s(schedule, *times, num_micro_batches))


def same(a: Sequence[float], b: Sequence[float]) -> bool:
    return list(a) == pytest.approx(list(b), rel=1e-9, abs=1e-300)


SECONDS = st.one_of(
    st.floats(1e-6, 10.0), st.sampled_from((1.0, 2.0, 0.5, 1.0 + 1e-12, 1.0 + 1e-6)), st.floats(0.9, 1.1)
)
HOPS = st.one_of(st.just(0.0), SECONDS, st.floats(1e-9, 1e-3), st.sampled_from((1e3, 1e6)))


@st.composite
def step_times(draw: st.DrawFn, max_stages: int = 10) -> Times:
    p = draw(st.integers(1, max_stages))
    if draw(st.integers(0, 4)) == 0:  # all equal, as in a homogeneous pipeline
        f, b, h = draw(SECONDS), draw(SECONDS), draw(HOPS)
        return [f] * p, [b] * p, [h] * (p - 1), [h] * (p - 1)

    def several(seconds: st.SearchStrategy[float], count: int) -> list[float]:
        return draw(st.lists(seconds, min_size=count, max_size=count))

    return several(SECONDS, p), several(SECONDS, p), several(HOPS, p - 1), several(HOPS, p - 1)


COUNTS = st.integers(1, 25) | st.integers(1, 25) | st.integers(1, 25) | st.integers(26, 400)


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(times=step_times(), num_micro_batches=COUNTS)
@example(times=([1.0] * 10, [2.0] * 10, [0.0] * 9, [0.0] * 9), num_micro_batches=400)
@example(times=([1.0, 3.0], [2.0, 1.0], [1e6], [0.0]), num_micro_batches=37)
@example(times=([0.0, 1.0], [0.0, 2.0], [0.0], [0.0]), num_micro_batches=5)
def test_every_stage_ends_when_the_event_simulation_says(
    schedule: Schedule, times: Times, num_micro_batches: int
) -> None:
    assert same(of(schedule, times, num_micro_batches), simulated(schedule, times, num_micro_batches))


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(times=step_times(), num_micro_batches=COUNTS)
def test_every_stage_ends_at_its_longest_path(schedule: Schedule, times: Times, num_micro_batches: int) -> None:
    assert same(of(schedule, times, num_micro_batches), plain(schedule, times, num_micro_batches))


@given(stage=st.integers(0, 9), after=st.integers(0, 9), num_micro_batches=st.integers(1, 60))
def test_the_orders_of_two_are_as_written_here(stage: int, after: int, num_micro_batches: int) -> None:
    """GPipe runs all forwards first, 1F1B as many as there are stages after this one."""
    for schedule in (GPIPE, ONE_F_ONE_B):
        warm_up = num_micro_batches if schedule == GPIPE else min(num_micro_batches, after)
        order = [("f", k) for k in range(warm_up)]
        for k in range(num_micro_batches):
            order += [("f", warm_up + k)] * (warm_up + k < num_micro_batches) + [("b", k)]
        assert stated_order(schedule, stage, stage + 1 + after, num_micro_batches) == order


def test_two_stages_by_hand() -> None:
    """f = 1, 2; b = 3, 1; messages 0.5 and 0.25; two micro-batches.

    1F1B: stage 0 runs f0 to 1, f1 to 2. Stage 1 gets f0 at 1.5: f0 to 3.5, b0 to 4.5, f1 to 6.5, b1 to 7.5.
    Stage 0: b0 from 4.75 to 7.75, b1 (there at 7.75) to 10.75. GPipe: stage 1 f0 to 3.5, f1 to 5.5, b0 to
    6.5, b1 to 7.5; stage 0 b0 from 6.75 to 9.75, b1 to 12.75.
    """
    times = ([1.0, 2.0], [3.0, 1.0], [0.5], [0.25])
    assert of(ONE_F_ONE_B, times, 2) == pytest.approx([10.75, 7.5])
    assert of(GPIPE, times, 2) == pytest.approx([12.75, 7.5])


@given(num_stages=st.integers(1, 10), num_micro_batches=st.integers(1, 60), schedule=st.sampled_from(SCHEDULES))
def test_a_stage_runs_everything_once_and_backward_after_forward(
    num_stages: int, num_micro_batches: int, schedule: Schedule
) -> None:
    for stage in range(num_stages):
        order = operations(schedule, StagePosition(stage, num_stages, num_micro_batches))
        every = {Operation(kind, 0, k) for kind in schedule.kinds for k in range(num_micro_batches)}
        assert len(order) == len(every)
        assert set(order) == every
        for k in range(num_micro_batches):
            forward, backward = (order.index(Operation(kind, 0, k)) for kind in schedule.kinds)
            assert forward < backward


# ------------------------------------------------------------------ many micro-batches


@settings(max_examples=6)
@given(times=step_times(max_stages=6), num_micro_batches=st.integers(2_000, 6_000))
def test_the_clock_equals_the_whole_recurrence(times: Times, num_micro_batches: int) -> None:
    assert same(of(ONE_F_ONE_B, times, num_micro_batches), plain(ONE_F_ONE_B, times, num_micro_batches))


@given(times=step_times(max_stages=7))
def test_the_beat_is_the_slope_of_the_steady_state(times: Times) -> None:
    f, b, ahead, back = times
    stage_s, trip_s = ([x + y for x, y in zip(*both, strict=True)] for both in ((f, b), (ahead, back)))
    beat = largest_cycle_mean_s(stage_s, trip_s)
    beat = max(beat, *ahead, *back) if ahead else beat
    rounds = 420 * 2  # whole periods of up to seven stages
    slope = (of(ONE_F_ONE_B, times, 2_000 + rounds)[0] - of(ONE_F_ONE_B, times, 2_000)[0]) / rounds
    assert slope == pytest.approx(beat, rel=1e-6)


def test_the_beat_by_hand() -> None:
    assert largest_cycle_mean_s([3.0, 2.0], [4.0]) == 4.5  # (3 + 4 + 2) / 2: the message is in the way
    assert largest_cycle_mean_s([3.0, 2.0], [0.5]) == 3.0  # the slower stage
    assert largest_cycle_mean_s([1.0, 1.0, 1.0], [0.0, 5.0]) == 3.5  # (1 + 5 + 1) / 2 of the last two
