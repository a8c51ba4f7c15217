"""ZeRO-2 and 3 in the search: aligned structures only, and every solver finds a plan where nothing else is allowed."""

import random
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.schedules.registry import INTERLEAVED, ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import Partition, PipelineGroup
from solvers.core.search import Search
from solvers.core.zero import (
    draw_sharding_groups,
    draw_zero_stage,
    fewest_holders,
    first_stage,
    holders_of,
    plain_stages,
    requires_lockstep,
    sharding_groups,
    without_idle_sharding,
)
from solvers.frame.starts import lockstep_partitions
from solvers.registry import for_any_problem, make_solver, names
from tests.slow import slow_but
from tests.solvers import problems

NAMES = names(for_any_problem)


def with_sharding(problem: Problem, zero: str) -> Problem:
    return replace(problem, workload=replace(problem.workload, optimizer_sharding=zero))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("zero", ["2", "3"])
def test_every_solver_finds_a_plan_in_lockstep(name: str, zero: str) -> None:
    if name == "hexiscale":
        pytest.importorskip("pymetis")
    problem = with_sharding(problems.loose(), zero)
    result = make_solver(name).solve(problem, Budget(3600.0, max_steps=200), seed=0)
    assert result.plan is not None, result.reason
    assert result.plan.sharding.stage == int(zero)
    assert violations(problem, result.plan, result.cost) == []


@pytest.mark.parametrize(
    "name", slow_but(("hexiscale", "portfolio"), ("random", "hexiscale", "portfolio", "local_search"))
)
def test_mixed_machines_work_in_lockstep(name: str) -> None:
    """Eight GPUs of two types: several pipelines that hold the same layers."""
    if name == "hexiscale":
        pytest.importorskip("pymetis")
    problem = with_sharding(problems.easy(), "3")
    result = make_solver(name).solve(problem, Budget(3600.0, max_steps=300), seed=1)
    assert result.plan is not None, result.reason
    assert violations(problem, result.plan, result.cost) == []


def test_memory_that_only_shards_fit() -> None:
    """Without pipeline or tensor parallelism, weights and gradients alone fill a GPU, unless they are sharded."""
    cluster = problems.cluster(("a", "fast", 4), fast_gib=1.6, network_gb_per_s=10.0)
    base = Problem(cluster, replace(problems.TINY, num_layers=16), replace(problems.BATCH_OF_4, recompute="full"))
    one_stage = replace(base, space=replace(base.space, num_stages=1, max_tp=1))
    for zero, fits in (("0", False), ("1", False), ("3", True)):
        result = make_solver("local_search").solve(with_sharding(one_stage, zero), Budget(5.0, max_steps=200), seed=0)
        assert (result.plan is not None) == fits


def test_only_one_aligned_bundle_may_be_in_lockstep() -> None:
    problem = with_sharding(problems.easy(), "auto")
    completer = PlanCompleter(PlanPricer(problem))
    pair = PipelineGroup((((0,), (4,)),), 1)
    assert completer.distance(Partition((pair,), ONE_F_ONE_B, 3)) == 0
    assert completer.distance(Partition((pair,), INTERLEAVED, 3)) > 0
    assert completer.distance(Partition((pair, PipelineGroup((((1,), (2,)),), 1)), ONE_F_ONE_B, 2)) > 0
    assert completer.distance(Partition((pair, PipelineGroup((((1,), (2,)),), 1)), ONE_F_ONE_B, 1)) == 0
    three = PipelineGroup((((0,), (4,), (1,)),), 1)  # 16 sequences do not divide by 3
    assert completer.distance(Partition((three,), ONE_F_ONE_B, 3)) > 0
    assert completer.distance(Partition((three,), ONE_F_ONE_B, 1)) == 0


def test_starts_in_lockstep_are_allowed() -> None:
    problem = problems.easy()
    completer = PlanCompleter(PlanPricer(problem))
    partitions = list(lockstep_partitions(problem))
    assert {partition.sharding for partition in partitions} == {2, 3}
    assert any(len(partition.devices()) == len(problem.usable_devices) for partition in partitions)
    assert all(completer.allowed(partition) for partition in partitions)
    assert not list(lockstep_partitions(with_sharding(problem, "1")))


