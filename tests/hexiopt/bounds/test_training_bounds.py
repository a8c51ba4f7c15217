"""Bounds with adapters, and with every optimizer: below every plan."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hexiopt.bounds import lower_bound_s
from hexiopt.cost.pricer import PlanPricer
from hexiopt.numbers.optimizers import OPTIMIZERS
from hexiopt.plan.check import check
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from tests.conftest import STRESS
from tests.strategies import plans, problems, roomy_problems
from tests.training import with_adapters, with_optimizer


@st.composite
def trained_problems(draw: st.DrawFn) -> Problem:
    """A problem with adapters, another optimizer than AdamW, or both."""
    problem = draw(problems() | roomy_problems())
    if draw(st.booleans()):
        problem = with_optimizer(problem, draw(st.sampled_from(tuple(OPTIMIZERS))))
    if draw(st.booleans()):
        sharding = problem.workload.optimizer_sharding
        problem = with_adapters(problem, draw(st.integers(0, 999)))
        if problem.workload.whole_matrices:
            problem = replace(problem, workload=replace(problem.workload, optimizer_sharding=sharding))
    return problem


@st.composite
def trained_plans(draw: st.DrawFn) -> tuple[Problem, Plan]:
    problem = draw(trained_problems())
    return problem, draw(plans(problem))


@settings(max_examples=200 if STRESS else 20)
@given(pair=trained_plans(), time_limit_s=st.sampled_from((0.0, 0.05, 0.3)))
def test_no_plan_beats_the_bound(pair: tuple[Problem, Plan], time_limit_s: float) -> None:
    problem, plan = pair
    assert check(problem, plan) == []
    model = PlanPricer(problem)
    cost = model.price(plan)
    assert 0.0 < lower_bound_s(model) <= cost.pipeline_s
    if time_limit_s and cost.fits:
        assert lower_bound_s(model) <= lower_bound_s(model, time_limit_s) <= cost.step_time_s


@given(pair=trained_plans())
def test_every_part_of_a_price_is_finite_and_states_are_none_for_none(pair: tuple[Problem, Plan]) -> None:
    """No optimizer divides by its states: SGD has none. The parts of a step add up."""
    problem, plan = pair
    cost = PlanPricer(problem).price(plan)
    total = cost.pipeline_s + cost.gradient_sync_s + cost.optimizer_s
    assert abs(total / cost.step_time_s - 1) < 1e-9
    states, masters = problem.workload.states, 0.0
    for pipeline in cost.pipelines:
        for stage in pipeline.stages:
            assert (stage.memory.optimizer > 0) == (states.moment > 0 or problem.parameters.end_states.moment > 0)
            masters += stage.memory.master
    assert (masters > 0) == (states.master > 0)
