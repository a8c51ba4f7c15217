"""Schedules as values: their orders against lists written here, what follows from an order, and names."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hexiopt.bounds import compute_bound_s, lower_bound_s
from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.files.plan_file import plan_from_section, plan_to_dict
from hexiopt.plan.check import check
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import default_schedule
from hexiopt.problem.workload import Workload
from hexiopt.reading import Section
from hexiopt.schedules import registry
from hexiopt.schedules.in_flight import in_flight, largest, most_in_flight, most_in_flight_before
from hexiopt.schedules.operation import BACKWARD_TURN as B
from hexiopt.schedules.operation import FORWARD_TURN as F
from hexiopt.schedules.operation import Operation, OperationKind, Turn
from hexiopt.schedules.registry import (
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    SCHEDULES,
    SPLIT_SCHEDULES,
    schedule_by_name,
    schedule_names,
)
from hexiopt.schedules.schedule import (
    Programme,
    Schedule,
    StagePosition,
    forwards_ahead,
    forwards_before_backward,
    largest_cycle_mean_s,
    operations,
)
from hexiopt.solving import Budget
from solvers.registry import make_solver
from tests.hexiopt.schedules.test_chain_graph import Times, step_times
from tests.solvers import problems as small
from tests.spans import all_spans
from tests.stated_pipelines import chain_ends_s
from tests.strategies import LAB, problems_with_plans, roomy_problems_with_plans

FORWARD, BACKWARD = OperationKind.FORWARD, OperationKind.BACKWARD
MEGATRONS = (GPIPE, ONE_F_ONE_B, INTERLEAVED)


@dataclass(frozen=True)
class Eager(Schedule):
    """1F1B with twice the warm-up: a schedule that no file of the project knows."""

    name: ClassVar[str] = "eager"
    lockstep: ClassVar[bool] = True

    def programme(self, at: StagePosition) -> Programme:
        """Two forwards for every stage after, then in turns."""
        warm_up = min(at.num_micro_batches, 2 * at.num_after)
        return (F, warm_up), (F + B, at.num_micro_batches - warm_up), (B, warm_up)


def list_operations(schedule: Schedule, at: StagePosition) -> list[Operation]:
    """The order by groups of micro-batches, as Megatron-LM's schedules walk through them."""
    stage, count, batches, chunks, depth = at
    groups = [range(start, min(start + count, batches)) for start in range(0, batches, count)]
    forwards = [Operation(FORWARD, c, k) for group in groups for c in range(chunks) for k in group]
    backwards = [Operation(BACKWARD, c, k) for group in groups for c in reversed(range(chunks)) for k in group]
    if schedule == GPIPE:
        return forwards + backwards
    behind = count - 1 - stage
    if depth is not None:
        behind = depth - 1
    warm_up = behind if chunks == 1 else 2 * behind + (chunks - 1) * count
    warm_up = min(len(forwards), warm_up)
    order = forwards[:warm_up]
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        order += pair
    return order + backwards[len(backwards) - warm_up :]


def positions(schedule: Schedule) -> Iterator[StagePosition]:
    for count, chunks, batches in product(range(1, 6), range(1, 5), range(1, 16)):
        if schedule.broken_rule(count, chunks, batches) is None:
            depths = (None, *(range(1, batches + 1) if schedule.takes_depths and chunks == 1 else ()))
            yield from (StagePosition(s, count, batches, chunks, depth) for s in range(count) for depth in depths)


@pytest.mark.parametrize("schedule", [*SCHEDULES, *SPLIT_SCHEDULES, Eager()], ids=str)
def test_every_pass_runs_once_and_none_waits_forever(schedule: Schedule) -> None:
    """Forwards come from the stage before, backwards from the one behind and after the own forward."""
    for count, chunks, batches in product(range(1, 5), range(1, 4), range(1, 9)):
        if schedule.broken_rule(count, chunks, batches) is not None:
            continue
        todo = [operations(schedule, StagePosition(s, count, batches, chunks)) for s in range(count)]
        passes = sorted((backward, c, k) for backward in (0, 1) for c in range(chunks) for k in range(batches))
        assert all(
            sorted((int(operation.backward), operation.chunk, operation.micro_batch) for operation in stage_order)
            == passes
            for stage_order in todo
        )
        done: set[tuple[bool, int, int]] = set()  # whether backward, virtual stage, micro-batch
        at, moved = [0] * count, True
        while moved:
            moved = False
            for s, order in enumerate(todo):
                while at[s] < len(order):
                    pending, virtual = order[at[s]], order[at[s]].chunk * count + s
                    needed = {(False, virtual - 1, pending.micro_batch)} if virtual and not pending.backward else set()
                    if pending.backward:
                        needed = {(False, virtual, pending.micro_batch)}
                        needed |= {(True, virtual + 1, pending.micro_batch)} if virtual + 1 < count * chunks else set()
                    if not needed <= done:
                        break
                    done.add((pending.backward, virtual, pending.micro_batch))
                    at[s], moved = at[s] + 1, True
        assert at == [len(stage_order) for stage_order in todo], (count, chunks, batches)


