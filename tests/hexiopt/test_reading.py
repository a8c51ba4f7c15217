"""Users' files: data or one InputError, whatever the bytes; sections key by key."""

import json
import math
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hexiopt.errors import InputError, did_you_mean
from hexiopt.files.problem_file import problem_from_section
from hexiopt.reading import MAX_DEPTH, MAX_FILE_BYTES, Section, as_mapping, parse, read_mapping, read_text
from tests.strategies import JSON
from tests.timing import within


def yaml(text: str) -> Any:
    return parse(text, "my.yaml", as_json=False)


def from_json(text: str) -> Any:
    return parse(text, "my.json", as_json=True)


def assert_read_or_refused(read: Callable[[], Any], where: str) -> None:
    """What is read is finished as a mapping or refused; a refusal names the file."""
    try:
        data = read()
    except InputError as refusal:
        line = str(refusal)
    else:
        line = where
        with suppress(InputError):
            Section(data, where).finish()
    assert line.startswith(where)


# ------------------------------------------------------------------ random text

PIECES = st.lists(
    st.sampled_from(
        [
            *"-:,[]{}&*!|>'\"%@`#?=~ \n\t0189aex._",
            "- ",
            ": ",
            "\n  ",
            "<<: ",
            "!!",
            "0x",
            "0b",
            ".inf",
            ".nan",
            "null",
        ]
    ),
    max_size=25,
).map("".join)


@given(text=PIECES | st.text(max_size=30))
@example("a: 1" + ":1" * 300 + ".0")  # sexagesimal
@example("a: 0x" + "f" * 5000)
@example("a: " + "9" * 5000)
@example("? [a]\n: 1")
@example("<<: 1")
@example("<<: [{a: 1}, {a: 2}]")
@example("=: 1")
@example("0b_: 0x_")
@example("2020-01-01: 2020-99-99")
@example("!!python/object/apply:os.system [ls]")
def test_any_text_as_yaml_is_data_or_refused(text: str) -> None:
    assert_read_or_refused(lambda: yaml(text), "my.yaml")


@given(text=st.text(alphabet='{}[]":,.0123456789eE+-truefalsnN \\\nu\ud800"', max_size=30) | st.text(max_size=30))
@example('{"a": ' + "9" * 5000 + "}")
@example('{"a": 1e999}')
@example('{"\\ud800": 1}')
@example('{"\\u001b[31m": 1}')
def test_any_text_as_json_is_data_or_refused(text: str) -> None:
    assert_read_or_refused(lambda: from_json(text), "my.json")


@given(raw=st.binary(max_size=40), suffix=st.sampled_from((".yaml", ".json")))
def test_any_bytes_are_a_mapping_or_refused(raw: bytes, suffix: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / f"any{suffix}"
    path.write_bytes(raw)
    assert_read_or_refused(lambda: read_mapping(path), str(path))


@given(data=JSON)
def test_json_gives_back_what_was_written(data: Any) -> None:
    try:
        text = json.dumps(data, allow_nan=False)
    except ValueError:
        with pytest.raises(InputError, match="is not a number of JSON"):
            from_json(json.dumps(data))
    else:
        assert from_json(text) == data


# ------------------------------------------------------------------ what plain data is


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &x 1\nb: *x", "line 1: anchors and aliases"),
        ("a: 1\nb: *x", "line 2: anchors and aliases"),
        ("a: !!python/object:os.system {}", "tag"),
        ("a: !include other.yaml", "tag '!include'"),
        ("a: !!str 1", "tag"),
        ("a: 1\nb:\n  c: 1\n  c: 2", "line 4: the key 'c' appears twice"),
        ("{a: 1, a: 1}", "appears twice"),
        ("? [1, 2]\n: 3", "unhashable|not text"),
        ("a: 1\n--- \nb: 2", "document"),
        ("a: [1, 2", "line"),
        ("a: 'x", "line"),
        ("\tb: 1", "line"),
        ("a: \x00", "malformed"),
    ],
)
def test_yaml_that_is_not_plain_data_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        as_mapping(yaml(text), "my.yaml")


