"""Starts are looked at in the order of estimates that include gradient sync, so that few prices find the best."""

import math
from itertools import islice

import pytest

from hexiopt.cost.pricer import PlanPricer
from hexiopt.cost.sharing import FairShares
from hexiopt.solving import Budget
from solvers.completion.completer import PlanCompleter
from solvers.core.partition import DoesNotFit, Partition, PipelineGroup
from solvers.core.search import Search
from solvers.core.zero import passed_bytes
from solvers.frame.starts import first_choice, lockstep_partitions, whole_grids
from solvers.heuristics.local_search import without_grids
from solvers.heuristics.ranking import estimated_step_s, in_turns, promising_first
from tests.estimate import Static
from tests.solvers.drawn import drawn_problem

FIRST = 40  # places among which the best stands


def completer(number: int) -> PlanCompleter:
    return PlanCompleter(Search("test", drawn_problem(number), Budget(3600.0), 0).pricer)


def price_s(plan_completer: PlanCompleter, partition: Partition, limit_s: float = math.inf) -> float:
    """In seconds; infinite where it does not fit, or exceeds the limit."""
    completed = plan_completer.complete(partition) if plan_completer.allowed(partition) else DoesNotFit(1)
    priced = None if isinstance(completed, DoesNotFit) else plan_completer.price(completed, limit_s)
    return priced.cost.step_time_s if priced is not None and priced.cost.fits else math.inf


def test_in_turns_takes_all_in_their_order() -> None:
    assert list(in_turns("ad", "", "be", "cfgh")) == list("abcdefgh")


BEHIND = pytest.mark.xfail(
    reason="the best start is 1.8 % shorter where messages share the network as they meet, which ranks do not know",
    strict=True,
)
CASES = [
    *(pytest.param(Static(), 1.002, number, id=f"estimated-{number}") for number in (2, 12)),
    *(pytest.param(FairShares(), 1.01, number, id=f"priced-{number}") for number in (2, 12)),
    pytest.param(Static(), 1.002, 14, id="estimated-14", marks=pytest.mark.slow),
    pytest.param(FairShares(), 1.01, 14, id="priced-14", marks=[pytest.mark.slow, BEHIND]),
]


@pytest.mark.parametrize(("network", "near", "number"), CASES)
def test_the_best_of_all_starts_is_among_the_first(network: FairShares, near: float, number: int) -> None:
    """Over the network that estimates know; and nearly so where messages share it as they meet."""
    plan_completer = PlanCompleter(PlanPricer(drawn_problem(number), network=network))
    starts = list(in_turns(whole_grids(plan_completer.problem), without_grids(plan_completer.problem, plan_completer)))
    ranked = list(promising_first(plan_completer, starts, None, lambda: True))
    assert sorted(map(hash, starts)) == sorted(map(hash, ranked))
    best_s = least_s = min(price_s(plan_completer, start) for start in ranked[:FIRST])
    for start in starts:
        best_s = min(best_s, price_s(plan_completer, start, best_s))
    assert least_s <= near * best_s


def test_estimates_ascend_and_what_does_not_fit_comes_last() -> None:
    plan_completer = completer(14)
    group = PipelineGroup((((0,), (1,)),), 1)
    forbidden = first_choice(plan_completer.problem, (group, *(PipelineGroup((((k,),),), 1) for k in range(2, 26))))
    forbidden = forbidden.with_pipeline_groups(forbidden.pipeline_groups * 3)  # 78 pipelines, 64 sequences
    starts = [forbidden, *islice(whole_grids(plan_completer.problem), 8)]
    ranked = list(promising_first(plan_completer, starts, None, lambda: True))
    completed = map(plan_completer.complete, ranked[:-1])
    estimates = [
        math.inf if isinstance(completion, DoesNotFit) else estimated_step_s(plan_completer.problem, completion)
        for completion in completed
    ]
    assert estimates == sorted(estimates)
    assert min(estimates) < math.inf
    assert ranked[-1] == forbidden


def test_few_steps_look_at_few_starts_and_no_time_at_one() -> None:
    plan_completer = completer(14)
    starts = list(islice(lockstep_partitions(plan_completer.problem), 100))
    assert len(list(promising_first(plan_completer, starts, 2, lambda: True))) == 24
    assert len(list(promising_first(plan_completer, starts, None, lambda: False))) == 1


def test_sync_is_that_of_the_slowest_interface_that_shares_layers() -> None:
    """Two pipelines over the same two machines send nothing between them; two in different machines all layers."""
    plan_completer = completer(14)  # machines 0 and 1 of four GPUs each
    model, cluster = plan_completer.problem.model, plan_completer.problem.cluster
    apart = first_choice(plan_completer.problem, (PipelineGroup((((0, 1, 2, 3), (4, 5, 6, 7)),), 1),))
    completed = plan_completer.complete(apart)
    assert not isinstance(completed, DoesNotFit)
    sync_s = estimated_step_s(plan_completer.problem, completed) - completed.estimate_s
    slowest = min(m.nic_bandwidth_bytes_per_s * m.num_interfaces for m in cluster.machines[:2])
    sent = model.num_layers * model.layer_params * passed_bytes(plan_completer.problem, apart.sharding)
    assert sync_s == pytest.approx(sent / slowest)
    alone = plan_completer.complete(
        first_choice(plan_completer.problem, (PipelineGroup((((0, 1, 2, 3),), ((4, 5, 6, 7),)), 1),))
    )
    assert not isinstance(alone, DoesNotFit)
    assert estimated_step_s(plan_completer.problem, alone) == alone.estimate_s


@pytest.mark.parametrize(("stage", "batches", "sent"), [(0, 5, 4), (1, 5, 4), (2, 5, 12), (3, 5, 30)])
def test_bytes_passed_for_each_parameter(stage: int, batches: int, sent: int) -> None:
    """Gradients and weights of two bytes, five micro-batches."""
    assert passed_bytes(drawn_problem(14), stage, batches) == sent
