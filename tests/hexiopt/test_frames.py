"""Small tables: text, HTML, CSV and pandas."""

import sys

import pytest

from hexiopt.errors import InputError
from hexiopt.frame import Frame

FRAME = Frame.of([{"name": "a<b", "count": 12_345, "share": 0.51234}, {"name": "c", "more": None}], title="Some")


def test_it_has_rows_and_columns() -> None:
    assert FRAME.columns == ("name", "count", "share", "more")
    assert FRAME["count"] == (12_345, None)
    assert list(FRAME)[1] == {"name": "c", "count": None, "share": None, "more": None}
    assert len(FRAME) == 2
    with pytest.raises(InputError, match="'shar' is not a column; did you mean share"):
        FRAME["shar"]


def test_it_is_written() -> None:
    assert repr(FRAME).splitlines() == ["Some", "name   count   share  more", "a<b   12,345  0.5123", "c"]
    assert FRAME.to_csv() == "name,count,share,more\na<b,12345,0.51234,\nc,,,\n"
    assert "a&lt;b" in FRAME._repr_html_()
    assert "<caption>Some</caption>" in FRAME._repr_html_()


def test_long_ones_are_cut_and_say_so() -> None:
    long = Frame(("x", "text"), tuple((k, "y" * 200) for k in range(100)))
    assert repr(long).splitlines()[-1] == "... and 40 more rows"
    assert max(map(len, repr(long).splitlines())) < 80
    assert long._repr_html_().endswith("<p>... and 40 more rows</p>")


def test_it_is_a_data_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    pd = pytest.importorskip("pandas")
    made = FRAME.to_pandas()
    assert isinstance(made, pd.DataFrame)
    assert list(made.columns) == list(FRAME.columns)
    assert made["share"].sum() == 0.51234
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match='needs the package pandas; install it with "pip install pandas"'):
        FRAME.to_pandas()


def test_wrong_frames_are_refused() -> None:
    with pytest.raises(InputError, match="a name appears twice"):
        Frame(("x", "x"), ())
    with pytest.raises(InputError, match="has 1 of 2 values"):
        Frame(("x", "y"), ((1,),))
    with pytest.raises(InputError, match="unknown field; did you mean rows"):
        FRAME.replace(row=())