@pytest.mark.parametrize("schedule", MEGATRONS, ids=str)
def test_the_order_is_that_of_an_independent_list(schedule: Schedule) -> None:
    for at in positions(schedule):
        assert operations(schedule, at) == list_operations(schedule, at), at


@pytest.mark.parametrize("schedule", [*SCHEDULES, *SPLIT_SCHEDULES, Eager()], ids=str)
def test_in_flight_and_the_first_backward_follow_from_the_order(schedule: Schedule) -> None:
    """At the Pareto-maximal moments of the whole order; none is left out, none is listed that another exceeds."""
    for at in positions(schedule):
        held, moments, order = [0] * at.num_chunks, set(), operations(schedule, at)
        for operation in order:
            held[operation.chunk] += -1 if operation.backward else 1
            moments.add(tuple(held))
        highest = {
            moment
            for moment in moments
            if not any(moment != other and all(a <= b for a, b in zip(moment, other, strict=True)) for other in moments)
        }
        peaks = in_flight(schedule, at)
        assert set(peaks) == highest
        assert len(peaks) == len(highest)
        assert forwards_before_backward(schedule, at) == next(k for k, step in enumerate(order) if step.backward)


@pytest.mark.parametrize("schedule", [*SCHEDULES, *SPLIT_SCHEDULES], ids=str)
def test_in_flight_grows_no_more_from_where_the_schedule_says(schedule: Schedule) -> None:
    for count, chunks in product(range(1, 6), range(1, 5)):
        enough = schedule.saturates_at(count, chunks)
        if enough is None or schedule.broken_rule(count, chunks, enough) is not None:
            continue
        for stage in range(count):
            few = in_flight(schedule, StagePosition(stage, count, enough, chunks))
            assert in_flight(schedule, StagePosition(stage, count, enough + 4 * count, chunks)) == few


@dataclass(frozen=True)
class Wavy(Schedule):
    """Two ranges whose counts rise and fall against each other, many times over."""

    name: ClassVar[str] = "wavy"
    chunked: ClassVar[bool] = True

    def programme(self, at: StagePosition) -> Programme:
        """All of the second range's forwards, then the first's forwards while the second's backwards run."""
        first, second = ((Turn(FORWARD, c), Turn(BACKWARD, c)) for c in (0, 1))
        many = at.num_micro_batches
        return ((second[0],), many), ((first[0], second[1]), many), ((first[1],), many)


@given(st.integers(1, 9), st.tuples(st.integers(1, 5), st.integers(1, 5)))
def test_a_block_that_moves_what_is_held_from_range_to_range(batches: int, chunk_bytes: tuple[int, int]) -> None:
    at = StagePosition(0, 2, batches, 2)
    held, most = [0, 0], 0
    for operation in operations(Wavy(), at):
        held[operation.chunk] += -1 if operation.backward else 1
        most = max(most, sum(n * size for n, size in zip(held, chunk_bytes, strict=True)))
    peak = largest(in_flight(Wavy(), at), chunk_bytes)
    assert sum(n * size for n, size in zip(peak, chunk_bytes, strict=True)) == most


@given(pair=problems_with_plans() | roomy_problems_with_plans())
def test_a_schedule_from_outside_is_priced_and_simulated(pair: tuple[Problem, Plan]) -> None:
    """It takes no more than a class: time, memory, simulation and check follow from its programme."""
    problem, plan = pair
    assume(all(pipeline.num_chunks == 1 for pipeline in plan.pipelines))
    model = PlanPricer(problem)
    eager, usual = (replace(plan, schedule=schedule) for schedule in (Eager(), ONE_F_ONE_B))
    cost, plain = model.price(eager), model.price(usual)
    spans = all_spans(model, eager, cost)
    ends = {(e.pipeline, e.stage, e.executor): e.end_s for e in spans if not e.is_message}
    for p, pipeline in enumerate(cost.pipelines):
        assert pipeline.executor_end_s == pytest.approx([end for at, end in sorted(ends.items()) if at[0] == p])
        for stage, same in zip(pipeline.stages, plain.pipelines[p].stages, strict=True):
            assert stage.memory.activations >= same.memory.activations
    assert [violation.rule for violation in check(problem, eager)] == ["schedule"]


