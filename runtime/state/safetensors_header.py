"""The header of a safetensors file, of which tensors are written one by one (https://huggingface.co/docs/safetensors):
eight bytes with its length, then JSON that says where each tensor lies."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The types that are read and written, by their names in a file."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def header(
    tensors: Iterable[tuple[str, Sequence[int], torch.dtype]], about: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """The header of a file with tensors of these names, shapes and types, one after another; and where in the file each
    of them begins, in bytes. `about` is what else the file says of itself."""
    entries = list(tensors)
    ends = [0, *accumulate(prod(shape) * dtype.itemsize for _, shape, dtype in entries)]
    content: dict[str, Any] = {"__metadata__": {**about, "format": "pt"}}
    for (name, shape, dtype), span in zip(entries, pairwise(ends), strict=True):
        content[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": span}
    text = json.dumps(content).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned in memory when mapped
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + start for start in ends[:-1]]
