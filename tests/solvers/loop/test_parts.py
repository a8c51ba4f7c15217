"""Large clusters are planned by parts: what a part is, what copies of its plan are worth, and where there are none."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.check import check
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.solving import Budget
from solvers.compiled import tables
from solvers.compiled.plans import state_of
from solvers.loop import parts
from solvers.loop.parts import split_problem, with_copies
from solvers.loop.settings import LoopSettings
from solvers.loop.tempering import Tempering
from solvers.loop.walk import GAIN, WORK
from solvers.portfolio import Portfolio
from tests.models import TINY
from tests.solvers import problems

STEPS = Budget(600.0, max_steps=400)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_PART", 4)


def six_machines(batch: int = 24, **constraints: int) -> Problem:
    """Three fast machines of two devices, and three slow ones."""
    machines = [(f"{gpu[0]}{k}", gpu, 2) for gpu in ("fast", "slow") for k in range(3)]
    return Problem(problems.cluster(*machines), TINY, Workload(batch, 512), Space(**constraints))


def test_parts_have_equal_shares_of_machines_and_of_the_batch() -> None:
    split = split_problem(six_machines(num_pipelines=6))
    assert split is not None
    part, copies = split
    assert part.usable_devices == (0, 1, 6, 7)
    assert copies == [{0: 2, 1: 3, 6: 8, 7: 9}, {0: 4, 1: 5, 6: 10, 7: 11}]
    assert (part.workload.global_batch, part.space.num_pipelines) == (8, 2)


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (six_machines(batch=25), "the batch has no divisor"),
        (six_machines(num_pipelines=5), "nor have the pipelines"),
        (problems.loose(), "three devices are less than two parts"),
        (
            Problem(problems.cluster(*[(f"m{k}", "fast", k) for k in range(1, 6)]), TINY, Workload(24, 512)),
            "no machine is like another",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_some_clusters_have_none(problem: Problem, why: str) -> None:
    assert split_problem(problem) is None, why


def test_copies_fit_and_take_as_long_but_for_gradient_sync() -> None:
    """Devices that hold a parameter are more, so each keeps less of its states."""
    problem = six_machines()
    split = split_problem(problem)
    assert split is not None
    part, copies = split
    line = Pipeline((Stage.of((0, 1), 0, 3), Stage.of((6, 7), 3, TINY.num_layers)), 8)
    for sharding in (Sharding(1), Sharding(1, ((0, 1), (6, 7)))):
        plan = Plan((line,), sharding=sharding)
        whole = with_copies(plan, copies)
        assert check(problem, whole) == check(part, plan)
        alone, together = PlanPricer(part).price(plan), PlanPricer(problem).price(whole)
        assert together.pipeline_s == pytest.approx(alone.pipeline_s)
        assert max(together.excess_bytes, 0) <= max(alone.excess_bytes, 0)
        assert len(whole.devices()) == 12
        if sharding.groups != "all":
            assert whole.sharding.groups == ((0, 1), (6, 7), (2, 3), (8, 9), (4, 5), (10, 11))


@pytest.mark.parametrize("room", [tables.MOST_PIPELINES, 2])
def test_a_search_begins_at_copies(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the arrays have no room for so many pipelines; the same steps give the same plan."""
    problem, copies = six_machines(), list[Plan]()
    monkeypatch.setattr(tables, "MOST_PIPELINES", room)

    def note(*given: Any) -> Plan:
        copies.append(with_copies(*given))
        return copies[-1]

    monkeypatch.setattr(parts, "with_copies", note)
    first, again = (Portfolio().solve(problem, STEPS, seed=1) for _ in range(2))
    assert copies
    assert first.plan == again.plan is not None
    assert first.steps <= 400
    assert first.cost is not None
    assert first.cost.step_time_s <= PlanPricer(problem).price(copies[-1]).step_time_s * (1 + 1e-9)


def test_a_known_plan_is_gone_on_from_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = six_machines()
    start = Portfolio().solve(problem, STEPS, seed=0).plan
    monkeypatch.setattr(parts, "split_problem", lambda _: pytest.fail("was split"))
    assert Portfolio().solve(problem, STEPS, seed=0, start=start).plan is not None


def test_moves_keep_their_odds_where_the_last_gain_was_long_ago() -> None:
    """What moves yielded is forgotten by and by; in the end its ratios are lost in rounding."""
    problem = six_machines()
    arrays = tables.tables_of(PlanPricer(problem))
    tempering = Tempering(arrays, None, replace(LoopSettings(), walks=2), 0, 1)
    line = Pipeline((Stage.of((0, 1), 0, TINY.num_layers),), 24)
    for each in tempering.walks:
        each.begin_at(state_of(arrays, Plan((line,)), problem.cluster), 1.0)
        each.kit.yields[0] = [1e-3, 50.0]
        each.kit.yields[1:, WORK] = 50.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tempering._learn()
        learned = tempering.walks[0].kit.odds.copy()
        tempering._yields[:, GAIN] *= 1e-320
        for _ in range(40):
            tempering._learn()
    odds = tempering.walks[0].kit.odds
    assert np.isfinite(odds).all()
    np.testing.assert_allclose(odds, learned, rtol=1e-9)
