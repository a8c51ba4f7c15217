"""The contract that every solver keeps, run on each of them; rivals may decline what they cannot express.

Solvers of sequence layouts have the same problems with `space.sequence`."""

import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from hexiopt.bounds import lower_bound_s
from hexiopt.cost.cost import violations
from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.plan.check import check
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import SWITCHES, Space
from hexiopt.problem.workload import Workload
from hexiopt.result import Result, Status
from hexiopt.schedules.registry import schedule_named
from hexiopt.solving import Budget, OnProgress, Progress
from solvers.core.search import Search
from solvers.registry import baseline, for_any_problem, make_solver, names, of_sequences
from tests.conftest import ROOT, STRESS
from tests.slow import slow_but
from tests.solvers import oracle, problems
from tests.timing import TRIES, within

NAMES, RIVALS, SEQUENCE = map(names, (for_any_problem, baseline, of_sequences))

EVERY = pytest.mark.parametrize("name", NAMES)
RIVALS_TOO = pytest.mark.parametrize("name", [*NAMES, *RIVALS])
ALL = pytest.mark.parametrize("name", [*NAMES, *RIVALS, *SEQUENCE])
# Rivals share the code that listens and keeps time: but for `make stress`, some stand for all.
FEWER = (*NAMES, *(RIVALS if STRESS else RIVALS[1::3]), *SEQUENCE)
ONE_OF_A_KIND = ("portfolio", "cp_sat", "sailor", "hexiseq")
SOME = pytest.mark.parametrize("name", slow_but(ONE_OF_A_KIND, FEWER))
DECLINING = names(lambda able: able.kind == "baseline")
PARTITIONING = names(lambda able: "pymetis" in able.requires)
GOOD = ("local_search", "portfolio")
LONG_S = 3600.0  # a time limit that a budget in steps never meets


def solve(
    name: str,
    problem: Problem,
    *,
    time_limit_s: float = LONG_S,
    steps: int | None = None,
    seed: int = 0,
    **more: Any,
) -> Result:
    return make_solver(name).solve(problem, Budget(time_limit_s, steps), seed=seed, **more)


def allowed(name: str, problem: Problem) -> Problem:
    """The problem, with sequence layouts for the solvers that plan them."""
    if name not in SEQUENCE:
        return problem
    return replace(problem, space=replace(problem.space, sequence=True))


def assert_sound(problem: Problem, result: Result) -> None:
    """A feasible result with a valid plan, a true price and an honest trajectory."""
    assert result.status in (Status.FEASIBLE, Status.OPTIMAL), result.reason
    assert result.plan is not None
    assert result.cost is not None
    priced = PlanPricer(problem).price(result.plan)
    assert violations(problem, result.plan, priced) == []
    assert result.cost == priced
    assert priced.fits
    assert 0.0 < result.bound_s <= priced.step_time_s
    assert result.bound_s >= lower_bound_s(PlanPricer(problem))
    assert result.gap == pytest.approx(1 - result.bound_s / priced.step_time_s)
    bests = [point.step_time_s for point in result.trajectory]
    assert bests == sorted(set(bests), reverse=True)
    assert bests[-1] == priced.step_time_s
    times = [point.runtime_s for point in result.trajectory]
    assert times == sorted(times)
    assert 0.0 <= times[0] <= times[-1] <= result.runtime_s
    assert result.reason == ""


def assert_sound_or_declined(name: str, problem: Problem, result: Result) -> None:
    """Sound; or of a rival, no plan and the reason, where its own plan space has none."""
    if name in DECLINING and result.plan is None:
        assert result.status is Status.NOT_FOUND
        assert result.reason
        assert "\n" not in result.reason
    else:
        assert_sound(problem, result)


@cache
def best_step_s(problem: str) -> float:
    result = solve("exhaustive", problems.TINY_PROBLEMS[problem]())
    assert result.status is Status.OPTIMAL
    return result.objective


@cache
def plain_step_s(problem: str) -> float:
    """The best without replicas and layer ranges."""
    task = problems.TINY_PROBLEMS[problem]()
    return solve("exhaustive", replace(task, space=replace(task.space, replicas=False, max_chunks=1))).objective


TINY = list(problems.TINY_PROBLEMS)[:: 1 if STRESS else 2]


