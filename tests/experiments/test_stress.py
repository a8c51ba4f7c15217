"""Thirty random problems through every solver and rival, without a violation (`make stress` has thousands)."""

import random
from dataclasses import replace

import pytest

from experiments.stress import in_plan_space, random_problem, run
from hexiopt.plan.parallelism import TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.solving import Budget
from solvers.registry import baseline, for_any_problem, make_solver, names, of_sequences, small_oracle
from tests.slow import slow_but

NAMES, RIVALS, SEQUENCE, ORACLES = map(names, (for_any_problem, baseline, of_sequences, small_oracle))


@pytest.mark.parametrize("first", slow_but((0,), range(0, 30, 5)))
def test_no_violation(first: int) -> None:
    ran = 0
    for seed in range(first, first + 5):
        rivals = [name for name in RIVALS[seed % 4 :: 4] if name != "flashflex" or seed == first]  # it is slow
        ours = [name for name in NAMES if name not in ("portfolio", "cp_sat")[seed % 2 :: 2]]  # both take long
        solvers = [*ORACLES, *ours, *rivals, *SEQUENCE[seed % 5 :: 5]]
        bound_s = 0.3 if seed == first else 0.0  # the bound of all plans is raised now and then
        tallies, wrong = run(seed, solvers, steps=4, exact_s=0.05, bound_s=bound_s)
        assert wrong == []
        ran += sum(tally.ended.total() - tally.ended["refused"] for tally in tallies.values())
    assert ran >= 5 * 5


def test_a_violation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that is too high is reported, once for every plan below it."""
    problem = random_problem(random.Random(3))
    best_s = make_solver("portfolio").solve(problem, Budget(3600.0, 12), seed=3).objective
    assert best_s < float("inf")
    monkeypatch.setattr("experiments.stress.lower_bound_s", lambda model, limit_s: 1.01 * best_s)
    _, wrong = run(3, ("portfolio",), steps=12)
    assert len(wrong) == 1
    assert "bound of all plans" in wrong[0]


def plan_of(*policies: str) -> Plan:
    """One stage on one device with these recompute policies, layer by layer."""
    return Plan((Pipeline((Stage(TensorParallel((0,)), ((0, len(policies)),), policies),), 1, 1),))


def test_a_stage_of_two_policies_is_held_to_what_solvers_prove() -> None:
    """The plan space mixes two policies in a stage; more than two, and stated groups, stand in plan files alone."""
    mixed = plan_of("none", "none", "full")
    assert in_plan_space(plan_of("full", "full"))
    assert in_plan_space(mixed)
    assert not in_plan_space(plan_of("none", "selective", "full"))
    assert not in_plan_space(replace(mixed, sharding=Sharding(stage=1, groups=((0,),))))
