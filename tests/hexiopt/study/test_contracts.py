"""The contract of strangers' solvers and cost models: the good pass, and every fault is named."""

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hexiopt.cost.cost import Cost
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget, Capabilities, OnProgress
from hexiopt.solving.result import Point, Result, Status
from hexiopt.testing import check_pricer, check_solver, problems
from solvers.heuristics.random_partition import RandomPartition
from tests.slow import slow_but


class Stranger:
    """Random plans of any solver, spoilt."""

    name = "stranger"
    capabilities = Capabilities()

    def __init__(self, spoil: Callable[[Result], Result] = lambda result: result) -> None:
        self.spoil = spoil

    def solve(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int = 0,
        pricer: Any = None,
        on_progress: OnProgress | None = None,
    ) -> Result:
        result = RandomPartition().solve(problem, budget, seed=seed, on_progress=on_progress)
        return self.spoil(result) if result.plan is not None else result


def half_price(result: Result) -> Result:
    assert result.cost is not None
    return replace(result, cost=replace(result.cost, step_time_s=result.cost.step_time_s / 2))


def worse_later(result: Result) -> Result:
    return replace(result, trajectory=(*result.trajectory, Point(result.runtime_s, result.steps, 1e9)))


COUNTED = itertools.cycle(range(4))  # never the same twice in a row

FAULTS: dict[str, tuple[Callable[[Result], Result], str]] = {
    "a false price": (half_price, "valid and truly priced: on the problem with .* it states a step of"),
    "a bound too high": (lambda result: replace(result, bound_s=1e9), "it states a lower bound of 1e.09 s"),
    "a dishonest trajectory": (worse_later, "the trajectory gets worse"),
    "luck": (lambda result: replace(result, steps=next(COUNTED)), "the same seed and steps give the same plan:"),
    "steps uncounted": (lambda result: replace(result, steps=1000), "keeps to them: 1000 steps of 5"),
    "a crash": (lambda result: 1 / 0, "unexpected ZeroDivisionError: division by zero"),  # type: ignore[return-value]
    "a reason beside a plan": (lambda result: replace(result, reason="tired"), "and yet a reason"),
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked to keep a time limit takes all of it."""
    monkeypatch.setattr("hexiopt.testing.SHORT_S", 0.3)


def test_a_good_one_passes() -> None:
    judged = check_solver(Stranger())  # type: ignore[arg-type]
    assert len(judged) == 6
    assert judged["checked"][0] == f"{len(problems())} of {len(problems())} problems, 0 declined"


@pytest.mark.parametrize("fault", slow_but(("a false price", "luck", "steps uncounted"), FAULTS))
def test_a_fault_is_named(fault: str) -> None:
    spoil, message = FAULTS[fault]
    with pytest.raises(AssertionError, match=r"^solver stranger breaks \d of 6 rules\n- ") as caught:
        check_solver(Stranger(spoil))  # type: ignore[arg-type]
    assert re.search(message, str(caught.value)), caught.value


class Silent(Stranger):
    """Says nothing where there is no plan."""

    def solve(self, problem: Problem, budget: Budget, **how: Any) -> Result:
        result = super().solve(problem, budget, **how)
        return replace(result, status=Status.NOT_FOUND, reason="") if result.plan is None else result


def test_silence_is_a_fault() -> None:
    with pytest.raises(AssertionError, match="no plan, and no reason"):
        check_solver(Silent())  # type: ignore[arg-type]


class Mine:
    """Our own prices, spoilt."""

    spoilt = "nothing"

    def __init__(self, problem: Problem) -> None:
        self._ours = PlanPricer(problem)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ours, name)

    def price(self, plan: Plan, pipelines: Any = None) -> Cost:
        cost = self._ours.price(plan, pipelines)
        return replace(cost, step_time_s=random.random() + 1.0) if self.spoilt == "price" else cost

    def stage_s(self, site: Any, num_layers: int, *how: Any) -> tuple[float, float]:
        return self._ours.stage_s(site, 1 if self.spoilt == "stages" else num_layers, *how)

    def max_layers(self, *how: Any) -> int:
        most = self._ours.max_layers(*how)
        return -most if self.spoilt == "memory" else most


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [("price", "gives another|is another"), ("stages", "for 1, 2 and 4 layers"), ("memory", "at most .* layers at")],
)
def test_a_cost_model_is_judged_too(spoilt: str, message: str) -> None:
    assert len(check_pricer(Mine)) == 4  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match=r"^pricer Spoilt breaks [12] of 4 rules\n- ") as caught:
        check_pricer(type("Spoilt", (Mine,), {"spoilt": spoilt}))
    assert re.search(message, str(caught.value)), caught.value
