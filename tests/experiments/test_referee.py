"""No plan of a solver passes to anybody unchecked."""

import csv
import pickle
from pathlib import Path

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.solving import Budget
from hexiopt.solving.referee import InvalidPlanError, referee
from hexiopt.solving.result import Result, Status
from solvers.registry import make_solver
from tests.conftest import Run
from tests.solvers import problems
from tests.solvers.stranger import install

LIARS = '''
from dataclasses import replace
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.solving.result import Result, Status
from hexiopt.solving import Capabilities
from solvers.registry import make_solver


class Short:
    """Places one layer on one device, and is very fast."""

    name = "short"
    capabilities = Capabilities()

    def solve(self, problem, budget, *, seed=0, pricer=None, on_progress=None):
        plan = Plan((Pipeline((Stage.of((0,), 0, 1),), problem.workload.global_batch),))
        cost = PlanPricer(problem).price(plan)
        return Result(self.name, Status.OPTIMAL, seed, 0.1, 1, plan, cost)


class Cheap:
    """States half of what its plan takes."""

    name = "cheap"
    capabilities = Capabilities()

    def solve(self, problem, budget, *, seed=0, pricer=None, on_progress=None):
        found = make_solver("random").solve(problem, budget, seed=seed)
        cost = replace(found.cost, step_time_s=found.cost.step_time_s / 2)
        return replace(found, solver=self.name, status=Status.OPTIMAL, cost=cost)
'''
TINY = ("cluster=small_mixed", "model=tiny", "solver.max_steps=20", "report=false", "hydra.run.dir=out")


@pytest.fixture(autouse=True)
def liars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path / "site", "liars", LIARS, short="Short", cheap="Cheap")


def test_a_plan_that_breaks_a_rule_is_an_error(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("plan", *TINY, "solver=short")
    assert ran.code == 1
    why = "its plan breaks the rule layers: pipeline 0 holds 1 layers, the model has 4"
    assert ran.err == f"hexiopt: solver: short: {why}\n"
    assert ran.out == ""
    assert not list((tmp_path / "out").rglob("*.json"))


def test_compare_marks_it_and_never_ranks_it(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("compare", *TINY, "compare.solvers=[short,random,cheap]")
    assert ran.code == 0, ran.err
    rows = {row["solver"]: row for row in csv.DictReader((tmp_path / "out" / "comparison.csv").open())}
    assert rows["random"]["over_best"] == "0.0"
    for name, rule in (("short", "layers"), ("cheap", "price")):
        assert rows[name]["status"] == "invalid"
        assert rule in rows[name]["reason"]
        assert {rows[name][column] for column in ("step_time_s", "mfu", "over_best", "gap")} == {""}
    assert "invalid: solver: short" in " ".join(ran.out.split())


def test_a_comparison_of_liars_has_no_winner(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("compare", *TINY, "compare.solvers=[short]")
    assert ran.code == 3
    assert "short (invalid)" in ran.err
    assert not (tmp_path / "out" / "comparison.csv").exists()


def test_the_registry_gives_out_no_other_solvers() -> None:
    with pytest.raises(InvalidPlanError, match="solver: short: its plan breaks the rule layers"):
        make_solver("short").solve(problems.easy(), Budget(1.0))


def result_of(plan: Plan, bound_s: float = 0.0) -> Result:
    return Result("x", Status.FEASIBLE, 0, 1.0, 1, plan, PlanPricer(problems.easy()).price(plan), bound_s)


def test_every_rule_is_asked() -> None:
    """Of the plan space, of memory, of the price stated, and of the bound."""
    problem = problems.easy()
    good = Plan((Pipeline((Stage.of((0,), 0, 6),), 16),))
    assert referee(problem, result_of(good), PlanPricer(problem)) == result_of(good)
    short = Plan((Pipeline((Stage.of((0,), 0, 6),), 15),))
    whole = problems.easy(fast_gib=0.5)
    cases = [
        (problem, result_of(short), "batch"),
        (whole, result_of(good), "memory"),
        (problem, result_of(good, bound_s=1e6), "bound"),
    ]
    for asked, result, rule in cases:
        with pytest.raises(InvalidPlanError, match=f"breaks the rule {rule}") as caught:
            referee(asked, result, PlanPricer(asked))
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.result) == (str(caught.value), caught.value.result)
        assert (again.result.status, again.result.plan, again.result.gap) == (Status.INVALID, None, 1.0)
    nothing = Result("x", Status.NOT_FOUND, 0, 1.0, 1, reason="none")
    assert referee(problem, nothing, PlanPricer(problem)) is nothing
