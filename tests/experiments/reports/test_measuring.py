"""The progress of a measurement."""

import io

import pytest
from rich.console import Console

from experiments.reports.progress import MeasuringProgress


def test_lines_are_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    told, quiet = io.StringIO(), io.StringIO()
    with (
        MeasuringProgress(console=Console(file=told)) as tell,
        MeasuringProgress(quiet=True, console=Console(file=quiet)) as silent,
    ):
        for seconds, what in ((1, "gemm"), (7, "attention"), (8, "stream"), (13, "a message [x]")):
            now[0] = 100.0 + seconds
            tell(what)
            silent(what)
    assert told.getvalue().splitlines() == ["measuring: attention · 7 s", "measuring: a message [x] · 13 s"]
    assert quiet.getvalue() == ""


def test_a_terminal_has_a_live_line() -> None:
    quoted = io.StringIO()
    with MeasuringProgress(console=Console(file=quoted, force_terminal=True)) as tell:
        tell("gemm")
    assert "measuring" in quoted.getvalue()
