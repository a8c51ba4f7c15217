"""Where nothing fits, a package is missing or a space is not allowed, every solver says so in a line."""

import re
import sys

import pytest

from hexiopt.errors import InputError
from hexiopt.solving import Budget
from hexiopt.solving.result import Status
from solvers.registry import make_solver
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.every_solver.contract import (
    LONG_S,
    NAMES,
    PARTITIONING,
    RIVALS,
    SEQUENCE,
    allow_layouts,
    assert_sound,
    in_turns,
    solve,
)


@in_turns(2)
@pytest.mark.parametrize("kind", slow_but(("model", "constraint"), problems.INFEASIBLE))
def test_an_infeasible_problem_has_a_reason(name: str, kind: str) -> None:
    problem, solver = allow_layouts(name, problems.INFEASIBLE[kind]()), make_solver(name)
    result = solver.solve(problem, Budget(LONG_S, 30))
    assert result.status in (Status.INFEASIBLE, Status.NOT_FOUND)
    assert kind == "constraint" or result.status is Status.INFEASIBLE
    assert (result.plan, result.cost, result.trajectory) == (None, None, ())
    assert (result.objective, result.gap) == (float("inf"), 1.0)
    assert result.reason.strip()
    assert "\n" not in result.reason
    assert re.search(r"\b[abc]:\d\b", result.reason), result.reason
    assert re.search(r"\d GiB", result.reason), result.reason


# What is not installed.


@pytest.mark.parametrize("name", PARTITIONING)
def test_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(InputError) as caught:
        solve(name, problems.easy(), steps=10)
    assert f"solver: {name}" in str(caught.value)
    assert "pymetis" in str(caught.value)
    assert "pip install" in str(caught.value)


@in_turns(1, [name for name in (*NAMES, *RIVALS) if name not in PARTITIONING])
def test_other_solvers_work_without_metis(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    problem = problems.easy()
    assert_sound(problem, solve(name, problem, steps=10))


@pytest.mark.parametrize("name", SEQUENCE)
def test_sequence_layouts_must_be_allowed(name: str) -> None:
    with pytest.raises(InputError) as caught:
        solve(name, problems.easy(), steps=1)
    assert name in str(caught.value)
    assert "space.sequence=true" in str(caught.value)


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean portfolio"):
        make_solver("portfolo")
