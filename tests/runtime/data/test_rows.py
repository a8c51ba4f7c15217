"""Datasets become token files: a document a row, each followed by its separator; nothing comes from a network."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.data import rows as rows_module
from runtime.data.corpus import prepare, separator_token
from runtime.data.rows import DatasetRows, is_rows
from runtime.data.tokens import open_tokens
from tests.runtime.data.test_data import VOCABULARY, refusal, words

TEXTS = ["to be", "or not", "", "to be or be"]
END = 6
TOKENS = [2, 3, END, 4, 5, END, END, 2, 3, 4, 3, END]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def json_lines(path: Path, texts: list[Any], column: str = "text") -> str:
    path.write_text("".join(json.dumps({"number": k, column: text}) + "\n" for k, text in enumerate(texts)))
    return str(path)


def parquet(path: Path, texts: list[str]) -> str:
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    writer.write_table(arrow.table({"text": texts}), path)
    return str(path)


@pytest.mark.parametrize("make", [json_lines, parquet])
def test_a_document_a_row(make: Any, tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("datasets")
    source = make(tmp_path / f"rows.{'jsonl' if make is json_lines else 'parquet'}", TEXTS)
    tokenizer = words(tmp_path / "tokenizer.json", VOCABULARY | {"<end>": END})
    assert separator_token("<end>", tokenizer) == END
    counts: list[int] = []
    path = prepare(DatasetRows(source), tokenizer, cache, 7, END, counts.append)
    assert open_tokens(path).tolist() == TOKENS
    assert counts[-1] == len(TOKENS)
    assert counts == sorted(counts)
    bare = prepare(DatasetRows(source), tokenizer, cache, 7)
    assert open_tokens(bare).tolist() == [token for token in TOKENS if token != END]
    by_byte = prepare(DatasetRows(source), None, cache, 257, 256)
    assert open_tokens(by_byte).tolist() == [token for text in TEXTS for token in [*text.encode(), 256]]
    assert open_tokens(by_byte).dtype == "uint16"


def test_several_files_and_another_column(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("datasets")
    for k, text in enumerate(TEXTS[:2]):
        json_lines(tmp_path / f"part-{k}.jsonl", [text], "content")
    rows = DatasetRows(str(tmp_path / "part-*.jsonl"), "content")
    first = prepare(rows, None, cache, 256, 0)
    assert open_tokens(first).tobytes() == b"to be\0or not\0"
    assert prepare(DatasetRows(str(tmp_path / "part-*.jsonl"), "content"), None, cache, 256, 0) == first
    json_lines(tmp_path / "part-2.jsonl", ["that"], "content")
    again = prepare(DatasetRows(str(tmp_path / "part-*.jsonl"), "content"), None, cache, 256, 0)
    assert open_tokens(again).tobytes() == b"to be\0or not\0that\0"


def test_files_are_documents_too(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in (("a", "to be\n"), ("b", ""), ("c", "or not")):
        (folder / name).write_text(text)
    assert open_tokens(prepare(folder, None, cache, 256, 0)).tobytes() == b"to be\n\0\0or not\0"
    tokenizer = words(tmp_path / "tokenizer.json", VOCABULARY)
    assert open_tokens(prepare(folder, tokenizer, cache, 10, 9)).tolist() == [2, 3, 9, 9, 4, 5, 9]


@pytest.mark.parametrize("subset", [None, "en"])
def test_a_dataset_of_the_hub_is_streamed(subset: str | None, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*names: Any, **how: Any) -> Any:
        asked.append((names, how))
        return iter([{"text": text} for text in TEXTS])

    fake = SimpleNamespace(load_dataset=load_dataset, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "datasets", fake)  # type: ignore[arg-type]
    rows = DatasetRows("hf://someone/texts", split="train[:1%]", subset=subset)
    path = prepare(rows, None, cache, 256, 0)
    assert open_tokens(path).tobytes() == b"to be\0or not\0\0to be or be\0"
    assert asked == [(("someone/texts", subset), {"split": "train[:1%]", "streaming": True})]
    assert prepare(rows, None, cache, 256, 0) == path
    assert len(asked) == 1
    refusal(lambda: prepare(rows, None, cache, 100, 0), "hf://someone/texts: has the token 116", "vocab_size is 100")


def test_the_hub_out_of_reach_is_said_at_once_unless_there_is_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(111, "Connection refused")

    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr(rows_module, "find_spec", lambda name: True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_ENDPOINT", "HF_DATASETS_CACHE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    phrases = (
        "hf://someone/texts: https://huggingface.co is out of reach (Connection refused)",
        "no copy is in the cache",
    )
    refusal(lambda: DatasetRows("hf://someone/texts").check(), *phrases)
    refusal(lambda: DatasetRows("hf://someone/texts").check(), "HF_HUB_OFFLINE is set", "give train.data a file")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    (tmp_path / "hub" / "datasets--someone--texts").mkdir(parents=True)
    fake = SimpleNamespace(load_dataset=lambda *_, **__: iter([{"text": "to be"}]), __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "datasets", fake)  # type: ignore[arg-type]
    DatasetRows("hf://someone/texts").check()
    assert os.environ["HF_HUB_OFFLINE"] == "1", "its packages do not try either"


def test_what_cannot_be_read_names_the_keys_that_say_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ValueError("Bad split: train. Available splits: ['test']")

    fake = SimpleNamespace(load_dataset=load_dataset, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "datasets", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(rows_module, "check_hub", lambda name: None)
    keys = "check the name, train.data_split=train and train.data_subset=en"
    refusal(lambda: DatasetRows("hf://someone/texts", subset="en").check(), "Bad split: train", keys)
    fake.load_dataset = lambda *_, **__: iter([])
    refusal(lambda: DatasetRows("hf://someone/texts", subset="en").check(), "has no row", "train.data_subset=en")


def test_what_is_a_dataset() -> None:
    assert all(map(is_rows, ("a.jsonl", "/b/c-*.parquet", "hf://allenai/c4")))
    assert not any(map(is_rows, ("a.txt", "folder", "tokens.npy", "/a.json")))


def test_refused(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    source = json_lines(tmp_path / "rows.jsonl", TEXTS)
    refusal(lambda: prepare(DatasetRows(source, "body"), None, cache, 256), "train.text_column", "body", "text: text")
    refusal(lambda: DatasetRows(str(tmp_path / "none-*.jsonl")), "none-*.jsonl", "does not exist")
    (tmp_path / "bad.jsonl").write_text("no JSON\n")
    refusal(lambda: prepare(DatasetRows(str(tmp_path / "bad.jsonl")), None, cache, 256), "bad.jsonl", "cannot be read")
    refusal(lambda: prepare(DatasetRows(source), None, cache, 256, 256), "train.separator: 256", "from 0 to 255")
    tokenizer = words(tmp_path / "tokenizer.json", VOCABULARY)
    refusal(lambda: separator_token("</s>", tokenizer), "train.separator: '</s>' is no token of", "tokenizer.json")
    refusal(lambda: separator_token("</s>", None), "train.separator", "there is no train.tokenizer")
    assert not cache.exists() or not list(cache.iterdir())
    monkeypatch.setattr(rows_module, "find_spec", lambda name: None)
    refusal(lambda: DatasetRows(source), "needs the package datasets; install hexiopt[datasets]")
