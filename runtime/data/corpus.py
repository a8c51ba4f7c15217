"""A corpus becomes one token file, once.

A corpus is a text file, a folder of text files, the rows of a dataset, or a token file: a one-dimensional `.npy` of
integers. Text is tokenised by byte (256 tokens), or by the `tokenizer.json` of a model. One process a machine calls
`prepare`; its ranks read `Batches` from the file, which they map and never hold.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from hexiopt.errors import InputError
from hexiopt.reading import read_text, sha256_of
from runtime.data.texts import TextFiles
from runtime.data.tokens import TOKEN_SUFFIX, Tokens, check_blocks, check_tokens, open_tokens, write_tokens

TOKENS = "tokens"  # the folder of a run's token files
# Part of the name of cached token files: raise it when the same text would give other tokens.
FORMAT = "hexiopt.tokens.1"
# The largest published ones have 30 MB.
MAX_TOKENIZER_BYTES = 2**28
# Pieces of text held at a time, which are tokenised in parallel.
PIECES = 64


@runtime_checkable
class Documents(Protocol):
    """Documents, one after another; None ends each."""

    @property
    def where(self) -> Path | str:
        """What errors name."""

    def check(self) -> None:
        """Raise InputError where they cannot be read, or there are none: at once, without reading all."""

    def stamps(self) -> list[Any]:
        """What changes when the texts do."""

    def blocks(self) -> Iterator[bytes | None]:
        """Their bytes."""

    def pieces(self) -> Iterator[str | None]:
        """Their text."""


@dataclass(frozen=True)
class Corpus:
    """What a run reads: `data`, and `validation` if it has a text of its own, as `prepare` takes them; a tokenizer; the
    token that ends documents, by number or text; whether attention keeps to documents."""

    data: Path | Documents | None = None
    validation: Path | Documents | None = None
    tokenizer: Path | None = None
    separator: int | str | None = None
    document_masking: bool = False

    def sources(self) -> list[Path | Documents | None]:
        """The data, and the validation's if it has its own."""
        return [self.data, *([] if self.validation is None else [self.validation])]

    def check(self, folder: Path) -> None:
        """Raise InputError where a text cannot be read, or is empty, whose tokens `folder` does not have: at once."""
        separator = separator_token(self.separator, self.tokenizer)
        for source in self.sources():
            if isinstance(source, Path) and source.suffix == TOKEN_SUFFIX:
                open_tokens(source)
                continue
            texts = _documents(source)
            if not _token_file(texts, _words(self.tokenizer), folder / TOKENS, separator).exists():
                texts.check()


def prepare(
    source: Path | Documents | None,
    tokenizer: Path | None,
    cache: Path,
    vocab_size: int,
    separator: int | None = None,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Path:
    """The token file of a corpus, every token checked to be one of the model's `vocab_size`.

    A token file (`.npy`) is used as it is; another path, or None, is as of `TextFiles`. Text becomes a token file in
    the folder `cache`, whole or not at all, which stands until the texts or the content of the tokenizer change. The
    token `separator`, if any, follows each document. Special tokens are not added. `on_tokens` hears how many tokens
    there are, now and then.

    Raises InputError where a file cannot be read or written, or a token is not in the vocabulary.
    """
    if separator is not None and not 0 <= separator < vocab_size:
        raise InputError(f"train.separator: {separator} is no token; the model's are from 0 to {vocab_size - 1}")
    if isinstance(source, Path) and source.suffix == TOKEN_SUFFIX:
        if tokenizer is not None:
            raise InputError(f"{source}: is tokenised already; leave out the tokenizer {tokenizer}")
        check_tokens(source, vocab_size, source)
        return source
    texts = _documents(source)
    where = tokenizer or texts.where
    words = _words(tokenizer)
    path = _token_file(texts, words, cache, separator)
    try:
        if path.exists():
            check_tokens(path, vocab_size, where)
            return path
        if tokenizer is None or words is None:
            dtype, blocks = _by_byte(texts, separator)
        else:
            dtype, blocks = _tokenise(texts, tokenizer, words, separator)
        write_tokens(path, dtype, _count_tokens(check_blocks(blocks, vocab_size, where), on_tokens))
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror or error}); choose a folder with room for it"
        ) from None
    return path


def separator_token(separator: int | str | None, tokenizer: Path | None) -> int | None:
    """The number of the token that ends documents, `separator` as it is, or as its text in a tokenizer. Raises
    InputError."""
    if not isinstance(separator, str):
        return separator
    if tokenizer is None:
        raise InputError(f"train.separator: {separator!r} is a text, and there is no train.tokenizer; state a number")
    words = read_text(tokenizer, max_bytes=MAX_TOKENIZER_BYTES)
    number: int | None = _tokenizer(tokenizer, words).token_to_id(separator)
    if number is None:
        raise InputError(f"train.separator: {separator!r} is no token of {tokenizer}; state one that it has")
    return number


def _documents(source: Path | Documents | None) -> Documents:
    return TextFiles(source) if source is None or isinstance(source, Path) else source


def _words(tokenizer: Path | None) -> str | None:
    """The content of a tokenizer's file."""
    return None if tokenizer is None else read_text(tokenizer, max_bytes=MAX_TOKENIZER_BYTES)


def _token_file(texts: Documents, tokenizer: str | None, cache: Path, separator: int | None) -> Path:
    """Where the tokens are kept, by a SHA-256 of what they depend on."""
    of_tokenizer = None if tokenizer is None else hashlib.sha256(tokenizer.encode()).hexdigest()
    facts = [FORMAT, texts.stamps(), of_tokenizer, *([] if separator is None else [separator])]
    return cache / f"tokens-{sha256_of(facts)}{TOKEN_SUFFIX}"


def _count_tokens(blocks: Iterable[Tokens], on_tokens: Callable[[int], None]) -> Iterator[Tokens]:
    count = 0
    for block in blocks:
        yield block
        count += len(block)
        on_tokens(count)


def _by_byte(texts: Documents, separator: int | None) -> tuple[np.dtype[Any], Iterator[Tokens]]:
    """The narrowest type that holds bytes and the separator, and the tokens in blocks."""
    dtype = np.min_scalar_type(max(255, separator or 0))
    end = np.array([] if separator is None else [separator], dtype)
    return dtype, (
        end if block is None else np.frombuffer(block, np.uint8).astype(dtype, copy=False) for block in texts.blocks()
    )


def _tokenizer(path: Path, text: str) -> Any:
    """The tokenizer of a file's `text`."""
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
    return tokenizer


def _tokenise(
    texts: Documents, path: Path, words: str, separator: int | None
) -> tuple[np.dtype[Any], Iterator[Tokens]]:
    """The narrowest type that holds every token of the tokenizer `words`, and the tokens of all texts in blocks."""
    tokenizer = _tokenizer(path, words)
    dtype = np.min_scalar_type(max(*tokenizer.get_vocab().values(), separator or 0, 0))
    end = np.array([] if separator is None else [separator], dtype)

    def blocks() -> Iterator[Tokens]:
        pieces = texts.pieces()
        while batch := list(islice(pieces, PIECES)):
            try:
                encoded = tokenizer.encode_batch_fast(
                    [piece for piece in batch if piece is not None], add_special_tokens=False
                )
            except Exception as error:
                raise InputError(
                    f"{path}: cannot tokenise the corpus ({error}); give a tokenizer with an unknown token"
                ) from None
            of_pieces = iter(encoded)
            for piece in batch:
                yield end if piece is None else np.array(next(of_pieces).ids, dtype=dtype)

    return dtype, blocks()
