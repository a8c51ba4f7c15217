"""Checkpoints that do not know the plan that wrote them: safetensors of torch's distributed checkpoint, and an index.

A checkpoint is a folder `step-NNNNNNNN`. Its files are those of DCP's Hugging Face writer, in which weights and moments
lie as boxes of whole parameters; nothing is pickled. DCP would not notice a file that is missing, nor one that does not
belong: `index.json` has all of them, with their lengths and hashes. It is written last, and the folder gets its name
when it is whole.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from hexiopt.errors import InputError
from hexiopt.files.huggingface import model_from_config
from hexiopt.problem.lora import Lora
from hexiopt.problem.model import ModelSpec
from hexiopt.reading import Section, read_mapping
from runtime.mapping.adapters import MAX_ALPHA, Adapters, with_adapters
from runtime.mapping.model_parts import whole_parts
from runtime.mapping.moments import ADAMW, RULES, moment_shape, moments_of
from runtime.mapping.parts import ParameterPart
from runtime.parallel.gradient_sync import Bucket
from runtime.state.slices import WEIGHT, Slices, State, state_dict, stored_name

FORMAT, VERSION = "hexiopt.checkpoint", 2
INDEX, SUFFIX = "index.json", ".safetensors"
_MAX_INDEX_BYTES = 2**28


@dataclass(frozen=True)
class CheckpointProgress:
    """How far a run has come: data follow from `seed`, `seq_len`, the share that is held out for validation, and the
    `sequences` that it has seen."""

    run: str
    step: int
    sequences: int
    seq_len: int
    seed: int
    validation_share: float = 0.0


@dataclass(frozen=True)
class BaseWeights:
    """What adapters stand beside: Hugging Face weights at `path` and their hash, or what the seed draws (None)."""

    path: str | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class TrainedModel:
    """What a checkpoint is of: a model or `adapters` of it, beside their `base`, and the optimizer whose moments it
    has."""

    model: ModelSpec
    optimizer: str = ADAMW
    adapters: Adapters | None = None
    base: BaseWeights = BaseWeights()

    @property
    def lora(self) -> Lora | None:
        """The form of its adapters."""
        return None if self.adapters is None else self.adapters.lora

    def parts(self) -> list[ParameterPart]:
        """What is trained, whole."""
        return [part for part in with_adapters(whole_parts(self.model), self.adapters) if part.trained]

    def to_dict(self) -> dict[str, Any]:
        """As plain data; a model trained whole by AdamW as in files written before others were."""
        data: dict[str, Any] = {"model": self.model.to_dict()}
        if self.optimizer != ADAMW:
            data["optimizer"] = self.optimizer
        if self.adapters is not None:
            targets = list(self.adapters.lora.matrices)
            lora = asdict(self.adapters.lora) | {"targets": targets}
            data["adapters"] = lora | {"alpha": self.adapters.alpha, "base": asdict(self.base)}
        return data

    @classmethod
    def read(cls, index: Section) -> "TrainedModel":
        """That of what `to_dict` made. Raises InputError."""
        model, optimizer = (
            model_from_config(index.section("model")),
            index.text("optimizer", choices=RULES, default=ADAMW),
        )
        if "adapters" not in index:
            return cls(model, optimizer)
        section = index.section("adapters")
        with section.building():
            lora = Lora(**section.fields(Lora))
        alpha, base_section = section.number("alpha", above=0, at_most=MAX_ALPHA), section.section("base")
        base = BaseWeights(base_section.raw("path", None), base_section.raw("sha256", None))
        base_section.finish()
        section.finish()
        return cls(model, optimizer, Adapters(lora, alpha), base)


def finished_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, by step."""
    return sorted(path.parent for path in folder.glob(f"step-*/{INDEX}"))


