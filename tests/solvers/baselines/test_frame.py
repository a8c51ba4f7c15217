"""The frame of rivals, with a rival whose candidates are written down here."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from hexiopt.cost.model import CostModel
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.result import Status
from hexiopt.solving import Budget
from solvers.baselines import frame as base
from solvers.baselines.frame import Candidate, Rival
from solvers.core.search import Search
from tests.solvers import problems


def on_device(device: int) -> Plan:
    """The whole model and batch on one device of `problems.easy`."""
    return Plan((Pipeline((Stage.of((device,), 0, 6),), 16),))


@dataclass(frozen=True)
class Listed(Rival):
    """Offers the candidates given to it."""

    listed: tuple[Candidate, ...] = ()

    name = "listed"

    def candidates(self, search: Search, rng: random.Random) -> Iterator[Candidate]:
        yield from self.listed

    def in_space(self, problem: Problem, plan: Plan) -> str | None:
        return None

    def draw(self, problem: Problem, rng: random.Random) -> Plan | None:
        return None


SLOW, FAST = on_device(4), on_device(0)
INVALID = Plan((Pipeline((Stage.of((0,), 0, 5),), 16),))


def solved(*listed: Candidate, space: Space = problems.ANY, steps: int | None = None):  # type: ignore[no-untyped-def]
    return Listed(listed).solve(problems.easy(space), Budget(10.0, steps))


def test_the_best_by_our_cost_model_is_the_answer() -> None:
    result = solved(Candidate(1.0, lambda: SLOW), Candidate(2.0, lambda: FAST))
    assert (result.plan, result.steps) == (FAST, 2)
    assert result.cost == CostModel(problems.easy()).price(FAST)
    assert [point.steps for point in result.trajectory] == [1, 2]


def test_candidates_come_by_turn_then_by_estimate() -> None:
    for listed in (
        (Candidate(2.0, lambda: FAST), Candidate(1.0, lambda: SLOW)),
        (Candidate(1.0, lambda: FAST, 1), Candidate(2.0, lambda: SLOW)),
    ):
        assert solved(*listed, steps=1).plan == SLOW


def test_what_is_nothing_new_or_not_allowed_is_no_step() -> None:
    result = solved(
        Candidate(1.0, lambda: None),
        Candidate(2.0, lambda: INVALID),
        Candidate(3.0, lambda: SLOW),
        Candidate(4.0, lambda: SLOW),
        Candidate(float("inf"), lambda: FAST),
    )
    assert (result.plan, result.steps) == (SLOW, 1)


def test_patience_ends_with_plans_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_PATIENCE", 2)
    slow = [Candidate(k, lambda d=d: on_device(d)) for k, d in enumerate((4, 5, 6))]
    assert solved(*slow, Candidate(9.0, lambda: FAST)).plan == SLOW
    assert solved(*slow[:2], Candidate(9.0, lambda: FAST)).plan == FAST


def test_a_space_without_such_plans_is_named() -> None:
    result = solved(Candidate(1.0, lambda: SLOW), space=Space(num_stages=2))
    assert result.status is Status.NOT_FOUND
    assert "listed's space" in result.reason
    assert "num_stages=2" in result.reason
