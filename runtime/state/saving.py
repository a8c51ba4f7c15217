"""Writes checkpoints beside training, which stops for no longer than a copy to host memory takes.

The copy is written by a thread, with collectives of a process group of its own. Every element is written by one rank:
the first of those that hold it, or, sharded, by each its share. All ranks write into one folder of another name, which
becomes the checkpoint, whole, when it is renamed: a process killed at any moment leaves the last one as it was. The
folder must be on a file system that all machines share.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hexiopt.errors import InputError
from runtime.device import wait_for
from runtime.network import host_group
from runtime.parallel.gradient_sync import Bucket
from runtime.state.adapter_files import FOLDER as ADAPTER
from runtime.state.adapter_files import write_adapter
from runtime.state.checkpoint import (
    SUFFIX,
    Checkpoint,
    CheckpointProgress,
    TrainedModel,
    finished_checkpoints,
    write_index,
)
from runtime.state.safetensors_header import header
from runtime.state.slices import WEIGHT, Slices, State, state_dict
from runtime.state.weights import sync

_UNFINISHED = ".unfinished-"
_LIMIT_S = 7200.0  # that one rank may write longer than another
_POLL_S = 0.5
_BLOCK_BYTES = 2**20


class CheckpointWriter:
    """Writes the checkpoints of a run into `folder`, together with all other ranks; the last `keep` stay. Beside what
    goes on from adapters is a folder `adapter`, as peft has them.

    Made by all ranks together. `states` are what is to be saved later: the memory for copies of them is made at once,
    because a first touch of gigabytes would stop training for seconds.
    """

    def __init__(self, folder: Path, trained: TrainedModel, keep: int, states: Iterable[tuple[Bucket, State]]) -> None:
        self._folder, self._trained, self._keep = folder, trained, keep
        self._group = host_group(_LIMIT_S)
        if dist.get_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{_UNFINISHED}*"):
                shutil.rmtree(left)
        dist.barrier(self._group)
        self._copies = [  # in host memory; each checkpoint is written over the last one
            {kind: _host_memory(tensor) for kind, tensor in state.items()} for bucket, state in states if bucket.counts
        ]
        self._thread: Thread | None = None
        self._writing: int | None = None  # the step of the checkpoint that the thread writes
        self._error: BaseException | None = None
        self._written: list[int] = []

    def save(
        self, progress: CheckpointProgress, states: Iterable[tuple[Bucket, State]], waiting: Callable[[], None]
    ) -> None:
        """Begin to write a checkpoint: returns when the states are copied. `waiting` is called now and then while the
        last one is still being written. Raises InputError where that has failed."""
        self.finish(waiting)
        self._take_over()
        copied = state_dict(self._copy_shares(states))
        self._thread = Thread(target=self._write, args=(progress, copied), daemon=True)
        self._writing = progress.step
        self._thread.start()

    def written_steps(self) -> list[int]:
        """The steps whose checkpoints have become whole since the last call. Raises InputError where one failed."""
        self._take_over()
        steps, self._written = self._written, []
        return steps

    def finish(self, waiting: Callable[[], None]) -> None:
        """Wait until the last checkpoint is written; `waiting` is called now and then. `written_steps` says whether it
        is."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(_POLL_S)
            waiting()

    def _take_over(self) -> None:
        """What the thread leaves once it has ended."""
        if self._thread is None or self._thread.is_alive():
            return
        if self._error is not None:
            raise InputError(
                f"{self._folder}: a checkpoint cannot be written ({_reason(self._error)}); choose a folder with room "
                "for it, which all machines share"
            )
        if self._writing is not None:
            self._written.append(self._writing)
            self._writing = None

    def _copy_shares(self, states: Iterable[tuple[Bucket, State]]) -> list[tuple[Bucket, State]]:
        """Copies of the shares that this rank writes."""
        counted = ((bucket, state) for bucket, state in states if bucket.counts)
        copies: list[tuple[Bucket, State]] = []
        for (bucket, state), copy in zip(counted, self._copies, strict=True):
            for kind, tensor in state.items():
                copy[kind].copy_(tensor.detach(), non_blocking=True)
            copies.append((bucket, copy))
        for device in {bucket.gradient.device for bucket, _ in copies}:
            wait_for(device)
        return copies

    def _write(self, progress: CheckpointProgress, copied: dict[str, Slices]) -> None:
        try:
            writer = _Writer(self._folder, dist.get_rank(), self._trained, progress, self._keep)
            save(dict(copied), storage_writer=writer, process_group=self._group)
        except BaseException as error:  # told when the thread is taken over; DCP's own is no Exception
            self._error = error


