"""The bookkeeping of searches that run side by side."""

from hexiopt.result import Point
from solvers.core.search import Budget, Search
from tests.solvers.problems import loose


def test_woven_trajectories_keep_the_times_of_both_lanes() -> None:
    search = Search("test", loose(), Budget(), 0)
    search.weave([Point(0.1, 1, 9.0), Point(0.4, 5, 6.0), Point(0.9, 8, 3.0)])
    search.weave([Point(0.2, 2, 8.0), Point(0.5, 4, 7.0), Point(0.9, 6, 3.0)])
    assert search.trajectory == (
        Point(0.1, 1, 9.0),
        Point(0.2, 1 + 2, 8.0),
        Point(0.4, 5 + 2, 6.0),
        Point(0.9, 8 + 4, 3.0),  # the other lane's 7.0 came too late, and its equal 3.0 second
    )
