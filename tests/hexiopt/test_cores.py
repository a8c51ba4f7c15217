"""Everything plans where the operating system does not say which cores a process may use, as on macOS."""

import os

import pytest

from hexiopt.bounds import lower_bound_s
from hexiopt.cores import usable_cores
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget
from solvers.registry import make_solver
from tests.solvers import problems


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.parametrize(("name", "problem"), [("portfolio", problems.easy()), ("cp_sat", problems.loose())])
def test_plans_without_sched_getaffinity(monkeypatch: pytest.MonkeyPatch, name: str, problem: Problem) -> None:
    """By the solvers that use a second core, which they do under a time limit only; with a bound on all cores."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    result = make_solver(name).solve(problem, Budget(1.0), seed=0)
    assert result.plan is not None
    assert lower_bound_s(PlanPricer(problem), 0.5) > 0
