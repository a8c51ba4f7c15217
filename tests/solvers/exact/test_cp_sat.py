"""`cp_sat`: every bound holds for random plans, the proof equals looking at all plans, and it can be repeated."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hexiopt.calibration.gpus import catalogue
from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.problem.workload import Workload
from hexiopt.result import Status
from hexiopt.schedules.registry import GPIPE
from hexiopt.solving import Budget
from solvers.core.search import Search
from solvers.exact.assignments import DeviceClasses, PlacedDevices
from solvers.exact.candidates import Candidates
from solvers.exact.cp_sat import CpSat, PackingProof
from solvers.exact.exhaustive import Exhaustive
from solvers.exact.packing import Packing, PackingLimits, PipelineColumn, most_together
from solvers.exact.placement_bounds import PlacementBound, SyncContext, SyncScope
from solvers.exact.placements import PlacementColumns, PlanFamily
from solvers.proof.stage_times import StageTable
from tests import strategies
from tests.conftest import STRESS
from tests.slow import slow_but
from tests.solvers import problems

SLOW = settings(suppress_health_check=[HealthCheck.filter_too_much])


@st.composite
def priced_plans(draw: st.DrawFn) -> tuple[Problem, Plan, PlanPricer, float]:
    """A plan that fits its problem, and its step time in seconds."""
    problem = draw(strategies.problems(max_batch=24))
    plan = draw(strategies.plans(problem))
    model = PlanPricer(problem)
    assume(not check(problem, plan))
    cost = model.price(plan)
    assume(cost.fits)
    return problem, plan, model, cost.step_time_s


def groups_of(plan: Plan) -> list[PlacedDevices]:
    """The devices of each pipeline's stages and replicas."""
    return [tuple(tuple(one.devices for one in stage.replicas) for stage in p.stages) for p in plan.pipelines]


def holders(plan: Plan) -> int:
    """The most replicas that may hold one layer."""
    return sum(max(len(stage.replicas) for stage in p.stages) for p in plan.pipelines)


# What bounds a pipeline.


@SLOW
@given(priced_plans())
def test_a_line_may_do_what_a_plan_does(drawn: tuple[Problem, Plan, PlanPricer, float]) -> None:
    problem, plan, model, step_s = drawn
    floor = PlacementBound(model, StageTable(model))
    zero, several = plan.sharding.stage, len(plan.pipelines) > 1
    sync = SyncScope.ALL if several else SyncScope.REPLICATED
    context = SyncContext(sync, StateSharding(zero, holders(plan)), zero >= 2)
    batch = problem.workload.global_batch
    for pipeline, groups in zip(plan.pipelines, groups_of(plan), strict=True):
        assert floor.most_sequences(groups, context, 1, batch, step_s) >= pipeline.num_sequences


def test_more_layers_in_a_fast_stage_may_spare_a_slow_one_before_it() -> None:
    """With one layer in the second stage two are left to the first, which takes too long for them; with two it fits."""
    gpu = catalogue()["rtx_3090"]
    machines = tuple(Machine(f"m-{k}", "m", gpu, 4, 1e7, 0.0, (), 1, 1e7, 0.0) for k in range(2))
    sizes = {"num_layers": 3, "hidden_size": 2, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "ffn_size": 1}
    ends = {"vocab_size": 1, "max_positions": 4096, "attention_bias": True, "mlp_bias": True}
    model = ModelSpec(name="small", architecture="gpt2", activation="gelu_new", **sizes, **ends)
    workload = Workload(global_batch=2, seq_len=4096, precision="fp16", recompute="none", schedule="gpipe")
    problem = Problem(Cluster("two", machines, 1e7, 0.0), model, workload, Space(max_micro_batch_size=1))
    slow_then_fast = Pipeline((Stage.of((1, 2), 0, 1), Stage.of((4,), 1, 3)), 1)
    plan = Plan((Pipeline((Stage.of((0,), 0, 3),), 1), slow_then_fast), GPIPE)
    pricer = PlanPricer(problem)
    bound = PlacementBound(pricer, StageTable(pricer))
    context = SyncContext(SyncScope.ALL, StateSharding(0, 2), False)
    step_s = pricer.price(plan).step_time_s
    assert bound.most_sequences(groups_of(plan)[1], context, 1, 2, step_s) >= 1


