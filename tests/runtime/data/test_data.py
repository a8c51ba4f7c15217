"""Training data: what is tokenised, when a token file is built again, which windows a step sees, what is refused."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.errors import InputError
from runtime.data import corpus as corpus_module
from runtime.data import texts as texts_module
from runtime.data import tokens as tokens_module
from runtime.data.batches import Batches
from runtime.data.corpus import prepare
from runtime.data.texts import TextFiles
from runtime.data.tokens import open_tokens
from tests.runtime.data.corpora import position_file, token_file

TEXT = "to be or not to be\nthat is the question\n"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT)
    return path


def words(path: Path, vocabulary: dict[str, int], unknown: str | None = "?") -> Path:
    """A tokenizer file that has a token a word, and asks for what would spoil a corpus: a cut, padding, a first one."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel(vocabulary, **({} if unknown is None else {"unk_token": unknown}))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=7)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="be $A", special_tokens=[("be", 3)])
    tokenizer.save(str(path))
    return path


VOCABULARY = {"?": 0, "that": 1, "to": 2, "be": 3, "or": 4, "not": 5}


def refusal(act: Callable[[], Any], *parts: str) -> None:
    """`act` raises an InputError of one line with all `parts`."""
    with pytest.raises(InputError) as caught:
        act()
    message = str(caught.value)
    assert len(message) < 600
    for part in parts:
        assert part in message


# ------------------------------------------------------------------ tokens of texts


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5), st.integers(1, 9))
def test_bytes_come_back(texts: list[bytes], block: int) -> None:
    """A folder's texts one after another, whatever their bytes and the size of the blocks."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts_module, "BLOCK", block)
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        for i, content in enumerate(texts):
            (corpus / f"{i}.txt").write_bytes(content)
        path = prepare(corpus, None, Path(folder, "cache"), 256)
        assert path.suffix == ".npy"
        tokens = open_tokens(path)
        assert tokens.dtype == np.uint8
        assert tokens.tobytes() == b"".join(texts)
        np.testing.assert_array_equal(np.load(path), tokens)


def test_folder_in_order_of_paths(tmp_path: Path, cache: Path) -> None:
    """Files below the folder, without hidden ones and token files, so that a cache may lie in it."""
    for name in ("b.txt", "a/2.md", "a/10", "c/d/e.py", ".hidden", ".git/config", "old.npy"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"<{name}>")
    first = prepare(tmp_path, None, cache, 256)
    assert open_tokens(first).tobytes() == b"<a/10><a/2.md><b.txt><c/d/e.py>"
    assert prepare(tmp_path, None, cache, 256) == first


@pytest.mark.parametrize(("piece", "pieces"), [(2**16, 64), (5, 2), (1, 1)])
def test_tokenizer(
    tmp_path: Path, text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, piece: int, pieces: int
) -> None:
    """The tokens of the whole text, however it is cut: at ends of lines, without truncation, padding, extra tokens."""
    monkeypatch.setattr(texts_module, "PIECE", piece)
    monkeypatch.setattr(corpus_module, "PIECES", pieces)
    text.write_text("to be\r\nor not\n\nto be? \n")
    if piece == 1:
        text.write_text("\n".join("?" * 5))
    tokens = open_tokens(prepare(text, words(tmp_path / "tokenizer.json", VOCABULARY), cache, 6))
    assert tokens.dtype == np.uint8
    assert tokens.tolist() == ([0] * 5 if piece == 1 else [2, 3, 4, 5, 2, 3, 0])


def test_pieces_end_with_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line too long for one piece is cut; nothing is lost; what is not UTF-8 is replaced."""
    monkeypatch.setattr(texts_module, "PIECE", 4)
    path = tmp_path / "corpus.txt"
    path.write_bytes("ab\ncd\r\n0123456789\né\n".encode() + b"\xff.")
    *pieces, end = TextFiles(path).pieces()
    assert end is None
    assert pieces == ["ab\ncd\r\n", "01234567", "89\né\n", "\ufffd."]


