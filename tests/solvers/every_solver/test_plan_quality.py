"""No solver is better than all plans, the good ones are nearly as good, and all keep to the plan space."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from hexiopt.problem.space import SWITCHES, Space
from hexiopt.schedules.registry import schedule_by_name
from tests.conftest import STRESS
from tests.slow import slow_but
from tests.solvers import problems
from tests.solvers.brute_force import best_plan
from tests.solvers.every_solver.contract import (
    GOOD,
    HEURISTICS,
    NAMES,
    RIVALS,
    SEQUENCE,
    allow_layouts,
    assert_sound,
    assert_sound_or_declined,
    in_turns,
    solve,
)


@cache
def best_step_s(problem: str) -> float:
    _, step_s = best_plan(problems.TINY_PROBLEMS[problem]())
    return step_s


TINY = list(problems.TINY_PROBLEMS)[:: 1 if STRESS else 2]


# All plans of the others take the oracle minutes.
# What a plan is worth.


@in_turns(2, (*NAMES, *RIVALS))
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
    "batch_remainder=false,uneven_batch=false": Space(batch_remainder=False, uneven_batch=False),
    "machine_sharding=false": Space(machine_sharding=False),
    **{f"max_tp={n}": Space(max_tp=n) for n in (1, 2)},
    "max_micro_batch_size=1": Space(max_micro_batch_size=1),
    "exclude=machine": Space(exclude=("b",)),
    "exclude=devices": Space(exclude=("a:0", "c:1", "c:3")),
    "exclude=all_but_one": Space(exclude=("a", "b", "c:0", "c:1", "c:2")),
}


# Proofs take seconds on each; of many they have tests of their own.
FEW_SPACES = (
    "replicas=false",
    "max_tp=1",
    "all_switches=false",
    "num_pipelines=2,num_stages=3",
    "exclude=devices",
)


def spaces_of(name: str) -> Sequence[str]:
    """Every second of them, solvers in turns, but for `make stress`."""
    if name not in HEURISTICS:
        return FEW_SPACES if STRESS else FEW_SPACES[::2]
    return list(SPACES) if STRESS else list(SPACES)[NAMES.index(name) % 2 :: 2]


@pytest.mark.parametrize(
    ("name", "space"),
    slow_but(
        [(name, space) for k, name in enumerate(NAMES) for space in spaces_of(name)[k % 3 :: 9]],
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


@in_turns(0, (*RIVALS, *SEQUENCE))
@pytest.mark.parametrize("space", slow_but(FEW_SPACES[-1:], FEW_SPACES[1:] if STRESS else FEW_SPACES[2:]))
def test_a_rival_keeps_to_the_plan_space(name: str, space: str) -> None:
    """Or says that its own has no such plan."""
    problem = allow_layouts(name, problems.easy(SPACES[space]))
    assert_sound_or_declined(name, problem, solve(name, problem, steps=20 if name in SEQUENCE else 100))


@pytest.mark.parametrize(("name", "stages"), slow_but([("portfolio", 5)], product(GOOD, (4, 5, 6))))
def test_a_number_of_stages_that_no_start_has(name: str, stages: int) -> None:
    problem = problems.easy(Space(num_stages=stages))
    assert_sound(problem, solve(name, problem, steps=1000))


@in_turns(0, NAMES)
@pytest.mark.parametrize("tp_degrees", slow_but(("all",), ("all", "powers_of_two")))
def test_a_machine_of_three(name: str, tp_degrees: str) -> None:
    """A machine that memory forces to be used whole, by its one group of three or by unequal groups."""
    problem = problems.three_gpus()
    problem = replace(problem, space=replace(problem.space, tp_degrees=tp_degrees))
    result = solve(name, problem, steps=200)
    assert_sound(problem, result)


@in_turns(3)
@pytest.mark.parametrize("fixed", slow_but(("interleaved",), ("gpipe", "1f1b", "interleaved")))
def test_fixed_choices(name: str, fixed: str) -> None:
    problem = problems.easy()
    workload = replace(problem.workload, schedule=fixed, recompute="full", optimizer_sharding="0")
    problem = allow_layouts(name, replace(problem, workload=workload))
    result = solve(name, problem, steps=20)
    assert_sound_or_declined(name, problem, result)
    if result.plan is None:
        return
    assert (result.plan.schedule, result.plan.sharding.stage) == (schedule_by_name(fixed), 0)
    assert {stage.policy for p in result.plan.pipelines for stage in p.stages} == {"full"}