@given(pair=problems_with_plans(plain=True))
def test_interleaved_with_one_range_a_stage_is_1f1b(pair: tuple[Problem, Plan]) -> None:
    problem, plan = pair
    assume(plan.sharding.stage < 2)
    cost, other = (PlanPricer(problem).price(replace(plan, schedule=s)) for s in (INTERLEAVED, ONE_F_ONE_B))
    assert cost == other


def test_default_schedule_is_1f1b_or_what_is_fixed() -> None:
    assert default_schedule(Workload()) == ONE_F_ONE_B
    for schedule in SCHEDULES:
        assert default_schedule(Workload(schedule=schedule.name)) == schedule


def test_a_row_in_the_registry_is_all_that_a_search_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of the new schedule are found, checked, written and read; nothing is claimed that is not proved for it."""
    monkeypatch.setitem(registry._BY_NAME, Eager.name, Eager())
    problem = small.easy()
    problem = replace(problem, workload=replace(problem.workload, schedule=Eager.name))
    for max_steps in (1, 60):  # the first plan already has it
        result = make_solver("portfolio").solve(problem, Budget(60.0, max_steps), seed=0)
        assert result.plan is not None
        assert result.cost is not None
        assert result.plan.schedule == Eager()
        assert violations(problem, result.plan, result.cost) == []
    data = plan_to_dict(result.plan, problem.cluster)
    assert plan_from_section(Section(data, "plan"), problem.cluster) == result.plan
    assert 0.0 < lower_bound_s(PlanPricer(problem), 0.05) == compute_bound_s(PlanPricer(problem))
    for solver in ("exact", "cp_sat"):
        with pytest.raises(InputError, match="proves nothing about the eager schedule"):
            make_solver(solver).solve(problem, Budget(1.0))


@pytest.mark.parametrize(
    ("schedule", "ahead", "beat_s"), [(GPIPE, math.inf, 4.0), (ONE_F_ONE_B, 1, 4.5), (INTERLEAVED, 1, 4.5)]
)
def test_how_far_stages_run_ahead_of_each_other(schedule: Schedule, ahead: float, beat_s: float) -> None:
    """And the beat that follows: with one stage ahead of the next by two, a message holds it up half as much."""
    assert {forwards_ahead(schedule, p, 1) for p in range(1, 9)} == {ahead}
    assert {forwards_ahead(INTERLEAVED, p, c) for p in range(2, 9) for c in (2, 3)} == {2}
    assert {forwards_ahead(Eager(), p, 1) for p in range(2, 9)} == {2}
    assert schedule.cycle_s([3.0, 2.0], [4.0], 1) == beat_s  # (3 + 4 + 2) / 2 of the two stages, or the message alone
    assert Eager().cycle_s([3.0, 2.0], [4.0], 1) == 3.0  # (3 + 4 + 2) / 3, and the slower stage alone
    assert INTERLEAVED.cycle_s([3.0, 2.0], [4.0], 2) == pytest.approx(2 * (1.5 + 4.0 + 1.0) / 3)


@given(times=step_times(max_stages=5))
def test_the_cycle_of_a_schedule_from_outside_is_the_slope_of_its_recurrence(times: Times) -> None:
    f, b, ahead, back = times
    stage_s, trip_s = ([x + y for x, y in zip(*both, strict=True)] for both in ((f, b), (ahead, back)))
    cycle_s = max(Eager().cycle_s(stage_s, trip_s, 1), *ahead, *back, 0.0)
    near, far = (max(chain_ends_s(Eager(), *times, count)) for count in (2_520, 5_040))
    assert (far - near) / 2_520 == pytest.approx(cycle_s, rel=1e-6)


@given(times=step_times(max_stages=5))
def test_the_cycle_of_gpipe_is_the_slope_of_its_recurrence(times: Times) -> None:
    """Where backwards and the messages back take twice as long as what goes ahead: the same stage or message is then
    the slowest both ways."""
    f, _, ahead, _ = times
    stage_s, trip_s = ([3 * x for x in seconds] for seconds in (f, ahead))
    b, back = ([2 * x for x in seconds] for seconds in (f, ahead))
    near, far = (max(chain_ends_s(GPIPE, f, b, ahead, back, count)) for count in (100, 200))
    assert (far - near) / 100 == pytest.approx(GPIPE.cycle_s(stage_s, trip_s, 1), rel=1e-6)


# ------------------------------------------------------------------ what searches ask


@pytest.mark.parametrize("schedule", [*SCHEDULES, *SPLIT_SCHEDULES, Eager()], ids=str)
def test_the_room_of_a_stage_is_the_most_of_any_with_so_many_behind_it(schedule: Schedule) -> None:
    for num_after, batches in product(range(5), range(1, 12)):
        each = [StagePosition(stage, stage + 1 + num_after, batches) for stage in range(5)]
        assert most_in_flight_before(schedule, num_after, batches) == max(most_in_flight(schedule, at) for at in each)


@pytest.mark.parametrize("schedule", [*SCHEDULES, *SPLIT_SCHEDULES, Eager()], ids=str)
def test_fewer_micro_batches_stand_for_many(schedule: Schedule) -> None:
    """Of so many stages each has as much in flight with them, and no schedule asks for more than there are."""
    for count, batches in product(range(1, 5), range(1, 15)):
        few = schedule.distinct_micro_batches(batches, count, 1)
        assert few <= batches
        for stage in range(count):
            assert in_flight(schedule, StagePosition(stage, count, few)) == in_flight(
                schedule, StagePosition(stage, count, batches)
            )
    assert schedule.saturates == (schedule.distinct_micro_batches(10**6, 3, 1) < 10**6)


@pytest.mark.parametrize("schedule", [*SCHEDULES, *SPLIT_SCHEDULES, Eager()], ids=str)
def test_a_plain_schedule_orders_stages_of_one_range_alike(schedule: Schedule) -> None:
    plain = schedule.plain()
    assert not plain.chunked
    assert plain.plain() == plain
    for at in positions(schedule):
        if at.num_chunks == 1:
            assert operations(plain, at) == operations(schedule, at)


def test_which_schedules_run_all_forwards_first() -> None:
    assert [schedule.all_forwards_first for schedule in (*MEGATRONS, Eager())] == [True, False, False, False]


@given(times=step_times(max_stages=5))
def test_the_cycle_is_the_largest_mean_where_waits_are_shared(times: Times) -> None:
    f, b, ahead, back = times
    stage_s, trip_s = ([x + y for x, y in zip(*both, strict=True)] for both in ((f, b), (ahead, back)))
    shares = [schedule for schedule in (*SCHEDULES, Eager()) if schedule.shares_waits]
    assert ONE_F_ONE_B in shares
    for schedule in shares:
        assert schedule.cycle_s(stage_s, trip_s, 1) == largest_cycle_mean_s(stage_s, trip_s)


@pytest.mark.parametrize("schedule", [*MEGATRONS, Eager()], ids=str)
def test_the_fill_is_that_of_the_recurrence_where_stages_are_alike(schedule: Schedule) -> None:
    for count, batches in product(range(1, 6), range(1, 12)):
        f, b, none = [1.0] * count, [2.0] * count, [0.0] * (count - 1)
        end_s = max(chain_ends_s(schedule, f, b, none, none, batches))
        assert 3.0 * (batches + count - 1) == end_s
        assert schedule.fill_s([3.0] * count, none, 1, 3.0) + 3.0 * batches == end_s
    assert INTERLEAVED.fill_s([4.0, 4.0], [1.0], 2, 4.0) == 3.0  # a range of the other stage, and the messages


# ------------------------------------------------------------------ names


@pytest.mark.parametrize(("name", "near"), [("1f1", "1f1b"), ("interleave", "interleaved"), ("pipe", "gpipe")])
def test_an_unknown_name_is_refused_with_the_nearest(name: str, near: str) -> None:
    plan = Plan((Pipeline((Stage.of((0,), 0, 2),), 1),))
    data = plan_to_dict(plan, LAB) | {"schedule": name}
    for use in (
        lambda: schedule_by_name(name),
        lambda: Workload(schedule=name),
        lambda: plan_from_section(Section(data, "plan"), LAB),
    ):
        with pytest.raises(InputError, match=f"schedule.*{name}.* is not known; did you mean {near}"):
            use()


def test_a_name_is_no_schedule() -> None:
    with pytest.raises(InputError, match="'1f1b' is not a schedule"):
        Plan((), "1f1b")  # type: ignore[arg-type]


def test_names_are_those_of_files() -> None:
    assert {"gpipe", "1f1b", "interleaved"} <= set(schedule_names())
    every = (*SCHEDULES, *SPLIT_SCHEDULES)
    assert [schedule_by_name(name) for name in schedule_names()] == list(every)
    assert len(set(every)) == len(every)
