"""`compare` outlives the solvers that it compares: who crashes, refuses or overruns has a row that says so."""

import csv
import json
from pathlib import Path

import pytest

import hexiopt as hx
from hexiopt.solving.result import Status
from tests.conftest import Run
from tests.solvers.stranger import install

STRANGERS = '''
import os, signal, time
from hexiopt.solving import Capabilities
from solvers.heuristics.random_partition import RandomPartition


class Crash:
    """Finds nothing but an exception."""

    name = "crash"
    capabilities = Capabilities()

    def solve(self, problem, budget, *, seed=0, pricer=None, on_progress=None):
        return divided(problem)


def divided(problem):
    return 1 / 0


class Sleepy(RandomPartition):
    """Sleeps, and then draws."""

    name = "sleepy"

    def search(self, run, rng):
        super().search(run, rng)
        time.sleep(0.8)


class Pressed(RandomPartition):
    """As if Ctrl-C had been pressed at its end."""

    name = "pressed"

    def search(self, run, rng):
        super().search(run, rng)
        os.kill(os.getpid(), signal.SIGINT)
'''
TINY = ("cluster=small_mixed", "model=tiny", "report=false", "bound.time_limit_s=0", "hydra.run.dir=out")


@pytest.fixture(autouse=True)
def strangers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path / "site", "strange", STRANGERS, crash="Crash", sleepy="Sleepy", pressed="Pressed")


def rows_in(folder: Path) -> dict[str, dict[str, str]]:
    return {row["solver"]: row for row in csv.DictReader((folder / "out" / "comparison.csv").open())}


def test_who_crashes_or_refuses_is_a_row_and_the_best_plan_is_written(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("compare", *TINY, "solver.max_steps=10", "compare.solvers=[crash,random,hexiseq]")
    assert ran.code == 0, ran.err
    rows = rows_in(tmp_path)
    assert {name: row["status"] for name, row in rows.items()} == {
        "random": "feasible",
        "crash": "crashed",
        "hexiseq": "refused",
    }
    assert rows["crash"]["reason"] == "ZeroDivisionError in strange.py:18 (division by zero)"
    assert "crashed: ZeroDivisionError in strange.py:18" in " ".join(ran.out.split())
    assert "allow them with space.sequence=true" in rows["hexiseq"]["reason"]
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["solver"]["name"] == "random"
    assert plan["prediction"]["step_time_s"] == float(rows["random"]["step_time_s"])


def test_nobody_left_is_no_plan(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("compare", *TINY, "solver.max_steps=10", "compare.solvers=[crash]")
    assert ran.code == 3
    assert "crash (crashed): ZeroDivisionError in strange.py:18" in ran.err
    ran = hexiopt("compare", *TINY, "solver.max_steps=10", "compare.solvers=[hexiseq]")
    assert ran.code == 2
    assert "allow them with space.sequence=true" in ran.err


def test_who_overruns_is_marked(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("compare", *TINY, "solver.time_limit_s=0.2", "compare.solvers=[sleepy,crash]")
    assert ran.code == 0, ran.err
    assert float(rows_in(tmp_path)["sleepy"]["overrun_s"]) >= 0.5
    assert "past the time limit" in " ".join(ran.out.split())


def test_ctrl_c_keeps_the_best_plan(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("compare", *TINY, "solver.max_steps=10", "compare.solvers=[pressed,random]")
    assert ran.code == 130, ran.err
    assert set(rows_in(tmp_path)) == {"pressed"}
    assert hx.load_plan(tmp_path / "out" / "plan.json").solver["name"] == "pressed"


def test_in_python_too(tmp_path: Path) -> None:
    problem = hx.Problem(hx.cluster("small_mixed"), hx.model("tiny"), hx.Workload(global_batch=8, seq_len=128))

    def crash(asked: hx.Problem) -> None:
        raise KeyError("no model")

    rows = hx.compare(problem, ["crash", "random"], 2, max_steps=5, time_limit_s=600, bound_time_limit_s=0)
    assert sorted(rows["status"]) == ["crashed", "crashed", "feasible", "feasible"]
    assert rows.best.solver == "random"
    assert {result.status for result in rows.results if result.solver == "crash"} == {Status.CRASHED}
    summary = {row["solver"]: row["plans"] for row in rows.summary()}
    assert summary == {"random": 2, "crash": 0}
    with pytest.raises(KeyError):
        hx.compare(problem, ["random"], max_steps=5, pricer=crash)  # type: ignore[arg-type]
