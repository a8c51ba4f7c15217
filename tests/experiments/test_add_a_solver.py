"""The page on adding a solver works as written: a stranger's package runs like our own solvers."""

import csv
import json
import re
import tomllib
from pathlib import Path

import pytest

from hexiopt.files.plan_file import read_plan
from hexiopt.plan.check import check
from tests.conftest import ROOT, Run
from tests.slow import slow_but
from tests.solvers.stranger import install

PAGE = (ROOT / "docs" / "add_a_solver.md").read_text(encoding="utf-8")
TINY = ("cluster=small_mixed", "model=tiny", "report=false", "hydra.run.dir=out", "solver.max_steps=60")


def block(language: str) -> str:
    match = re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert match is not None, language
    return match.group(1)


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    points = tomllib.loads(block("toml"))["project"]["entry-points"]["hexiopt.solvers"]
    assert points == {"mine": "my_planner:Symmetric"}
    install(monkeypatch, tmp_path / "site", "my_planner", block("python"), mine="Symmetric")


def test_it_is_short() -> None:
    assert len([line for line in block("python").splitlines() if line.strip()]) <= 30


@pytest.mark.parametrize("max_tp", slow_but((1,), (1, 4)))
def test_it_plans_with_its_parameters(hexiopt: Run, tmp_path: Path, max_tp: int) -> None:
    ran = hexiopt("plan", *TINY, "solver=mine", f"solver.max_tp={max_tp}")
    assert (ran.code, ran.err) == (0, "")
    placed = read_plan(tmp_path / "out" / "plan.json")
    assert check(placed.problem, placed.plan) == []
    stages = [stage for pipeline in placed.plan.pipelines for stage in pipeline.stages]
    assert max(len(group) for stage in stages for group in stage.parallelism.executors) <= max_tp
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["solver"]["name"] == "mine"


def test_it_is_compared(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("compare", *TINY, "compare.solvers=[mine,portfolio]")
    assert (ran.code, ran.err) == (0, "")
    rows = list(csv.DictReader((tmp_path / "out" / "comparison.csv").open()))
    assert sorted(row["solver"] for row in rows) == ["mine", "portfolio"]
    assert 0 < float(rows[0]["step_time_s"]) <= float(rows[1]["step_time_s"]), "the best comes first"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("solver.max_tp=x", "solver.max_tp: 'x' is not a whole number"),
        ("solver.max_pp=4", "solver.max_pp: unknown key; did you mean max_tp"),
    ],
)
def test_its_parameters_are_checked(hexiopt: Run, override: str, message: str) -> None:
    ran = hexiopt("plan", *TINY, "solver=mine", override)
    assert ran.code == 2
    assert ran.err.startswith(f"hexiopt: {message}")
    assert ran.err.count("\n") == 1


@pytest.mark.slow
def test_a_sweep_over_solvers(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("plan", "-m", *TINY, "hydra.sweep.dir=sweep", "solver=mine,random", "solver.time_limit_s=5")
    assert ran.code == 0, ran.err
    names = [json.loads(path.read_text())["solver"]["name"] for path in sorted(tmp_path.glob("sweep/*/plan.json"))]
    assert names == ["mine", "random"]
