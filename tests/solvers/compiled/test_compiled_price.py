"""The compiled cost model is the pricer's: random candidates of random problems, priced by both."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from experiments.app.configurations import named_cluster, named_model
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from solvers.compiled.plans import plan_of
from solvers.compiled.state import SearchState, new_work
from solvers.compiled.step import FAR, refresh
from solvers.compiled.support import unsupported
from solvers.compiled.tables import tables_of
from tests.solvers.compiled.candidates import assert_free, like_state, random_state
from tests.solvers.drawn import drawn_problem

EXACT = 1e-3


def errors(problem: Problem, number: int, states: int) -> list[float]:
    """The relative errors of candidates that fit; their own plans are priced as they are."""
    pricer = PlanPricer(problem)
    assert unsupported(problem, pricer) is None
    tables, rng, found = tables_of(pricer), random.Random(number), []
    work = new_work(tables)
    for k in range(states):
        state: SearchState = (like_state if k % 4 == 3 else random_state)(rng, tables, problem)
        assert_free(tables, state)
        objective = refresh(tables, work, state)
        if not state.plan[0]["num_pipelines"] or objective >= FAR:
            continue
        plan = plan_of(tables, work, state, pricer.policies())
        cost = pricer.price(plan)
        assert cost.fits, (number, k, cost.excess_bytes)
        assert sum(p.num_sequences for p in plan.pipelines) == problem.workload.global_batch
        found.append(float(state.plan[0]["step_s"]) / cost.step_time_s - 1.0)
        assert math.isfinite(objective)
        assert objective >= state.plan[0]["step_s"]
    return found


def one_interface(problem: Problem) -> Problem:
    """The problem with one network interface a machine."""
    cluster = problem.cluster
    return replace(
        problem, cluster=replace(cluster, machines=tuple(replace(m, num_interfaces=1) for m in cluster.machines))
    )


@pytest.mark.parametrize("number", range(8))
def test_candidates_cost_what_the_pricer_says(number: int) -> None:
    found = errors(drawn_problem(number), number, 24)
    assert np.abs(found).max(initial=0.0) < EXACT, found


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8, 60))
def test_many_candidates_cost_what_the_pricer_says(number: int) -> None:
    found = errors(drawn_problem(number), number, 24)
    assert np.abs(found).max(initial=0.0) < EXACT, found
