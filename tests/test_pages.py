"""The code of the pages on how to add a schedule and a baseline does what they say."""

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.simulation.engine import simulate
from hexiopt.solving import Budget
from tests.conftest import ROOT
from tests.solvers import problems
from tests.solvers.baselines import problems as mixed
from tests.solvers.baselines.random_plans import random_plans


def defined(page: str) -> SimpleNamespace:
    """What the first block of Python on a page defines."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    [block] = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": page.removesuffix(".md")}
    exec(compile(block, page, "exec", dont_inherit=True), names)
    return SimpleNamespace(**names)


def test_a_schedule_of_the_page_is_priced_simulated_and_checked() -> None:
    problem = problems.loose()
    layers, devices = problem.model.num_layers, problem.usable_devices
    stages = tuple(Stage.of((d,), s * layers // 2, (s + 1) * layers // 2) for s, d in enumerate(devices[:2]))
    plan = Plan((Pipeline(stages, problem.workload.global_batch),), defined("add_a_schedule.md").Eager())
    cost = PlanPricer(problem).price(plan)
    assert max(event.end_s for event in simulate(plan, cost)) == pytest.approx(cost.pipeline_s, rel=1e-9)
    assert {violation.rule for violation in check(problem, plan)} <= {"schedule"}  # which the workload may fix


def test_a_baseline_of_the_page_is_fair_to_its_space() -> None:
    """Its plan lies in the space, and no random plan of the space beats it, as is asked of every baseline."""
    problem, solver = mixed.slow_network(), defined("add_a_baseline.md").ZeroThree()
    result = solver.solve(problem, Budget(3600.0))
    assert result.plan is not None, result.reason
    assert solver.space.first_violation(problem, result.plan) is None
    drawn = set(random_plans(solver.space, problem, random.Random(1), 500))
    assert len(drawn) >= 10
    pricer = PlanPricer(problem)
    assert result.objective <= 1.02 * min(pricer.price(plan).objective for plan in drawn)
