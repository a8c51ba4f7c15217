"""Which runs go on from a checkpoint, and which are refused."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hexiopt.errors import InputError
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from runtime.state.checkpoint import CheckpointProgress, TrainedModel
from runtime.state.saving import CheckpointWriter
from runtime.training.preparation import resumed_progress
from tests.runtime.parallel.test_training import trainee, whole
from tests.runtime.ranks import random_plan, run_ranks
from tests.solvers.problems import cluster

MODEL = random_plan(random.Random(5))[1]
PROBLEM = Problem(cluster(("a", "fast", 1)), MODEL, Workload(4, 16, precision="fp32"))


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoints")

    def work(rank: int) -> Any:
        rank_trainee = trainee(whole(PROBLEM.model, 4), PROBLEM.model, 4, seq_len=16)
        writer = CheckpointWriter(folder, TrainedModel(PROBLEM.model), 1, rank_trainee.optimizer.states())
        writer.save(CheckpointProgress("own", 3, 12, 16, 7), rank_trainee.optimizer.states(), lambda: None)
        writer.finish(lambda: None)

    run_ranks(1, work)
    return folder / "step-00000003"


def test_another_batch_goes_on_at_the_same_token(checkpoint_folder: Path) -> None:
    larger = PROBLEM.replace(workload=PROBLEM.workload.replace(global_batch=9))
    for problem in (PROBLEM, larger):
        assert resumed_progress(checkpoint_folder, problem, 7) == CheckpointProgress("own", 3, 12, 16, 7)


@pytest.mark.parametrize(
    ("change", "seed", "message"),
    [
        (lambda p: p.replace(workload=p.workload.replace(seq_len=8)), 7, "trained with workload.seq_len=16, not 8"),
        (lambda p: p, 1, "trained with train.seed=7, not 1"),
        (lambda p: p.replace(model=replace(MODEL, ffn_size=2 * MODEL.ffn_size)), 7, "is of another model than"),
    ],
)
def test_other_text_or_another_model_is_one_line(
    checkpoint_folder: Path, change: Callable[[Problem], Problem], seed: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        resumed_progress(checkpoint_folder, change(PROBLEM), seed)
