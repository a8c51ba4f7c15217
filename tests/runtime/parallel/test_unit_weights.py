"""ZeRO-2 and 3 in a run: their checkpoints are any plan's, bf16 keeps masters, and nothing whole is left over."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from tests.runtime.parallel.test_training import SEQ_LEN, trainee, whole
from tests.runtime.ranks import random_model, run_ranks
from tests.runtime.state.test_checkpoint import BATCH, train
from tests.slow import slow_but

MODEL = random_model(random.Random(5), 4)


def two_pipelines(zero: int, tp: int = 1) -> Plan:
    """Of two stages each."""
    groups = iter([tuple(range(tp * k, tp * k + tp)) for k in range(4)])
    lines = [Pipeline((Stage.of(next(groups), 0, 2), Stage.of(next(groups), 2, 4, "full")), 3) for _ in range(2)]
    return Plan(tuple(lines), ONE_F_ONE_B, Sharding(zero))


@pytest.mark.parametrize(("zero", "tp"), slow_but([(3, 1)], [(2, 1), (3, 1), (3, 2)]))
def test_checkpoints_are_read_by_plans_of_other_zero_stages(zero: int, tp: int, tmp_path: Path) -> None:
    """Trained under ZeRO-2 or 3, resumed by one process, and resumed under ZeRO-2 or 3 again: as never interrupted."""
    through = train(whole(MODEL, BATCH), MODEL, tmp_path / "through", 0, 6)
    first = train(two_pipelines(zero, tp), MODEL, tmp_path / "first", 0, 2)
    second = train(whole(MODEL, BATCH), MODEL, tmp_path / "second", 2, 4, resume=tmp_path / "first" / "step-00000002")
    third = train(
        two_pipelines(zero, tp), MODEL, tmp_path / "third", 4, 6, resume=tmp_path / "second" / "step-00000004"
    )
    assert first + second + third == pytest.approx(through, rel=1e-11)


@pytest.mark.parametrize("zero", slow_but([3], [2, 3]))
def test_bf16_and_what_is_left_after_a_step(zero: int) -> None:
    """The loss falls as it does where nothing is sharded; a share is its masters, rounded; no unit is whole."""

    def work(plan: Plan) -> Any:
        def rank(number: int) -> list[float]:
            rank_trainee = trainee(plan, MODEL, BATCH, torch.bfloat16, torch.float32)
            tokens = torch.randint(MODEL.vocab_size, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
            losses = [rank_trainee.step(lambda first, end: tokens[first:end], 3e-3)[0] for _ in range(12)]
            if plan.sharding.stage:
                late = [(bucket, state) for bucket, state in rank_trainee.optimizer.states() if bucket.zero == zero]
                assert late
                for bucket, state in late:
                    assert bucket.whole is None
                    assert len(bucket.gradient) == bucket.length // 2
                    if zero == 3:
                        assert bucket.weight is not None
                        assert bucket.weight.equal(state["weight"].bfloat16())
                        assert all(rank_trainee.weights[name].numel() == 0 for name in bucket.places)
            return losses

        return run_ranks(len(plan.devices()), rank)[0]

    losses, want = work(two_pipelines(zero)), work(two_pipelines(0))
    assert losses[-1] < losses[0] - 0.05
    assert losses == pytest.approx(want, rel=0.01)
