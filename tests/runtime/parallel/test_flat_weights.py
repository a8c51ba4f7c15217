"""Parameters are where the optimiser steps them: in the flat weights of their buckets."""

import random
from dataclasses import replace

import pytest
import torch

from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.training.trainee import Trainee
from tests.runtime.parallel.test_training import SEQ_LEN, trainee
from tests.runtime.ranks import random_model, run_ranks

BATCH = 2
# Three ranks of a TP group have a key-value head whole or share it, in buckets of their own.
MODEL = replace(random_model(random.Random(5), 2), num_heads=6, num_kv_heads=2)


def plan(zero: int) -> Plan:
    """Two pipelines of a stage, one of them of TP 3."""
    groups = ((0,), (1, 2, 3))
    lines = tuple(Pipeline((Stage.of(devices, 0, MODEL.num_layers),), 1) for devices in groups)
    return Plan(lines, ONE_F_ONE_B, Sharding(zero))


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def check_places(rank_trainee: Trainee) -> int:
    """How many parameters lie in several buckets; all others are where their bucket has them."""
    flat = {memory(bucket.weight) for bucket in rank_trainee.buckets if bucket.weight is not None}
    assert flat
    apart = {name for name, weight in rank_trainee.weights.items() if memory(weight.data) not in flat}
    for bucket in rank_trainee.buckets:
        assert (bucket.weight is None) == any(name in apart for name in bucket.places)
        for name, view, where in bucket.pieces(bucket.weight if bucket.weight is not None else bucket.gradient):
            assert view.shape == rank_trainee.weights[name].data[where].shape
            if bucket.weight is not None:
                assert view.data_ptr() == rank_trainee.weights[name].data_ptr()
    return len(apart)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("zero", [0, 1])
def test_weights_stay_in_their_buckets_and_change_there(zero: int, dtype: torch.dtype) -> None:
    def work(rank: int) -> tuple[int, bool]:
        rank_trainee = trainee(plan(zero), MODEL, BATCH, dtype, dtype)
        check_places(rank_trainee)
        before = {name: weight.data.clone() for name, weight in rank_trainee.weights.items()}
        tokens = torch.randint(MODEL.vocab_size, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
        rank_trainee.step(lambda first, end: tokens[first:end], 3e-3)
        rank_trainee.finish()
        changed = all(
            not weight.data.equal(before[name]) for name, weight in rank_trainee.weights.items() if weight.ndim > 1
        )
        if not zero:  # the masters of all that the rank holds, rounded
            for bucket, state in rank_trainee.optimizer.states():
                for name, view, where in bucket.pieces(state["weight"]):
                    assert view.to(dtype).equal(rank_trainee.weights[name].data[where])
        return check_places(rank_trainee), changed

    apart = run_ranks(4, work)
    assert all(changed for _, changed in apart)
    assert apart[0][0] > 0
