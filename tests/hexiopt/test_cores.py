"""Everything plans where the operating system does not say which cores a process may use, as on macOS."""

import os

import pytest

from hexiopt.bounds import lower_bound_s
from hexiopt.cores import usable_cores
from hexiopt.cost.pricer import PlanPricer
from hexiopt.solving import Budget
from solvers.registry import make_solver, names
from tests.slow import slow_but
from tests.solvers.every_solver.contract import LONG_S, first_problem


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


SEVERAL_CORES = names(lambda able: able.cores != 1)


@pytest.mark.parametrize("name", slow_but(SEVERAL_CORES, names()))
def test_plans_without_sched_getaffinity(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By every solver. Those that use a second core do so under a time limit only; the bound is raised on all cores."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    problem = first_problem(name)
    result = make_solver(name).solve(problem, Budget(1.0) if name in SEVERAL_CORES else Budget(LONG_S, 5), seed=0)
    assert result.plan is not None, result.reason
    assert name not in SEVERAL_CORES or lower_bound_s(PlanPricer(problem), 0.5) > 0
