"""Every solver ends by its time limit, and as a listener says."""

import time
from functools import partial

import pytest

from hexiopt.problem.problem import Problem
from hexiopt.solving import OnProgress, Progress
from solvers.core.search import Search
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.every_solver.contract import (
    FEWER,
    LONG_S,
    RIVALS,
    SOME,
    allow_layouts,
    assert_sound,
    assert_sound_or_declined,
    in_turns,
    solve,
)
from tests.timing import TRIES, within


class Ticking:
    """A clock by which every look is a hundredth of a second after the one before."""

    def __init__(self) -> None:
        self._looks = 0

    def __call__(self) -> float:
        self._looks += 1
        return 0.01 * self._looks


@pytest.fixture
def tick_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "clock", staticmethod(Ticking()))


@in_turns(3)
@pytest.mark.usefixtures("tick_clock")
def test_a_search_ends_soon_after_its_time_limit(name: str) -> None:
    """After some more looks at the clock: those of a search inside others, on the way out."""
    problem = allow_layouts(name, problems.sixteen_gpus())
    result = solve(name, problem, time_limit_s=4.0)
    assert_sound_or_declined(name, problem, result)
    assert result.runtime_s <= 5.0


@pytest.mark.parametrize("name", slow_but(("portfolio",), FEWER))
def test_keeps_the_time_limit(name: str) -> None:
    """And has a plan then; a machine that others use too may leave no time for one at first."""
    problem = allow_layouts(name, problems.thirty_two_gpus())
    for limit_s in (1.0, 4.0, 16.0):
        began = time.perf_counter()
        result = within(max(0.1 * limit_s, 0.5), partial(solve, name, problem, time_limit_s=limit_s), after_s=limit_s)
        assert result.runtime_s <= time.perf_counter() - began
        if result.plan is not None:
            break
    assert_sound(problem, result)


# Who listens.


def long_problem(name: str) -> Problem:
    """A problem on which a solver looks at the clock often enough to tell of its progress; `fsdp` has little to try on
    most, and other rivals look for their first plan long on the largest."""
    if name == "fsdp":
        return problems.eight_kinds()
    return allow_layouts(name, problems.sixteen_gpus() if name in RIVALS else problems.thirty_two_gpus())


@SOME
@pytest.mark.usefixtures("tick_clock")
def test_a_listener_hears_progress(name: str) -> None:
    problem = long_problem(name)
    heard: list[Progress] = []

    def listen(progress: Progress) -> bool:
        heard.append(progress)
        return True

    result = solve(name, problem, time_limit_s=3.0, on_progress=listen)
    assert {progress.solver for progress in heard} == {name}
    assert {progress.time_limit_s for progress in heard} == {3.0}
    for field in ("runtime_s", "steps"):
        values = [getattr(progress, field) for progress in heard]
        assert values == sorted(values)
    bests = [progress.best_s for progress in heard]
    assert bests == sorted(bests, reverse=True)
    assert bests[-1] >= result.objective
    assert all(0.0 < progress.bound_s <= progress.best_s for progress in heard)


@SOME
@pytest.mark.usefixtures("tick_clock")
def test_a_listener_may_stop(name: str) -> None:
    problem = long_problem(name)

    def late_s() -> float:
        stopped: list[tuple[float, float]] = []

        def listen(progress: Progress) -> bool:
            if progress.best_s == float("inf"):
                return True
            stopped.append((time.process_time(), progress.best_s))
            return False

        result = solve(name, problem, time_limit_s=LONG_S, on_progress=listen)
        ended = time.process_time()
        assert len(stopped) == 1
        assert_sound(problem, result)
        assert result.objective <= stopped[0][1]
        return ended - stopped[0][0]

    assert any(late_s() < 0.5 for _ in range(TRIES))


@in_turns(1)
def test_a_listener_may_stop_before_any_plan(name: str) -> None:
    """Then there is none, or the one that came last; never an exception."""
    listen: OnProgress = lambda progress: False  # noqa: E731
    result = within(
        2.0, lambda: solve(name, allow_layouts(name, problems.hopeless()), time_limit_s=5.0, on_progress=listen)
    )
    assert result.plan is None
    assert result.reason
