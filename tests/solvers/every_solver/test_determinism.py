"""The same seed and steps give the same plan: again, in another process, on other cores, whatever the clock does."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from hexiopt.cores import usable_cores
from hexiopt.solving.result import Result
from solvers.core.search import Search
from solvers.registry import names
from tests.conftest import ROOT, STRESS
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.every_solver.contract import (
    FEWER,
    GOOD,
    HEURISTICS,
    LONG_S,
    ONE_OF_A_KIND,
    SMALL_ORACLES,
    allow_layouts,
    first_problem,
    in_turns,
    solve,
)
from tests.timing import within

_FRESH = """
import json, sys
from tests.solvers.every_solver.test_determinism import outcome
print(json.dumps({name: outcome(name) for name in sys.argv[1:]}))
"""


def facts(result: Result) -> list[Any]:
    """What must be the same again."""
    return [repr(result.plan), result.objective, result.bound_s, str(result.status), result.steps]


def facts_of_solver(name: str) -> list[Any]:
    """Of a budget in steps, on a small problem; of heuristics of any problem, also on a real one."""
    small_facts = facts(solve(name, first_problem(name), steps=15, seed=7))
    return small_facts + (facts(solve(name, problems.sixteen_gpus(), steps=15, seed=7)) if name in HEURISTICS else [])


outcome = cache(facts_of_solver)  # on a machine as it is


@pytest.mark.parametrize(
    "solvers", [("portfolio",), pytest.param((*FEWER, *SMALL_ORACLES), marks=pytest.mark.slow)], ids=len
)
def test_another_process_finds_the_same_plans(solvers: tuple[str, ...]) -> None:
    """With another hash seed. The golden plans, which all solvers find again, are of other processes too."""
    ran = subprocess.run(
        [sys.executable, "-c", _FRESH, *solvers],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout) == {name: outcome(name) for name in solvers}


@pytest.mark.parametrize("name", slow_but(("random",), ("random", *GOOD)))
def test_the_seed_matters(name: str) -> None:
    steps = 100 if name == "random" else 400  # rules, which come first, are the same for all
    plans = (solve(name, problems.thirty_two_gpus(), steps=steps, seed=seed).plan for seed in range(5))
    first = next(plans)
    assert any(plan != first for plan in plans)


def test_cores_do_not_change_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problems.thirty_two_gpus()
    ran = []
    for cores in (1, 4):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)), raising=False)
        ran.append(solve("portfolio", problem, steps=60))
    assert ran[0].plan == ran[1].plan
    assert ran[0].cost == ran[1].cost


class Erratic:
    """A clock that often stands still and sometimes leaps, as on a machine that others use too; never to the end."""

    def __init__(self, seed: int) -> None:
        self._rng, self._now_s = random.Random(seed), 0.0

    def __call__(self) -> float:
        if self._rng.random() < 0.1:
            self._now_s += self._rng.random() * (0.99 * LONG_S - self._now_s)
        return self._now_s


@in_turns(0, names())
def test_the_clock_steers_nothing_where_steps_are_limited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the same seed and steps give the same plan again, also within one process."""
    calm = outcome(name)
    monkeypatch.setattr(Search, "clock", staticmethod(Erratic(0)))
    disturbed_facts = facts(solve(name, first_problem(name), steps=15, seed=7))
    assert disturbed_facts == calm[: len(disturbed_facts)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*GOOD, "hexiscale"])
def test_nor_in_longer_searches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = solve(name, problems.sixteen_gpus(), steps=120)
    monkeypatch.setattr(Search, "clock", staticmethod(Erratic(1)))
    erratic = solve(name, problems.sixteen_gpus(), steps=120)
    assert facts(erratic) == facts(calm)


@contextmanager
def other_load() -> Iterator[None]:
    """Twice as many other processes at work as there are cores."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * usable_cores())]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.slow
@pytest.mark.parametrize("name", names() if STRESS else ONE_OF_A_KIND)
def test_nor_does_other_load(name: str) -> None:
    calm = outcome(name)
    with other_load():
        assert facts_of_solver(name) == calm


@in_turns(4)
def test_steps_bind(name: str) -> None:
    """Few steps end long before the time limit; the count is the solver's own."""
    result = within(6.0, lambda: solve(name, allow_layouts(name, problems.easy()), steps=10))
    assert result.steps <= 10
