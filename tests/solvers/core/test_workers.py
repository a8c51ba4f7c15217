"""How long other processes of a search may take."""

import time
from functools import partial

import pytest

from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.solving import Budget
from solvers.core import workers
from solvers.core.search import Search
from solvers.core.workers import in_parallel
from tests.solvers.problems import loose

_LIMIT_S = 0.05


def first_plan(own: Search, *, after_s: float, computing: bool) -> None:
    """Offer a plan after so many seconds, unless told to stop."""
    until_s = time.monotonic() + after_s
    while time.monotonic() < until_s:
        if not computing:
            time.sleep(0.05)
        own.should_continue()
        if own.stopped:
            return
    workload, model = own.problem.workload, own.problem.model
    stage = Stage.of((0,), 0, model.num_layers, "full")
    own.offer(Plan((Pipeline((stage,), workload.global_batch),), ONE_F_ONE_B))


def find(monkeypatch: pytest.MonkeyPatch, *, allowed_s: float, after_s: float, computing: bool) -> Search:
    monkeypatch.setattr(workers, "_FIRST_PLAN_S", allowed_s)
    run = Search("t", loose(), Budget(_LIMIT_S), 0)
    with in_parallel(run, partial(first_plan, after_s=after_s, computing=computing)) as answers:
        answers()
    return run


def test_a_first_plan_is_waited_for_by_the_cpu_time_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that other programs keep from computing is not late."""
    run = find(monkeypatch, allowed_s=0.3, after_s=1.5, computing=False)
    assert run.plan is not None
    assert run.runtime_s > 1.5


def test_who_computes_in_vain_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    run = find(monkeypatch, allowed_s=0.3, after_s=60.0, computing=True)
    assert run.plan is None
    assert run.runtime_s < 60.0


def test_past_the_time_limit_nobody_is_waited_for_where_there_is_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_FIRST_PLAN_S", 60.0)
    run = Search("t", loose(), Budget(_LIMIT_S), 0)
    first_plan(run, after_s=0.0, computing=True)
    assert run.plan is not None
    with in_parallel(run, partial(first_plan, after_s=60.0, computing=True)) as answers:
        assert answers() == [None]
    assert run.runtime_s < 60.0
