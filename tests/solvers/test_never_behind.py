"""The default is behind no member, no baseline and no sub-problem, on 200 random problems: small, middle and large.

Its members have as many steps each as what it is compared with: under a time limit they would run side by side. What is
left of a tolerance is the luck of two searches in so few steps: members take turns that the exchange of plans changes,
and a wider space draws other random numbers. The first problems have steps for a fraction of a second; the others, that
only `make stress` runs, for a few seconds.
"""

from collections.abc import Mapping

import pytest

from hexiopt.errors import InputError
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget
from solvers.registry import baseline, make_solver, names
from tests.conftest import STRESS
from tests.slow import slow_but
from tests.solvers.drawn import drawn_problem, sub_problem

MEMBERS = 2
LUCK = 1.01
OURS = ("columns", "random", "hexiscale", "local_search")
QUICK, SLOW = (0, 1, 3), range(30)
# GPUs, and what is ahead by how much with seed 0; most is its luck, as other seeds of both show.
OPEN = {
    42: "12, hexiscale by 2.4 %, which with two other seeds is behind by 8 and 36 %",
    147: "32, local_search by 1.2 %, which with two other seeds is level",
    152: "63, columns by 1.3 %, with two other seeds by 1.2 %",
}
NARROWER = {
    64: "225, leaving a kind of machines out by 2.5 %, with two other seeds level",
    96: "7, one layer range a stage by 1.1 %; either finds the better plan in 4,000 steps",
    137: "112, one recomputation for all stages by 2.7 %, with two other seeds level and by 0.6 %",
    185: "128, one recomputation for all stages by 1.6 %; either finds both plans, with other seeds",
}


def steps_of(number: int) -> int:
    """Of each of those compared."""
    return 100 if number in SLOW else 500


def numbered(known: Mapping[int, str]) -> pytest.MarkDecorator:
    """Problems by number; those of `known` must fail, so that whoever mends them hears of it."""
    asked = range(200) if STRESS else SLOW
    cases = slow_but(QUICK, [number for number in asked if number not in known])
    marks = [
        (n, (pytest.mark.slow, pytest.mark.xfail(reason=why, strict=True))) for n, why in known.items() if n in asked
    ]
    return pytest.mark.parametrize("number", [*cases, *(pytest.param(n, marks=own) for n, own in marks)])


def found_s(solver: str, problem: Problem, steps: int) -> float:
    """Step time of its plan; infinite without one, and where it refuses the problem."""
    try:
        return make_solver(solver).solve(problem, Budget(3600.0, steps)).objective
    except InputError:
        return float("inf")


@numbered(OPEN)
def test_not_behind_a_member_or_a_baseline(number: int) -> None:
    problem, baselines = drawn_problem(number), names(baseline)
    rivals, steps = (OURS[number % len(OURS)], baselines[number % len(baselines)]), steps_of(number)
    least_s = min(found_s(rival, problem, steps) for rival in rivals)
    assert found_s("portfolio", problem, MEMBERS * steps) <= LUCK * least_s


@numbered(NARROWER)
def test_more_machines_and_freedoms_do_not_hurt(number: int) -> None:
    problem = drawn_problem(number)
    narrower = sub_problem(problem, number)
    steps = MEMBERS * steps_of(number)
    assert found_s("portfolio", problem, steps) <= LUCK * found_s("portfolio", narrower, steps)
