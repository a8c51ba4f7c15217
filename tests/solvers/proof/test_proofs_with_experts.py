"""Proofs where layers have experts: the best of all plans by brute force, whatever degrees devices that share them
have; and what proofs decline."""

from dataclasses import replace

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.errors import InputError
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget
from hexiopt.solving.result import OPTIMALITY_TOLERANCE, Status
from solvers.proof.gaps import is_provable, not_covered
from solvers.registry import make_solver
from tests.conftest import STRESS
from tests.slow import slow_but
from tests.solvers.brute_force import best_plan
from tests.solvers.drawn_experts import drawn_with_experts
from tests.solvers.oracle import TooManyError

PRICES = 40_000  # of a problem by brute force
STEPS = 4000


def provable(number: int) -> Problem:
    """A drawn problem without what proofs leave out."""
    problem = drawn_with_experts(number, num_layers=3, types_apart=True)
    schedule = problem.workload.schedule if problem.workload.schedule != "interleaved" else "1f1b"
    workload = replace(problem.workload, schedule=schedule, optimizer_sharding=str(number % 2))
    return replace(problem, workload=workload, space=replace(problem.space, replicas=False))


@pytest.mark.parametrize("count", slow_but([4], [4, 300 if STRESS else 10]))
def test_exact_is_the_best_of_all(count: int) -> None:
    compared = shared = 0
    for number in range(count):
        problem = provable(number)
        assert is_provable(PlanPricer(problem))
        assert not_covered(problem) == ""
        try:
            plan, best_s = best_plan(problem, PRICES)
        except TooManyError:
            continue
        result = make_solver("exact").solve(problem, Budget(60.0, STEPS))
        if plan is None:
            assert result.status in (Status.INFEASIBLE, Status.NOT_FOUND)
            continue
        assert result.bound_s <= best_s * (1 + 1e-9), number
        if result.status is Status.OPTIMAL:
            compared += 1
            shared += any(len(s.parallelism.parameter_copies) > 1 for p in plan.pipelines for s in p.stages)
            assert result.objective <= best_s * (1 + OPTIMALITY_TOLERANCE), number
    assert compared > min(4, 0.4 * count)


def test_experts_over_machines_are_outside_the_proof() -> None:
    """Whoever proves the rest says so."""
    numbers = (n for n in range(100) if len(drawn_with_experts(n).cluster.machines) == 3)
    problem = drawn_with_experts(next(numbers))
    machine = problem.cluster.machines[0]
    machines = tuple(replace(machine, name=name, spec_name=name) for name in "abc")
    alike = replace(
        problem,
        cluster=replace(problem.cluster, machines=machines),
        space=replace(problem.space, max_micro_batch_size=4),
        workload=replace(problem.workload, global_batch=4),
    )
    assert "experts shared over machines (space.max_micro_batch_size=1)" in not_covered(alike)
    assert "experts" not in not_covered(replace(alike, space=replace(alike.space, max_micro_batch_size=1)))


@pytest.mark.parametrize("solver", ["exact", "cp_sat"])
def test_layers_of_several_kinds_are_declined_in_a_line(solver: str) -> None:
    problem = next(
        p for n in range(100) if not (p := drawn_with_experts(n, num_layers=4, several=True)).model.equal_layers
    )
    with pytest.raises(InputError, match="proves nothing about layers of several kinds; take solver=portfolio"):
        make_solver(solver).solve(problem, Budget(1.0))
