"""A plan's loss by forwards alone is that of one process, and asking for it changes nothing that is trained."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.plan.plan import Plan
from hexiopt.problem.model import ModelSpec
from tests.runtime.parallel.test_training import SEQ_LEN, SETTINGS, trainee, whole
from tests.runtime.ranks import random_aligned_plan, random_plan, random_sequence_plan, run_ranks
from tests.runtime.stream_order import run_in_order
from tests.slow import slow_but

Case = tuple[Plan, ModelSpec, int]


def unaligned_case(seed: int) -> Case:
    return random_plan(random.Random(seed))


def aligned_case(seed: int) -> Case:
    return random_aligned_plan(random.Random(seed), max_ranks=5, most_layers=4)


def long_case(seed: int) -> Case:
    return random_sequence_plan(random.Random(seed), SEQ_LEN)


CASES = [
    *((unaligned_case, seed) for seed in range(20)),
    *((aligned_case, seed) for seed in range(20)),
    *((long_case, seed) for seed in range(10)),
]
QUICK = [(unaligned_case, 5), (unaligned_case, 12), (aligned_case, 1), (long_case, 2)]


def losses(case: Case, asks: bool, run: Callable[[int, Callable[[int], Any]], list[Any]] = run_ranks) -> list[Any]:
    """By rank: the losses of two steps, and of another batch before and after them if one `asks` for these."""
    plan, model, batch = case
    generator = torch.Generator().manual_seed(0)
    tokens, others = torch.randint(model.vocab_size, (2, batch, SEQ_LEN + 1), generator=generator)

    def work(rank: int) -> Any:
        rank_trainee, asked, stepped = trainee(plan, model, batch), [], []
        for _ in range(2):
            asked += [rank_trainee.loss(lambda first, end: others[first:end])] if asks else []
            stepped.append(rank_trainee.step(lambda first, end: tokens[first:end], SETTINGS.lr))
        timed = len(rank_trainee.pipeline.timeline())
        asked += [rank_trainee.loss(lambda first, end: others[first:end])] if asks else []
        assert len(rank_trainee.pipeline.timeline()) == timed
        return stepped, asked

    return run(len(plan.devices()), work)


@pytest.mark.parametrize(("make", "seed"), slow_but(QUICK[2:3], CASES))
def test_the_loss_of_a_plan_is_that_of_one_process(make: Callable[[int], Case], seed: int) -> None:
    _, model, batch = case = make(seed)
    ((_, expected),) = losses((whole(model, batch), model, batch), True)
    assert len(expected) == 3
    results, without = losses(case, True), losses(case, False)
    for (stepped, asked), (same, _) in zip(results, without, strict=True):
        assert asked == pytest.approx(expected, rel=1e-10)
        assert stepped == same
    assert expected[0] != expected[1] != expected[2]


@pytest.mark.parametrize(("make", "seed"), slow_but(QUICK, CASES))
def test_forwards_alone_have_one_order(make: Callable[[int], Case], seed: int) -> None:
    results = losses(make(seed), True, run_in_order)
    assert all(asked == pytest.approx(results[0][1], rel=1e-12) for _, asked in results)


def test_the_quick_ones_have_what_matters() -> None:
    plans = [make(seed)[0] for make, seed in QUICK]
    stages = [stage for plan in plans for pipeline in plan.pipelines for stage in pipeline.stages]
    assert {plan.sharding.stage for plan in plans} >= {3}
    assert any(pipeline.num_chunks > 1 for plan in plans for pipeline in plan.pipelines)
    assert any(isinstance(stage.parallelism, SequenceParallel) for stage in stages)
    assert any(len(replica.devices) > 1 for stage in stages for replica in stage.parallelism.replicas)
