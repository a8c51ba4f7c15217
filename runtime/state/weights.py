"""A model's weights as Hugging Face has them: read part by part, written tensor by tensor. Nothing is unpickled."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hexiopt.errors import InputError, quoted
from hexiopt.problem.architectures import DECODER
from hexiopt.problem.model import ModelSpec
from hexiopt.reading import Section, read_mapping
from runtime.mapping.model_parts import EMBEDDING, HEAD, execution_of, whole_parts
from runtime.mapping.parts import ParameterPart
from runtime.state.file_layout import FileLayout, class_name
from runtime.state.safetensors_header import DTYPES as STORED_DTYPES
from runtime.state.safetensors_header import header

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SUFFIX = ".safetensors"
# The index of a model of 10,000 layers has 15 MB.
MAX_INDEX_BYTES = 2**26
SHARD_BYTES = 5 * 10**9
_HASHED_ROWS = 16
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # by precision
# Frequencies of rotary positions, which older files hold: they follow from config.json.
_COMPUTED = ".rotary_emb.inv_freq"


# ------------------------------------------------------------------ reading


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What the header of `file` says of a tensor."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class HuggingFaceWeights:
    """The parameters of a model in safetensors files, checked once to be those that it has, no fewer and no more.

    `path` is a folder with `model.safetensors`, or else with the files of `model.safetensors.index.json`; or one file.
    What the model computes itself (frequencies of rotary positions) may be there and is not read, and so may the LM
    head's matrix of a model with tied embeddings where it equals the embedding.

    Raises InputError where a file is missing, damaged or outside the folder, where a parameter is missing, has another
    shape or is not of floating point, and where one would be dropped.
    """

    def __init__(self, path: Path, model: ModelSpec) -> None:
        self._stored, self._model, self._layout = _tensors_at(path), model, FileLayout(model)
        needed = self._layout.shapes
        belong = "check that weights and config.json belong together"
        missing = [name for name in needed if name not in self._stored]
        if missing:
            raise InputError(f"{path}: lacks {_abbreviate(missing)} of the model {model.name}; {belong}")
        for name, shape in needed.items():
            stored = self._stored[name]
            if stored.shape != shape:
                raise InputError(
                    f"{stored.file}: {name} has the shape {list(stored.shape)}, in the model {model.name} "
                    f"{list(shape)}; {belong}"
                )
            if stored.dtype not in STORED_DTYPES:
                raise InputError(
                    f"{stored.file}: {name} is of type {stored.dtype}, and {', '.join(STORED_DTYPES)} are read; "
                    "take the model before it was quantised"
                )
        if model.tied_embeddings and HEAD in self._stored:
            self._check_tied()
            needed[HEAD] = (model.vocab_size, model.hidden_size)
        extra = [name for name in self._stored if name not in needed and not name.endswith(_COMPUTED)]
        if extra:
            raise InputError(f"{path}: has {_abbreviate(extra)}, which the model {model.name} has not; {belong}")

    def read(self, part: ParameterPart) -> Tensor:
        """The values of a part [part.local_shape] as they are stored, mapped from the file: for copying at once.

        Raises InputError where the file cannot be read any more.
        """
        return self._layout.read(part, lambda name, cut: read_slice(self._stored[name].file, name, cut))

    @cached_property
    def sha256(self) -> str:
        """The hash of all vectors and of the first rows of the embedding: it tells models of the same shapes apart."""
        digest = hashlib.sha256()
        for part in whole_parts(self._model):
            if part.name == EMBEDDING:
                part = replace(part, end=min(part.end, _HASHED_ROWS))
            if part.name == EMBEDDING or not part.decays:
                digest.update(self.read(part).float().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _check_tied(self) -> None:
        """Refuse an LM head that tying would drop."""
        names = HEAD, self._layout.name_of(EMBEDDING)
        head, embedding = (self._stored[name] for name in names)
        if (head.shape, head.dtype) == (embedding.shape, embedding.dtype):
            both = [read_slice(self._stored[name].file, name, (slice(None),)) for name in names]
            if torch.equal(*both):
                return
        raise InputError(
            f"{head.file}: {HEAD} is not {EMBEDDING}, to which tie_word_embeddings ties it; "
            "set tie_word_embeddings false, or remove the matrix"
        )


def _abbreviate(names: list[str]) -> str:
    """The first of the names, and how many more there are."""
    return quoted(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _tensors_at(path: Path) -> dict[str, StoredTensor]:
    """What is stored of each tensor, by name."""
    if not os.path.isdir(path):
        return stored_tensors(path)
    if os.path.lexists(path / SINGLE):
        return stored_tensors(path / SINGLE)
    if not os.path.lexists(path / INDEX):
        raise InputError(f"{path}: has neither {SINGLE} nor {INDEX}; give a folder with a model saved as safetensors")
    index = read_mapping(path / INDEX, max_bytes=MAX_INDEX_BYTES)
    files = Section(index, str(path / INDEX)).section("weight_map")
    promised: dict[str, set[str]] = {}
    for name in files.keys():  # noqa: SIM118
        file = files.text(name)
        if not file.endswith(SUFFIX) or "/" in file or "\\" in file:
            files.fail(name, f"is not the name of a {SUFFIX} file in the same folder; put the file there and name it")
        promised.setdefault(file, set()).add(name)
    tensors: dict[str, StoredTensor] = {}
    for file, names in promised.items():
        header = stored_tensors(path / file)
        for name in sorted(names ^ header.keys()):
            has, says = ("lacks", "there") if name in names else ("has", "not there")
            raise InputError(f"{path / file}: {has} {quoted(name)}, which {INDEX} says is {says}; fetch both again")
        tensors |= header
    return tensors


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name. Raises InputError where it cannot be read or is not whole."""
    with _open_file(path) as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: StoredTensor(path, tuple(at.get_shape()), at.get_dtype()) for name, at in slices.items()}


