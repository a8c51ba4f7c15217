"""The bookkeeping of searches that run beside each other."""

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.solving import Budget
from hexiopt.solving.result import Point
from solvers.core.search import Search, SearchOutcome
from tests.solvers.problems import hopeless, loose


def search_with(*points: Point) -> Search:
    search = Search("test", loose(), Budget(), 0)
    search.absorb(SearchOutcome(None, None, 0, None, ()))
    search._merge_trajectory(points)
    return search


def test_merged_trajectories_keep_the_times_of_both_searches() -> None:
    search = search_with(Point(0.1, 1, 9.0), Point(0.4, 5, 6.0), Point(0.9, 8, 3.0))
    search._merge_trajectory([Point(0.2, 2, 8.0), Point(0.5, 4, 7.0), Point(0.9, 6, 3.0)])
    assert search.trajectory == (
        Point(0.1, 1, 9.0),
        Point(0.2, 1 + 2, 8.0),
        Point(0.4, 5 + 2, 6.0),
        Point(0.9, 8 + 4, 3.0),  # the other's 7.0 came too late, and its equal 3.0 second
    )


def test_of_two_plans_that_do_not_fit_the_nearer_one_is_kept() -> None:
    """Whichever of two searches beside each other met it."""
    problem = hopeless()
    model, layers = PlanPricer(problem), problem.model.num_layers
    far, near = (
        Plan((Pipeline(stages, 16, 1),), ONE_F_ONE_B, Sharding(0))
        for stages in (
            (Stage.of((0,), 0, layers),),
            tuple(Stage.of((d,), d * layers // 8, (d + 1) * layers // 8, "full") for d in range(8)),
        )
    )
    for mine, other in ((far, near), (near, far)):
        search, beside = (Search("test", problem, Budget(), 0) for _ in range(2))
        search.offer(mine)
        beside.offer(other)
        search.absorb(beside.outcome())
        assert search.closest_to_fitting == (near, model.price(near))


@pytest.mark.parametrize("limit_s", [-1, 0, float("nan"), float("inf"), "10", True])
def test_a_time_limit_is_a_number_of_seconds_above_0(limit_s: float) -> None:
    with pytest.raises(InputError, match="time_limit_s"):
        Budget(limit_s)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_steps_are_whole_from_1(steps: int) -> None:
    with pytest.raises(InputError, match="max_steps"):
        Budget(1.0, steps)
