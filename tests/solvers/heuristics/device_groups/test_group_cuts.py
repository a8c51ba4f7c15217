"""Cuts of ranked devices as partitions: legal, and as good as the plans that Metis makes of them."""

import random

import pytest

from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.solving import Budget
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import DoesNotFit
from solvers.core.search import Search
from solvers.heuristics.device_groups.group_cuts import cut_partitions
from solvers.heuristics.device_groups.stage_estimates import StageEstimates
from solvers.registry import make_solver
from tests.solvers import problems
from tests.solvers.drawn import drawn_problem
from tests.solvers.frame.test_starts import assert_legal


def partitions(problem: Problem) -> tuple[PlanCompleter, list]:
    search = Search("test", problem, Budget(3600.0), 0)
    found = list(cut_partitions(StageEstimates(search.pricer), random.Random(0), lambda share: True))
    return PlanCompleter(search.pricer), found


@pytest.mark.parametrize(
    "problem", [problems.easy(), problems.easy(Space(exclude=("a:0", "c:1"))), problems.three_gpus(), drawn_problem(14)]
)
def test_cuts_are_legal_and_differ(problem: Problem) -> None:
    _, found = partitions(problem)
    assert found
    assert len(set(found)) == len(found)
    for partition in found:
        for group in partition.pipeline_groups:
            assert_legal(problem, partition.with_pipeline_groups([group]))
        devices = [d for own in partition.pipeline_groups for d in sorted(own.devices())]
        assert len(set(devices)) == len(devices)


@pytest.mark.parametrize("number", [13, 19])
def test_not_behind_metis(number: int) -> None:
    """Replicas in some stages only, and TP degrees by stage: what chains of whole machines lack."""
    problem = drawn_problem(number)
    completer, found = partitions(problem)
    best_s = float("inf")
    for partition in found[:200]:
        completed = completer.complete(partition)
        priced = None if isinstance(completed, DoesNotFit) else completer.price(completed, best_s)
        if priced is not None and priced.cost.fits:
            best_s = min(best_s, priced.cost.step_time_s)
    assert best_s <= 1.002 * make_solver("metis_atc24").solve(problem, Budget(3600.0, 100)).objective