def read_slice(file: Path, name: str, cut: tuple[slice, ...]) -> Tensor:
    """The values of the tensor `name` of a file, `cut` in its first dimensions, mapped from it: for copying at once.

    Raises InputError where the file cannot be read.
    """
    with _open_file(file) as opened:
        values: Tensor = opened.get_slice(name)[cut]
    return values


@contextmanager
def _open_file(path: Path) -> Iterator[Any]:
    """The safetensors file at `path`. Raises InputError where it cannot be read or is not whole."""
    try:
        if not path.is_file():
            reason = "is not a regular file" if path.exists() else "does not exist"
            raise InputError(f"{path}: the file {reason}; check the path")
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise InputError(
            f"{path}: is not a whole safetensors file ({str(error)[:100]}); fetch or write it again"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check path and permissions") from None


# ------------------------------------------------------------------ writing


def write_hugging_face(
    folder: Path,
    model: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model that is trained here as transformers loads it: weights and `config.json`.

    `tensors` are the parameters of `whole_parts` by name, each once, in any order; one at a time is held. They are
    stored as `dtype`, in one file, or in several of at most `shard_bytes` and one tensor at least. All is written
    aside and then put in its place: whenever the call is interrupted, the folder has the weights that it had, all of
    the new ones, or none that load. Other files in it stay.

    Raises InputError where the folder cannot be written.
    """
    layout = FileLayout(model)
    shapes = layout.shapes
    grouped = _group_by_file(list(shapes.items()), dtype.itemsize, shard_bytes)
    count = len(grouped)
    files = [SINGLE] if count == 1 else [f"model-{k:05}-of-{count:05}{SUFFIX}" for k in range(1, count + 1)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".new-") as aside:
            new = Path(aside)
            _write_tensors(new, dict(zip(files, grouped, strict=True)), layout.stored_tensors(tensors), dtype)
            _write_json(new / CONFIG, _config(model, dtype))
            if count > 1:
                size = sum(map(prod, shapes.values())) * dtype.itemsize
                weight_map = {name: file for file, of_file in zip(files, grouped, strict=True) for name, _ in of_file}
                _write_json(new / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
            _put_in_place(new, folder, [CONFIG, *files, *([INDEX] if count > 1 else [])])
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be written ({error.strerror or error}); choose a folder with room for the model"
        ) from None


StoredShape = tuple[str, tuple[int, ...]]  # of a tensor, by name


def _group_by_file(shapes: list[StoredShape], itemsize: int, shard_bytes: int) -> list[list[StoredShape]]:
    """The tensors of each file: in order, as many as fit."""
    files: list[list[StoredShape]] = []
    left_bytes = 0
    for name, shape in shapes:
        size = prod(shape) * itemsize
        if not files or size > left_bytes:
            files.append([])
            left_bytes = shard_bytes
        files[-1].append((name, shape))
        left_bytes -= size
    return files


def _write_tensors(
    folder: Path, files: dict[str, list[StoredShape]], tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> None:
    places = {
        name: (folder / file, offset, shape)
        for file, shapes in files.items()
        for (name, shape), offset in zip(shapes, _write_header(folder / file, shapes, dtype), strict=True)
    }
    for name, tensor in tensors:
        path, offset, shape = places.pop(name)
        assert tensor.shape == shape, f"{name} is not whole"
        values = tensor.detach().to("cpu", dtype).contiguous().view(torch.uint8)
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(values.numpy().data)
    assert not places, f"{len(places)} parameters not given"
    for name in files:
        sync(folder / name)


def _write_header(path: Path, shapes: list[StoredShape], dtype: torch.dtype) -> list[int]:
    """Write the header of a file with tensors of these shapes. Returns where in the file each of them begins."""
    text, starts = header([(name, shape, dtype) for name, shape in shapes], {})
    path.write_bytes(text)
    return starts


def _config(model: ModelSpec, dtype: torch.dtype) -> dict[str, Any]:
    """The `config.json` of a model, in keys that transformers before and since version 5 reads."""
    kind = execution_of(model).type
    if model.architecture == DECODER:
        values = json.loads(model.config)
    else:
        values = {key: value for key, value in model.to_dict().items() if key != "name"}
    return {
        "architectures": [class_name(kind)],
        "model_type": kind,
        "_name_or_path": model.name,
        "torch_dtype": str(dtype).removeprefix("torch."),
        # Which tokens they are is not known here, and the defaults of transformers are those of other vocabularies.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **{key: value for key, value in values.items() if key != "architectures"},
    }


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    sync(path)


def sync(path: Path) -> None:
    """Have a file, or a folder's names, on the disk: else a power failure may leave a file of zeros."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _put_in_place(new: Path, folder: Path, names: list[str]) -> None:
    """Move the new files into the folder; what a loader opens first is removed before and comes last."""
    for old in (INDEX, SINGLE):
        (folder / old).unlink(missing_ok=True)
    for shard in folder.glob(f"model-?????-of-?????{SUFFIX}"):
        shard.unlink()
    for name in names:
        os.replace(new / name, folder / name)
