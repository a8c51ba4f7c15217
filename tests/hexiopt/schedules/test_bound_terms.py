"""What schedules state for lower bounds, against their operations and the exact recurrence."""

import heapq
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B, SCHEDULES, SPLIT_SCHEDULES
from hexiopt.schedules.schedule import BoundTerms, Schedule, StagePosition, operations, weakest_terms
from tests.conftest import STRESS
from tests.stated_pipelines import Executor, ExecutorLink, executor_ends_s

BOUNDED = [schedule for schedule in (*SCHEDULES, *SPLIT_SCHEDULES) if schedule.is_bounded]
SECONDS = st.floats(0.0, 8.0)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Schedule, int, int, int]:
    """A schedule, stages, layer ranges and micro-batches that go together."""
    schedule = draw(st.sampled_from(BOUNDED))
    stages, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 4)) if schedule.chunked else 1
    batches = draw(st.integers(1, 14)) * schedule.micro_batch_multiple(stages, chunks)
    assume(schedule.broken_rule(stages, chunks, batches) is None)
    return schedule, stages, chunks, batches


@given(shapes(), st.data())
def test_no_stage_ends_before_its_terms_allow(shape: tuple[Schedule, int, int, int], data: st.DataObject) -> None:
    schedule, stages, chunks, batches = shape
    times = st.lists(st.tuples(SECONDS, SECONDS), min_size=chunks, max_size=chunks)
    late_s = data.draw(st.lists(SECONDS, min_size=stages, max_size=stages)) if schedule.splits else [None] * stages
    chunk_s = [tuple((*pair, *([late] * schedule.splits)) for pair in data.draw(times)) for late in late_s]
    executors = tuple(Executor(s, seconds) for s, seconds in enumerate(chunk_s))
    pairs = [*pairwise(range(stages)), *([(stages - 1, 0)] if chunks > 1 else [])]
    links = [ExecutorLink(False, a, b, data.draw(SECONDS)) for a, b in pairs]
    links += [ExecutorLink(True, b, a, data.draw(SECONDS)) for a, b in pairs]
    step_s = max(executor_ends_s(schedule, stages, batches, executors, tuple(links)))
    for s, stage_s in enumerate(chunk_s):
        terms = schedule.bound_terms(stages - 1 - s, stages, min(chunks, 2))
        assert terms is not None
        ahead = min(terms.forwards_ahead, batches * chunks - 1)
        before, behind = [other[0] for other in chunk_s[:s]], [other[-1] for other in chunk_s[s + 1 :]]
        journey_s = sum(sum(times[: 1 if terms.split else 2]) for times in before) + sum(
            sum(times[:2]) for times in behind
        )
        work_s = batches * sum(map(sum, stage_s))
        assert terms.split == schedule.splits
        assert journey_s + work_s - ahead * max(times[0] for times in stage_s) <= step_s * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(("schedule", "chunks"), [(GPIPE, 1), (ONE_F_ONE_B, 1), (INTERLEAVED, 2), (INTERLEAVED, 3)])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_latest_return_is_tight(schedule: Schedule, chunks: int, stages: int) -> None:
    """One slow stage among equal faster ones: a forward fewer ahead would claim more than the step takes."""
    for s in range(stages):
        terms = schedule.bound_terms(stages - 1 - s, stages, min(chunks, 2))
        assert terms is not None
        slacks = []
        for other_s in (0.0, 0.25, 0.5, 0.75, 1.0):
            for batches in (2 * stages, 8 * stages):
                times = [(1.0, 1.0) if k == s else (other_s, other_s) for k in range(stages)]
                executors = tuple(Executor(k, (pair,) * chunks) for k, pair in enumerate(times))
                pairs = [*pairwise(range(stages)), *([(stages - 1, 0)] if chunks > 1 else [])]
                links = [
                    ExecutorLink(back, *(pair[::-1] if back else pair), 0.0) for pair in pairs for back in (False, True)
                ]
                step_s = max(executor_ends_s(schedule, stages, batches, executors, tuple(links)))
                ahead = min(terms.forwards_ahead, batches * chunks - 1)
                slacks.append(step_s - ((stages - 1) * 2 * other_s + 2 * batches * chunks - ahead))
        assert min(slacks) >= -1e-9
        if chunks == 1 or s == stages - 1:
            assert min(slacks) == pytest.approx(0.0, abs=1e-9)


