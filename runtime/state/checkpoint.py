"""Checkpoints that do not know the plan that wrote them: safetensors, and a JSON index in whole parameters.

A checkpoint is a folder `step-NNNNNNNN`. Every element of master weights and moments is written by one rank: what the
same ranks hold by the first of them, or, sharded, by each its share. A piece is some consecutive elements, in row-major
order, of the range [start, end) along a parameter's split dimension. All ranks write into one folder of another name,
which becomes the checkpoint, whole, when it is renamed: a process killed at any moment leaves the last one as it was.
The folder must be on a file system that all machines share.
"""

import hashlib
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hexiopt.errors import InputError
from hexiopt.problem.model import ModelSpec
from hexiopt.readers.huggingface import model_from_config
from hexiopt.reading import Section, read_mapping
from runtime.mapping.parts import ParameterPart, whole_parts
from runtime.parallel.gradient_sync import Bucket

FORMAT, VERSION = "hexiopt.checkpoint", 1
KINDS = ("weight", "exp_avg", "exp_avg_sq")
INDEX = "index.json"
_UNFINISHED = ".unfinished-"
_MAX_INDEX_BYTES = 2**30
_BLOCK_BYTES = 2**22

State = Mapping[str, Tensor]  # a bucket's share of each kind, flat


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [first, last) of the range [start, end) of a parameter, and where they are."""

    name: str
    start: int
    end: int
    first: int
    last: int
    file: str
    number: int  # of the tensors `NUMBER.KIND` in the file


@dataclass(frozen=True)
class CheckpointProgress:
    """How far training has come. Data follow from `seed` and `step` alone."""

    step: int
    seed: int


def save(
    folder: Path, model: ModelSpec, progress: CheckpointProgress, states: Iterable[tuple[Bucket, State]], keep: int
) -> None:
    """Write a checkpoint, together with all other ranks; the last `keep` stay. One that is there is left as it is."""
    rank, target = dist.get_rank(), folder / f"step-{progress.step:08d}"
    writing = folder / f"{_UNFINISHED}{target.name}"
    dist.barrier()  # nobody is writing now, so that all see the same
    if target.exists():
        return
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(left)
        writing.mkdir()
    dist.barrier()
    _write_rank(writing, rank, states)
    dist.barrier()
    if rank == 0:
        _write_index(writing, model, progress)
        writing.rename(target)
        _sync(folder)
        for old in finished(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()


def finished(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, by step."""
    return sorted(path.parent for path in folder.glob(f"step-*/{INDEX}"))


def _write_rank(writing: Path, rank: int, states: Iterable[tuple[Bucket, State]]) -> None:
    tensors: dict[str, Tensor] = {}
    pieces: list[Piece] = []
    file = f"rank-{rank:05d}.safetensors"
    for bucket, state in states:
        if not bucket.counts:
            continue
        share, at = bucket.share, 0
        for part in bucket.parts:
            size = prod(part.local_shape)
            low, high = max(at, share.start), min(at + size, share.stop)
            if low < high:
                number = len(pieces)
                pieces.append(Piece(part.name, part.start, part.end, low - at, high - at, file, number))
                for kind in KINDS:
                    own = state[kind][low - share.start : high - share.start]
                    tensors[f"{number}.{kind}"] = own.detach().cpu().contiguous().clone()
            at += size
    if tensors:
        save_file(tensors, writing / file)
    digest = _sha256(writing / file) if tensors else None
    _write_json(writing / f"rank-{rank:05d}.json", {"sha256": digest, "pieces": [asdict(piece) for piece in pieces]})


def _write_index(writing: Path, model: ModelSpec, progress: CheckpointProgress) -> None:
    files, pieces = {}, []
    for path in sorted(writing.glob("rank-*.json")):
        own = json.loads(path.read_text())
        data = path.with_suffix(".safetensors")
        if own["sha256"] is not None:
            files[data.name] = {"bytes": data.stat().st_size, "sha256": own["sha256"]}
        pieces += own["pieces"]
        path.unlink()
    index = {"format": FORMAT, "version": VERSION, "model": model.to_dict(), **asdict(progress)}
    _write_json(writing / INDEX, {**index, "files": files, "pieces": pieces})
    _sync(writing)


