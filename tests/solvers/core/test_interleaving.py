"""Interleaving in a search: ranges in order, draws that leave 1F1B its share, structures that become valid plans."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space, layer_ranges
from hexiopt.problem.workload import Workload
from hexiopt.schedules.in_flight import in_flight
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule, StagePosition
from hexiopt.solving import Budget
from solvers.completion.completer import PlanCompleter
from solvers.completion.pricing import PricedPlan
from solvers.core.interleaving import draw_schedule, may_interleave, possible_chunks
from solvers.core.operators import OperatorStatistics
from solvers.core.partition import Partition, PipelineGroup
from solvers.core.search import Search
from solvers.frame.solver import offer_partition
from solvers.heuristics.hill_climbing import HillClimber
from solvers.heuristics.operators.table import PartitionProposals
from tests.solvers import problems
from tests.stated_pipelines import Executor, ExecutorLink, executor_ends_s

EIGHT = replace(problems.TINY, num_layers=8)


def problem(space: Space | None = None, **work: object) -> Problem:
    """Four devices of one kind, eight layers, eight sequences."""
    workload = Workload(global_batch=8, seq_len=512)
    return Problem(problems.cluster(("a", "fast", 4)), EIGHT, replace(workload, **work), space or Space())  # type: ignore[arg-type]


def partition(*stages: int, chunks: int, size: int = 1) -> Partition:
    """A bundle of one pipeline for each number of stages, on devices in order."""
    pipeline_groups, at = [], 0
    for count in stages:
        pipeline_groups.append(PipelineGroup(tuple(((at + s,),) for s in range(count)), size))
        at += count
    return Partition(tuple(pipeline_groups), INTERLEAVED, 0, chunks)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(1, 4))
def test_ranges_cover_all_layers_in_the_order_of_virtual_stages(counts: list[int], chunks: int) -> None:
    chunks = min(chunks, *counts)
    ranges = layer_ranges(counts, chunks)
    in_order = [stage_ranges[c] for c in range(chunks) for stage_ranges in ranges]
    assert (in_order[0][0], in_order[-1][1]) == (0, sum(counts))
    assert all(previous[1] == following[0] for previous, following in pairwise(in_order))
    for spans, count in zip(ranges, counts, strict=True):
        lengths = [end - first for first, end in spans]
        assert sum(lengths) == count
        assert min(lengths) >= 1
        assert max(lengths) - min(lengths) <= 1


def test_ranges_that_are_possible() -> None:
    assert possible_chunks(4, 2, 8) == 4
    assert possible_chunks(4, 3, 8) == 2
    assert possible_chunks(4, 8, 8) == 1
    assert possible_chunks(4, 1, 8) == 1
    assert possible_chunks(4, 9, 8) == 1


def test_1f1b_is_drawn_most_often() -> None:
    rng, free = random.Random(0), problem()
    drawn = Counter(draw_schedule(free, rng) for _ in range(2000))
    assert sum(n for (schedule, _), n in drawn.items() if schedule == ONE_F_ONE_B) > 1000
    assert 100 < sum(n for (schedule, _), n in drawn.items() if schedule == INTERLEAVED) < 600
    assert all((schedule == INTERLEAVED) == (chunks > 1) for schedule, chunks in drawn)
    assert max(chunks for _, chunks in drawn) == free.space.max_chunks


@pytest.mark.parametrize("fixed", [GPIPE, ONE_F_ONE_B], ids=str)
def test_nothing_else_is_drawn_where_the_schedule_is_fixed(fixed: Schedule) -> None:
    rng, bound = random.Random(0), problem(schedule=fixed.name)
    assert {draw_schedule(bound, rng) for _ in range(50)} == {(fixed, 1)}
    assert not may_interleave(bound)
    operators = PartitionProposals(bound, OperatorStatistics()).plain.operators
    assert "change_chunks" not in {operator.name for operator in operators}


def test_one_range_only() -> None:
    rng, bound = random.Random(0), problem(Space(max_chunks=1), schedule="interleaved")
    assert {draw_schedule(bound, rng) for _ in range(50)} == {(INTERLEAVED, 1)}
    free = problem(Space(max_chunks=1))  # interleaved with one range is 1F1B under a second name
    assert {draw_schedule(free, rng) for _ in range(50)} == {(GPIPE, 1), (ONE_F_ONE_B, 1)}
    drawn = {draw_schedule(problem(schedule="interleaved"), rng) for _ in range(200)}
    assert {(INTERLEAVED, 1), (INTERLEAVED, 2), (INTERLEAVED, 8)} <= drawn


def complete_plan(of: Problem, partition: Partition) -> Plan | None:
    completed = PlanCompleter(PlanPricer(of)).complete(partition)
    return completed.plan if completed else None


@pytest.mark.parametrize("space", [Space(), Space(uneven_layers=False), Space(uneven_batch=False)])
def test_a_structure_becomes_an_interleaved_plan(space: Space) -> None:
    of = problem(space)
    for stages, chunks, expected in (((2, 2), 2, [2, 2]), ((4,), 8, [2]), ((4,), 2, [2]), ((2,), 3, [3])):
        plan = complete_plan(of, partition(*stages, chunks=chunks))
        assert plan is not None
        assert [pipeline.num_chunks for pipeline in plan.pipelines] == expected
        assert check(of, plan) == []


@given(
    stages=st.lists(st.integers(2, 4), min_size=1, max_size=2).filter(lambda each: sum(each) <= 4),
    chunks=st.integers(2, 4),
    zero=st.integers(0, 1),
)
def test_the_search_knows_the_memory_of_a_stage(stages: list[int], chunks: int, zero: int) -> None:
    """As priced, to the byte: ranges are not all as long, nor as often in flight."""
    plan = complete_plan(problem(), replace(partition(*stages, chunks=chunks), sharding=zero))
    assume(plan is not None)
    assert plan is not None
    model = PlanPricer(problem())
    for pipeline, priced in zip(plan.pipelines, model.price(plan).pipelines, strict=True):
        count = len(pipeline.stages)
        for k, (stage, cost) in enumerate(zip(pipeline.stages, priced.stages, strict=True)):
            memory = model.stages.memory_model(model.tp_group(stage.devices), pipeline.micro_batch_size)
            at = StagePosition(k, count, pipeline.num_micro_batches, pipeline.num_chunks)
            held = in_flight(plan.schedule, at)
            shards = StateSharding(zero, len(plan.pipelines))
            assert cost.memory == memory.stage(stage.num_layers, k == 0, k == count - 1, stage.policy, held, shards)


def test_a_lone_stage_has_one_range_beside_interleaved_ones() -> None:
    plan = complete_plan(problem(), partition(1, 2, chunks=2))
    assert plan is not None
    assert [pipeline.num_chunks for pipeline in plan.pipelines] == [1, 2]
    assert plan.pipelines[1].num_micro_batches % 2 == 0
    assert check(problem(), plan) == []


def test_a_batch_that_the_stages_do_not_divide_is_a_misfit() -> None:
    assert complete_plan(problem(), partition(3, chunks=2)) is None
    assert complete_plan(problem(), partition(3, chunks=1)) is not None


def test_the_polisher_keeps_interleaved_plans_valid() -> None:
    """Layers, policies and micro-batches move; ranges and multiples stay as they must be."""
    of = problem()
    search = Search("test", of, Budget(max_steps=400), 0)
    completer = PlanCompleter(search.pricer)
    for chunks in (2, 3):
        assert offer_partition(search, completer, partition(2, 2, chunks=chunks)) is not None
    climber = HillClimber(search, completer, random.Random(0))
    climber.finish((), search.until())
    plan, met = search.plan, set()
    assert plan is not None
    for _ in range(300):
        assert search.cost is not None
        neighbour = climber.neighbour(PricedPlan(plan, search.pricer.price(plan)))
        if neighbour is not None:
            trial = neighbour[1]
            assert check(of, trial) == []
            met.add(tuple(stage.layers for pipeline in trial.pipelines for stage in pipeline.stages))
            plan = trial
    assert len(met) > 1


@given(
    stage_s=st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6),
    route=st.floats(0.0, 0.3),
    chunks=st.integers(2, 4),
)
def test_the_beat_is_near_the_exact_one(stage_s: list[float], route: float, chunks: int) -> None:
    """The slope of the exact recurrence, for equal ranges and hops that are short or long; never below a stage."""
    count = len(stage_s)
    executors = tuple(Executor(s, ((t / 3 / chunks, 2 * t / 3 / chunks),) * chunks) for s, t in enumerate(stage_s))
    links = [ExecutorLink(False, s, (s + 1) % count, route / 2) for s in range(count)]
    links += [ExecutorLink(True, (s + 1) % count, s, route / 2) for s in range(count)]
    near, far = (max(executor_ends_s(INTERLEAVED, count, m * count, executors, tuple(links))) for m in (50, 90))
    slope = (far - near) / (40 * count)
    beat = INTERLEAVED.cycle_s(stage_s, [route] * (count - 1), chunks)
    assert max(stage_s) <= beat * (1 + 1e-12)
    assert 0.6 * slope <= beat <= 1.4 * slope
    no_hops = [0.0] * (count - 1)
    assert INTERLEAVED.cycle_s(stage_s, no_hops, chunks) <= ONE_F_ONE_B.cycle_s(stage_s, no_hops, 1) * (1 + 1e-12)
