"""The loop: the same plan on any number of threads, within its budget, its first plan soon."""

import itertools

import pytest

from hexiopt.errors import InputError
from hexiopt.plan.check import check
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget
from solvers.core.search import Search
from solvers.loop.orders import every_candidate
from solvers.loop.search import Loop
from solvers.loop.settings import LoopSettings
from solvers.portfolio import Portfolio
from tests.slow import slow_but
from tests.solvers.drawn import drawn_problem
from tests.solvers.loop.candidates import check_devices
from tests.solvers.problems import loose


def run_loop(problem: Problem, steps: int, seed: int = 0) -> Search:
    run = Search("loop", problem, Budget(3600.0, steps), seed)
    Portfolio().find(run)
    return run


@pytest.mark.parametrize("number", slow_but((6,), (6, 14)))
def test_any_number_of_threads_gives_the_same(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for cores in (1, 3):
        monkeypatch.setattr("solvers.loop.search.usable_cores", lambda cores=cores: cores)
        runs.append(run_loop(drawn_problem(number), 120))
    counts = [[(c.operator, c.proposed, c.accepted, c.improved) for c in run.operators.counts()] for run in runs]
    assert counts[0] == counts[1]
    assert runs[0].plan == runs[1].plan
    assert [p.step_time_s for p in runs[0].trajectory] == [p.step_time_s for p in runs[1].trajectory]


@pytest.mark.parametrize("steps", [1, 7, 40])
def test_no_more_steps_than_there_are(steps: int) -> None:
    problem = drawn_problem(8)
    run = run_loop(problem, steps)
    assert run.steps <= steps
    assert run.plan is not None
    assert not check(problem, run.plan)


def test_a_first_plan_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a day later."""
    monkeypatch.setattr(Search, "clock", staticmethod(itertools.count(0.0, 86_400.0).__next__))
    run = Search("loop", drawn_problem(10), Budget(1.0), 0)
    Portfolio().find(run)
    assert run.plan is not None


def test_more_steps_never_give_a_worse_plan_than_the_first() -> None:
    run = run_loop(drawn_problem(13), 300)
    times = [point.step_time_s for point in run.trajectory]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_every_order_of_a_few_devices() -> None:
    """Three devices, two of them alike in one machine: 16 candidates, as counted by hand."""
    run = Search("loop", loose(), Budget(3600.0, 10), 0)
    tables = Loop(run, LoopSettings(), run.exact_pricer).tables
    shapes = []
    for state in every_candidate(tables):
        check_devices(tables, state)
        count = int(state.plan[0]["num_pipelines"])
        rows = [state.stages[p, : state.pipelines[p]["num_stages"]] for p in range(count)]
        shapes.append(
            tuple(
                sorted(
                    tuple(zip(r["machine"].tolist(), map(int.bit_count, r["mask"].tolist()), strict=True)) for r in rows
                )
            )
        )
    assert len(shapes) == len(set(shapes))
    b, bb, a = (1, 1), (1, 2), (0, 1)
    alone = {((a,),), ((b,),), ((bb,),), ((b, b),), ((b,), (b,))}
    both = {((a, b),), ((b, a),), ((a,), (b,)), ((a, bb),), ((bb, a),), ((a,), (bb,))}
    three = {((a, b, b),), ((b, a, b),), ((b, b, a),), ((a,), (b,), (b,)), ((a,), (b, b))}
    three |= {((a, b), (b,)), ((b,), (b, a))}
    assert set(shapes) == alone | both | three


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"walks": 0}, "walks"),
        ({"candidates": True}, "candidates"),
        ({"hot": 0.001}, "cold"),
        ({"finish": 1.0}, "finish"),
    ],
)
def test_values_out_of_range(changes: dict[str, float], key: str) -> None:
    with pytest.raises(InputError, match=rf"solver\.{key}: .* is out of range"):
        LoopSettings(**changes)  # type: ignore[arg-type]