@given(shapes(), st.integers(1, 6))
def test_a_stage_holds_what_its_terms_say(shape: tuple[Schedule, int, int, int], at_least: int) -> None:
    """Also where the class of pipelines is wider: at least so many stages."""
    schedule, stages, chunks, batches = shape
    for s in range(stages):
        held = [0] * chunks
        for operation in operations(schedule, StagePosition(s, stages, batches, chunks)):
            if operation.backward:
                break
            held[operation.chunk] += 1
        after = stages - 1 - s
        terms = schedule.bound_terms(after, max(after + 1, min(at_least, stages)), min(chunks, 2))
        assert terms is not None
        least = terms.with_micro_batches(batches)
        assert held[-1] >= least.last_in_flight
        assert all(count >= least.in_flight for count in held[:-1])
        assert chunks == 1 or held[0] >= least.in_flight + least.first_again
        assert chunks > 1 or least.first_again == 0


def test_the_weakest_terms_hold_for_all() -> None:
    assert weakest_terms((GPIPE, ONE_F_ONE_B), 3, 4, 1) == BoundTerms(3, 4, 4)
    assert weakest_terms((GPIPE, ONE_F_ONE_B, INTERLEAVED), 3, 4, 1) == BoundTerms(3, 4, 4)
    assert weakest_terms((GPIPE,), 3, 4, 1).forwards_ahead == 0
    assert weakest_terms((ONE_F_ONE_B, *SPLIT_SCHEDULES), 3, 4, 1) == BoundTerms(3, 4, 4, split=True)


def ends_in_any_order_s(
    times: Sequence[tuple[float, float, float]], hops: Sequence[float], depths: Sequence[int], batches: int, rng: Random
) -> float:
    """When a pipeline ends whose stages choose at random among what may come next, or to wait: forward and backward of
    a micro-batch in the order of arrival, with at most `depths` [stages] in flight, and weight gradients.

    `times` [stages] are seconds of a forward, backward and weight gradients, `hops` [stages - 1] those of a message.
    """
    last, now_s, events = len(times) - 1, 0.0, list[tuple[float, int, str, int]]()
    came = {"f": [batches, *[0] * last], "b": [0] * (last + 1), "w": [0] * (last + 1)}
    begun, busy = {kind: [0] * (last + 1) for kind in "fbw"}, [False] * (last + 1)
    while True:
        for s in range(last + 1):
            may = [kind for kind in "fbw" if begun[kind][s] < came[kind][s]]
            if begun["f"][s] - begun["b"][s] >= depths[s] and "f" in may:
                may.remove("f")
            if may and not busy[s] and (rng.random() < 0.8 or not events):
                kind = rng.choice(may)
                begun[kind][s], busy[s] = begun[kind][s] + 1, True
                heapq.heappush(events, (now_s + times[s]["fbw".index(kind)], s, kind, -1))
        if not events:
            assert all(done == [batches] * (last + 1) for done in begun.values())
            return now_s
        now_s, s, kind, to = heapq.heappop(events)
        if to >= 0:  # a message
            came[kind][to] += 1
            continue
        busy[s] = False
        came["w"][s] += kind == "b"
        if kind == "f" and s == last:
            came["b"][s] += 1
        elif kind != "w" and (to := s + (1 if kind == "f" else -1)) >= 0:
            heapq.heappush(events, (now_s + hops[min(s, to)], s, kind, to))


@settings(max_examples=2000 if STRESS else 200)
@given(
    times=st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=5),
    batches=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_the_latest_return_holds_for_every_order_and_depth(
    times: list[tuple[float, float, float]], batches: int, seed: int, data: st.DataObject
) -> None:
    """Of split backwards, with as many forwards ahead as a stage may have in flight beside the micro-batch that
    returns: whatever a stage prefers, and however many it may have in flight."""
    count = len(times)
    hops = data.draw(st.lists(SECONDS, min_size=count - 1, max_size=count - 1))
    depths = sorted(data.draw(st.lists(st.integers(1, 6), min_size=count, max_size=count)), reverse=True)
    step_s = ends_in_any_order_s(times, hops, depths, batches, Random(seed))
    for s, (forward_s, *_) in enumerate(times):
        before_s = sum(hops[:s]) + sum(f for f, _, _ in times[:s])
        behind_s = 2 * sum(hops[s:]) + sum(f + b for f, b, _ in times[s + 1 :])
        ahead_s = min(depths[s] - 1, batches - 1) * forward_s
        bound_s = before_s + batches * sum(times[s]) + max(0.0, behind_s - ahead_s)
        assert bound_s <= step_s * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(("count", "held"), [(1, (1, 1, 0)), (4, (4, 4, 0)), (6, (4, 4, 2)), (9, (4, 4, 3))])
def test_few_micro_batches_are_all_held(count: int, held: tuple[int, int, int]) -> None:
    assert BoundTerms(6, 4, 4, 3).with_micro_batches(count)[1:4] == held
