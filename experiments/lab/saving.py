"""How long a checkpoint stops training, beside how long it takes to write: measured on this machine, on one process."""

import tempfile
import time
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from hexiopt.problem.model import ModelSpec
from runtime.mapping.model_parts import whole_parts
from runtime.mapping.moments import ADAMW, moments_of
from runtime.network import join_world
from runtime.parallel.gradient_sync import Bucket
from runtime.state.checkpoint import CheckpointProgress, TrainedModel
from runtime.state.saving import CheckpointWriter
from runtime.state.slices import WEIGHT

_MODEL = ModelSpec(
    name="saved",
    architecture="llama",
    num_layers=2,
    hidden_size=1024,
    num_heads=8,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=4096,
    vocab_size=1024,
    max_positions=512,
)
_ELEMENT_BYTES = 4 * 3


@dataclass(frozen=True)
class SavingTimes:
    """Seconds that saving stopped training, and from then until the checkpoint was whole; of how many bytes."""

    stopped_s: float
    written_s: float
    size_bytes: int


def saving_times(size_bytes: int) -> list[SavingTimes]:
    """Of two checkpoints of about that size, one after another, in a temporary folder. The process, which is in no
    world of torch.distributed yet, makes one of its own, and leaves it."""
    row_bytes = 2 * _MODEL.hidden_size * _ELEMENT_BYTES
    model = replace(_MODEL, vocab_size=max(1024, size_bytes // row_bytes))
    join_world(torch.device("cpu"), 0, 1, 60.0, store=HashStore())
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _times(model, Path(folder))
    finally:
        dist.destroy_process_group()


def _times(model: ModelSpec, folder: Path) -> list[SavingTimes]:
    states = []
    for number, part in enumerate(whole_parts(model)):
        length = prod(part.shape)
        bucket = Bucket(number, (0,), True, {}, part.decays, 0, (part,), length, {}, torch.empty(0))
        states.append((bucket, {kind: torch.ones(length) for kind in (WEIGHT, *moments_of(ADAMW, part))}))
    times = []
    writer = CheckpointWriter(folder, TrainedModel(model), keep=1, states=states)
    for step in (1, 2):
        began = time.perf_counter()
        writer.save(CheckpointProgress("stop", step, step, 1, 0), states, lambda: None)
        stopped = time.perf_counter()
        writer.finish(lambda: None)
        size = sum(path.stat().st_size for path in (folder / f"step-{step:08d}").iterdir())
        times.append(SavingTimes(stopped - began, time.perf_counter() - stopped, size))
    return times
