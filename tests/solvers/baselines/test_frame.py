"""The frame of rivals, with a rival whose candidates are written down here."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.space import Space
from hexiopt.solving import Budget
from hexiopt.solving.result import Status
from hexiopt.study.jobs import measures_of
from hexiopt.units import GIB
from solvers.baselines._frame import Baseline, BestEstimate, PlanCandidate, SearchLimits, best_first, climb
from solvers.core.search import Search
from solvers.registry import make_solver
from tests.solvers import problems


def on_device(device: int) -> Plan:
    """The whole model and batch on one device of `problems.easy`."""
    return Plan((Pipeline((Stage.of((device,), 0, 6),), 16),))


@dataclass(frozen=True)
class Listed(Baseline):
    """Offers the candidates given to it."""

    listed: tuple[PlanCandidate, ...] = ()

    name = "listed"
    limits = SearchLimits(max_without_improvement=2)

    def candidates(self, run: Search, rng: random.Random) -> Iterator[PlanCandidate]:
        yield from self.listed


SLOW, FAST = on_device(4), on_device(0)
INVALID = Plan((Pipeline((Stage.of((0,), 0, 5),), 16),))


def solve(*listed: PlanCandidate, space: Space = problems.ANY, steps: int | None = None):  # type: ignore[no-untyped-def]
    return Listed(listed).solve(problems.easy(space), Budget(10.0, steps))


def test_the_best_by_our_cost_model_is_the_answer() -> None:
    result = solve(PlanCandidate(1.0, lambda: SLOW), PlanCandidate(2.0, lambda: FAST))
    assert (result.plan, result.steps) == (FAST, 2)
    assert result.cost == PlanPricer(problems.easy()).price(FAST)
    assert [point.steps for point in result.trajectory] == [1, 2]


def test_candidates_come_by_turn_then_by_estimate() -> None:
    for listed in (
        (PlanCandidate(2.0, lambda: FAST), PlanCandidate(1.0, lambda: SLOW)),
        (PlanCandidate(1.0, lambda: FAST, 1), PlanCandidate(2.0, lambda: SLOW)),
    ):
        assert solve(*listed, steps=1).plan == SLOW


def test_what_is_nothing_new_or_not_allowed_is_no_step() -> None:
    result = solve(
        PlanCandidate(1.0, lambda: None),
        PlanCandidate(2.0, lambda: INVALID),
        PlanCandidate(3.0, lambda: SLOW),
        PlanCandidate(4.0, lambda: SLOW),
        PlanCandidate(float("inf"), lambda: FAST),
    )
    assert (result.plan, result.steps) == (SLOW, 1)


def test_pricing_ends_after_plans_that_fit_and_are_no_better() -> None:
    slow = [PlanCandidate(k, lambda d=d: on_device(d)) for k, d in enumerate((4, 5, 6))]
    assert solve(*slow, PlanCandidate(9.0, lambda: FAST)).plan == SLOW
    assert solve(*slow[:2], PlanCandidate(9.0, lambda: FAST)).plan == FAST


def test_a_space_without_such_plans_is_named() -> None:
    result = solve(PlanCandidate(1.0, lambda: SLOW), space=Space(num_stages=2))
    assert result.status is Status.NOT_FOUND
    assert "listed's space" in result.reason
    assert "num_stages=2" in result.reason


def test_the_best_is_replaced_by_better_neighbours() -> None:
    def neighbours() -> Iterator[PlanCandidate]:
        yield PlanCandidate(3.0, lambda: on_device(5))
        yield PlanCandidate(4.0, lambda: FAST)

    assert solve(PlanCandidate(1.0, lambda: SLOW, neighbours=neighbours)).plan == FAST


def test_the_first_alone_is_priced() -> None:
    """By the published estimate, whatever the turn; what is nothing new, forbidden or not published is not counted."""
    listed = (
        PlanCandidate(1.0, lambda: FAST, published=False),
        PlanCandidate(2.0, lambda: INVALID),
        PlanCandidate(4.0, lambda: FAST),
        PlanCandidate(3.0, lambda: SLOW, 1, lambda: iter([PlanCandidate(1.0, lambda: on_device(1))])),
    )
    for k, best in ((1, SLOW), (2, FAST), (10, FAST)):
        result = Listed(listed, top_k=k).solve(problems.easy(problems.ANY), Budget(10.0))
        assert (result.plan, result.steps) == (best, min(k, 2))


def test_a_first_that_does_not_fit_is_told_and_not_repaired() -> None:
    problem = problems.easy(problems.ANY, fast_gib=1.0)
    candidates = [PlanCandidate(1.0, lambda: on_device(0)), PlanCandidate(2.0, lambda: on_device(1))]
    result = Listed(tuple(candidates), top_k=1).solve(problem, Budget(10.0))
    assert (result.status, result.steps) == (Status.NOT_FOUND, 1)
    assert result.closest_to_fitting is not None
    plan, cost = result.closest_to_fitting
    assert (plan, cost) == (on_device(0), PlanPricer(problem).price(plan))
    assert cost.excess_bytes > 0
    told = measures_of(result)
    assert (told["unfit_step_s"], told["lacks_gib"]) == (cost.step_time_s, cost.excess_bytes / GIB)


@pytest.mark.parametrize("k", [0, -1, True, 1.5, "1"])
def test_a_number_of_candidates_is_whole(k: object) -> None:
    with pytest.raises(InputError, match=r"^solver\.top_k: .* is out of range; state a whole number from 1 on"):
        make_solver("amp", top_k=k)


def opened_estimates(limits: SearchLimits, best: BestEstimate) -> list[float]:
    """Estimates met where a skeleton has two candidates: its bound, and ten times that."""
    run = Search("listed", problems.easy(), Budget(10.0), 0)
    skeletons = [(bound, bound) for bound in (1.0, 1.2, 2.0, 3.0)]
    two = lambda bound: [PlanCandidate(bound, lambda: None), PlanCandidate(10 * bound, lambda: None)]  # noqa: E731
    return [candidate.estimate_s for candidate in best_first(run, skeletons, two, limits, best)]


def test_skeletons_are_opened_while_their_bound_is_near_the_best_estimate() -> None:
    assert opened_estimates(SearchLimits(slack=1.5), BestEstimate()) == [1.0, 10.0, 1.2, 12.0]
    assert opened_estimates(SearchLimits(slack=1.5), BestEstimate(0.5)) == []
    assert opened_estimates(SearchLimits(), BestEstimate()) == [1.0, 10.0, 1.2, 12.0, 2.0, 20.0, 3.0, 30.0]


def test_no_skeleton_is_opened_after_too_many_candidates() -> None:
    best = BestEstimate()
    assert opened_estimates(SearchLimits(max_candidates=2), best) == [1.0, 10.0, 1.2, 12.0]
    assert (best.seconds, best.count) == (1.0, 4)


@dataclass(frozen=True)
class LateBaseline(Listed):
    """Offers its candidates when the time limit is long over."""

    def candidates(self, run: Search, rng: random.Random) -> Iterator[PlanCandidate]:
        for candidate in self.listed:
            Search.clock = staticmethod(lambda: 1e6)  # type: ignore[assignment]
            yield candidate


def test_where_steps_are_counted_a_long_enumeration_leaves_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the clock ended the run between enumeration and pricing on a busy machine: no plan at all."""
    listed = (PlanCandidate(2.0, lambda: FAST), PlanCandidate(1.0, lambda: SLOW))
    for steps, plan in ((10, SLOW), (None, None)):
        monkeypatch.setattr(Search, "clock", staticmethod(lambda: 0.0))
        result = LateBaseline(listed).solve(problems.easy(problems.ANY), Budget(10.0, steps))
        assert (result.plan, result.steps) == (plan, int(plan is not None))


@pytest.mark.parametrize(("steps", "visited"), [(100, [1, 2, 3]), (2, [1, 2]), (0, [])])
def test_a_climb_takes_the_first_better_neighbour(steps: int, visited: list[int]) -> None:
    """From place to place of a ridge, two neighbours each; no neighbour is looked at once the steps are spent."""
    heights, looked_at = [0.0, 1.0, 2.0, 5.0, 4.0, 9.0], list[int]()

    def is_better(place: int) -> bool:
        before = visited_or_start[-1]
        looked_at.append(place)
        if heights[place] <= heights[before]:
            return False
        visited_or_start.append(place)
        return True

    visited_or_start = [0]
    places = climb(0, lambda k: (k for k in (k + 1, k - 1) if k >= 0), is_better, lambda: len(looked_at) < steps)
    assert list(places) == visited
    assert len(looked_at) <= steps
