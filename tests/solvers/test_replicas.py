"""Replicas in a search: samples dealt by speed, structures that become valid plans, and where they may not be."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.cost import violations
from hexiopt.cost.model import CostModel
from hexiopt.plan.check import check
from hexiopt.plan.plan import Pipeline, Plan, Replica, Sharding, Stage, held_by
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from solvers.completion.completer import Builder
from solvers.completion.replicas import dealt_samples
from solvers.core.partition import Bundle, Misfit, Structure
from solvers.core.search import Budget, Search
from solvers.frame.starts import single_structures
from solvers.heuristics.hill_climbing import Polisher
from solvers.heuristics.operators.partitions import Neighbourhood
from solvers.registry import make_solver
from tests.solvers import problems
from tests.solvers.test_starts import assert_legal


def builder_of(problem: Problem) -> Builder:
    return Builder(Search("test", problem, Budget(), 0))


def built(problem: Problem, structure: Structure) -> Plan:
    found = builder_of(problem).build(structure)
    assert not isinstance(found, Misfit)
    assert check(problem, found[0]) == []
    return found[0]


def lone(*stages: tuple[tuple[int, ...], ...], size: int, sharding: int = 1) -> Structure:
    """One pipeline."""
    return Structure((Bundle.line(stages, size),), ONE_F_ONE_B, sharding)


@given(
    st.lists(st.lists(st.floats(0.0, 1.0), min_size=9, max_size=9), min_size=1, max_size=4),
    st.integers(0, 5),
)
def test_samples_make_the_slowest_as_fast_as_possible(rises: list[list[float]], more: int) -> None:
    """Against all ways to deal them."""
    size = len(rises) + more
    times = [[sum(own[:n]) for n in range(10)] for own in rises]
    samples = dealt_samples([lambda n, own=own: own[n] for own in times], size)

    def slowest(given: Sequence[int]) -> float:
        return max(own[n] for own, n in zip(times, given, strict=True))

    every = [deal for deal in product(range(1, size + 1), repeat=len(rises)) if sum(deal) == size]
    assert sum(samples) == size
    assert slowest(samples) == min(map(slowest, every))


def test_faster_replicas_take_more_samples() -> None:
    """`fast` has more than three times the compute of `slow`."""
    problem = problems.loose()
    problem = replace(problem, workload=replace(problem.workload, global_batch=16), space=Space())
    plan = built(problem, lone(((1,), (0,), (2,)), size=16))
    (stage,) = plan.pipelines[0].stages
    slow, fast, other = stage.samples(16)
    assert slow == other < fast
    assert slow + fast + other == 16


def test_a_stage_of_one_replica_is_plain() -> None:
    plan = built(problems.three_gpus(), lone(((0,),), ((1,), (2,)), size=2))
    first, second = plan.pipelines[0].stages
    assert first.is_plain
    assert second.samples(2) == (1, 1)
    assert not Bundle.line([((0,),), ((1,),)], 1).replicated


def test_samples_and_bundles_that_do_not_go() -> None:
    problem = problems.three_gpus()
    assert isinstance(builder_of(problem).build(lone(((0,), (1,), (2,)), size=2)), Misfit)
    forbidden = replace(problem, space=replace(problem.space, replicas=False))
    pair = lone(((0,), (1,)), size=2)
    assert builder_of(problem).allowed(pair)
    assert not builder_of(forbidden).allowed(pair)
    uneven = lone(((0,), (1, 2)), size=2)
    assert builder_of(problem).allowed(uneven)
    assert not builder_of(problem).allowed(replace(uneven, sharding=3))  # one TP degree for all that gather together
    alike = replace(problem, space=replace(problem.space, uneven_tp=False))
    assert not builder_of(alike).allowed(uneven)


def test_memory_counts_the_holders_of_a_stage() -> None:
    """Three replicas share what one would keep whole: with it they hold layers that one alone cannot."""
    own = problems.cluster(("a", "fast", 3), fast_gib=1.2)
    problem = Problem(own, replace(problems.TINY, num_layers=6), Workload(8, 512, recompute="full"), Space())
    builder = builder_of(problem)
    assert isinstance(builder.build(lone(((0,),), size=1, sharding=3)), Misfit)
    plan = built(problem, lone(((0,), (1,), (2,)), size=4, sharding=3))
    assert CostModel(problem).price(plan).fits


@pytest.mark.parametrize("case", ["three_gpus", "fast_network", "loose", "easy"])
def test_what_moves_make_is_priced_and_valid(case: str) -> None:
    """On a long walk; replicas of unequal degrees, over machines, and several such pipelines among them."""
    problem = {**problems.TINY_PROBLEMS, "easy": problems.easy}[case]()
    problem = replace(problem, space=replace(problem.space, max_micro_batch_size=4))
    builder, rng = builder_of(problem), random.Random(1)
    neighbourhood = Neighbourhood(problem, replicates=True)
    structure = Structure(tuple(Bundle((((d,),),)) for d in problem.usable_devices), ONE_F_ONE_B, 1)
    replicated = 0
    for _ in range(1200):
        structure = neighbourhood.random_move(structure, rng) or structure
        assert_legal(problem, structure)
        found = builder.price(structure) if builder.allowed(structure) else None
        if found is None or isinstance(found, Misfit):
            continue
        plan, cost = found
        assert violations(problem, plan, cost) == []
        replicated += any(len(stage.replicas) > 1 for pipeline in plan.pipelines for stage in pipeline.stages)
    assert replicated > 100


def test_starts_of_single_pipelines() -> None:
    problem = problems.loose()
    found = [structure.bundles[0] for structure in single_structures(problem, True)]
    assert len(found) == len(set(found))
    assert Bundle.line([((1,), (2,)), ((0,),)], 2) in found
    assert Bundle.line([((0,),), ((1, 2),)], 1) in found
    plain = [structure.bundles[0] for structure in single_structures(problem, False)]
    assert not any(bundle.replicated for bundle in plain)
    assert set(plain) < set(found)
    for structure in single_structures(problem, True):
        assert_legal(problem, structure)
    assert list(single_structures(problems.sixteen_gpus(), True)) == []  # too many GPUs


def test_polishing_shifts_samples() -> None:
    """Away from a replica that has most of them, to one that is as fast."""
    problem = Problem(problems.cluster(("a", "fast", 2)), problems.TINY, Workload(16, 2048, recompute="none"), Space())
    search = Search("test", problem, Budget(60.0, 2000), 0)
    builder = Builder(search)
    stage = Stage(held_by((Replica((0,), 13), Replica((1,), 3))), ((0, 4),), ("none",))
    search.offer(Plan((Pipeline((stage,), 1, 16),), ONE_F_ONE_B, Sharding(1)))
    before_s = search.best_s
    Polisher(search, builder, random.Random(0)).finish()
    assert search.best_s < before_s
    assert search.plan is not None
    (stage,) = search.plan.pipelines[0].stages
    assert max(stage.samples(16)) < 13


@pytest.mark.parametrize("name", ["local_search", "portfolio"])
def test_searches_find_replicas_where_they_are_best_and_allowed(name: str) -> None:
    problem = problems.three_gpus()
    plain = replace(problem, space=replace(problem.space, replicas=False))
    found, without = (make_solver(name).solve(p, Budget(60.0, 3000)) for p in (problem, plain))
    assert found.plan is not None
    assert without.plan is not None
    assert any(len(stage.replicas) > 1 for pipeline in found.plan.pipelines for stage in pipeline.stages)
    assert all(len(stage.replicas) == 1 for pipeline in without.plan.pipelines for stage in pipeline.stages)
    assert found.objective < without.objective
