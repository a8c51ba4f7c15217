"""Checkpoints: written under one plan, read under others, whole or refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hexiopt.errors import InputError
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.state.checkpoint import INDEX, Checkpoint, CheckpointProgress, finished, save
from tests.runtime.parallel.test_training import SEQ_LEN, SETTINGS, trainee, whole
from tests.runtime.ranks import random_plan, run_ranks

BATCH = 6


def plans_for(model: ModelSpec, count: int) -> list[Plan]:
    """Random plans for a model and the batch."""
    found: list[Plan] = []
    seed = 0
    while len(found) < count:
        seed += 1
        plan, other, batch = random_plan(random.Random(seed), 6)
        if other.num_layers == model.num_layers and batch == BATCH:
            found.append(plan)
    return found


def train(
    plan: Plan, model: ModelSpec, folder: Path, first: int, end: int, *, resume: Path | None = None
) -> list[float]:
    """Losses of steps `first` to `end`, and a checkpoint after them."""

    def work(rank: int) -> Any:
        own = trainee(plan, model, BATCH)
        if resume is not None:
            checkpoint = Checkpoint(resume)
            assert checkpoint.progress.step == first
            own.optimizer.load(checkpoint.read, first)

        def sequences(step: int) -> Callable[[int, int], torch.Tensor]:
            tokens = torch.randint(
                model.vocab_size, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step)
            )
            return lambda low, high: tokens[low:high]

        losses = [own.step(sequences(step), SETTINGS.lr)[0] for step in range(first, end)]
        save(folder, model, CheckpointProgress(end, 1), own.optimizer.states(), keep=2)
        return losses

    return run_ranks(len(plan.devices()), work)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    return random_plan(random.Random(5))[1]


@pytest.fixture(scope="module")
def written(model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three steps under a plan of several processes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    train(plans_for(model, 1)[0], model, folder, 0, 3)
    return folder / "step-00000003"


def test_other_plans_go_on_where_one_stopped(model: ModelSpec, written: Path, tmp_path: Path) -> None:
    curve = train(whole(model, BATCH), model, tmp_path / "whole", 0, 8)
    plans = [whole(model, BATCH), *plans_for(model, 4)[1:]]
    assert len({len(plan.devices()) for plan in plans}) > 2
    for k, plan in enumerate(plans):
        again = train(plan, model, tmp_path / str(k), 3, 8, resume=written)
        assert again == pytest.approx(curve[3:], rel=1e-9)


def test_sequence_layouts_write_and_read_them_too(model: ModelSpec, written: Path, tmp_path: Path) -> None:
    """One writer of each slice, though all their devices hold all of it; sharded or not."""
    curve = train(whole(model, BATCH), model, tmp_path / "whole", 3, 6, resume=written)
    groups = (SequenceGroup((1, 0), (3, 1), (2, 4)), SequenceGroup((2,), (3,), (6,)))
    stage = Stage(SequenceParallel(groups, "zigzag"), ((0, model.num_layers),), ("none",))
    for zero in (0, 1):
        plan, folder = Plan((Pipeline((stage,), 2, BATCH // 2),), ONE_F_ONE_B, Sharding(zero)), tmp_path / str(zero)
        assert train(plan, model, folder, 3, 5, resume=written) == pytest.approx(curve[:2], rel=1e-9)
        (left,) = finished(folder)
        Checkpoint(left).check()
        again = train(whole(model, BATCH), model, tmp_path / f"again-{zero}", 5, 6, resume=left)
        assert again == pytest.approx(curve[2:], rel=1e-9)


def test_only_the_last_ones_stay(model: ModelSpec, tmp_path: Path) -> None:
    plan, resume = plans_for(model, 1)[0], None
    for step in range(3):
        train(plan, model, tmp_path, step, step + 1, resume=resume)
        resume = tmp_path / f"step-{step + 1:08d}"
    assert [path.name for path in finished(tmp_path)] == ["step-00000002", "step-00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_what_was_left_unfinished_is_no_checkpoint(model: ModelSpec, tmp_path: Path) -> None:
    left = tmp_path / ".unfinished-step-00000009"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    assert finished(tmp_path) == []
    train(whole(model, BATCH), model, tmp_path, 0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def copied(written: Path, to: Path) -> Path:
    to.mkdir()
    for path in written.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def truncated(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def flipped(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "is missing, truncated or changed"),
        (flipped, "is missing, truncated or changed"),
        (lambda folder: min(folder.glob("*.safetensors")).unlink(), "is missing, truncated or changed"),
        (lambda folder: (folder / INDEX).unlink(), "the file does not exist"),
        (lambda folder: (folder / INDEX).write_text("{"), "index.json"),
        (lambda folder: changed(folder, lambda index: index["pieces"].pop()), "elements; resume from another"),
        (lambda folder: changed(folder, lambda index: index.update(version=2)), "version"),
        (lambda folder: changed(folder, lambda index: index.update(format="x")), "format"),
        (lambda folder: changed(folder, lambda index: index["files"].update({"../x": {}})), "is not a file of the"),
    ],
)
def test_damage_is_one_line(written: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = copied(written, tmp_path / written.name)
    Checkpoint(folder).check()
    damage(folder)
    with pytest.raises(InputError) as error:
        Checkpoint(folder).check()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
