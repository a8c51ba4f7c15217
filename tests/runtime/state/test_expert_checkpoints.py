"""Experts are written under one plan and read under others, biases that balance them with the rest."""

from pathlib import Path

import pytest

from hexiopt.plan.parallelism import ExpertParallel, ExpertReplica, TensorParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.state.checkpoint import Checkpoint
from tests.runtime.expert_plans import expert_model
from tests.runtime.parallel.test_training import whole
from tests.runtime.state.test_checkpoint import BATCH, train

MODEL = expert_model("deepseek_v3", 2, 1)
# A device with experts alone beside uneven ones; then equal ones, a pipeline of two stages beside them.
UNEVEN = ExpertParallel((ExpertReplica((2,), 2, (1,)), ExpertReplica((0,), 1, (3,)), ExpertReplica((1,), 0, (2,))))
FIRST = Plan((Pipeline((Stage(UNEVEN, ((0, 2),), ("full",)),), 2, 3),), ONE_F_ONE_B, Sharding(1))
OTHER = Plan(
    (
        Pipeline((Stage(TensorParallel((0, 3), degree=1), ((0, 2),), ("none",)),), 2, 2),
        Pipeline((Stage.of((1,), 0, 1), Stage.of((2,), 1, 2)), 2, 1),
    ),
    ONE_F_ONE_B,
    Sharding(0),
)


def test_other_plans_go_on_with_experts(tmp_path: Path) -> None:
    curve = train(whole(MODEL, BATCH), MODEL, tmp_path / "whole", 0, 4)
    assert train(FIRST, MODEL, tmp_path / "first", 0, 2) == pytest.approx(curve[:2], rel=1e-9)
    left = tmp_path / "first" / "step-00000002"
    checkpoint = Checkpoint(left)
    checkpoint.check()
    assert checkpoint.model == MODEL
    assert checkpoint.model.config == MODEL.config
    for k, plan in enumerate((OTHER, whole(MODEL, BATCH))):
        assert train(plan, MODEL, tmp_path / str(k), 2, 4, resume=left) == pytest.approx(curve[2:], rel=1e-9)