@pytest.mark.parametrize("kind", slow_but(("slow_network",), TINY))
def test_exhaustive_equals_the_naive_oracle(kind: str) -> None:
    """Without replicas and layer ranges; with them it may only find better ones."""
    problem = problems.TINY_PROBLEMS[kind]()
    naive_s = oracle.best_step_s(problem)
    assert plain_step_s(kind) == pytest.approx(naive_s, rel=1e-9)
    assert best_step_s(kind) <= naive_s * (1 + 1e-9)


def test_the_oracle_counts_what_there_is() -> None:
    """Two devices, two layers, two sequences, counted by hand.

    In one machine: one device (whose name does not matter), both by TP, both as stages, both as pipelines.
    With a machine each: either device, two orders of stages, two pipelines, no TP.
    """
    workload = Workload(2, 512, recompute="none", schedule="1f1b", optimizer_sharding="0")
    space = Space(max_micro_batch_size=1)
    model = replace(problems.TINY, num_layers=2)
    together, apart = [("a", "fast", 2)], [("a", "fast", 1), ("b", "slow", 1)]
    for machines, plans in ((together, 4), (apart, 5)):
        problem = Problem(problems.cluster(*machines), model, workload, space)
        found = list(oracle.all_plans(problem))
        assert len(found) == len(set(found)) == plans
        assert not any(check(problem, plan) for plan in found)
    free = replace(problem, workload=Workload(2, 512), space=Space())
    # Per structure: policies (of two layers, three alike or a leaner one first) times splits of the batch; ZeRO-0 and 1
    # with three schedules, 2 and 3 with two.
    one, stages, pipelines = 6 * 2, 9 * 2, 36 * 1
    assert len(list(oracle.all_plans(free))) == (2 * one + 2 * stages + pipelines) * (2 * 3 + 2 * 2)


# What a plan is worth.


@RIVALS_TOO
@pytest.mark.parametrize("kind", slow_but(("loose",), TINY))
def test_never_better_than_all_plans(name: str, kind: str) -> None:
    """And the good ones within a hundredth of the best."""
    problem = problems.TINY_PROBLEMS[kind]()
    result = solve(name, problem, steps=3000 if name in GOOD else 100)
    assert_sound_or_declined(name, problem, result)
    assert result.objective >= best_step_s(kind) * (1 - 1e-12)
    if name in GOOD:
        assert result.objective <= 1.01 * best_step_s(kind)


# The plan space.

SPACES = {
    **{f"{switch}=false": Space(**{switch: False}) for switch in SWITCHES},
    "all_switches=false": Space(**dict.fromkeys(SWITCHES, False)),
    **{f"num_pipelines={n}": Space(num_pipelines=n) for n in (1, 2, 4)},
    **{f"num_stages={n}": Space(num_stages=n) for n in (1, 2, 3)},
    "num_pipelines=2,num_stages=3": Space(num_pipelines=2, num_stages=3),
    "num_pipelines=2,uneven_batch=false": Space(num_pipelines=2, uneven_batch=False),
    **{f"max_tp={n}": Space(max_tp=n) for n in (1, 2)},
    "max_micro_batch_size=1": Space(max_micro_batch_size=1),
    "exclude=machine": Space(exclude=("b",)),
    "exclude=devices": Space(exclude=("a:0", "c:1", "c:3")),
    "exclude=all_but_one": Space(exclude=("a", "b", "c:0", "c:1", "c:2")),
}


# The exact model takes seconds on each; of many it has tests of its own.
FEW_SPACES = (
    "replicas=false",
    "max_tp=1",
    "all_switches=false",
    "num_pipelines=2,num_stages=3",
    "exclude=devices",
)


def spaces_of(name: str) -> Sequence[str]:
    """Every second of them, solvers in turns, but for `make stress`."""
    if name == "cp_sat":
        return FEW_SPACES if STRESS else FEW_SPACES[::2]
    return list(SPACES) if STRESS else list(SPACES)[NAMES.index(name) % 2 :: 2]


