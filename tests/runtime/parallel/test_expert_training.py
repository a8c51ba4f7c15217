"""Plans whose ranks exchange tokens train as one process does: gradients and loss curves, in float64."""

import random
from functools import partial

import pytest

from hexiopt.plan.plan import Plan
from hexiopt.problem.model import ModelSpec
from hexiopt.schedules.registry import SPLIT_SCHEDULES
from runtime.parallel.expert_parts import ExpertTraining
from tests.conftest import STRESS
from tests.runtime.expert_plans import SHAPES, expert_features, random_expert_plan
from tests.runtime.parallel.test_training import SEQ_LEN, equal_one_process
from tests.runtime.stream_order import run_in_order
from tests.slow import slow_but

TYPES = tuple(SHAPES)
QUICK, SLOW, ALL = range(28, 42), 84, 210  # 2, 12 and 30 of each type
BALANCED = ExpertTraining(sequence_balance=0.1, expert_bias_rate=0.01)


def small(seed: int) -> tuple[Plan, ModelSpec, int]:
    return random_expert_plan(random.Random(seed), TYPES[seed % len(TYPES)], 5 if seed in QUICK else 7)


@pytest.mark.parametrize("seed", slow_but(QUICK, range(ALL if STRESS else SLOW)))
def test_a_plan_with_experts_trains_as_one_process(seed: int) -> None:
    """Every other one with a loss and biases that balance experts."""
    settings = BALANCED if seed % 2 else ExpertTraining(expert_bias_rate=0.0)
    run = partial(run_in_order, one_queue=seed % 3 > 0)
    of_gradients, _ = equal_one_process(small(seed), 4 if STRESS else 2, SEQ_LEN, run, everywhere={"experts": settings})
    assert of_gradients <= 1e-13


@pytest.mark.parametrize("seed", slow_but((501,), range(500, 503)))
def test_a_plan_with_experts_trains_over_gloo(seed: int) -> None:
    equal_one_process(small(seed), 4, everywhere={"experts": BALANCED})


def test_the_quick_ones_share_experts_in_every_way() -> None:
    found = set().union(*(expert_features(*small(seed)[:2]) for seed in QUICK))
    wanted = {"stated experts", "experts alone", "no experts", "uneven samples", "TP beside experts", "even experts"}
    wanted |= {"one replica", "replicas", "full", "selective", *SHAPES, SPLIT_SCHEDULES[0].name}
    wanted |= {"interleaved", *(f"ZeRO-{stage}" for stage in range(4))}
    assert wanted <= found, wanted - found
