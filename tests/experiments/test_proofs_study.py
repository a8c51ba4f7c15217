"""The problems of the study `proofs`."""

from pathlib import Path

import pytest

from experiments.studies.cases.proofs import GROUPS, ProblemSizes, random_problem
from hexiopt.files.plan_file import read_plan, write_plan
from hexiopt.files.problem_file import problem_sha256
from hexiopt.solving import Budget
from solvers.portfolio import Portfolio


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.label)
def test_plans_of_random_problems_read_back(group: ProblemSizes, tmp_path: Path) -> None:
    problem = random_problem(group, 0)
    solution = Portfolio().solve(problem, Budget(600.0, max_steps=20))
    assert solution.plan is not None
    assert solution.cost is not None
    write_plan(tmp_path / "plan.json", problem, solution.plan, solution.cost, {"name": "portfolio"})
    known = read_plan(tmp_path / "plan.json")
    assert known.plan == solution.plan
    assert problem_sha256(known.problem) == problem_sha256(problem)