@pytest.mark.parametrize(
    ("name", "space"),
    slow_but(
        [(name, space) for name in NAMES for space in spaces_of(name)[::3]],
        [(name, space) for name in NAMES for space in spaces_of(name)],
    ),
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_switches_and_constraints(name: str, space: str) -> None:
    problem = problems.easy(SPACES[space])
    result = solve(name, problem, steps=250 if name == "local_search" else 80)
    assert_sound(problem, result)
    assert result.plan is not None
    assert set(result.plan.devices()) <= set(problem.usable_devices)


@pytest.mark.parametrize("name", [*RIVALS, *SEQUENCE])
@pytest.mark.parametrize("space", slow_but(FEW_SPACES[-1:], FEW_SPACES[1:] if STRESS else FEW_SPACES[2:]))
def test_a_rival_keeps_to_the_plan_space(name: str, space: str) -> None:
    """Or says that its own has no such plan."""
    problem = allowed(name, problems.easy(SPACES[space]))
    assert_sound_or_declined(name, problem, solve(name, problem, steps=20 if name in SEQUENCE else 100))


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("stages", slow_but((5,), (4, 5, 6)))
def test_a_number_of_stages_that_no_start_has(name: str, stages: int) -> None:
    problem = problems.easy(Space(num_stages=stages))
    assert_sound(problem, solve(name, problem, steps=1000))


@EVERY
@pytest.mark.parametrize("tp_degrees", slow_but(("all",), ("all", "powers_of_two")))
def test_a_machine_of_three(name: str, tp_degrees: str) -> None:
    """A machine that memory forces to be used whole, by its one group of three or by unequal groups."""
    problem = problems.three_gpus()
    problem = replace(problem, space=replace(problem.space, tp_degrees=tp_degrees))
    result = solve(name, problem, steps=200)
    assert_sound(problem, result)


@ALL
@pytest.mark.parametrize("fixed", slow_but(("interleaved",), ("gpipe", "1f1b", "interleaved")))
def test_fixed_choices(name: str, fixed: str) -> None:
    problem = problems.easy()
    workload = replace(problem.workload, schedule=fixed, recompute="full", optimizer_sharding="0")
    problem = allowed(name, replace(problem, workload=workload))
    result = solve(name, problem, steps=20)
    assert_sound_or_declined(name, problem, result)
    if result.plan is None:
        return
    assert (result.plan.schedule, result.plan.sharding.stage) == (schedule_named(fixed), 0)
    assert {stage.policy for p in result.plan.pipelines for stage in p.stages} == {"full"}


# Determinism.

_FRESH = """
import json
from tests.solvers.test_contract import outcomes
print(json.dumps(outcomes()))
"""


@cache
def outcome(name: str) -> list[Any]:
    """Plan and cost for a budget in steps, on a small cluster; of our own solvers, also on a real one."""
    found: list[Any] = []
    for problem in (problems.easy(), *([problems.sixteen_gpus()] if name in NAMES else [])):
        result = solve(name, allowed(name, problem), steps=15, seed=7)
        found += [repr(result.plan), result.objective, result.steps]
    return found


def outcomes() -> dict[str, list[Any]]:
    return {name: outcome(name) for name in FEWER}


@ALL
def test_same_seed_and_steps_same_plan(name: str) -> None:
    again = solve(name, allowed(name, problems.easy()), steps=15, seed=7)
    assert [repr(again.plan), again.objective, again.steps] == outcome(name)[:3]


def test_another_process_finds_the_same_plans() -> None:
    """With another hash seed."""
    ran = subprocess.run(
        [sys.executable, "-c", _FRESH],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "12345"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout) == outcomes()


@pytest.mark.parametrize("name", slow_but(("random", "local_search"), ("random", *GOOD)))
def test_the_seed_matters(name: str) -> None:
    steps = 400 if name == "portfolio" else 100  # its floor, which comes first, is the same for all
    plans = {solve(name, problems.thirty_two_gpus(), steps=steps, seed=seed).plan for seed in range(3)}
    assert len(plans) > 1


def test_cores_do_not_change_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problems.thirty_two_gpus()
    ran = []
    for cores in (1, 4):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        ran.append(solve("portfolio", problem, steps=100))
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


@ALL
def test_the_clock_steers_nothing_where_steps_are_limited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = outcome(name)
    monkeypatch.setattr(Search, "clock", staticmethod(Erratic(0)))
    result = solve(name, allowed(name, problems.easy()), steps=15, seed=7)
    assert [repr(result.plan), result.objective, result.steps] == calm[:3]


@pytest.mark.parametrize("name", [*GOOD, "hexiscale"])
def test_nor_in_longer_searches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calm = solve(name, problems.sixteen_gpus(), steps=120)
    monkeypatch.setattr(Search, "clock", staticmethod(Erratic(1)))
    erratic = solve(name, problems.sixteen_gpus(), steps=120)
    assert (erratic.plan, erratic.objective, erratic.steps) == (calm.plan, calm.objective, calm.steps)


@ALL
def test_steps_bind(name: str) -> None:
    """Few steps end long before the time limit; the count is the solver's own."""
    result = within(6.0, lambda: solve(name, allowed(name, problems.easy()), steps=10))
    assert result.steps <= 10


# Time.


class Ticking:
    """A clock by which every look is a hundredth of a second after the one before."""

    def __init__(self) -> None:
        self._looks = 0

    def __call__(self) -> float:
        self._looks += 1
        return 0.01 * self._looks


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Search, "clock", staticmethod(Ticking()))


