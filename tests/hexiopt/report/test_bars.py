"""Groups of bars: the median of seeds, a dash where there is no number, one line for what is wrong."""

import pytest

import hexiopt as hx
from hexiopt import InputError


def test_a_bar_is_the_median_and_its_line_the_range() -> None:
    ax = hx.plot.bars({"a": {"ours": [3.0, 1.0, 2.0], "theirs": 4.0}, "b": {"ours": None}}, unit="s", reference=2.5)
    widths = [round(bar.get_width(), 9) for bar in ax.patches]  # type: ignore[attr-defined]
    assert widths == [2.0, 4.0, 0.0]
    spread, mark = ax.lines
    assert list(spread.get_xdata()) == [1.0, 3.0]
    assert list(mark.get_xdata()) == [2.5, 2.5]
    assert [text.get_text() for text in ax.texts] == ["2.00", "4.00", "–"]
    assert [text.get_text() for text in ax.get_yticklabels()] == ["a", "b"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["ours", "theirs"]  # type: ignore[union-attr]
    assert ax.get_xlabel() == "s"


def test_groups_stand_from_top_to_bottom() -> None:
    ax = hx.plot.bars({"first": {"s": 1.0}, "second": {"s": 2.0}})
    first, second = (bar.get_y() for bar in ax.patches)  # type: ignore[attr-defined]
    low, high = ax.get_ylim()
    assert first < second
    assert low > high
    assert ax.get_legend() is None


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "bars: 0 groups of 0 series"),
        ({"a": {}}, "bars: 1 groups of 0 series"),
        ({"a": {"s": float("inf")}}, "bars: a: s: inf is not a finite number"),
        ({"a": {"s": ["1"]}}, "bars: a: s: '1' is not a finite number"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(groups: dict[str, dict[str, float]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        hx.plot.bars(groups)
