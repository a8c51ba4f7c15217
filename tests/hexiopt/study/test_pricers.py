"""A result has one pricer: nobody who shows, saves or draws it prices the plan again."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

import hexiopt as hx
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import Violation, check
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.solving import Budget, Capabilities, Result, Status
from tests.conftest import Run
from tests.experiments.command_line import QUICK, planned

PROBLEM = hx.Problem(
    hx.Cluster.of({"a100_80gb_sxm": 8}, gpus_per_machine=8), hx.model("tiny"), hx.Workload(global_batch=8, seq_len=256)
)
SHUFFLED = Plan((Pipeline((Stage.of((5, 2), 0, 2), Stage.of((7,), 2, 4)), 8),))  # not in the order of the machine


@dataclass(frozen=True)
class _Ready:
    """A solver whose plan is at hand, so that no search prices it."""

    name: ClassVar[str] = "ready"
    capabilities: ClassVar[Capabilities] = Capabilities()
    result: Result = field(
        default_factory=lambda: Result(
            "ready", Status.FEASIBLE, 0, 0.0, 1, plan=SHUFFLED, cost=PlanPricer(PROBLEM).price(SHUFFLED)
        )
    )

    def solve(self, problem: hx.Problem, budget: Budget, **more: Any) -> Result:
        return self.result


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[int, int]]:
    """Pricers made and plans priced since the last call."""
    made, priced = [0], [0]
    build, price = PlanPricer.__init__, PlanPricer.price

    def counted_build(self: PlanPricer, *args: Any, **more: Any) -> None:
        made[0] += 1
        build(self, *args, **more)

    def counted_price(self: PlanPricer, *args: Any) -> Any:
        priced[0] += 1
        return price(self, *args)

    monkeypatch.setattr(PlanPricer, "__init__", counted_build)
    monkeypatch.setattr(PlanPricer, "price", counted_price)

    def since() -> tuple[int, int]:
        counts = made[0], priced[0]
        made[0] = priced[0] = 0
        return counts

    return since


def test_a_plan_is_priced_by_the_referee_and_once_more_if_its_devices_are_renamed(
    count: Callable[[], tuple[int, int]], tmp_path: Path
) -> None:
    ready = _Ready()
    count()
    solution = hx.solve(PROBLEM, ready)
    assert count() == (1, 2)
    plan = solution.found()
    assert plan.devices() != SHUFFLED.devices()
    solution.above(1e-9)
    texts = str(solution), str(plan.cost.breakdown()), str(plan.stages()), solution._repr_html_()
    assert all(texts)
    plan.save(tmp_path / "plan.json")
    assert hx.price(PROBLEM, plan) == solution.cost == plan.cost
    assert hx.check(PROBLEM, plan) == []
    assert count() == (0, 0)


def test_a_plan_that_is_loaded_is_priced_once(count: Callable[[], tuple[int, int]], tmp_path: Path) -> None:
    hx.PlacedPlan.of(PROBLEM, SHUFFLED).save(tmp_path / "plan.json")
    count()
    plan = hx.load_plan(tmp_path / "plan.json")
    assert hx.price(plan.problem, plan).fits
    assert hx.check(plan.problem, plan) == []
    assert str(plan.cost.breakdown())
    assert count() == (1, 1)


def test_the_rules_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ask(problem: hx.Problem, plan: Plan) -> list[Violation]:
        asked.append(plan)
        return check(problem, plan)

    for name in ("hexiopt.study.price.broken_rules", "hexiopt.cost.cost.check"):
        monkeypatch.setattr(name, ask)
    assert hx.check(PROBLEM, SHUFFLED) == []
    assert len(asked) == 1


def test_a_copy_for_another_problem_has_another_pricer() -> None:
    plan = hx.PlacedPlan.of(PROBLEM, SHUFFLED)
    longer = PROBLEM.replace(workload=PROBLEM.workload.replace(seq_len=512))
    assert plan.replace(problem=longer).cost == hx.price(longer, SHUFFLED) != plan.cost


def test_the_verb_price_makes_one_pricer(hexiopt: Run, tmp_path: Path, count: Callable[[], tuple[int, int]]) -> None:
    path = planned(hexiopt, tmp_path)
    count()
    assert hexiopt("price", f"plan={path}", QUICK[-1]).code == 0
    assert count() == (1, 1)
