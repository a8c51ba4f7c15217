"""Checkpoints: written under one plan, read under others, whole or refused."""

import errno
import json
import random
import threading
import warnings
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from hexiopt.errors import InputError
from hexiopt.plan.parallelism import SequenceGroup, SequenceParallel
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.mapping.model_parts import whole_parts
from runtime.state import saving
from runtime.state.checkpoint import INDEX, Checkpoint, CheckpointProgress, TrainedModel, finished_checkpoints
from runtime.state.saving import CheckpointWriter
from runtime.state.slices import boxes
from tests.runtime.parallel.test_training import SEQ_LEN, SETTINGS, trainee, whole
from tests.runtime.ranks import random_plan, run_ranks

BATCH = 6


def plans_for(model: ModelSpec, count: int) -> list[Plan]:
    """Random plans for a model and the batch."""
    plans: list[Plan] = []
    seed = 0
    while len(plans) < count:
        seed += 1
        plan, other, batch = random_plan(random.Random(seed), 6)
        if other.num_layers == model.num_layers and batch == BATCH:
            plans.append(plan)
    return plans


def train(
    plan: Plan, model: ModelSpec, folder: Path, first: int, end: int, *, resume: Path | None = None
) -> list[float]:
    """Losses of steps `first` to `end`, and a checkpoint after them."""

    def work(rank: int) -> Any:
        rank_trainee = trainee(plan, model, BATCH)
        if resume is not None:
            checkpoint = Checkpoint(resume)
            assert checkpoint.progress.step == first
            rank_trainee.optimizer.load(checkpoint.fill, first)

        def sequences(step: int) -> Callable[[int, int], torch.Tensor]:
            tokens = torch.randint(
                model.vocab_size, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step)
            )
            return lambda low, high: tokens[low:high]

        losses = [rank_trainee.step(sequences(step), SETTINGS.lr)[0] for step in range(first, end)]
        writer = CheckpointWriter(folder, TrainedModel(model), keep=2, states=rank_trainee.optimizer.states())
        writer.save(
            CheckpointProgress("own", end, end * BATCH, SEQ_LEN, 1), rank_trainee.optimizer.states(), lambda: None
        )
        writer.finish(lambda: None)
        assert writer.written_steps() == [end]
        return losses

    return run_ranks(len(plan.devices()), work)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def model() -> ModelSpec:
    return random_plan(random.Random(5))[1]