def test_draws_keep_most_of_their_share_for_plain_stages() -> None:
    problem = problems.easy()
    rng = random.Random(0)
    aligned = Counter(draw_zero_stage(problem, rng, aligned=True) for _ in range(2000))
    assert set(aligned) == {0, 1, 2, 3}
    assert aligned[0] + aligned[1] > 1500
    assert {draw_zero_stage(problem, rng, aligned=False) for _ in range(200)} == {0, 1}
    deep = with_sharding(problem, "3")
    assert {draw_zero_stage(deep, rng, aligned=False) for _ in range(10)} == {3}
    assert (requires_lockstep(problem), requires_lockstep(deep)) == (False, True)
    assert (plain_stages(problem), plain_stages(deep)) == ((0, 1), ())
    assert (first_stage(problem), first_stage(deep), first_stage(with_sharding(problem, "0"))) == (1, 3, 0)


def test_groups_of_machines_are_drawn_where_there_are_several() -> None:
    rng = random.Random(0)
    several, single = problems.easy(), problems.three_gpus()
    assert sharding_groups(several, 1) == ("all", "machine")
    assert sharding_groups(several, 0) == sharding_groups(single, 3) == ("all",)
    drawn = Counter(draw_sharding_groups(several, rng, 1) for _ in range(400))
    assert 50 < drawn["machine"] < 150
    assert {draw_sharding_groups(single, rng, 1) for _ in range(50)} == {"all"}


def test_the_fewest_holders_that_share_a_machine() -> None:
    """Machines a (0, 1), b (2, 3) and c (4 to 7)."""
    machine_of = problems.easy().cluster.machine_of.tolist()
    assert fewest_holders([[(0,), (1,)], [(4,), (5,)]], machine_of) == 2
    assert fewest_holders([[(0,), (1,), (2,)]], machine_of) == 1
    assert fewest_holders([[(4, 5), (6, 7)]], machine_of) == 2
    lines = tuple(Pipeline((Stage.of((d,), 0, 3), Stage.of((4 + d,), 3, 6)), 8) for d in (0, 1))
    assert holders_of(Plan(lines, ONE_F_ONE_B, Sharding(1, "machine")), machine_of) == 2
    assert holders_of(Plan(lines, ONE_F_ONE_B, Sharding(1)), machine_of) == 2
    other = (lines[0], Pipeline((Stage.of((1,), 0, 2), Stage.of((5,), 2, 6)), 8))
    assert holders_of(Plan(other, ONE_F_ONE_B, Sharding(1, "machine")), machine_of) == 1


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_structures_sharded_inside_machines_never_exceed_memory(zero: int) -> None:
    """What a search takes for the states of a device is at least what they are."""
    cluster = problems.cluster(("a", "fast", 2), ("b", "fast", 2), ("c", "slow", 4), fast_gib=1.3, slow_gib=1.1)
    problem = replace(problems.easy(), cluster=cluster, workload=replace(problems.easy().workload, recompute="full"))
    completer, model, built = PlanCompleter(PlanPricer(problem)), PlanPricer(problem), 0
    for partition in lockstep_partitions(with_sharding(problem, "auto")):
        completed = completer.complete(replace(partition, sharding=zero, groups="machine"))
        if completed:
            built += 1
            assert completed.plan.sharding == Sharding(zero, "machine")
            assert model.price(completed.plan).fits
    assert built


def test_a_plan_whose_parameters_have_one_holder_each_shards_nothing() -> None:
    """ZeRO would shard nothing: the plan says so, and costs no more."""
    base = problems.loose()
    for tied, stages in product((False, True), (1, 2)):
        problem = replace(base, model=replace(base.model, tied_embeddings=tied))
        model, layers = PlanPricer(problem), problem.model.num_layers
        ends = [layers * s // stages for s in range(stages + 1)]
        pipeline = Pipeline(tuple(Stage.of((s,), ends[s], ends[s + 1]) for s in range(stages)), 4)
        for zero in (1, 2, 3):
            plan = Plan((pipeline,), sharding=Sharding(zero))
            search = Search("test", problem, Budget(), 0)
            search.offer(plan)
            best_plan = search.result().plan
            assert best_plan is not None
            assert best_plan.sharding.stage == (zero if tied and stages == 2 else 0)
            # Weights of several stages count from a common start of all optimisers, though nothing is gathered.
            step_s, sharded_s = (model.price(each).step_time_s for each in (best_plan, plan))
            assert step_s <= sharded_s * (1 + 1e-12)
            assert step_s == pytest.approx(sharded_s, rel=1e-12 if zero == 3 or stages == 1 else 0.03)
        assert without_idle_sharding(plan, with_sharding(problem, "3")) == plan  # the workload asks for it


def test_pipelines_that_hold_the_same_layers_stay_sharded() -> None:
    plan = Plan(tuple(Pipeline((Stage.of((d,), 0, 4),), 2) for d in (0, 1)), sharding=Sharding(1))
    assert without_idle_sharding(plan, problems.loose()) == plan
