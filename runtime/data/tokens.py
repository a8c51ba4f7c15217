"""Token files: one-dimensional arrays of integers (`.npy`), written whole or not at all, mapped where they are read."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from hexiopt.errors import InputError

Tokens = NDArray[np.integer[Any]]

TOKEN_SUFFIX = ".npy"
# Bytes or tokens held at a time.
BLOCK = 2**22


def write_tokens(path: Path, dtype: np.dtype[Any], blocks: Iterable[Tokens]) -> None:
    """Write a token file whole or not at all: into a hidden neighbour first, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            num_tokens = 0
            _write_header(file, dtype, num_tokens)
            for block in blocks:
                file.write(block.data)
                num_tokens += len(block)
            file.seek(0)
            _write_header(file, dtype, num_tokens)
            # Without it a power failure may leave a file of the full length, and zeros in it.
            file.flush()
            os.fsync(handle)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _write_header(file: BinaryIO, dtype: np.dtype[Any], num_tokens: int) -> None:
    """The head of a token file, as long for any number of tokens (numpy leaves room for it to grow)."""
    about = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": (num_tokens,)}
    npy.write_array_header_1_0(file, about)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns what the system says against reading `path` into an InputError."""
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{error.filename or path}: cannot be read ({reason}); check path and permissions") from None
    except ValueError as error:
        raise InputError(f"{str(path)!r}: cannot be read ({error}); check the path") from None


def open_tokens(path: Path) -> Tokens:
    """The tokens of a token file, mapped: an array [num_tokens] that is read where it is used.

    Raises InputError where the file is not a whole, one-dimensional `.npy` of integers.
    """
    try:
        tokens: Tokens = np.asarray(npy.open_memmap(path, mode="r"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); check path and permissions") from None
    except Exception as error:  # whatever numpy makes of a damaged header
        raise InputError(
            f"{path}: is not a whole .npy file ({str(error)[:100]}); remove it or write it again"
        ) from None
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(
            f"{path}: has {tokens.ndim} dimensions of {tokens.dtype}; a token file has one, of integers: save it so"
        )
    return tokens


def check_tokens(path: Path, vocab_size: int, where: Path | str) -> None:
    """Raise InputError naming `where` if a token file has a token that the model does not have."""
    tokens = open_tokens(path)
    bounds = np.iinfo(tokens.dtype)
    if bounds.min < 0 or bounds.max >= vocab_size:
        blocks = (tokens[start : start + BLOCK] for start in range(0, len(tokens), BLOCK))
        for _ in check_blocks(blocks, vocab_size, where):
            pass


def check_blocks(blocks: Iterable[Tokens], vocab_size: int, where: Path | str) -> Iterator[Tokens]:
    """The blocks as they come. Raises InputError naming `where` at the first token that the model does not have."""
    for block in blocks:
        if len(block):
            least, largest = int(block.min()), int(block.max())
            if least < 0:
                raise InputError(f"{where}: has the token {least}; tokens are whole numbers from 0, write them so")
            if largest >= vocab_size:
                raise InputError(
                    f"{where}: has the token {largest}, and the model's vocab_size is {vocab_size}; "
                    "choose a larger vocabulary or another tokenizer"
                )
        yield block
