"""The panel's own code: who is judged, by which numbers, and that worse plans are seen."""

from dataclasses import replace
from pathlib import Path

import pytest

from hexiopt.solving import Budget
from solvers.registry import make_solver
from tests.conftest import ROOT
from tests.golden import files
from tests.quality import __main__ as quality
from tests.quality import stored
from tests.quality.problems import PROBLEMS
from tests.quality.runs import Run, Side, Worker, by_cpu_time, by_steps, panel_problem
from tests.quality.table import Row, geometric_mean, table, worse
from tests.quality.worker import NEVER_S

SMALL = ("drawn_1", "drawn_13")
STEPS = 20


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what is stored of two small problems, from one seed within few steps."""
    for name in ("STORED", "PLANS"):
        monkeypatch.setattr(stored, name, tmp_path / getattr(stored, name).name)
    assert quality.main(["--store", "--problems", ",".join(SMALL), "--seeds", "1", "--steps", str(STEPS)]) == 0
    return tmp_path / "stored.json"


@pytest.mark.slow
def test_what_was_stored_is_no_worse_and_what_was_better_is_seen(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--problems", ",".join(SMALL), "--seeds", "1"]
    assert quality.main(asked) == 0
    assert "geometric mean 1.0000" in capsys.readouterr().out
    entries, plans = stored.read(), files.read(stored.PLANS)
    assert entries.keys() == plans.keys() == set(SMALL)
    [first] = entries["drawn_1"].step_time_s
    assert first == make_solver("portfolio").solve(panel_problem("drawn_1"), Budget(NEVER_S, STEPS)).objective
    assert not stored.stale("drawn_1", entries["drawn_1"], plans["drawn_1"])
    assert "priced" in stored.stale(
        "drawn_1", replace(entries["drawn_1"], step_time_s=(first / 1.1,)), plans["drawn_1"]
    )
    assert "another" in stored.stale("drawn_1", replace(entries["drawn_1"], problem_sha256=""), plans["drawn_1"])
    small.write_text(small.read_text(encoding="utf-8").replace(str(first), str(first / 1.1)), encoding="utf-8")
    assert quality.main(asked) == 1
    assert "store the panel again" in capsys.readouterr().out.lower()


def test_worse_is_a_geometric_mean_or_a_problem() -> None:
    same = [Row("drawn_1", (1.0, 2.0), (1.0, 2.0))] * 20
    assert worse(same) == []
    assert worse([*same, Row("desk", (1.0, 1.0), (1.008, 1.01))]) == []  # the mean of its seeds counts
    assert [line.split(":")[0] for line in worse([*same, Row("desk", (1.0, 1.0), (1.02, 1.01))])] == ["desk"]
    assert [line.split(":")[0] for line in worse([Row("desk", (1.0,), (1.005,))] * 9)] == ["geometric mean"]
    assert geometric_mean([Row("desk", (1.0,), (2.0,)), Row("desk", (1.0,), (0.5,))]) == pytest.approx(1.0)
    nothing = [*same, Row("desk", (1.0, 1.0), (1.0, float("inf")))]
    assert [line.split(":")[0] for line in worse(nothing)] == ["geometric mean", "desk"]
    assert max(map(len, table(nothing).splitlines())) <= 80


def test_budgets_and_names_of_the_panel() -> None:
    entries = stored.read()
    assert entries.keys() <= PROBLEMS.keys()
    assert all(len(entry.step_time_s) == quality.SEEDS for entry in entries.values())
    assert files.read(stored.PLANS).keys() == entries.keys()


def test_runs_are_in_turns() -> None:
    sides = Side(solver="portfolio"), Side(solver="local_search")
    runs = quality.in_turns(sides, SMALL, 2, 1.0)
    assert [run.side for run in runs] == [*sides, *reversed(sides)] * 2
    assert [(run.problem, run.seed) for run in runs[::2]] == [(name, seed) for name in SMALL for seed in (0, 1)]


def test_a_search_of_another_checkout_is_not_taken_for_one_of_this(tmp_path: Path) -> None:
    """A folder without the packages, of which Python then takes those that are installed."""
    worker = Worker(tmp_path)
    try:
        with pytest.raises(AssertionError):
            worker.search(Run(Side(tmp_path), "drawn_1", 0, max_steps=1))
    finally:
        worker.close()


@pytest.mark.slow
def test_cpu_time_on_one_core() -> None:
    """Two solvers in turns, each within its CPU time as far as a search can notice, and what loading takes."""
    sides = Side(ROOT, "portfolio"), Side(ROOT, "local_search")
    for run, outcome in by_cpu_time(quality.in_turns(sides, ("drawn_1",), 1, 1.0)):
        assert outcome.step_time_s < float("inf"), run
        assert 0.9 < outcome.cpu_s < 4.0
    [(_, again)] = by_steps([Run(sides[1], "drawn_1", 0, max_steps=STEPS)], 2)
    assert (
        again.step_time_s
        == make_solver("local_search").solve(panel_problem("drawn_1"), Budget(NEVER_S, STEPS)).objective
    )
