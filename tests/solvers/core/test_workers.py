"""Other processes of a search end with it."""

import time

import pytest

from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.core.search import Search
from solvers.core.workers import in_parallel
from tests.solvers.problems import loose

_LONG_S = 60.0


def offer_a_plan(search: Search) -> str:
    workload, model = search.problem.workload, search.problem.model
    stage = Stage.of((0,), 0, model.num_layers, "full")
    search.offer(Plan((Pipeline((stage,), workload.global_batch),), ONE_F_ONE_B))
    return "offered"


def compute_in_vain(search: Search) -> None:
    """Until told to stop."""
    until_s = time.monotonic() + _LONG_S
    while time.monotonic() < until_s and not search.stopped:
        search.should_continue()


def test_what_another_process_finds_is_merged() -> None:
    run = Search("t", loose(), Budget(_LONG_S), 0)
    with in_parallel(run, offer_a_plan, offer_a_plan) as answers:
        assert answers() == ["offered", "offered"]
    assert run.plan is not None


def test_nobody_is_waited_for_past_the_time_limit() -> None:
    run = Search("t", loose(), Budget(0.05), 0)
    with in_parallel(run, compute_in_vain) as answers:
        assert answers() == [None]
    assert run.runtime_s < _LONG_S


def test_the_error_of_another_process_is_raised() -> None:
    run = Search("t", loose(), Budget(_LONG_S), 0)

    def fail(_: Search) -> None:
        raise ValueError("no plan of mine")

    with pytest.raises(ValueError, match="no plan of mine"), in_parallel(run, fail) as answers:
        answers()
