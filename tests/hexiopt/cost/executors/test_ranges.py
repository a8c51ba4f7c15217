"""All ranges of layers of a stage at once, beside the price of each."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from hexiopt.cost.executors.memory import Holders
from hexiopt.cost.executors.ranges import counts_by_kind
from hexiopt.cost.executors.stage_model import StagePlace
from hexiopt.cost.pricer import PlanPricer
from hexiopt.plan.parallelism import (
    ExpertParallel,
    ExpertReplica,
    Replica,
    Replicated,
    StageParallelism,
    TensorParallel,
)
from hexiopt.plan.plan import Stage
from hexiopt.problem.kinds import LayerKind
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.schedules.in_flight import holding
from tests.hexiopt.shapes_of_kinds import DENSE_LAYER, EXPERT_LAYER, KINDS, model_of
from tests.solvers.problems import cluster

CLUSTER = cluster(("a", "fast", 4), ("b", "slow", 4), fast_gib=24, slow_gib=24)
POLICIES = ("none", "selective", "full")
EXAMPLES: dict[str, StageParallelism] = {
    "one device": TensorParallel((0,)),
    "a TP group": TensorParallel((0, 1), degree=2),
    "replicas that share experts": TensorParallel((0, 1, 2, 3), degree=2),
    "replicas": Replicated((Replica((0, 1), 3), Replica((4,), 1))),
    "experts in any numbers": ExpertParallel((ExpertReplica((0,), 3, (9,)), ExpertReplica((4, 5), 1, (3, 4)))),
    "waves": ExpertParallel((ExpertReplica((0,), 2, (8,)), ExpertReplica((4,), 2, (8,))), 2),
}


def some_layers(rng: random.Random) -> Sequence[LayerKind]:
    kinds = rng.choice((KINDS[:4], (EXPERT_LAYER, KINDS[6]), (DENSE_LAYER, EXPERT_LAYER)))
    return [EXPERT_LAYER, *rng.choices(kinds, k=6)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_range_costs_what_its_stage_does(name: str, zero: int) -> None:
    parallelism = EXAMPLES[name]
    if isinstance(parallelism, ExpertParallel) and zero > 1:
        pytest.skip("not under ZeRO-2 and 3")
    rng = random.Random(f"{name}{zero}")
    for _ in range(3):
        model = model_of(*some_layers(rng))
        problem = Problem(CLUSTER, model, Workload(16, 1024), Space(uneven_experts=True))
        stages, held = PlanPricer(problem).stages, holding(rng.randrange(1, 5))
        place = StagePlace(rng.random() < 0.5, rng.random() < 0.5, held, zero)
        holders = [Holders((float(rng.randrange(1, 4)),))] * len(parallelism.parameter_copies)
        key = stages.ranges_key(Stage(parallelism, ((0, 1),)), 4)
        ranges = stages.ranges(key, place, holders, POLICIES)
        for p, policy in enumerate(POLICIES):
            for first in range(model.num_layers):
                for end in range(first + 1, model.num_layers + 1):
                    stage = Stage(parallelism, ((first, end),), (policy,))
                    costs = stages.executors(stage, 4, place, holders)
                    excess = max(cost.excess_bytes for cost in costs)
                    seconds = max(cost.forward_s + cost.backward_s for cost in costs)
                    if isinstance(parallelism, Replicated):  # whose slowest may be another in each layer
                        assert seconds <= ranges.seconds[p, first, end] * (1 + 1e-9)
                    elif isinstance(parallelism, ExpertParallel) and parallelism.waves == 2:
                        # The first layer of a stage lasts longer, until waves overlap.
                        assert 0.6 * seconds <= ranges.seconds[p, first, end] <= seconds * (1 + 1e-9)
                    else:
                        assert ranges.seconds[p, first, end] == pytest.approx(seconds, rel=1e-9)
                    if zero < 2 or end - first >= 2:
                        assert ranges.excess[p, first, end] == pytest.approx(excess, abs=1e-6 * 2**30)
                    else:
                        assert ranges.excess[p, first, end] >= excess - 1.0
        assert np.isinf(ranges.seconds[0, 3, 3])


def test_counts_of_ranges() -> None:
    model = model_of(DENSE_LAYER, EXPERT_LAYER, EXPERT_LAYER, DENSE_LAYER)
    counts = counts_by_kind(model)
    for first in range(5):
        for end in range(first, 5):
            kinds = model.depth[first:end]
            assert counts[:, first, end].tolist() == [kinds.count(k) for k in range(2)]
