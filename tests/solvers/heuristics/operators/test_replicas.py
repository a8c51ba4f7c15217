"""Replicas in a search: samples dealt by speed, structures that become valid plans, and where they may not be."""

import random
from dataclasses import replace

import pytest

from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import Replica, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import DoesNotFit, Partition, PipelineGroup
from solvers.core.search import Search
from solvers.frame.starts import single_pipeline_partitions
from solvers.heuristics.hill_climbing import HillClimber
from solvers.registry import make_solver
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.frame.test_starts import assert_legal
from tests.solvers.heuristics.operators.test_partition_operators import move, proposals_of


def completer_of(problem: Problem) -> PlanCompleter:
    return PlanCompleter(PlanPricer(problem))


def complete_plan(problem: Problem, partition: Partition) -> Plan:
    completed = completer_of(problem).complete(partition)
    assert not isinstance(completed, DoesNotFit)
    assert check(problem, completed.plan) == []
    return completed.plan


def lone(*stages: tuple[tuple[int, ...], ...], size: int, sharding: int = 1) -> Partition:
    """One pipeline."""
    return Partition((PipelineGroup.pipeline(stages, size),), ONE_F_ONE_B, sharding)


def test_faster_replicas_take_more_samples() -> None:
    """`fast` has more than three times the compute of `slow`."""
    problem = problems.loose()
    problem = replace(problem, workload=replace(problem.workload, global_batch=16), space=Space())
    plan = complete_plan(problem, lone(((1,), (0,), (2,)), size=16))
    (stage,) = plan.pipelines[0].stages
    slow, fast, other = stage.parallelism.samples(16)
    assert slow == other < fast
    assert slow + fast + other == 16


def test_a_stage_of_one_replica_is_plain() -> None:
    plan = complete_plan(problems.three_gpus(), lone(((0,),), ((1,), (2,)), size=2))
    first, second = plan.pipelines[0].stages
    assert isinstance(first.parallelism, TensorParallel)
    assert second.parallelism.samples(2) == (1, 1)
    assert not PipelineGroup.pipeline([((0,),), ((1,),)], 1).replicated


def test_samples_and_bundles_that_do_not_go() -> None:
    problem = problems.three_gpus()
    assert isinstance(completer_of(problem).complete(lone(((0,), (1,), (2,)), size=2)), DoesNotFit)
    forbidden = replace(problem, space=replace(problem.space, replicas=False))
    pair = lone(((0,), (1,)), size=2)
    assert completer_of(problem).allowed(pair)
    assert not completer_of(forbidden).allowed(pair)
    uneven = lone(((0,), (1, 2)), size=2)
    assert completer_of(problem).allowed(uneven)
    assert not completer_of(problem).allowed(replace(uneven, sharding=3))  # one TP degree for all that gather together
    alike = replace(problem, space=replace(problem.space, uneven_tp=False))
    assert not completer_of(alike).allowed(uneven)


def test_memory_counts_the_holders_of_a_stage() -> None:
    """Three replicas share what one would keep whole: with it they hold layers that one alone cannot."""
    cluster = problems.cluster(("a", "fast", 3), fast_gib=1.2)
    problem = Problem(cluster, replace(problems.TINY, num_layers=6), Workload(8, 512, recompute="full"), Space())
    completer = completer_of(problem)
    assert isinstance(completer.complete(lone(((0,),), size=1, sharding=3)), DoesNotFit)
    plan = complete_plan(problem, lone(((0,), (1,), (2,)), size=4, sharding=3))
    assert PlanPricer(problem).price(plan).fits


@pytest.mark.parametrize("case", ["three_gpus", "fast_network", "loose", "easy"])
def test_what_moves_make_is_priced_and_valid(case: str) -> None:
    """On a long walk; replicas of unequal degrees, over machines, and several such pipelines among them."""
    problem = {**problems.TINY_PROBLEMS, "easy": problems.easy}[case]()
    problem = replace(problem, space=replace(problem.space, max_micro_batch_size=4))
    completer, rng = completer_of(problem), random.Random(1)
    proposals = proposals_of(problem, replicates=True)
    partition = Partition(tuple(PipelineGroup((((d,),),)) for d in problem.usable_devices), ONE_F_ONE_B, 1)
    replicated = 0
    for _ in range(1200):
        partition = move(proposals, partition, rng)
        assert_legal(problem, partition)
        completed = completer.allowed(partition) and completer.complete(partition)
        priced = completer.price(completed) if completed else None
        if priced is None:
            continue
        plan = priced.plan
        assert violations(problem, plan, priced.cost) == []
        replicated += any(
            len(stage.parallelism.replicas) > 1 for pipeline in plan.pipelines for stage in pipeline.stages
        )
    assert replicated > 100


def test_starts_of_single_pipelines() -> None:
    problem = problems.loose()
    pipelines = [partition.pipeline_groups[0] for partition in single_pipeline_partitions(problem, True)]
    assert len(pipelines) == len(set(pipelines))
    assert PipelineGroup.pipeline([((1,), (2,)), ((0,),)], 2) in pipelines
    assert PipelineGroup.pipeline([((0,),), ((1, 2),)], 1) in pipelines
    plain = [partition.pipeline_groups[0] for partition in single_pipeline_partitions(problem, False)]
    assert not any(pipeline_group.replicated for pipeline_group in plain)
    assert set(plain) < set(pipelines)
    for partition in single_pipeline_partitions(problem, True):
        assert_legal(problem, partition)
    assert list(single_pipeline_partitions(problems.sixteen_gpus(), True)) == []  # too many GPUs


def test_polishing_shifts_samples() -> None:
    """Away from a replica that has most of them, to one that is as fast."""
    problem = Problem(problems.cluster(("a", "fast", 2)), problems.TINY, Workload(16, 2048, recompute="none"), Space())
    search = Search("test", problem, Budget(3600.0, 2000), 0)
    completer = PlanCompleter(search.pricer)
    stage = Stage.of_replicas((Replica((0,), 13), Replica((1,), 3)), ((0, 4),), ("none",))
    search.offer(Plan((Pipeline((stage,), 1, 16),), ONE_F_ONE_B, Sharding(1)))
    before_s = search.best_s
    HillClimber(search, completer, random.Random(0)).finish((), search.until())
    assert search.best_s < before_s
    assert search.plan is not None
    (stage,) = search.plan.pipelines[0].stages
    assert max(stage.parallelism.samples(16)) < 13


@pytest.mark.parametrize("name", slow_but(("local_search",), ("local_search", "portfolio")))
def test_searches_find_replicas_where_they_are_best_and_allowed(name: str) -> None:
    problem = problems.three_gpus()
    plain = replace(problem, space=replace(problem.space, replicas=False))
    result, without = (make_solver(name).solve(p, Budget(3600.0, 3000)) for p in (problem, plain))
    assert result.plan is not None
    assert without.plan is not None
    assert any(len(stage.parallelism.replicas) > 1 for pipeline in result.plan.pipelines for stage in pipeline.stages)
    assert all(len(stage.parallelism.replicas) == 1 for pipeline in without.plan.pipelines for stage in pipeline.stages)
    assert result.objective < without.objective
