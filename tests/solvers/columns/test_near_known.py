"""Arrangements of chains near a known plan."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget
from solvers.columns.chain_column import ChainRecipe
from solvers.columns.near_known import NearKnown
from solvers.completion.completer import PlanCompleter
from solvers.core.search import Search
from solvers.frame.solver import offer_partition
from solvers.registry import make_solver
from tests.solvers.columns.test_columns import mixed


def plan_through(problem: Problem, machines: str, pipelines: int = 1, size: int = 1) -> Plan:
    """Pipelines through the first device of each of `machines`; the next ones take the next devices."""
    layers, names = problem.model.num_layers, [machine.name for machine in problem.cluster.machines]
    found = []
    for k in range(pipelines):
        devices = [problem.usable_by_machine[names.index(name)][k] for name in machines]
        ends = [layers * (s + 1) // len(devices) for s in range(len(devices))]
        stages = [Stage.of((d,), first, end) for d, first, end in zip(devices, [0, *ends], ends, strict=False)]
        batches = problem.workload.global_batch // (pipelines * size)
        found.append(Pipeline(tuple(stages), batches, micro_batch_size=size))
    return Plan(tuple(found))


def near(problem: Problem, known: Plan, steps: int, seed: int = 0) -> NearKnown:
    """With a budget in steps."""
    run = Search("near", problem, Budget(3600.0, steps), seed)
    return NearKnown(run, PlanCompleter(run.pricer, replicates=False), 1, random.Random(seed), known)


@settings(max_examples=30)
@given(st.permutations("abcde"), st.integers(1, 5))
def test_begins_in_the_known_order_of_machines(machines: list[str], number: int) -> None:
    """Those that the plan leaves idle follow."""
    problem = mixed()
    search = near(problem, plan_through(problem, "".join(machines[:number])), 1)
    names = [machine.name for machine in problem.cluster.machines]
    expected = [search.kinds.kind_of[names.index(name)] for name in (*machines[:number], *sorted(machines[number:]))]
    [(order, width)] = search.chains
    assert width == 1
    assert [kind for kind, count in order for _ in range(count)] == expected
    assert all(a[0] != b[0] for a, b in pairwise(order))


@pytest.mark.parametrize(("machines", "pipelines"), [("cab", 1), ("dacb", 2), ("cd", 4)])
def test_no_chain_near_the_known_one_is_better(machines: str, pipelines: int) -> None:
    """In its order, with half, as many and twice its pipelines, priced one by one."""
    problem = mixed()
    known = plan_through(problem, machines, pipelines)
    search, every = near(problem, known, 60), near(problem, known, 1)
    best_s = math.inf
    for width in (pipelines // 2, pipelines, 2 * pipelines):
        if width in every.kinds.widths and (own := every.partition((ChainRecipe(every.chains[0][0], width, 1),))):
            priced = offer_partition(every.run, every.completer, own)
            best_s = min(best_s, math.inf if priced is None else priced.cost.step_time_s)
    assert search.search(search.run.until(), 4)
    assert search.run.best_s <= best_s < math.inf


def test_micro_batches_have_the_known_size() -> None:
    problem = mixed()
    search = near(problem, plan_through(problem, "cab", size=2), 20)
    found = search.search(search.run.until(), 4)
    assert found
    assert {group.micro_batch_size for partition in found for group in partition.pipeline_groups} == {2}


def test_steps_alone_decide_what_is_found_from_a_known_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the number of cores; and no fallbacks are priced."""
    problem, known, found = mixed(), plan_through(mixed(), "cab"), []
    for cores in (1, 3):
        monkeypatch.setattr("solvers.core.workers.usable_cores", lambda cores=cores: cores)
        found.append(make_solver("portfolio").solve(problem, Budget(3600.0, 160), start=known))
    assert found[0].plan == found[1].plan
    operators = {own.operator for own in found[0].operators}
    assert "arrange_chains" in operators
    assert "fall_back" not in operators


def test_a_start_that_does_not_fit_leaves_the_fallbacks() -> None:
    """Else there might be no plan at all."""
    problem = mixed()
    known = plan_through(problem, "e")
    tight = problem.replace(workload=replace(problem.workload, seq_len=32_768))
    assert not Search("start", tight, Budget(1.0), 0).offer(known).fits
    result = make_solver("portfolio").solve(tight, Budget(3600.0, 60), start=known)
    assert result.plan is not None
    assert "fall_back" in {own.operator for own in result.operators}