def write_index(
    folder: Path, trained: TrainedModel, progress: CheckpointProgress, files: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the index of a checkpoint: of each of its files `bytes` and `sha256`."""
    index = {"format": FORMAT, "version": VERSION, **asdict(progress), **trained.to_dict(), "files": dict(files)}
    with (folder / INDEX).open("w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


class Checkpoint:
    """A finished checkpoint, opened to be read. Raises InputError where its index is not sound."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_dir():
            raise InputError(f"{path}: is not a checkpoint; name a folder step-NNNNNNNN")
        index = Section(read_mapping(path / INDEX, max_bytes=_MAX_INDEX_BYTES), str(path / INDEX))
        index.text("format", choices=[FORMAT])
        if index.integer("version", at_least=1, at_most=VERSION) < VERSION:
            raise InputError(
                f"{path}: is of version 1, which this hexiopt does not read; export its weights with the hexiopt that "
                "wrote it, and start from them (train.weights)"
            )
        self.trained = TrainedModel.read(index)
        self.model = self.trained.model
        step, sequences, seq_len = (
            index.integer(key, at_least=0, at_most=2**62) for key in ("step", "sequences", "seq_len")
        )
        seed = index.integer("seed", at_least=0, at_most=2**32 - 1)
        share = index.number("validation_share", at_least=0, at_most=1, default=0.0)
        self.progress = CheckpointProgress(index.text("run"), step, sequences, seq_len, seed, share)
        files = index.section("files")
        self._files = {name: files.section(name) for name in files.keys()}  # noqa: SIM118
        for name in self._files:
            if Path(name).name != name:
                files.fail(name, "is not a file of the checkpoint; write the checkpoint again")
        index.finish()

    def check(self) -> None:
        """Every file whole, none beside them, every element of every parameter there once. Raises InputError."""
        for name, entry in self._files.items():
            path = self._path / name
            size, digest = entry.integer("bytes", at_least=0, at_most=2**62), entry.text("sha256")
            if not path.is_file() or path.stat().st_size != size or _sha256(path) != digest:
                raise InputError(f"{path}: is missing, truncated or changed; resume from another checkpoint")
        for path in self._path.glob(f"*{SUFFIX}"):
            if path.name not in self._files:
                raise InputError(f"{path}: is not in {INDEX}; remove it, or resume from another checkpoint")
        for part in self.trained.parts():
            for kind in (WEIGHT, *moments_of(self.trained.optimizer, part)):
                name, shape = stored_name(kind, part.name), moment_shape(kind, part.shape)
                has, needed = self._elements(name, shape), prod(shape)
                if has != needed:
                    raise InputError(
                        f"{self._path}: has {has} of {needed} elements of {name}; resume from another checkpoint"
                    )

    def _elements(self, name: str, shape: tuple[int, ...]) -> int:
        """How many of a tensor's elements there are. DCP refuses to write any twice."""
        stored = self._metadata.state_dict_metadata.get(name)
        if not isinstance(stored, TensorStorageMetadata) or any(a > b for a, b in zip(stored.size, shape, strict=True)):
            return 0
        return sum(prod(chunk.sizes) for chunk in stored.chunks)

    def fill(self, bucket: Bucket, state: State) -> None:
        """Read the share of a bucket, from whatever boxes it was cut into, on whatever device it is."""
        self._load(state_dict([(bucket, state)]))

    def read(self, kind: str, part: ParameterPart) -> Tensor:
        """A part of master weights or moments."""
        name = stored_name(kind, part.name)
        stored = self._metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        values = torch.empty(part.local_shape, dtype=stored.properties.dtype)
        start = tuple(part.start if d == part.dim else 0 for d in range(len(part.shape)))
        self._load({name: Slices(part.shape, {start: values})})
        return values

    def _load(self, wanted: dict[str, Slices]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads for itself
                load(dict(wanted), storage_reader=_Reader(self._path, self._metadata), no_dist=True)
        except (CheckpointException, SafetensorError, OSError) as error:
            why = str(error).strip().splitlines()[-1]
            raise InputError(f"{self._path}: cannot be read ({why}); resume from another checkpoint") from None

    @cached_property
    def _metadata(self) -> Metadata:
        """Which boxes there are, from the headers of all files."""
        try:
            return HuggingFaceStorageReader(str(self._path)).read_metadata()
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise InputError(f"{self._path}: cannot be read ({error}); resume from another checkpoint") from None


class _Reader(HuggingFaceStorageReader):
    """Knows what is in the files, so that their headers are read once, and not again for every bucket."""

    def __init__(self, path: Path, known: Metadata) -> None:
        super().__init__(str(path))
        self._known = known

    def read_metadata(self) -> Metadata:
        return self._known


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
