"""The bound of what machines receive: below every plan of the space, and above the compute bound where networks are
slow."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hexiopt.bounds import compute_bound_s, lower_bound_s
from hexiopt.bounds.interfaces import InterfaceBound
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space, sharding_stages
from hexiopt.problem.workload import Workload
from tests.conftest import STRESS
from tests.hexiopt.cost.test_late_weights import split_plan
from tests.models import TINY
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.oracle import every_plan
from tests.strategies import problems_with_plans, roomy_problems_with_plans

SLOWER = (1.0, 0.1, 1e-2, 1e-3, 1e-4)


def slow_interfaces(problem: Problem, factor: float) -> Problem:
    """`problem` with interfaces at a share of their speed."""
    machines = tuple(
        machine.replace(nic_bandwidth_bytes_per_s=machine.nic_bandwidth_bytes_per_s * factor)
        for machine in problem.cluster.machines
    )
    return replace(problem, cluster=replace(problem.cluster, machines=machines))


def bound_s(model: PlanPricer, plan: Plan) -> float:
    """The bound on plans with the kind of sharding that `plan` has."""
    batches = plan.pipelines[0].num_micro_batches if plan.sharding.stage >= 2 else None
    return InterfaceBound(model, batches).seconds(compute_bound_s(model))


@pytest.mark.parametrize("factor", slow_but((0.1,), SLOWER))
@settings(max_examples=400 if STRESS else 30)
@given(pair=problems_with_plans() | roomy_problems_with_plans(), split=st.booleans())
def test_no_plan_beats_the_bound(factor: float, pair: tuple[Problem, Plan], split: bool) -> None:
    """Whatever its stages, replicas, schedule, micro-batches and sharding, whether or not it fits into memory; but for
    stated sharding groups, which are not in the space."""
    problem, plan = pair
    assume(isinstance(plan.sharding.groups, str) and plan.sharding.stage in sharding_stages(problem.workload))
    problem = slow_interfaces(problem, factor)
    if split and plan.sharding.stage < 2:
        plan = split_plan(plan)
        problem = replace(
            problem,
            workload=replace(problem.workload, schedule="auto"),
            space=replace(problem.space, split_backward=True),
        )
    model = PlanPricer(problem)
    assert bound_s(model, plan) <= model.price(plan).step_time_s


@pytest.mark.parametrize("sharding", slow_but("1", "0123"))
def test_no_plan_of_a_tiny_problem_beats_the_bound(sharding: str) -> None:
    """By pricing every plan, on networks on which the bound is more than that of compute; there it rises as they get
    slower."""
    cluster = problems.cluster(("a", "fast", 1), ("b", "slow", 1), ("c", "slow", 1), network_gb_per_s=1.0)
    workload = Workload(4, 512, recompute="none", optimizer_sharding=sharding)
    usual = Problem(cluster, replace(TINY, num_layers=3), workload, Space(max_micro_batch_size=2))
    plans, above, last_s = list(every_plan(usual)), 0, 0.0
    assert len(plans) > 100
    for factor in (1.0, 0.3, 0.1, 0.03):
        model = PlanPricer(slow_interfaces(usual, factor))
        best: dict[int | None, tuple[float, float]] = {}
        for plan in plans:
            late = plan.pipelines[0].num_micro_batches if plan.sharding.stage >= 2 else None
            price_s, least_s = model.price(plan).step_time_s, best.get(late, (float("inf"), 0.0))[1]
            best[late] = min(price_s, best.get(late, (price_s, 0.0))[0]), least_s or bound_s(model, plan)
        assert all(least_s <= price_s for price_s, least_s in best.values())
        lowest_s = min(least_s for _, least_s in best.values())
        assert lowest_s >= last_s
        above, last_s = above + (lowest_s > 1.02 * compute_bound_s(model)), lowest_s
    assert above


def test_a_fast_network_proves_nothing_and_a_slow_one_raises_the_bound() -> None:
    """The raised bound of all plans is no less than the one of interfaces."""
    problem = replace(problems.slow_network(), workload=Workload(64, 2048, recompute="none", schedule="1f1b"))
    fast, slow = (PlanPricer(slow_interfaces(problem, factor)) for factor in (1000.0, 0.1))
    assert InterfaceBound(fast, None).seconds(compute_bound_s(fast)) == compute_bound_s(fast)
    interfaces_s = InterfaceBound(slow, None).seconds(compute_bound_s(slow))
    assert interfaces_s > 1.1 * compute_bound_s(slow)
    late_s = min(InterfaceBound(slow, m).seconds(compute_bound_s(slow)) for m in (1, 2, 4, 8, 16, 32, 64))
    assert lower_bound_s(slow, 2.0, clock=lambda: 0.0) >= min(interfaces_s, late_s)  # however busy the machine is
