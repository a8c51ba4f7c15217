"""The portfolio proves its plans of small problems."""

from dataclasses import replace

import pytest

from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.solving import Budget
from hexiopt.solving.result import Status
from solvers.core.search import Search
from solvers.portfolio import Portfolio
from solvers.proof.gaps import num_usages, share_for_proof
from tests.solvers.proof.problems import random_problem

STEPS = Budget(600.0, max_steps=1_500)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return random_problem(3)


def test_a_small_problem_is_proved_by_default(problem: Problem) -> None:
    result = Portfolio().solve(problem, STEPS)
    assert result.status is Status.OPTIMAL
    assert result.bound_s <= result.objective


def test_the_same_steps_prove_the_same_on_any_cores(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for cores in (1, 2, 4):
        monkeypatch.setattr("solvers.core.workers.usable_cores", lambda cores=cores: cores)
        results.append(Portfolio().solve(problem, STEPS, seed=2))
    assert len({(result.plan, result.bound_s, result.steps) for result in results}) == 1


def test_the_proof_never_makes_the_plan_worse(problem: Problem) -> None:
    alone = Search("portfolio", problem, STEPS.part(1 - share_for_proof(Search("x", problem, STEPS, 0))), 0)
    Portfolio().find(alone)
    assert Portfolio().solve(problem, STEPS).objective <= alone.best_s


@pytest.mark.slow
def test_a_gap_ends_the_proof() -> None:
    """Of a problem that packings alone do not prove."""
    rough, whole = (Portfolio(gap).solve(random_problem(9), STEPS) for gap in (0.05, 0.0))
    assert rough.gap <= 0.05 * (1 + 1e-9)
    assert rough.steps < whole.steps


def test_what_the_proof_leaves_out_is_said(problem: Problem) -> None:
    """Where the best plan may be outside what the proof covers, it has a smaller share."""
    more = Budget(600.0, max_steps=3000)
    result = Portfolio().solve(replace(problem, space=Space(max_micro_batch_size=2)), more)
    assert result.restricted_bound is not None
    assert result.restricted_bound.space == "plans without replicated stages (space.replicas=false)"
    assert result.restricted_gap <= 1e-6


def test_budgets_and_problems_too_small_or_large_for_a_proof(problem: Problem) -> None:
    assert share_for_proof(Search("x", problem, STEPS, 0)) > 0.0
    assert share_for_proof(Search("x", problem, Budget(600.0, max_steps=200), 0)) == 0.0
    machines = tuple(
        replace(m, name=f"{m.name}_{k}", spec_name=f"{m.spec_name}_{k}")
        for m in problem.cluster.machines
        for k in range(5)
    )
    large = replace(problem, cluster=replace(problem.cluster, machines=machines))
    assert num_usages(large) > 150
    assert share_for_proof(Search("x", large, STEPS, 0)) == 0.0