@SLOW
@given(priced_plans())
def test_no_stage_is_faster_than_its_table(drawn: tuple[Problem, Plan, PlanPricer, float]) -> None:
    """With a recompute policy for each layer as the plan has it."""
    _problem, plan, model, _ = drawn
    assume(plan.sharding.stage < 2)
    table = StageTable(model)
    for pipeline, priced in zip(plan.pipelines, model.pipelines(plan), strict=True):
        for s, (stage, cost) in enumerate(zip(pipeline.stages, priced.stages, strict=True)):
            first, last = s == 0, s == len(pipeline.stages) - 1
            samples = stage.samples(pipeline.micro_batch_size)
            for replica, x, one in zip(stage.replicas, samples, cost.executors, strict=True):
                shards = StateSharding(plan.sharding.stage, holders(plan))
                times = table.times(model.tp_group(replica.devices), x, first, last, 1, shards)
                both = one.forward_s + one.backward_s
                assert times.both_s[stage.num_layers] <= both * (1 + 1e-9)
                assert times.forward_s[stage.num_layers] == pytest.approx(one.forward_s, rel=1e-9)


# The model.


def test_choices_are_all_that_fit_and_suffice() -> None:
    """Two bins of two devices, three sorts of pipelines; counted by hand."""
    columns = [PipelineColumn(((1, 0), (0, 1)), 3), PipelineColumn(((2, 0), (0, 2)), 7), PipelineColumn(((1, 1),), 5)]
    limits = PackingLimits((2, 2), 10, 4)
    packing = Packing(columns, limits)
    found, complete = packing.choices(100, 10.0)
    assert complete
    assert found == [
        ((1, 2),),
        ((0, 2), (1, 1)),
        ((0, 4),),
        ((0, 2), (2, 1)),
        ((0, 1), (1, 1)),
        ((2, 2),),
    ]
    assert [packing.sequences(choice) for choice in found] == [14, 13, 12, 11, 10, 10]
    left, complete = Packing(columns, limits, found[1:]).choices(100, 10.0)
    assert complete
    assert left == [((1, 2),)]
    assert Packing(columns, replace(limits, global_batch=15)).choices(100, 10.0) == ([], True)
    assert Packing(columns, replace(limits, global_batch=15)).choices(100, 10.0) == ([], True)
    assert Packing(columns, replace(limits, most_pipelines=1)).choices(100, 10.0) == ([], True)
    few, complete = packing.choices(2, 10.0)
    assert len(few) == 2
    assert not complete


def test_most_together_is_a_knapsack() -> None:
    most = np.array([[0, 2, 3], [4, 5, 9], [6, 7, 8]])
    together = most_together(most)
    assert together.tolist() == [[0, 2, 4], [4, 6, 9], [8, 10, 13]]


# The proof.


@pytest.mark.parametrize("kind", slow_but(("tight", "slow_network"), problems.TINY_PROBLEMS))
def test_equals_looking_at_all_plans(kind: str) -> None:
    problem = problems.TINY_PROBLEMS[kind]()
    result, best = CpSat().solve(problem, Budget(3600.0, 3000)), Exhaustive().solve(problem, Budget(3600.0))
    assert result.status is best.status is Status.OPTIMAL
    assert result.objective == pytest.approx(best.objective, rel=1e-9)
    assert result.bound_s <= result.objective


@settings(max_examples=60 if STRESS else 6, suppress_health_check=list(HealthCheck))
@given(strategies.problems(max_batch=5))
def test_equals_looking_at_all_plans_of_random_problems(problem: Problem) -> None:
    assume(len(problem.usable_devices) <= 3)
    problem = replace(problem, model=replace(problem.model, num_layers=min(problem.model.num_layers, 4)))
    best = Exhaustive().solve(problem, Budget(20.0))
    assume(best.status in (Status.OPTIMAL, Status.INFEASIBLE))
    result = CpSat().solve(problem, Budget(3600.0, 4000))
    assert result.status is best.status
    if best.cost is not None:
        assert result.objective == pytest.approx(best.objective, rel=1e-9)
        assert result.bound_s == pytest.approx(best.objective, rel=1e-6)