@pytest.mark.parametrize(("largest", "dtype"), [(255, "uint8"), (256, "uint16"), (65535, "uint16"), (65536, "uint32")])
def test_narrowest_type(tmp_path: Path, text: Path, cache: Path, largest: int, dtype: str) -> None:
    tokenizer = words(tmp_path / "tokenizer.json", VOCABULARY | {"question": largest})
    tokens = open_tokens(prepare(text, tokenizer, cache, largest + 1))
    assert tokens.dtype == dtype
    assert tokens[-1] == largest


def test_default_corpus(cache: Path) -> None:
    """Python's own sources: text, and no tests or installed packages."""
    path = prepare(None, None, cache, 256)
    tokens = open_tokens(path)
    assert len(tokens) > 2**20
    tokens.tobytes().decode("utf-8")
    paths = TextFiles(None).paths
    assert texts_module.LIBRARY / "json" / "decoder.py" in paths
    assert all(path.suffix == ".py" for path in paths)
    assert not any(texts_module.NOT_LIBRARY & set(path.relative_to(texts_module.LIBRARY).parts) for path in paths)
    assert prepare(None, None, cache, 256) == path
    assert Batches(path, 128, 0).sequences(0, 4).shape == (4, 129)


# ------------------------------------------------------------------ the cache


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The token files that were built."""
    built = []
    write = corpus_module.write_tokens  # type: ignore[attr-defined]

    def note(path: Path, *rest: Any) -> None:
        built.append(path)
        write(path, *rest)

    monkeypatch.setattr(corpus_module, "write_tokens", note)
    return built


def test_built_once_until_something_changes(tmp_path: Path, cache: Path, builds: list[Path]) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    text_file = corpus / "1.txt"
    text_file.write_text("to be")
    json = tmp_path / "tokenizer.json"

    def is_rebuilt(tokenizer: Path | None = None) -> bool:
        before = len(builds)
        paths = {prepare(corpus, tokenizer, cache, 256) for _ in range(2)}
        assert len(paths) == 1
        assert len(builds) <= before + 1
        return len(builds) > before

    assert is_rebuilt()
    assert not is_rebuilt()
    assert is_rebuilt(words(json, VOCABULARY))
    assert not is_rebuilt(words(json, VOCABULARY))
    assert is_rebuilt(words(json, VOCABULARY | {"be": 9}))
    stamp = text_file.stat().st_mtime_ns
    text_file.write_text("to be or")  # another size, the same time
    os.utime(text_file, ns=(stamp, stamp))
    assert is_rebuilt()
    text_file.write_text("or be to")  # the same size, another time
    os.utime(text_file, ns=(stamp, stamp + 1))
    assert is_rebuilt()
    (corpus / "2.txt").write_text("")
    assert is_rebuilt()
    text_file.rename(corpus / "0.txt")
    assert is_rebuilt()
    assert sorted(cache.iterdir()) == sorted(set(builds))


def test_a_token_file_is_used_as_it_is(tmp_path: Path, cache: Path) -> None:
    path = token_file(tmp_path, [3, 1, 2])
    assert prepare(path, None, cache, 4) == path
    assert not cache.exists()


def test_a_failed_build_leaves_nothing(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TextFiles) -> Iterator[bytes]:
        yield bytes(3)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TextFiles, "blocks", fail)
        with pytest.raises(KeyboardInterrupt):
            prepare(text, None, cache, 256)
    assert list(cache.iterdir()) == []
    assert open_tokens(prepare(text, None, cache, 256)).tobytes() == TEXT.encode()


def test_a_killed_build_leaves_no_token_file(text: Path, cache: Path) -> None:
    """What it had written lies in a hidden file, which is not taken for a token file."""
    script = f"""
import os, signal
from pathlib import Path
from runtime.data import corpus

def killed(self):
    yield bytes(2**20)
    os.kill(os.getpid(), signal.SIGKILL)