@ALL
@pytest.mark.usefixtures("ticking")
def test_a_search_ends_soon_after_its_time_limit(name: str) -> None:
    """After some more looks at the clock: those of a search inside others, on the way out."""
    problem = allowed(name, problems.sixteen_gpus())
    result = solve(name, problem, time_limit_s=4.0)
    assert_sound_or_declined(name, problem, result)
    assert result.runtime_s <= 5.0


@pytest.mark.parametrize("name", slow_but(("portfolio", "sailor", "hexiseq"), FEWER))
def test_keeps_the_time_limit(name: str) -> None:
    """And has a plan then; a machine that others use too may leave no time for one at first."""
    problem = allowed(name, problems.thirty_two_gpus())
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
    return allowed(name, problems.sixteen_gpus() if name in RIVALS else problems.thirty_two_gpus())


@SOME
@pytest.mark.usefixtures("ticking")
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
@pytest.mark.usefixtures("ticking")
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


@ALL
def test_a_listener_may_stop_before_any_plan(name: str) -> None:
    """Then there is none, or the one that came last; never an exception."""
    listen: OnProgress = lambda progress: False  # noqa: E731
    result = within(2.0, lambda: solve(name, allowed(name, problems.hopeless()), time_limit_s=5.0, on_progress=listen))
    assert result.plan is None
    assert result.reason


# Nothing fits.


@ALL
@pytest.mark.parametrize("kind", slow_but(("model", "constraint"), problems.INFEASIBLE))
def test_an_infeasible_problem_has_a_reason(name: str, kind: str) -> None:
    problem, solver = allowed(name, problems.INFEASIBLE[kind]()), make_solver(name)
    result = solver.solve(problem, Budget(LONG_S, 30))
    assert result.status in (Status.INFEASIBLE, Status.NOT_FOUND)
    assert kind == "constraint" or result.status is Status.INFEASIBLE
    assert (result.plan, result.cost, result.trajectory) == (None, None, ())
    assert (result.objective, result.gap) == (float("inf"), 1.0)
    assert result.reason.strip()
    assert "\n" not in result.reason
    assert re.search(r"\b[abc]:\d\b", result.reason), result.reason
    assert re.search(r"\d GiB", result.reason), result.reason


# What is not installed.


@pytest.mark.parametrize("name", PARTITIONING)
def test_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(InputError) as caught:
        solve(name, problems.easy(), steps=10)
    assert f"solver: {name}" in str(caught.value)
    assert "pymetis" in str(caught.value)
    assert "pip install" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in (*NAMES, *RIVALS) if name not in PARTITIONING])
def test_other_solvers_work_without_metis(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    problem = problems.easy()
    assert_sound(problem, solve(name, problem, steps=10))


@pytest.mark.parametrize("name", SEQUENCE)
def test_sequence_layouts_must_be_allowed(name: str) -> None:
    with pytest.raises(InputError) as caught:
        solve(name, problems.easy(), steps=1)
    assert name in str(caught.value)
    assert "space.sequence=true" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean portfolio") as caught:
        make_solver("portfolo")
    assert "\n" not in str(caught.value)
