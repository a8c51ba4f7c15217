"""Chains by dynamic programming, against all ways to take TP groups in the same machines; and the moves they make."""

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from solvers.completion.completer import PlanCompleter
from solvers.core.operators import OperatorStatistics
from solvers.core.partition import PipelineGroup
from solvers.frame.starts import first_choice
from solvers.heuristics.chains import ChainBuilder, ChainTerms
from solvers.heuristics.fewest_stages import StageWay
from solvers.heuristics.operators.recreate import Recreation
from solvers.heuristics.operators.table import PartitionProposals
from tests.solvers import problems
from tests.solvers.frame.test_starts import CASES, assert_legal
from tests.solvers.heuristics.operators.test_partition_operators import whole
from tests.solvers.heuristics.test_fewest_stages import cuts

_AS_GOOD = {10.0: 1.06, 1.0: 1.1, 0.3: 1.15}  # by GB/s: round trips are dealt in halves


def chains_of(problem: Problem) -> ChainBuilder:
    """As a search has them."""
    model = PlanPricer(problem)
    return ChainBuilder(model, PlanCompleter(model).splitters)


def two_machines(network_gb_per_s: float, fast_gib: float, slow_gib: float) -> Problem:
    """Two GPUs and four slower ones, twelve layers."""
    gpus = (("a", "fast", 2), ("b", "slow", 4))
    pair = problems.cluster(*gpus, network_gb_per_s=network_gb_per_s, fast_gib=fast_gib, slow_gib=slow_gib)
    workload = Workload(32, 2048, schedule="1f1b", optimizer_sharding="1")
    return Problem(pair, replace(problems.TINY, num_layers=12), workload)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("memory_gib", [(16.0, 8.0), (2.94, 1.94)])
@pytest.mark.parametrize("network_gb_per_s", _AS_GOOD)
@pytest.mark.parametrize("size", [1, 2])  # with replicas at 2
def test_a_chain_is_as_good_as_any(
    order: tuple[int, int], memory_gib: tuple[float, float], network_gb_per_s: float, size: int
) -> None:
    problem = two_machines(network_gb_per_s, *memory_gib)
    completer, chain_maker, devices = PlanCompleter(PlanPricer(problem)), chains_of(problem), problem.usable_by_machine

    def step_s(pipeline_group: PipelineGroup) -> float:
        completed = completer.complete(first_choice(problem, (pipeline_group,)))
        priced = completer.price(completed) if completed else None
        return priced.cost.objective if priced is not None else float("inf")

    best_s = float("inf")
    every = [StageWay(tp, replicas) for tp in (1, 2, 4) for replicas in range(1, size + 1)]
    for ways in product(*(tuple(cuts(len(devices[m]), every)) for m in order)):
        stages, ends = [], dict.fromkeys(order, 0)
        for m, own in zip(order, ways, strict=True):
            for tp, replicas in own:
                firsts = [ends[m] + k * tp for k in range(replicas)]
                stages.append(tuple(devices[m][first : first + tp] for first in firsts))
                ends[m] += tp * replicas
        if stages:
            best_s = min(best_s, step_s(PipelineGroup.pipeline(stages, size)))
    terms = ChainTerms(size, 32 // size, StateSharding(1, 1), ONE_F_ONE_B, replicates=True)
    chains = [chain_maker.chain(order, devices, 1, terms, rank) for rank in range(3)]
    assert best_s < float("inf")
    assert min(step_s(chain) for chain in chains if chain is not None) <= _AS_GOOD[network_gb_per_s] * best_s


def test_small_machines_serve_wide_chains_together() -> None:
    problem = problems.easy()
    chains, devices, terms = (
        chains_of(problem),
        problem.usable_by_machine,
        ChainTerms(1, 4, StateSharding(1, 4), ONE_F_ONE_B),
    )
    chain = chains.chain((0, 1), devices, 4, terms)
    assert chain is not None
    assert [sorted(stage_groups) for stage_groups in chain.stages] == [
        [(device,) for device in (*devices[0], *devices[1])]
    ]
    assert chains.chain((0, 2), devices, 8, terms) is None


def test_chains_of_one_policy_take_the_leanest_where_memory_asks_for_it() -> None:
    problem = two_machines(10.0, 1.34, 1.04)
    workload = replace(problem.workload, seq_len=4096)
    one_policy = replace(problem, workload=workload, space=Space(recompute_per_stage=False))
    completer, devices = PlanCompleter(PlanPricer(one_policy)), problem.usable_by_machine
    chain = chains_of(one_policy).chain((0, 1), devices, 1, ChainTerms(1, 32, StateSharding(1, 1), ONE_F_ONE_B))
    assert chain is not None
    partition = first_choice(one_policy, (chain,))
    assert completer.complete(partition)
    assert completer.rate(partition, StateSharding(1, 1)) > 0.0
    only_fastest = replace(one_policy, workload=replace(workload, recompute="none"))
    assert (
        chains_of(only_fastest).chain((0, 1), devices, 1, ChainTerms(1, 32, StateSharding(1, 1), ONE_F_ONE_B)) is None
    )


@given(st.sampled_from(sorted(CASES)), st.integers(0, 2**32 - 1), st.booleans())
def test_bundles_made_anew_are_legal(case: str, seed: int, replicates: bool) -> None:
    problem, rng = CASES[case], random.Random(seed)
    recreation = Recreation(problem, chains_of(problem), replicates=replicates)
    proposals = PartitionProposals(
        problem, OperatorStatistics(), replicates=True, recreation=recreation, recreate_share=0.5
    )
    partition = whole(problem)
    for _ in range(40):
        before = partition
        found = proposals.draw(partition, rng)
        assert partition == before
        if found is not None:
            assert_legal(problem, found[1])
            partition = found[1]


def test_bundles_are_joined_and_parted() -> None:
    problem, rng = problems.easy(), random.Random(0)
    recreation, partition, changes = Recreation(problem, chains_of(problem)), whole(problem), set()
    for _ in range(200):
        found = recreation.recreate_as_chains(partition, rng)
        if found is not None:
            changes.add(len(found.pipeline_groups) - len(partition.pipeline_groups))
            partition = found
    assert changes == {-1, 0, 1}
