"""A rank's own of a parameter, or of a moment of it, as torch's distributed checkpoint (DCP) reads and writes it.

DCP knows tensors as boxes of a whole. A rank's share of a bucket is a run of flat elements, which may begin and end
inside a matrix: it is up to three boxes of each parameter that it meets.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from runtime.mapping.moments import is_whole, moment_shape
from runtime.mapping.parts import ParameterPart
from runtime.parallel.gradient_sync import Bucket

WEIGHT = "weight"

State = Mapping[str, Tensor]  # a bucket's share of each kind, flat
Box = tuple[tuple[int, ...], tuple[int, ...], int]  # where it begins, its sizes, and its first element of the flat ones


def stored_name(kind: str, name: str) -> str:
    """What a parameter, or a moment of it, is called in a checkpoint: weights as Hugging Face calls them."""
    return name if kind == WEIGHT else f"{kind}.{name}"


def boxes(shape: tuple[int, ...], low: int, high: int) -> Iterator[Box]:
    """The boxes that make up the elements [low, high), in row-major order, of a tensor."""
    if low >= high:
        return
    if len(shape) == 1:
        yield (low,), (high - low,), low
        return
    inner = prod(shape[1:])
    first, last = -(-low // inner), high // inner  # whole rows
    middle = (first * inner, last * inner) if first < last else (min(first * inner, high),)
    for a, b in pairwise((low, *middle, high)):
        if a >= b:
            continue
        if a % inner == 0 and b % inner == 0:
            yield (a // inner, *(0 for _ in shape[1:])), ((b - a) // inner, *shape[1:]), a
        else:
            row = a // inner
            for starts, sizes, at in boxes(shape[1:], a - row * inner, b - row * inner):
                yield (row, *starts), (1, *sizes), at + row * inner


class Slices(Tensor):
    """Boxes of a whole of `shape`: `parts` has the tensor of each by where it begins. Stands for the whole in a state
    dict of DCP, which asks it for what the methods with underscores give."""

    parts: dict[torch.Size, Tensor]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], parts: Mapping[tuple[int, ...], Tensor]) -> "Slices":
        """Of `parts` there is one at least."""
        example = next(iter(parts.values()))
        wrapper = Tensor._make_wrapper_subclass(cls, shape, dtype=example.dtype)
        wrapper.parts = {torch.Size(start): part for start, part in parts.items()}
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of slices")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(start, part.shape) for start, part in self.parts.items()]

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk, TensorProperties.create_from_tensor(self.parts[chunk.offsets]), self.size()
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.parts[index.offset]


def state_dict(states: Iterable[tuple[Bucket, State]]) -> dict[str, Slices]:
    """The shares of a rank as a state dict of DCP, whose tensors are views of them."""
    parts: dict[str, dict[tuple[int, ...], Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for bucket, state in states:
        for kind, flat in state.items():
            share, at = slice(0, len(flat)) if is_whole(kind) else bucket.share, 0
            for part in bucket.parts:
                name, shape = stored_name(kind, part.name), moment_shape(kind, part.local_shape)
                low, high = max(at, share.start), min(at + prod(shape), share.stop)
                for start, sizes, first in boxes(shape, low - at, high - at):
                    begin = at + first - share.start
                    shapes[name] = moment_shape(kind, part.shape)
                    view = flat[begin : begin + prod(sizes)].view(sizes)
                    parts.setdefault(name, {})[_in_whole(part, start)] = view
                at += prod(shape)
    return {name: Slices(shapes[name], pieces) for name, pieces in parts.items()}


def _in_whole(part: ParameterPart, start: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(first + (part.start if d == part.dim else 0) for d, first in enumerate(start))