def _host_memory(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=not like.is_cpu).zero_()


def _reason(error: BaseException) -> str:
    """One line: of all ranks' failures the first one's."""
    if isinstance(error, CheckpointException):
        error = error.failures[min(error.failures)][0]
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


class _Writer(HuggingFaceStorageWriter):
    """Writes a rank's boxes as DCP's Hugging Face reader expects them, tensor by tensor.

    Torch's own would make the bytes of a whole file first, holding Python's interpreter meanwhile: of 512 MB, training
    stood still for seconds. It also keeps only the last of several boxes of one parameter.
    """

    def __init__(self, folder: Path, rank: int, trained: TrainedModel, progress: CheckpointProgress, keep: int) -> None:
        self._target = folder / f"step-{progress.step:08d}"
        self._writing = folder / f"{_UNFINISHED}{self._target.name}"
        super().__init__(str(self._writing), save_distributed=True)
        self._rank, self._trained, self._progress, self._keep = rank, trained, progress, keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One file, and further ones for further boxes of the same tensors."""
        files: list[list[WriteItem]] = []
        seen: dict[str, int] = {}
        for item in plan.items:
            number = seen[item.index.fqn] = seen.get(item.index.fqn, -1) + 1
            if number == len(files):
                files.append([])
            files[number].append(item)
        results: list[WriteResult] = []
        for number, items in enumerate(files):
            path = self._writing / f"rank-{self._rank:05}-{number}{SUFFIX}"
            stored = {path.name: _write_file(path, items, planner)}
            sizes = [_bytes(item) for item in items]
            results += [WriteResult(i.index, size, stored) for i, size in zip(items, sizes, strict=True)]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On one rank, when all have written: the index, the name, and which older ones go. A checkpoint that is there
        already, of a run that went back behind it, is left as it is."""
        if self._target.exists():
            shutil.rmtree(self._writing)
            return
        files = {
            name: entry for of_rank in results for result in of_rank for name, entry in result.storage_data.items()
        }
        write_index(self._writing, self._trained, self._progress, dict(sorted(files.items())))
        if self._trained.adapters is not None:
            whole = Checkpoint(self._writing)
            tensors = [(part.name, whole.read(WEIGHT, part)) for part in self._trained.parts()]
            write_adapter(self._writing / ADAPTER, self._trained, tensors)
        sync(self._writing)
        self._writing.rename(self._target)
        sync(self._target.parent)
        for old in finished_checkpoints(self._target.parent)[: -self._keep]:
            shutil.rmtree(old)


def _write_file(path: Path, items: Sequence[WriteItem], planner: SavePlanner) -> dict[str, Any]:
    """Write a safetensors file, and have it on the disk; its length and hash."""
    begins = {item.index.fqn: {"saved_offsets": _data(item).chunk.offsets} for item in items}
    about = {"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0"}
    head, _ = header([(item.index.fqn, _data(item).chunk.sizes, _data(item).properties.dtype) for item in items], about)
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for block in _blocks(head, items, planner):
            file.write(block)
            digest.update(block)
            size += len(block)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _blocks(head: bytes, items: Sequence[WriteItem], planner: SavePlanner) -> Iterator[bytes | memoryview]:
    """The bytes of a file, in blocks that are still in the processor's cache when they are hashed."""
    yield head
    for item in items:
        tensor = planner.resolve_data(item)
        assert isinstance(tensor, Tensor)
        assert tensor.is_contiguous()
        data = tensor.flatten().view(torch.uint8).numpy().data
        for start in range(0, len(data), _BLOCK_BYTES):
            yield data[start : start + _BLOCK_BYTES]


def _data(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _bytes(item: WriteItem) -> int:
    return prod(_data(item).chunk.sizes) * _data(item).properties.dtype.itemsize
