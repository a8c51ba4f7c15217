"""A corpus becomes one token file, once.

A corpus is a text file, a folder of text files, or a token file: a one-dimensional `.npy` of integers. Text is
tokenised by byte (256 tokens), or by the `tokenizer.json` of a model. One process a machine calls `prepare`; its
ranks read `Batches` from the file, which they map and never hold.
"""

import hashlib
import os
import stat
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from hexiopt.errors import InputError
from hexiopt.reading import read_text, sha256_of

Tokens = NDArray[np.integer[Any]]

TOKEN_SUFFIX = ".npy"
# Part of the name of cached token files: raise it when the same text would give other tokens.
FORMAT = "hexiopt.tokens.1"
# The largest published ones have 30 MB.
MAX_TOKENIZER_BYTES = 2**28
# Bytes or tokens held at a time.
BLOCK = 2**22
# Characters tokenised as one text, up to the end of a line after them; and such pieces held at a time, in parallel.
PIECE = 2**16
PIECES = 64
# The default corpus: Python's own sources, without what is installed beside them, and without tests, some of which
# are no UTF-8 on purpose.
LIBRARY = Path(sysconfig.get_path("stdlib"))
NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


# ------------------------------------------------------------------ from text to tokens


def prepare(source: Path | None, tokenizer: Path | None, cache: Path, vocab_size: int) -> Path:
    """The token file of a corpus, every token checked to be one of the model's `vocab_size`.

    A token file (`.npy`) is used as it is. Text becomes a token file in the folder `cache`, whole or not at all, which
    stands until the names, sizes or times of the texts or the content of the tokenizer change. Of a folder, all files
    below it are read in the order of their paths, without hidden ones, token files and links to folders. Texts follow
    each other without separators, and special tokens are not added. `source` None is the source code of Python's
    standard library on this machine.

    Raises InputError where a file cannot be read or written, or a token is not in the vocabulary.
    """
    if source is not None and source.suffix == TOKEN_SUFFIX:
        if tokenizer is not None:
            raise InputError(f"{source}: is tokenised already; leave out the tokenizer {tokenizer}")
        _check_file(source, vocab_size, source)
        return source
    where = tokenizer or source or LIBRARY
    files = _files(source)
    text = None if tokenizer is None else read_text(tokenizer, max_bytes=MAX_TOKENIZER_BYTES)
    path = cache / f"tokens-{_fingerprint(files, text)}{TOKEN_SUFFIX}"
    try:
        if path.exists():
            _check_file(path, vocab_size, where)
            return path
        if tokenizer is None or text is None:
            dtype, blocks = np.dtype(np.uint8), _bytes(files)
        else:
            dtype, blocks = _tokenised(files, tokenizer, text)
        _write(path, dtype, _checked(blocks, vocab_size, where))
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror or error}); choose a folder with room for it"
        ) from None
    return path


def _files(source: Path | None) -> list[Path]:
    """The texts of a corpus as absolute paths, in the order in which they are read."""
    if source is None:
        return _below(LIBRARY, suffix=".py", without=NOT_LIBRARY)
    root = Path(os.path.abspath(source))
    with _reading(root):
        return _below(root) if root.is_dir() else [root]


def _below(folder: Path, suffix: str = "", without: frozenset[str] = frozenset()) -> list[Path]:
    """The files below `folder` whose names end in `suffix`, outside folders of the names `without`."""

    def refuse(error: OSError) -> NoReturn:
        raise error

    found = []
    with _reading(folder):
        for parent, folders, names in os.walk(folder, onerror=refuse):
            folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
            found += [
                Path(parent, name)
                for name in names
                if name.endswith(suffix) and not name.startswith(".") and not name.endswith(TOKEN_SUFFIX)
            ]
    if not found:
        raise InputError(f"{folder}: the folder has no {suffix or 'text'} file; choose another corpus")
    return sorted(found)


def _fingerprint(files: list[Path], tokenizer: str | None) -> str:
    """SHA-256 of what the tokens depend on: names, sizes and times of the texts, content of the tokenizer."""
    stamps = []
    for path in files:
        with _reading(path):
            found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise InputError(f"{path}: is not a regular file; take it out of the corpus")
        stamps.append([str(path), found.st_size, found.st_mtime_ns])
    return sha256_of([FORMAT, stamps, None if tokenizer is None else hashlib.sha256(tokenizer.encode()).hexdigest()])


def _bytes(files: list[Path]) -> Iterator[Tokens]:
    """The bytes of all files, as blocks of tokens."""
    for path in files:
        with _reading(path), path.open("rb") as file:
            while block := file.read(BLOCK):
                yield np.frombuffer(block, dtype=np.uint8)


def _pieces(files: list[Path]) -> Iterator[str]:
    """The text of all files, cut at ends of lines where they have such; what is not UTF-8 becomes U+FFFD."""
    for path in files:
        with _reading(path), path.open(encoding="utf-8", errors="replace", newline="") as file:
            while piece := file.read(PIECE) + file.readline(PIECE):
                yield piece


def _tokenised(files: list[Path], path: Path, text: str) -> tuple[np.dtype[Any], Iterator[Tokens]]:
    """The narrowest type that holds every token of the tokenizer `text`, and the tokens of all files in blocks."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError(f"{path}: needs the package tokenizers; install hexiopt[train]") from None
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing narrower
        raise InputError(f"{path}: is not a tokenizer ({error}); give a tokenizer.json of Hugging Face") from None
    # A file may ask for both, which would drop the end of every piece, or lengthen it.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    dtype = np.min_scalar_type(max(tokenizer.get_vocab().values(), default=0))

    def blocks() -> Iterator[Tokens]:
        pieces = _pieces(files)
        while batch := list(islice(pieces, PIECES)):
            try:
                encoded = tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            except Exception as error:
                raise InputError(
                    f"{path}: cannot tokenise the corpus ({error}); give a tokenizer with an unknown token"
                ) from None
            for one in encoded:
                yield np.array(one.ids, dtype=dtype)

    return dtype, blocks()


def _write(path: Path, dtype: np.dtype[Any], blocks: Iterable[Tokens]) -> None:
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
def _reading(path: Path) -> Iterator[None]:
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


# ------------------------------------------------------------------ token files


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


def _check_file(path: Path, vocab_size: int, where: Path) -> None:
    tokens = open_tokens(path)
    bounds = np.iinfo(tokens.dtype)
    if bounds.min < 0 or bounds.max >= vocab_size:
        blocks = (tokens[start : start + BLOCK] for start in range(0, len(tokens), BLOCK))
        for _ in _checked(blocks, vocab_size, where):
            pass


def _checked(blocks: Iterable[Tokens], vocab_size: int, where: Path) -> Iterator[Tokens]:
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