def _write_json(path: Path, data: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(data, file)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    """Of a file's bytes, which are on the disk when it returns."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
        os.fsync(file.fileno())
    return digest.hexdigest()


class Checkpoint:
    """A finished checkpoint, opened to be read. Raises InputError where its index is not sound."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_dir():
            raise InputError(f"{path}: is not a checkpoint; name a folder step-NNNNNNNN")
        index = Section(read_mapping(path / INDEX, max_bytes=_MAX_INDEX_BYTES), str(path / INDEX))
        index.text("format", choices=[FORMAT])
        index.integer("version", at_least=VERSION, at_most=VERSION)
        self.model = model_from_config(index.section("model"))
        self.progress = CheckpointProgress(
            index.integer("step", at_least=0, at_most=10**12), index.integer("seed", at_least=0, at_most=2**32 - 1)
        )
        files = index.section("files")
        self._files = {name: files.section(name) for name in files.keys()}  # noqa: SIM118
        for name in self._files:
            if Path(name).name != name:
                files.fail(name, "is not a file of the checkpoint; write the checkpoint again")
        self._pieces: dict[str, list[Piece]] = defaultdict(list)
        for section in index.sections("pieces"):
            numbers = {
                key: section.integer(key, at_least=0, at_most=2**62)
                for key in ("start", "end", "first", "last", "number")
            }
            piece = Piece(name=section.text("name"), file=section.text("file", choices=self._files), **numbers)
            section.finish()
            self._pieces[piece.name].append(piece)
        index.finish()

    def check(self) -> None:
        """Every file whole, every element of every parameter there once. Raises InputError."""
        for name, stated in self._files.items():
            path = self._path / name
            size, digest = stated.integer("bytes", at_least=0, at_most=2**62), stated.text("sha256")
            if not path.is_file() or path.stat().st_size != size or _sha256(path) != digest:
                raise InputError(f"{path}: is missing, truncated or changed; resume from another checkpoint")
        for part in whole_parts(self.model):
            cuts = sorted(
                (p.start * (rows := prod(part.shape) // part.shape[part.dim]) + p.first, p.start * rows + p.last)
                for p in self._pieces[part.name]
            )
            at = 0
            for first, last in cuts:
                if first != at:
                    break
                at = last
            if at != prod(part.shape):
                raise InputError(
                    f"{self._path / INDEX}: {part.name} is there for {at} of {prod(part.shape)} elements; "
                    "resume from another checkpoint"
                )

    def read(self, kind: str, part: ParameterPart) -> Tensor:
        """A part of master weights or moments, from whatever pieces it was cut into."""
        found: Tensor | None = None
        by_range: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        for piece in self._pieces[part.name]:
            if piece.start < part.end and part.start < piece.end:
                by_range[piece.start, piece.end].append(piece)
        for (start, end), pieces in by_range.items():
            shape = (*part.shape[: part.dim], end - start, *part.shape[part.dim + 1 :])
            flat = torch.cat([self._tensor(kind, piece) for piece in sorted(pieces, key=lambda p: p.first)])
            own = flat.view(shape)
            if found is None:
                found = own.new_empty(part.local_shape)
            low, high = max(start, part.start), min(end, part.end)
            found.narrow(part.dim, low - part.start, high - low).copy_(own.narrow(part.dim, low - start, high - low))
        assert found is not None, "checked"
        return found

    def _tensor(self, kind: str, piece: Piece) -> Tensor:
        path = self._path / piece.file
        try:
            with safe_open(path, framework="pt") as file:
                tensor: Tensor = file.get_tensor(f"{piece.number}.{kind}")
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: cannot be read ({error}); resume from another checkpoint") from None
        return tensor
