"""Annealing over arrangements of chains, against all single chains of a small cluster."""

import math
import random
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexiopt.problem.problem import Problem
from hexiopt.solving import Budget
from solvers.columns.arrangement_search import OPERATORS, Arrangement, ArrangementSearch
from solvers.columns.chain_column import ChainRecipe
from solvers.completion.completer import PlanCompleter
from solvers.core.search import Search
from solvers.frame.solver import offer_partition
from tests.solvers import problems
from tests.solvers.columns.test_columns import mixed
from tests.solvers.frame.test_starts import CASES, assert_legal


def search_of(problem: Problem, steps: int, seed: int = 0, zero_stage: int = 1) -> ArrangementSearch:
    """With a budget in steps."""
    run = Search("arrangements", problem, Budget(3600.0, steps), seed)
    return ArrangementSearch(run, PlanCompleter(run.pricer), zero_stage, random.Random(seed))


def first_arrangement(search: ArrangementSearch) -> Arrangement:
    """One chain through all machines."""
    return (ChainRecipe(tuple((kind, int(n)) for kind, n in enumerate(search.kinds.supply)), 1, search.sizes[0]),)


@settings(max_examples=20)
@given(st.sampled_from(sorted(CASES)), st.integers(0, 2**32 - 1))
def test_every_sequence_of_moves_is_legal(case: str, seed: int) -> None:
    search, rng = search_of(CASES[case], 1), random.Random(seed)
    arrangement = first_arrangement(search)
    for _ in range(20):
        found = rng.choice(OPERATORS).apply(search, arrangement, rng)
        if found is not None:
            arrangement = found
        assert arrangement
        assert all(recipe.order and all(count > 0 for _, count in recipe.order) for recipe in arrangement)
        used = [recipe.counts(len(search.kinds)) for recipe in arrangement]
        assert all(sum(own) <= n for own, n in zip(zip(*used, strict=True), search.kinds.supply, strict=True))
        partition = search.partition(arrangement)
        if partition is not None:
            assert_legal(CASES[case], partition)


def test_every_move_changes_some_layout() -> None:
    search, rng = search_of(mixed(), 1), random.Random(0)
    arrangement, changed = first_arrangement(search), set[str]()
    for _ in range(400):
        operator = rng.choice(OPERATORS)
        found = operator.apply(search, arrangement, rng)
        if found is not None and found != arrangement:
            changed.add(operator.name)
            arrangement = found
    assert changed == {operator.name for operator in OPERATORS}


def test_no_single_chain_is_better() -> None:
    problem = mixed()
    search, every = search_of(problem, 300), search_of(problem, 1)
    runs = tuple((kind, int(n)) for kind, n in enumerate(every.kinds.supply))
    best_s = float("inf")
    for count in range(1, len(runs) + 1):
        for order in permutations(runs, count):
            for width in every.kinds.widths:
                partition = every.partition((ChainRecipe(order, width, every.sizes[0]),))
                priced = partition and offer_partition(every.run, every.completer, partition)
                if priced:
                    best_s = min(best_s, priced.cost.step_time_s)
    found = search.search(search.run.until(), 4)
    assert search.run.best_s <= best_s * (1 + 1e-9)
    assert 1 <= len(found) <= 4
    again = search_of(problem, 300)
    assert again.search(again.run.until(), 4) == found


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_it_keeps_to_its_steps(steps: int) -> None:
    search = search_of(mixed(), max(steps, 1))
    search.search(search.run.until(float(steps > 0)), 4)
    assert search.run.steps == steps
    assert (search.run.plan is not None) == (steps > 0)


def test_lockstep_has_no_layouts() -> None:
    search = search_of(mixed(), 50, zero_stage=3)
    assert search.search(search.run.until(), 4) == []


def test_lone_pipelines_through_any_machines_come_first() -> None:
    """Of every number of machines of each kind, in every order, none is better than the best one priced at first."""
    problem = mixed()
    search, every = search_of(problem, 60), search_of(problem, 1)
    supply = [int(n) for n in every.kinds.supply]
    best_s = float("inf")
    for counts in product(*(range(n + 1) for n in supply)):
        for order in permutations((kind, n) for kind, n in enumerate(counts) if n):
            partition = every.partition((ChainRecipe(order, 1, every.sizes[0]),)) if order else None
            priced = partition and offer_partition(every.run, every.completer, partition)
            if priced:
                best_s = min(best_s, priced.cost.step_time_s)
    lone = list(search._starts([(1, search.sizes[0])], search.run.until()))
    assert 1 <= len(lone) <= 2
    assert math.exp(lone[0].energy) == search.run.best_s <= best_s * (1 + 1e-9)
    assert search.run.steps <= 6


def test_of_many_machines_lone_pipelines_take_all_or_a_half_and_so_on() -> None:
    problem = replace(mixed(), cluster=problems.cluster(*((f"m{k}", "fast", 1 + k % 2) for k in range(80))))
    search = search_of(problem, 1)
    assert search.kinds.supply.tolist() == [40.0, 40.0]
    found = list(search._lone_orders())
    assert len(found) == len(set(found)) == 6 + 6 + 2 * 6 * 6
    assert {count for runs in found for _, count in runs} == {1, 2, 5, 10, 20, 40}
