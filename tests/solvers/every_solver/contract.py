"""What every test of the contract of solvers uses: who keeps it, how they run, and what a sound result is.

Rivals may decline what they cannot express; solvers of sequence layouts have the same problems with `space.sequence`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from hexiopt.bounds import lower_bound_s
from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget
from hexiopt.solving.result import Result, Status
from solvers.registry import baseline, for_any_problem, make_solver, names, of_sequences, small_oracle
from tests.conftest import STRESS
from tests.slow import slow_but
from tests.solvers import problems

NAMES, RIVALS, SEQUENCE = map(names, (for_any_problem, baseline, of_sequences))

EVERY = pytest.mark.parametrize("name", NAMES)
KEEPING = (*NAMES, *RIVALS, *SEQUENCE)
# Rivals share the code that listens and keeps time: but for `make stress`, some stand for all.
FEWER = (*NAMES, *(RIVALS if STRESS else ("espresso", "galvatron", "sailor")), *SEQUENCE)

ONE_OF_A_KIND = ("portfolio", "cp_sat", "sailor", "hexiseq")
SOME = pytest.mark.parametrize("name", slow_but(ONE_OF_A_KIND, FEWER))


def in_turns(turn: int, of: Sequence[str] = KEEPING) -> pytest.MarkDecorator:
    """Solvers of `of`: `make test` asks every fifth, each test another fifth of them, `make test-slow` the others."""
    return pytest.mark.parametrize("name", slow_but(of[turn % 5 :: 5], of))


DECLINING = names(lambda able: able.kind == "baseline")
LAYOUTS_ONLY = names(lambda able: able.sequence == "only")
SMALL_ORACLES = names(small_oracle)
HEURISTICS = tuple(name for name in NAMES if name not in names(lambda able: able.kind == "oracle"))
PARTITIONING = names(lambda able: "pymetis" in able.requires)
GOOD = ("local_search", "portfolio")
LONG_S = 3600.0  # a time limit that a budget in steps never meets


def solve(
    name: str,
    problem: Problem,
    *,
    time_limit_s: float = LONG_S,
    steps: int | None = None,
    seed: int = 0,
    **more: Any,
) -> Result:
    return make_solver(name).solve(problem, Budget(time_limit_s, steps), seed=seed, **more)


def allow_layouts(name: str, problem: Problem) -> Problem:
    """The problem, with sequence layouts for the solvers that plan nothing else."""
    if name not in LAYOUTS_ONLY:
        return problem
    return replace(problem, space=replace(problem.space, sequence=True))


def first_problem(name: str) -> Problem:
    """A problem that the solver called `name` takes."""
    return allow_layouts(name, problems.loose() if name in SMALL_ORACLES else problems.easy())


def assert_sound(problem: Problem, result: Result) -> None:
    """A feasible result with a valid plan, a true price and an honest trajectory."""
    assert result.status in (Status.FEASIBLE, Status.OPTIMAL), result.reason
    assert result.plan is not None
    assert result.cost is not None
    priced = PlanPricer(problem).price(result.plan)
    assert violations(problem, result.plan, priced) == []
    assert result.cost == priced
    assert priced.fits
    assert 0.0 < result.bound_s <= priced.step_time_s
    assert result.bound_s >= lower_bound_s(PlanPricer(problem))
    assert result.gap == pytest.approx(1 - result.bound_s / priced.step_time_s)
    bests = [point.step_time_s for point in result.trajectory]
    assert bests == sorted(set(bests), reverse=True)
    assert bests[-1] == priced.step_time_s
    times = [point.runtime_s for point in result.trajectory]
    assert times == sorted(times)
    assert 0.0 <= times[0] <= times[-1] <= result.runtime_s
    assert result.reason == ""


def assert_sound_or_declined(name: str, problem: Problem, result: Result) -> None:
    """Sound; or of a rival, no plan and the reason, where its own plan space has none."""
    if name in DECLINING and result.plan is None:
        assert result.status is Status.NOT_FOUND
        assert result.reason
        assert "\n" not in result.reason
    else:
        assert_sound(problem, result)
