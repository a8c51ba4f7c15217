"""What holds for every rival: its answer is in its space, and neither a random plan of that space nor another rival's
answer that lies in it beats it."""

import random
from functools import cache

import pytest

from hexiopt.cost.cost import violations
from hexiopt.cost.model import CostModel
from hexiopt.errors import InputError
from hexiopt.plan.check import check
from hexiopt.result import Result
from solvers.baselines.frame import Rival
from solvers.core.search import Budget
from solvers.registry import RIVALS, make_solver
from tests.conftest import STRESS
from tests.solvers.baselines import problems

# FlashFlex partitions heuristically: what its search misses of its space is its own limit.
SEARCH_ALL = tuple(name for name in RIVALS if name != "flashflex")

DRAWS = 250  # on each problem
TOLERANCE = 0.02

EVERY = pytest.mark.parametrize("name", RIVALS)
MIXED = pytest.mark.parametrize("kind", problems.MIXED if STRESS else list(problems.MIXED)[::3])


def rival(name: str) -> Rival:
    if name == "flashflex":
        pytest.importorskip("pymetis")
    made = make_solver(name)
    assert isinstance(made, Rival)
    return made


@cache
def answer(name: str, kind: str) -> Result:
    return rival(name).solve(problems.MIXED[kind](), Budget(120.0))


@EVERY
@MIXED
def test_the_answer_is_in_its_space(name: str, kind: str) -> None:
    problem, result = problems.MIXED[kind](), answer(name, kind)
    assert result.plan is not None, result.reason
    assert violations(problem, result.plan, result.cost) == []
    assert rival(name).in_space(problem, result.plan) is None


@EVERY
@MIXED
def test_no_random_plan_of_its_space_beats_it(name: str, kind: str) -> None:
    """Every draw is a valid plan of the space, and there are some that fit."""
    problem, own, rng = problems.MIXED[kind](), rival(name), random.Random(1)
    model = CostModel(problem)
    steps_s = []
    for _ in range(DRAWS):
        plan = own.draw(problem, rng)
        if plan is None:
            continue
        assert check(problem, plan) == []
        assert own.in_space(problem, plan) is None
        steps_s.append(model.price(plan).objective)
    assert len(steps_s) >= DRAWS / 10
    assert min(steps_s) < float("inf")
    assert answer(name, kind).objective <= (1 + TOLERANCE) * min(steps_s)


@pytest.mark.parametrize("name", SEARCH_ALL)
@MIXED
def test_no_other_answer_in_its_space_beats_it(name: str, kind: str) -> None:
    pytest.importorskip("pymetis")
    problem, own = problems.MIXED[kind](), answer(name, kind)
    for other in RIVALS:
        theirs = answer(other, kind)
        if theirs.plan is not None and rival(name).in_space(problem, theirs.plan) is None:
            assert own.objective <= (1 + TOLERANCE) * theirs.objective, other


def test_options_are_those_of_the_rival() -> None:
    assert make_solver("flashflex", defects="as_released") != make_solver("flashflex")
    with pytest.raises(InputError, match=r"solver\.defects: megatron does not take it; it has no options"):
        make_solver("megatron", defects="as_released")
    with pytest.raises(InputError, match=r"solver\.defects: 'as_relased' is not known; did you mean as_released"):
        make_solver("flashflex", defects="as_relased")
