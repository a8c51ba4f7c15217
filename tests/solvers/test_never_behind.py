"""The default is within 3 % of the best that any solver finds in four times the work, on random problems of all sizes.

Others are every planner and every baseline that takes the problem, and the default itself where a machine kind or a
freedom is taken away: more machines and freedoms must not hurt. What they found is stored as plans
(`tests/quality/best_of_all.py`), so that no test runs a rival, and none is won or lost by a rival's luck; a plan whose
price has changed is seen here.
"""

import pytest

from hexiopt.files.problem_file import problem_sha256
from hexiopt.solving import Budget
from solvers.registry import make_solver
from tests.quality import best_of_all
from tests.quality.runs import price_s
from tests.quality.worker import NEVER_S
from tests.slow import slow_but
from tests.solvers.drawn import drawn_problem

BEHIND = 1.03
QUICK = (1, 7)
BEST = best_of_all.read()


@pytest.mark.parametrize("number", slow_but(QUICK, [*BEST]))
def test_within_3_percent_of_the_best_of_all(number: int) -> None:
    result = make_solver("portfolio").solve(drawn_problem(number), Budget(NEVER_S, best_of_all.STEPS))
    best = BEST[number]
    assert result.objective <= BEHIND * best.step_time_s, f"behind {best.solver}"


@pytest.mark.parametrize("number", BEST)
def test_the_best_of_all_costs_what_it_did(number: int) -> None:
    """Else `python -m tests.quality.best_of_all`: `--reprice`, or the number, for all solvers to try again."""
    problem, best = drawn_problem(number), BEST[number]
    assert problem_sha256(problem) == best.problem_sha256
    assert price_s(problem, best.plan) == pytest.approx(best.step_time_s, rel=1e-9)
