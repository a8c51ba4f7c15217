"""Slurm's node lists."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexiopt.problem.nodelist import MAX_NODES, compress, expand

WORDS = st.text("abgpu-_.", min_size=1, max_size=4)
RANGES = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 12), st.integers(1, 4)), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login", ["login"]),
        ("gpu[01-04,07]", ["gpu01", "gpu02", "gpu03", "gpu04", "gpu07"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[98-101]", ["gpu98", "gpu99", "gpu100", "gpu101"]),
        ("r[1-2]n[01-02]x", ["r1n01x", "r1n02x", "r2n01x", "r2n02x"]),
        ("a,b[1,3],c", ["a", "b1", "b3", "c"]),
    ],
)
def test_lists_as_slurm_prints_them(text: str, names: list[str]) -> None:
    assert expand(text) == names


@given(WORDS, RANGES, WORDS)
def test_every_number_of_every_range_once_in_order(prefix: str, ranges: list[tuple[int, int, int]], rest: str) -> None:
    inside = ",".join(f"{low:0{width}d}-{low + more}" for low, more, width in ranges)
    expected = [f"{prefix}{n:0{width}d}{rest}" for low, more, width in ranges for n in range(low, low + more + 1)]
    # The width that is written is that of the first number, which may be longer than asked for.
    assert expand(f"{prefix}[{inside}]{rest}") == expected
    assert expand(",".join(expected)) == expected


@given(st.sets(st.text("ab019-", min_size=1, max_size=5), min_size=1, max_size=30))
def test_compressed_names_are_the_names(names: set[str]) -> None:
    lists = compress(sorted(names))
    assert sorted(name for name_list in lists for name in expand(name_list)) == sorted(names)
    assert sorted(expand(",".join(lists))) == sorted(names)


def test_names_are_compressed_as_slurm_does() -> None:
    assert compress(["gpu08", "gpu09", "gpu10", "login", "gpu12", "d-1"]) == ["gpu[08-10,12]", "login", "d-1"]


@given(st.text("ab019[],-", max_size=20))
def test_any_text_is_names_or_refused(text: str) -> None:
    rule = None
    try:
        names = expand(text)
    except ValueError as error:
        rule = str(error)
    if rule is not None:
        assert "; " in rule
        return
    assert names
    assert all(re.fullmatch(r"[ab019-]+", name) for name in names)
    assert expand(",".join(names)) == names


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("gpu[4-1]", "descends"),
        ("gpu[1-2", "brackets"),
        ("gpu1-2]", "brackets"),
        ("gpu[]", "not a range"),
        ("gpu[a-b]", "not a range"),
        ("gpu[1-2-3]", "not a range"),
        ("a,,b", "empty name"),
        ("", "empty name"),
        (f"gpu[1-{MAX_NODES + 1}]", "more than"),
        ("gpu[1-999999999]", "more than"),
        ("r[1-9999]n[1-9999]", "more than"),
        (f"gpu[1-{MAX_NODES}],a", "more than"),
    ],
)
def test_what_is_no_list_is_refused(text: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        expand(text)