@pytest.fixture(scope="module")
def checkpoint_folder(model: ModelSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three steps under a plan of several processes."""
    folder = tmp_path_factory.mktemp("checkpoints")
    train(plans_for(model, 1)[0], model, folder, 0, 3)
    return folder / "step-00000003"


def test_other_plans_go_on_where_one_stopped(model: ModelSpec, checkpoint_folder: Path, tmp_path: Path) -> None:
    curve = train(whole(model, BATCH), model, tmp_path / "whole", 0, 8)
    plans = [whole(model, BATCH), *plans_for(model, 4)[1:]]
    assert len({len(plan.devices()) for plan in plans}) > 2
    for k, plan in enumerate(plans):
        again = train(plan, model, tmp_path / str(k), 3, 8, resume=checkpoint_folder)
        assert again == pytest.approx(curve[3:], rel=1e-9)


def test_sequence_layouts_write_and_read_them_too(model: ModelSpec, checkpoint_folder: Path, tmp_path: Path) -> None:
    """One writer of each slice, though all their devices hold all of it; sharded or not."""
    curve = train(whole(model, BATCH), model, tmp_path / "whole", 3, 6, resume=checkpoint_folder)
    groups = (SequenceGroup((1, 0), (3, 1), (2, 4)), SequenceGroup((2,), (3,), (6,)))
    stage = Stage(SequenceParallel(groups, "zigzag"), ((0, model.num_layers),), ("none",))
    for zero in (0, 1):
        plan, folder = Plan((Pipeline((stage,), 2, BATCH // 2),), ONE_F_ONE_B, Sharding(zero)), tmp_path / str(zero)
        assert train(plan, model, folder, 3, 5, resume=checkpoint_folder) == pytest.approx(curve[:2], rel=1e-9)
        (left,) = finished_checkpoints(folder)
        Checkpoint(left).check()
        again = train(whole(model, BATCH), model, tmp_path / f"again-{zero}", 5, 6, resume=left)
        assert again == pytest.approx(curve[2:], rel=1e-9)


def test_only_the_last_ones_stay(model: ModelSpec, tmp_path: Path) -> None:
    plan, resume = plans_for(model, 1)[0], None
    for step in range(3):
        train(plan, model, tmp_path, step, step + 1, resume=resume)
        resume = tmp_path / f"step-{step + 1:08d}"
    assert [path.name for path in finished_checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_what_was_left_unfinished_is_no_checkpoint(model: ModelSpec, tmp_path: Path) -> None:
    left = tmp_path / ".unfinished-step-00000009"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    assert finished_checkpoints(tmp_path) == []
    train(whole(model, BATCH), model, tmp_path, 0, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def copy_checkpoint(checkpoint_folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in checkpoint_folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def change_index(folder: Path, change: Callable[[Any], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def truncate(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def flip_bit(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def lose_file(folder: Path) -> None:
    """A file that the index does not have either."""
    path = max(folder.glob("*.safetensors"))
    path.unlink()
    change_index(folder, lambda index: index["files"].pop(path.name))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "is missing, truncated or changed"),
        (flip_bit, "is missing, truncated or changed"),
        (lambda folder: min(folder.glob("*.safetensors")).unlink(), "is missing, truncated or changed"),
        (lambda folder: (folder / INDEX).unlink(), "the file does not exist"),
        (lambda folder: (folder / INDEX).write_text("{"), "index.json"),
        (lambda folder: (folder / "stray.safetensors").write_bytes(b""), "is not in index.json"),
        (lose_file, "elements of "),
        (lambda folder: change_index(folder, lambda index: index.update(version=3)), "version"),
        (
            lambda folder: change_index(folder, lambda index: index.update(version=1)),
            "is of version 1, which this hexiopt",
        ),
        (lambda folder: change_index(folder, lambda index: index.update(format="x")), "format"),
        (
            lambda folder: change_index(folder, lambda index: index["files"].update({"../x": {}})),
            "is not a file of the",
        ),
    ],
)
def test_damage_is_one_line(
    checkpoint_folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = copy_checkpoint(checkpoint_folder, tmp_path / checkpoint_folder.name)
    Checkpoint(folder).check()
    damage(folder)
    with pytest.raises(InputError) as error:
        Checkpoint(folder).check()
    assert message in str(error.value)


def test_nothing_on_the_disk_is_pickled(checkpoint_folder: Path) -> None:
    """Safetensors, which torch's own reader takes as they are, and an index."""
    files = {path.name for path in checkpoint_folder.iterdir()}
    assert {Path(name).suffix for name in files} == {".safetensors", ".json"}
    metadata = HuggingFaceStorageReader(str(checkpoint_folder)).read_metadata()
    name, shape = "model.embed_tokens.weight", next(iter(whole_parts(Checkpoint(checkpoint_folder).model))).shape
    tensors = {name: torch.empty(shape, dtype=torch.float64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(tensors, storage_reader=HuggingFaceStorageReader(str(checkpoint_folder)), no_dist=True)
    torch.testing.assert_close(
        tensors[name], Checkpoint(checkpoint_folder).read("weight", whole_parts(Checkpoint(checkpoint_folder).model)[0])
    )
    assert f"exp_avg.{name}" in metadata.state_dict_metadata


def test_training_goes_on_while_a_checkpoint_is_written(
    model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it is whole it is none; it has the states of the moment at which it was begun."""
    go_on = threading.Event()
    write = saving._write_file

    def hold_up(*arguments: Any) -> Any:
        assert go_on.wait(60.0)
        return write(*arguments)

    monkeypatch.setattr(saving, "_write_file", hold_up)
    waited: list[int] = []

    def wait() -> None:
        waited.append(1)
        go_on.set()

    def work(rank: int) -> Any:
        rank_trainee, tokens = trainee(whole(model, BATCH), model, BATCH), torch.arange(SEQ_LEN + 1).expand(BATCH, -1)
        before = {name: weight.detach().clone() for name, weight in rank_trainee.weights.items()}
        writer = CheckpointWriter(tmp_path, TrainedModel(model), keep=2, states=rank_trainee.optimizer.states())
        writer.save(CheckpointProgress("own", 1, BATCH, SEQ_LEN, 1), rank_trainee.optimizer.states(), wait)
        rank_trainee.step(lambda low, high: tokens[low:high] % model.vocab_size, 1.0)
        assert writer.written_steps() == []
        assert finished_checkpoints(tmp_path) == []
        assert not waited
        writer.save(CheckpointProgress("own", 2, BATCH, SEQ_LEN, 1), rank_trainee.optimizer.states(), wait)
        assert waited
        assert writer.written_steps() == [1]
        first = Checkpoint(tmp_path / "step-00000001")
        for part in whole_parts(model):
            assert torch.equal(first.read("weight", part), before[part.name])
        writer.finish(wait)
        assert writer.written_steps() == [2]
        return [path.name for path in finished_checkpoints(tmp_path)]

    assert run_ranks(1, work) == [["step-00000001", "step-00000002"]]


def test_a_full_disk_is_one_line(model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, whichever of them it happened on; nothing half-written is taken for a checkpoint."""
    write = saving._write_file

    def full(path: Path, *arguments: Any) -> Any:
        if path.name.startswith("rank-00001"):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *arguments)

    monkeypatch.setattr(saving, "_write_file", full)
    plan = plans_for(model, 1)[0]

    def work(rank: int) -> Any:
        rank_trainee = trainee(plan, model, BATCH)
        writer = CheckpointWriter(tmp_path, TrainedModel(model), keep=1, states=rank_trainee.optimizer.states())
        writer.save(CheckpointProgress("own", 1, BATCH, SEQ_LEN, 1), rank_trainee.optimizer.states(), lambda: None)
        writer.finish(lambda: None)
        with pytest.raises(InputError) as error:
            writer.written_steps()
        return str(error.value)

    for message in run_ranks(len(plan.devices()), work):
        assert "a checkpoint cannot be written ([Errno 28] No space left on device" in message
    assert finished_checkpoints(tmp_path) == []


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), st.data())
def test_a_run_of_elements_is_boxes(shape: tuple[int, ...], draw: st.DataObject) -> None:
    size = prod(shape)
    low = draw.draw(st.integers(0, size))
    high = draw.draw(st.integers(low, size))
    whole = torch.arange(size).view(shape)
    pieces = list(boxes(shape, low, high))
    for starts, sizes, first in pieces:
        box = whole[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))]
        assert box.flatten().tolist() == list(range(first, first + prod(sizes)))
    assert sum(prod(sizes) for _, sizes, _ in pieces) == high - low
    assert len(pieces) <= max(1, 2 * len(shape) - 1)