corpus.TextFiles.blocks = killed
corpus.prepare(Path({str(text)!r}), None, Path({str(cache)!r}), 256)
"""
    root = Path(tokens_module.__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=root, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert all(path.name.startswith(".") for path in cache.iterdir())
    assert open_tokens(prepare(text, None, cache, 256)).tobytes() == TEXT.encode()


def test_a_full_disk(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    refusal(lambda: prepare(text, None, cache, 256), str(cache), "No space left", "choose a folder")
    assert list(cache.iterdir()) == []


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize("name", ["missing.txt", "missing.npy", "no\0name", "no\0name.npy", "x" * 300, "\udcff\n.txt"])
def test_missing_corpus(tmp_path: Path, cache: Path, name: str) -> None:
    reason = "null byte" if "\0" in name else "cannot be read"
    refusal(lambda: prepare(tmp_path / name, None, cache, 256), reason)


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "dangling"])
def test_what_is_no_file(tmp_path: Path, cache: Path, kind: str) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    if kind == "pipe":
        os.mkfifo(corpus / "a")
    if kind == "loop":
        (corpus / "a").symlink_to(corpus / "a")
    if kind == "dangling":
        (corpus / "a").symlink_to(tmp_path / "b")
    words = {"pipe": "not a regular file", "folder": "no text file"}.get(kind, "cannot be read")
    refusal(lambda: prepare(corpus, None, cache, 256), str(corpus), words)
    if kind != "folder":
        refusal(lambda: prepare(corpus / "a", None, cache, 256), str(corpus / "a"), words)


def test_a_folder_that_cannot_be_listed(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not passed over in silence."""
    scandir = os.scandir

    def refuse(path: Any) -> Any:
        if Path(path).name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    (tmp_path / "secret").mkdir()
    monkeypatch.setattr(os, "scandir", refuse)
    refusal(lambda: prepare(tmp_path, None, cache, 256), str(tmp_path / "secret"), "Permission denied")


def test_a_cache_that_cannot_be_written(text: Path) -> None:
    refusal(lambda: prepare(text, None, text, 256), str(text), "cannot be written", "choose a folder")


@pytest.mark.parametrize("num_tokens", [0, 1, 4])
def test_too_short_for_one_window(tmp_path: Path, cache: Path, num_tokens: int) -> None:
    text = tmp_path / "corpus.txt"
    text.write_text("a" * num_tokens)
    path = prepare(text, None, cache, 256)
    for source in (None, text):
        named = f"{source or path}: has {num_tokens} tokens"
        refusal(lambda source=source: Batches(path, 4, 0, source=source), named, "takes 5", "lower workload.seq_len")
    if num_tokens == 4:
        assert Batches(path, 3, 0).num_windows == 1


@pytest.mark.parametrize(
    ("tokens", "fault"),
    [
        (np.zeros(9), "1 dimensions of float64"),
        (np.zeros(9, bool), "1 dimensions of bool"),
        (np.zeros((3, 3), np.int32), "2 dimensions of int32"),
        (np.int32(3), "0 dimensions of int32"),
        (np.array(["a", "b"]), "1 dimensions of <U1"),
    ],
)
def test_wrong_arrays(tmp_path: Path, cache: Path, tokens: Any, fault: str) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, tokens)
    refusal(lambda: Batches(path, 1, 0), str(path), fault, "one, of integers")
    refusal(lambda: prepare(path, None, cache, 256), str(path), fault)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npy"
    np.save(path, np.array([{}]), allow_pickle=True)
    refusal(lambda: open_tokens(path), str(path), "not a whole .npy file")


