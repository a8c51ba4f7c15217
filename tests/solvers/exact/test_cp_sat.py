"""`cp_sat`: its packings are those of the table, its proofs those of brute force, and it can be repeated."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget
from hexiopt.solving.result import Status
from solvers.core.search import Search
from solvers.exact.cp_sat import CpSat, PackingProgram
from solvers.exact.exact import Exact
from solvers.frame.solver import SearchSolver
from solvers.portfolio import Portfolio
from solvers.proof.partitions import PackingTable
from solvers.proof.usages import Usages, case_of
from tests.slow import slow_but
from tests.solvers.brute_force import best_plan
from tests.solvers.proof.problems import random_problem
from tests.solvers.proof.test_proof import agrees

STEPS = Budget(600.0, max_steps=4_000)


# The model.


class Tables:
    """The usages of a few machines, and a batch."""

    def __init__(self, most: list[int], batch: int) -> None:
        self.usages, self.batch = Usages(most, ["a", *["b"] * (len(most) - 1)]), batch
        self.most_stages = sum(most)


@given(st.lists(st.integers(1, 3), min_size=2, max_size=3), st.integers(1, 12), st.randoms(use_true_random=False))
def test_the_program_packs_as_the_table(most: list[int], batch: int, rng: random.Random) -> None:
    """The same most, the same least that the others leave to a pipeline, and a best partition that is one."""
    tables = Tables(most, batch)
    sequences = np.array([0, *(rng.choice((0, 0, 1, 2, 5)) for _ in range(tables.usages.size - 1))])
    table, program = (made(tables, sequences) for made in (PackingTable, PackingProgram))  # type: ignore[arg-type]
    assert program.most == max(0, table.most)
    for k in range(2, table.most_pipelines + 1):
        assert max(-1, program.most_of(k)) == max(-1, table.most_of(k))
        if table.most_of(k) < 0:
            continue
        parts = program.best(k)
        assert len(parts) == k
        assert (tables.usages.vectors[list(parts)].sum(axis=0) <= tables.usages.most).all()
        assert sequences[list(parts)].sum() == table.most_of(k)
        for usage in set(parts):
            assert program.needed(usage, k) == table.needed(usage, k)
            assert program.needed(usage) == table.needed(usage)


# The proof.


@pytest.mark.parametrize("seed", slow_but((0, 3, 5), range(8)))
def test_its_proofs_equal_looking_at_all_plans(seed: int) -> None:
    assert agrees(random_problem(seed), packings=PackingProgram)


@pytest.mark.parametrize("solver", [Exact(), CpSat(), Portfolio()], ids=lambda solver: solver.name)
@pytest.mark.parametrize("seed", slow_but((3,), range(8)))
def test_solvers_find_and_prove_the_best_of_all_plans(seed: int, solver: SearchSolver) -> None:
    problem = random_problem(seed)
    _, best_s = best_plan(problem)
    result = solver.solve(problem, STEPS, seed=1)
    assert result.status is Status.OPTIMAL
    assert result.objective == pytest.approx(best_s, rel=1e-6)
    assert result.bound_s <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("solver", slow_but((CpSat(),), (Exact(), CpSat())), ids=["exact", "cp_sat"])
def test_no_proof_of_what_no_step_was_left_for(solver: SearchSolver) -> None:
    """However few the steps, wherever they end."""
    problem = random_problem(12)
    _, best_s = best_plan(problem)
    proved = 0
    for steps in range(1, 400, 57):
        result = solver.solve(problem, Budget(600.0, steps))
        assert result.bound_s <= best_s * (1 + 1e-9), steps
        optimal = result.status is Status.OPTIMAL
        assert not optimal or result.objective == pytest.approx(best_s, rel=1e-6), steps
        proved += optimal
    assert proved


def test_it_ends_where_exact_does() -> None:
    """The same steps give the same plan and bound again, and those of `exact`, whose packings are the same."""
    problem = random_problem(3)
    results = [solver.solve(problem, STEPS, seed=1) for solver in (CpSat(), CpSat(), Exact())]
    assert len({(result.plan, result.bound_s, result.status) for result in results}) == 1
    assert results[0].steps == results[1].steps


def test_partitions_come_in_batches_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few at once."""
    tables = Tables([2, 2, 1], 4)
    sequences = np.full(tables.usages.size, 2)
    sequences[0] = 0
    expected = {}
    for at_once in (256, 1):
        monkeypatch.setattr("solvers.exact.cp_sat._AT_ONCE", at_once)
        program = PackingProgram(tables, sequences)  # type: ignore[arg-type]
        for case in {case_of(tables.usages.vectors[[1, 3]]), case_of(tables.usages.vectors[[1, 4]])}:
            partitions = list(program.every(2, case, lambda: None))
            assert len(partitions) == len(set(partitions)) > 1
            assert expected.setdefault(case, set(partitions)) == set(partitions)


def test_a_larger_problem_gets_a_plan_and_a_bound() -> None:
    """Of machines of two interfaces, which proofs do not cover; where steps are counted, the clock raises no bound."""
    problem: Problem = random_problem(3)
    two = tuple(replace(machine, num_interfaces=2) for machine in problem.cluster.machines)
    problem = replace(problem, cluster=replace(problem.cluster, machines=two))
    result = CpSat().solve(problem, Budget(600.0, 15))
    assert result.plan is not None
    assert result.bound_s == Search("test", problem, Budget(), 0).bound_s