NARROWER = [
    *({switch: False} for switch in SWITCHES),
    *({"num_pipelines": n} for n in (1, 2)),
    {"num_stages": 2},
    {"num_pipelines": 1, "num_stages": 3},
]


@pytest.mark.parametrize("change", slow_but(NARROWER[:1], NARROWER if STRESS else NARROWER[::3]), ids=str)
def test_equals_looking_at_all_plans_of_narrower_spaces(change: dict[str, Any]) -> None:
    problem = replace(problems.loose(), space=Space(max_micro_batch_size=2, **change))
    result, best = CpSat().solve(problem, Budget(3600.0, 4000)), Exhaustive().solve(problem, Budget(3600.0))
    assert result.status is best.status is Status.OPTIMAL
    assert result.objective == pytest.approx(best.objective, rel=1e-9)


def test_finds_the_best_plan_by_itself() -> None:
    """Without the portfolio's plan the proof finds it: all plans are in the model."""
    problem = problems.fast_network()
    search = Search("test", problem, Budget(3600.0), 0)
    assert PackingProof(search).run()
    assert search.best_s == pytest.approx(Exhaustive().solve(problem, Budget(3600.0)).objective, rel=1e-9)
    assert search.bound_s == pytest.approx(search.best_s, rel=1e-9)


def test_a_line_is_tightened_to_what_it_can_process() -> None:
    problem = problems.slow_network()
    model = PlanPricer(problem)
    device_classes = DeviceClasses.of(problem)
    lines = PlacementColumns(model, device_classes, Candidates(model), PlacementBound(model, StageTable(model)))
    limit_s = 2 * Exhaustive().solve(problem, Budget(3600.0)).objective
    columns = lines.columns(PlanFamily(alone=True, lockstep=False), limit_s, lambda: True)
    assert columns is not None
    rng = random.Random(0)
    for k in rng.sample(range(len(columns)), min(20, len(columns))):
        if columns[k].most_sequences:
            tight = lines.tighten(k, 1, columns[k].most_sequences, limit_s)
            assert 0 <= tight <= columns[k].most_sequences
            assert lines.tighten(k, 1, columns[k].most_sequences, limit_s) == tight


# Where it is too large to prove.


@pytest.mark.slow
def test_the_bound_of_larger_problems_holds_and_rises() -> None:
    problem = problems.easy()
    before = Search("test", problem, Budget(), 0).bound_s
    for limit_s in (3.0, 12.0, 48.0):  # a machine that others use too may leave little time for it
        found = CpSat().solve(problem, Budget(limit_s))
        if found.bound_s > before:
            break
    assert found.plan is not None
    assert before < found.bound_s <= found.objective


def test_the_clock_raises_no_bound_where_steps_are_counted() -> None:
    """Of a problem too large to prove."""
    problem = problems.easy()
    found = CpSat().solve(problem, Budget(3600.0, 15))
    assert found.plan is not None
    assert found.bound_s == Search("test", problem, Budget(), 0).bound_s


@pytest.mark.slow
def test_the_same_steps_give_the_same_proof() -> None:
    """Whatever the time limit: where steps are counted, the portfolio's plan at the start has its share of them."""
    problem = problems.loose()
    budgets = [Budget(limit_s, steps) for steps in (40, 3000) for limit_s in (600.0, 86_400.0)]
    runs = [CpSat().solve(problem, budget, seed=3) for budget in budgets]
    for one, other in (runs[:2], runs[2:]):
        assert (one.plan, one.steps, one.bound_s) == (other.plan, other.steps, other.bound_s)
    assert runs[0].bound_s <= runs[2].bound_s