def test_other_files_are_no_token_files(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tokens.npy"
    with path.open("wb") as file:
        np.savez(file, np.arange(3))
    refusal(lambda: prepare(path, None, cache, 256), "not a whole .npy file")
    path.write_text("text\nof lines\n")
    refusal(lambda: prepare(path, None, cache, 256), "not a whole .npy file")
    refusal(lambda: open_tokens(tmp_path), "cannot be read")


@given(st.data())
def test_damaged_token_files(draw: st.DataObject) -> None:
    """Cut short anywhere, or with bytes of the header changed: refused, or read as what it then says."""
    with TemporaryDirectory() as folder:
        path = position_file(Path(folder), 20)
        raw = bytearray(path.read_bytes())
        size = draw.draw(st.integers(0, len(raw) - 1))
        path.write_bytes(raw[:size])
        refusal(lambda: open_tokens(path), "not a whole .npy file", "write it again")
        for _ in range(draw.draw(st.integers(1, 3))):
            raw[draw.draw(st.integers(0, 80))] = draw.draw(st.sampled_from(b"\0\n ()[]{},'-0129efiuO<>|\x80\xff"))
        path.write_bytes(raw)
        with suppress(InputError):
            assert open_tokens(path).ndim == 1


def test_a_damaged_cache_is_not_read(text: Path, cache: Path) -> None:
    path = prepare(text, None, cache, 256)
    path.write_bytes(path.read_bytes()[:-1])
    refusal(lambda: prepare(text, None, cache, 256), str(path), "remove it")


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"", "tokenizer"), (b"{}", "tokenizer"), (b'{\n"model": 3}', "tokenizer"), (b"\xff", "UTF-8")],
)
def test_bad_tokenizer_files(tmp_path: Path, text: Path, cache: Path, content: bytes, part: str) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "vocabulary.json"
    path.write_bytes(content)
    refusal(lambda: prepare(text, path, cache, 256), str(path), part)
    refusal(lambda: prepare(text, tmp_path / "missing.json", cache, 256), "missing.json", "does not exist")
    assert not cache.exists()


def test_a_tokenizer_without_an_unknown_token(tmp_path: Path, text: Path, cache: Path) -> None:
    path = words(tmp_path / "tokenizer.json", VOCABULARY, None)
    refusal(lambda: prepare(text, path, cache, 256), str(path), "cannot tokenise", "unknown token")
    assert list(cache.iterdir()) == []


def test_a_tokenizer_for_a_token_file(tmp_path: Path, cache: Path) -> None:
    path = position_file(tmp_path, 9)
    refusal(lambda: prepare(path, tmp_path / "tokenizer.json", cache, 256), str(path), "tokenizer.json", "leave out")


def test_without_the_package_of_tokenizers(
    tmp_path: Path, text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refusal(lambda: prepare(text, path, cache, 256), str(path), "hexiopt[train]")
    assert prepare(text, None, cache, 256).exists()


@pytest.mark.parametrize("block", [1, 2**22])
def test_tokens_that_the_model_does_not_have(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(tokens_module, "BLOCK", block)
    path = token_file(tmp_path, [0, 1, 300, 2])
    assert prepare(path, None, cache, 301) == path
    refusal(lambda: prepare(path, None, cache, 300), str(path), "the token 300", "vocab_size is 300", "choose")
    refusal(lambda: prepare(token_file(tmp_path, [1, -2], np.int8), None, cache, 300), "the token -2", "from 0")
    refusal(lambda: prepare(token_file(tmp_path, [255], np.uint8), None, cache, 255), "the token 255")


def test_texts_that_the_model_does_not_have(tmp_path: Path, text: Path, cache: Path) -> None:
    """At once, before a file is built; and where it is, for a smaller model. It is what the corpus has that counts."""
    tokenizer = words(tmp_path / "tokenizer.json", VOCABULARY | {"question": 9, "unused": 70_000})
    refused = (str(tokenizer), "the token 9", "vocab_size is 9", "choose")
    refusal(lambda: prepare(text, tokenizer, cache, 9), *refused)
    assert list(cache.iterdir()) == []
    prepare(text, tokenizer, cache, 10)
    refusal(lambda: prepare(text, tokenizer, cache, 9), *refused)
    refusal(lambda: prepare(text, None, cache, 100), str(text), f"the token {max(TEXT.encode())}", "vocab_size is 100")