def test_billion_laughs_cost_nothing() -> None:
    text = "a0: &a0 [x, x]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 60))

    def refuse() -> None:
        with pytest.raises(InputError, match="anchors and aliases"):
            yaml(text)

    within(0.5, refuse)


def test_a_long_sexagesimal_is_no_trap() -> None:
    """`1:1:1:...` is a number to the base of 60 in YAML 1.1; of a megabyte it must not take minutes."""

    def read() -> None:
        with suppress(InputError):
            yaml("a: 1" + ":1" * 150_000)

    within(1.0, read)


@pytest.mark.parametrize("opening", ["[", "{a: ", "- "])
def test_deep_yaml_is_refused(opening: str) -> None:
    closing = {"[": "]", "{a: ": "}", "- ": ""}[opening]
    for depth in (MAX_DEPTH + 1, 5_000):
        inner = "1" if opening == "- " else ""
        with pytest.raises(InputError, match="nested"):
            yaml(opening * depth + (inner or "1") + closing * depth)
    assert yaml("[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1))


def test_deep_json_is_refused() -> None:
    """However deep a value lies in a file, and wherever it is refused, there is one line to show."""
    for depth in (*range(MAX_DEPTH + 1, 1000), 100_000):
        deep = "[" * depth + "]" * depth
        text = '{"cluster": {"name": "a", "machines": [{"name": ' + deep + "}]}}"
        with pytest.raises(InputError):
            problem_from_section(Section(from_json(text), "my.json"))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", '{"a": NaN}', '{"a": [1, -Infinity]}'])
def test_json_has_no_nan(text: str) -> None:
    with pytest.raises(InputError, match="is not a number of JSON"):
        from_json(text)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"b": {"a": 1, "a": 1}}'])
def test_json_with_a_key_twice_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="'a' appears twice"):
        from_json(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e9", 1e9),
        ("1E9", 1e9),
        ("-1.5e-3", -1.5e-3),
        ("2.e3", 2e3),
        ("1_000", 1000),
        ("1e", "1e"),
        ("e9", "e9"),
    ],
)
def test_numbers_of_yaml(text: str, value: Any) -> None:
    number = yaml(f"a: {text}")["a"]
    assert number == value
    assert type(number) is type(value)


def test_dates_stay_text() -> None:
    assert yaml("a: 2024-01-31") == {"a": "2024-01-31"}


# ------------------------------------------------------------------ files


def test_a_file_of_each_language(tmp_path: Path) -> None:
    for name, text in (("a.yaml", "a: 1e3"), ("a.yml", "a: 1e3"), ("a.json", '{"a": 1e3}')):
        (tmp_path / name).write_text(text)
        assert read_mapping(tmp_path / name) == read_mapping(str(tmp_path / name)) == {"a": 1000.0}


