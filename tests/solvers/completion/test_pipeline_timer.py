"""Pipelines of bundles: their messages take what the cost model says, and layers make room for them."""

import random
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hexiopt.cost.executors.memory import StateSharding
from hexiopt.cost.pricer import PlanPricer
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from solvers.completion import pipelines as lines
from solvers.completion.completer import PlanCompleter
from solvers.completion.layers import LayerSplitter
from solvers.completion.pipelines import PipelineRate, PipelineTimer, SplitInput
from solvers.core.partition import DoesNotFit, Partition, PipelineGroup
from tests.estimate import Static
from tests.solvers import problems
from tests.solvers.frame.test_starts import CASES
from tests.solvers.heuristics.operators.test_partition_operators import move, proposals_of, whole


def walk(problem: Problem, seed: int, steps: int) -> Partition:
    """A structure some random moves from every device on its own."""
    rng, proposals, partition = random.Random(seed), proposals_of(problem, replicates=True), whole(problem)
    for _ in range(steps):
        partition = move(proposals, partition, rng)
    return partition


@given(st.sampled_from(sorted(CASES)), st.integers(0, 2**32 - 1))
def test_round_trips_are_those_of_static_shares(case: str, seed: int) -> None:
    """Of all pipelines, whatever else uses the network: replicas, layer ranges, machines of several interfaces."""
    problem = CASES[case]
    partition = walk(problem, seed, 30)
    completer = PlanCompleter(PlanPricer(problem))
    assume(completer.allowed(partition))
    completed = completer.complete(partition)
    assume(completed)
    assert completed
    priced = PlanPricer(problem, network=Static()).pipelines(completed.plan)
    trips = [
        pipeline_trips
        for pipeline_group in PipelineTimer(PlanPricer(problem)).trips_s(partition)
        for pipeline_trips in pipeline_group
    ]
    assert len(trips) == len(priced)
    for trips_s, cost in zip(trips, priced, strict=True):
        both = [ahead + back for ahead, back in zip(cost.send_forward_s, cost.send_backward_s, strict=True)]
        assert trips_s == pytest.approx(both)


def far_apart(gb_per_s: float) -> Problem:
    """Twelve layers on two machines of two devices; a message between them takes as long as some layers."""
    cluster = problems.cluster(("a", "fast", 2), ("b", "fast", 2), network_gb_per_s=gb_per_s)
    workload = Workload(16, 512, schedule="1f1b", recompute="none")
    return Problem(cluster, replace(problems.TINY, num_layers=12), workload, problems.SMALL_SPACE)


@pytest.mark.parametrize(("tight", "within"), [(False, 1.02), (True, 1.001)])
@pytest.mark.parametrize("gb_per_s", [0.1, 0.3, 0.6, 3.0])
def test_layers_make_room_for_messages(gb_per_s: float, tight: bool, within: float) -> None:
    """The beat is within 2 % of the best of all splits, or within 0.1 % without slack; where messages are slow, other
    layers than what computes in balance."""
    problem = far_apart(gb_per_s)
    model = PlanPricer(problem)
    pipeline_group = PipelineGroup(tuple(((device,),) for device in range(4)))
    maker, splitter = PipelineTimer(model), LayerSplitter(model, model.policies(), even=False)
    [trips] = maker.trips_s(Partition((pipeline_group,), ONE_F_ONE_B, 1))
    terms = SplitInput(ONE_F_ONE_B, 1, StateSharding(1, 1), True, 4, tight)
    made = maker.pipelines[pipeline_group, terms, splitter, trips]
    assert not isinstance(made, DoesNotFit)

    def period_s(layers: tuple[int, ...]) -> float:
        stage_s = [sum(model.stage_s(model.tp_group((s,)), n, s == 0, s == 3, 1, "none")) for s, n in enumerate(layers)]
        return PipelineRate.of(ONE_F_ONE_B, stage_s, trips[0], 1).period_s

    best_s = min(period_s(layers) for layers in product(range(1, 10), repeat=4) if sum(layers) == 12)
    assert made[0].rate.period_s <= within * best_s
    balanced = splitter.split(
        [frozenset((model.tp_group((s,)),)) for s in range(4)], 1, ONE_F_ONE_B, 4, StateSharding(1, 1)
    )
    assert not isinstance(balanced, int)
    differs = made[0].rate.period_s < period_s(tuple(n for n, _ in balanced)) * (1 - 1e-9)
    assert differs == (gb_per_s < 1.0)


def test_what_is_forgotten_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = CASES[min(CASES)]
    partitions = [walk(problem, seed, 10) for seed in range(20)]
    remembering = PlanCompleter(PlanPricer(problem))
    monkeypatch.setattr(lines, "_KEPT", 3)
    forgetful = PlanCompleter(PlanPricer(problem))
    for partition in partitions * 2:
        assert forgetful.complete(partition) == remembering.complete(partition)
