"""The recurrence of plain pipelines: against the event simulation and against a longest path written here."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hexiopt.plan.messages import messages
from hexiopt.plan.plan import Pipeline, Stage
from hexiopt.schedules.operation import OperationKind
from hexiopt.schedules.registry import ONE_F_ONE_B, SCHEDULES
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
    return [(letters[operation.kind], operation.micro_batch) for operation in order]


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


def simulate(schedule: Schedule, times: Times, num_micro_batches: int) -> list[float]:
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
    assert same(of(schedule, times, num_micro_batches), simulate(schedule, times, num_micro_batches))


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(times=step_times(), num_micro_batches=COUNTS)
def test_every_stage_ends_at_its_longest_path(schedule: Schedule, times: Times, num_micro_batches: int) -> None:
    assert same(of(schedule, times, num_micro_batches), plain(schedule, times, num_micro_batches))


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