def test_a_byte_order_mark_is_no_key(tmp_path: Path) -> None:
    for name, text in (("a.yaml", "a: é"), ("a.json", '{"a": "é"}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert read_mapping(tmp_path / name) == {"a": "é"}


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    for raw in (b"a: \xff", "a: é".encode("latin-1"), "a: é".encode("utf-16"), b"a: \xed\xa0\x80"):
        path.write_bytes(raw)
        with pytest.raises(InputError, match="not UTF-8 text; save it as UTF-8"):
            read_mapping(path)


def test_a_huge_sparse_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)

    def refuse() -> None:
        with pytest.raises(InputError, match="larger than 1 MiB"):
            read_mapping(path)

    within(0.5, refuse)


def test_the_limit_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_bytes(b"#" * MAX_FILE_BYTES)
    assert len(read_text(path)) == MAX_FILE_BYTES
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(InputError, match="larger than 1 MiB"):
        read_text(path)
    assert len(read_text(path, max_bytes=MAX_FILE_BYTES + 1)) == MAX_FILE_BYTES + 1


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "dir.yaml").mkdir()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for path, words in (
        (tmp_path / "pipe.yaml", "not a regular file"),
        (tmp_path / "dir.yaml", "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "none.yaml", "does not exist"),
        (tmp_path / "loop.yaml", "does not exist|cannot be read"),
        (Path("a\x00b"), "does not exist|cannot be read"),
        (Path("a" * 5000), "cannot be read"),
    ):
        with pytest.raises(InputError, match=words):
            read_mapping(path)


@pytest.mark.parametrize("text", ["", "1", "[1]", "- a: 1", "text", "null", "{1: 2}", "{true: 1}"])
def test_only_mappings_with_text_keys(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"is not a mapping|is not text"):
        read_mapping(path)


# ------------------------------------------------------------------ sections


def test_errors_name_file_and_key() -> None:
    section = Section({"machines": [{"name": 3}]}, "my.yaml")
    (machine,) = section.sections("machines")
    with pytest.raises(InputError, match=r"^my\.yaml: machines\[0\]\.name: 3 is not text; write a word$"):
        machine.text("name")
    with pytest.raises(InputError, match=r"^my\.yaml: machines\[0\]\.gpu: is missing; state it$"):
        machine.text("gpu")


def test_keys_that_nothing_took_are_refused() -> None:
    section = Section({"name": "a", "nmae": "b"}, "my.yaml")
    section.text("name")
    with pytest.raises(InputError, match="nmae: unknown key; did you mean name"):
        section.finish()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (True, "not a number"),
        ("3", "not a number"),
        ([3], "not a number"),
        (math.nan, "not finite"),
        (math.inf, "not finite"),
        (0, "out of range"),
        (11, "out of range"),
        (10**400, "out of range"),
        (None, "null"),
    ],
)
def test_numbers_have_ranges(value: Any, words: str) -> None:
    section = Section({"x": value}, "my.yaml")
    with pytest.raises(InputError, match=words):
        section.number("x", above=0, at_most=10, default=1.0)
    with pytest.raises(InputError, match=words):
        section.integer("x", at_least=1, at_most=10)


def test_a_default_of_none_takes_null() -> None:
    assert Section({"x": None}, "a").number("x", at_most=1, default=None) is None
    assert Section({}, "a").integer("x", at_least=0, at_most=1, default=None) is None
    assert Section({}, "a").number("x", at_most=1, default=0.5) == 0.5


@pytest.mark.parametrize("word", ["globl_batch", "zzz"])
def test_closest_names_a_cure(word: str) -> None:
    hint = did_you_mean(word, ["global_batch", "seq_len"])
    assert hint == ("did you mean global_batch?" if word != "zzz" else "known: global_batch, seq_len")


@given(st.text() | st.text(st.characters(categories=["Cs", "Zl", "Zp", "Zs", "Cc"])))
def test_an_input_error_is_one_line(text: str) -> None:
    """Whatever it says, and one that a terminal can print; so no other test asks for it."""
    line = str(InputError(text))
    assert len(line.splitlines()) <= 1
    line.encode()


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ("intra_bandwith_gb_per_s", "intra_bandwidth_gb_per_s"),
        ("intra_bandwidth", "intra_bandwidth_gb_per_s"),
        ("num_gpu", "num_gpus"),
        ("nam", "name"),
        ("machine", "machines"),
    ],
)
def test_a_misspelt_key_is_named(given: str, key: str) -> None:
    with pytest.raises(InputError, match=f"^a: {given}: unknown key; did you mean {key}\\?$"):
        Section({given: 1}, "a").raw(key)


def test_another_key_is_not_taken_for_a_misspelling() -> None:
    with pytest.raises(InputError, match=r"^a: intra_bandwidth_gb_per_s: is missing; state it$"):
        Section({"nic_bandwidth_gb_per_s": 1, "intra_latency_us": 1}, "a").raw("intra_bandwidth_gb_per_s")
