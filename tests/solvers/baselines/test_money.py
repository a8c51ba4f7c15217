"""Money: the cheapest plan within the deadline, and what is asked of prices and options."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.plan import Plan
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.solving import Budget
from hexiopt.solving.result import Result, Status
from solvers.baselines._money import Objective, prices_per_s
from solvers.registry import make_solver
from tests.slow import slow_but
from tests.solvers import problems as small
from tests.solvers.baselines.published_spaces import SPACES
from tests.solvers.baselines.random_plans import random_plans

EACH = pytest.mark.parametrize("name", ["espresso", "sailor"])
PRICES = {"a": 8.0, "b": 8.0, "c": 2.0}  # an hour of two fast, two fast, four slow GPUs


def money(prices: tuple[float, ...], plan: Plan, step_s: float) -> float:
    """Money for a step of a plan, by the objective that ranks plans."""
    return Objective(prices).of(plan.devices(), step_s)


def with_prices(cluster: Cluster) -> Cluster:
    return replace(cluster, machines=tuple(replace(m, price_per_hour=PRICES[m.name]) for m in cluster.machines))


def problem() -> Problem:
    easy = small.easy()
    return replace(easy, cluster=with_prices(easy.cluster), workload=Workload(global_batch=32, seq_len=2048))


def test_a_device_costs_its_share_of_the_machine() -> None:
    priced_problem = problem()
    prices = prices_per_s(priced_problem)
    assert prices == pytest.approx([4 / 3600] * 4 + [0.5 / 3600] * 4)
    plan = fastest("sailor").plan
    assert plan is not None
    assert money(prices, plan, 2.0) == pytest.approx(2 * sum(prices[d] for d in plan.devices()))


@cache
def fastest(name: str) -> Result:
    return make_solver(name).solve(problem(), Budget(3600.0))


@pytest.mark.parametrize("name", slow_but(("espresso",), ("espresso", "sailor")))
def test_money_buys_time(name: str) -> None:
    """The later the deadline, the cheaper; without one the slow GPUs, of more FLOPS for the money."""
    priced_problem = problem()
    prices = prices_per_s(priced_problem)
    plan, best_s = fastest(name).plan, fastest(name).objective
    assert plan is not None
    spent = [money(prices, plan, best_s)]
    for deadline_s in (1.05 * best_s, 2 * best_s, 4 * best_s, None):
        result = make_solver(name, objective="money", deadline_s=deadline_s).solve(priced_problem, Budget(3600.0))
        assert result.plan is not None, result.reason
        assert violations(priced_problem, result.plan, result.cost) == []
        assert SPACES[name].first_violation(priced_problem, result.plan) is None
        assert deadline_s is None or result.objective <= deadline_s
        spent.append(money(prices, result.plan, result.objective))
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(spent))
    assert spent[-1] < 0.5 * spent[0]
    assert set(result.plan.devices()) <= {4, 5, 6, 7}


@pytest.mark.parametrize("name", slow_but(("sailor",), ("espresso", "sailor")))
def test_no_random_plan_in_time_is_cheaper(name: str) -> None:
    priced_problem = problem()
    prices, model = prices_per_s(priced_problem), PlanPricer(priced_problem)
    deadline_s = 2 * fastest(name).objective
    best = make_solver(name, objective="money", deadline_s=deadline_s).solve(priced_problem, Budget(3600.0))
    assert best.plan is not None
    in_time = 0
    for plan in random_plans(SPACES[name], priced_problem, random.Random(1), 2000):
        step_s = model.price(plan).objective
        if step_s <= deadline_s:
            in_time += 1
            assert money(prices, best.plan, best.objective) <= 1.02 * money(prices, plan, step_s)
    assert in_time > 20


@EACH
def test_a_deadline_that_nothing_meets(name: str) -> None:
    result = make_solver(name, objective="money", deadline_s=1e-6).solve(problem(), Budget(5.0))
    assert result.status is Status.NOT_FOUND
    assert result.plan is None
    assert f"no plan of {name}'s space is estimated to take at most solver.deadline_s=1e-06" in result.reason


@EACH
def test_a_deadline_that_is_just_missed(name: str) -> None:
    """The reason says what was reached."""
    fastest_s = fastest(name).objective
    result = make_solver(name, objective="money", deadline_s=0.95 * fastest_s).solve(problem(), Budget(3600.0))
    assert result.plan is None
    assert f"{fastest_s:.4g} s" in result.reason


@EACH
def test_bad_options(name: str) -> None:
    with pytest.raises(InputError, match="price_per_hour"):
        make_solver(name, objective="money").solve(small.easy(), Budget(1.0))
    with pytest.raises(InputError, match=r"solver\.objective: 'cost' is not known; choose time or money"):
        make_solver(name, objective="cost")
    with pytest.raises(InputError, match=r"solver\.deadline_s: belongs to solver\.objective=money"):
        make_solver(name, deadline_s=1.0)
    with pytest.raises(InputError, match=r"solver\.deadline_s: -1"):
        make_solver(name, objective="money", deadline_s=-1.0)


def test_the_objective() -> None:
    free, paid = Objective(), Objective((3.0, 1.0, 2.0), 10.0)
    assert free.of((0, 1), 7.0) == free.lower_bound(2, 7.0) == 7.0
    assert paid.of((0, 2), 2.0) == 10.0
    assert paid.lower_bound(2, 2.0) == 6.0  # the two cheapest
    assert paid.of((1,), 13.0) == paid.lower_bound(1, 13.0) == float("inf")


@EACH
def test_deterministic(name: str) -> None:
    made = [make_solver(name, objective="money").solve(problem(), Budget(3600.0, 50)) for _ in range(2)]
    assert made[0].plan == made[1].plan
    assert made[0].steps <= 50
