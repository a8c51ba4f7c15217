"""The template package is that of the page, keeps the contract, and, installed by pip, works without a checkout."""

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

TEMPLATE = ROOT / "docs" / "solver_template"
PAGE = (ROOT / "docs" / "add_a_solver.md").read_text(encoding="utf-8")
USE = """
import hexiopt as hx
problem = hx.Problem(hx.cluster("small_mixed"), hx.model("tiny"), hx.Workload(global_batch=16, seq_len=256))
print(hx.solve(problem, "mine", time_limit_s=600, max_steps=20, max_tp=2).status)
print(sorted(hx.compare(problem, ["mine", "random"], time_limit_s=600, max_steps=5, bound_time_limit_s=0)["solver"]))
print(hx.sweep(problem, {"solver.max_tp": [1, 2]}, "sweep", solver="mine", max_steps=5).title)
steered = hx.solve(problem, "random", time_limit_s=600, max_steps=20, pricer="hidden_sync")
ours = hx.price(problem, steered.plan)
print(steered.cost.gradient_sync_s, steered.plan.cost == steered.cost, ours.gradient_sync_s > 0, steered.bound_s)
alike = {"pricer": "hidden_sync", "time_limit_s": 600, "max_steps": 20}
print(*sorted(set(hx.compare(problem, ["random", "exact"], **alike)["status"])), "lower bound" in str(steered))
print(hx.sweep(problem, {"pricer": [None, "hidden_sync"]}, "sweep", solver="mine", max_steps=5).title)
again = hx.sweep(problem, {"seed": [0]}, "sweep", solver="mine", max_steps=5, pricer="hidden_sync")
print(again.title, hx.load_plan(again["folder"][0] + "/plan.json").solver.get("lower_bound_s"))
print(dict(hx.solvers()["mine"].parameters))
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_page_shows_what_is_in_it() -> None:
    planner, contract = blocks("python")
    assert planner == (TEMPLATE / "my_planner.py").read_text(encoding="utf-8")
    assert contract == (TEMPLATE / "test_my_planner.py").read_text(encoding="utf-8")
    pyproject = (TEMPLATE / "pyproject.toml").read_text(encoding="utf-8")
    for block in blocks("toml"):
        assert block.rpartition("\n\n")[2] in pyproject
    for name in ("my_planner.py", "my_pricer.py"):
        code = [line for line in (TEMPLATE / name).read_text(encoding="utf-8").splitlines() if line.strip()]
        assert len(code) <= 30, name


@pytest.mark.slow
def test_it_is_built_installed_and_used(tmp_path: Path) -> None:
    source, site, elsewhere = tmp_path / "source", tmp_path / "site", tmp_path / "elsewhere"
    source.mkdir()
    elsewhere.mkdir()
    for path in TEMPLATE.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    flags = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    pip = [sys.executable, "-m", "pip", "install", *flags, "--target", str(site), str(source)]
    built = subprocess.run(pip, cwd=elsewhere, capture_output=True, text=True, check=False)
    if "No module named 'setuptools'" in built.stderr or "Cannot import 'setuptools" in built.stderr:
        pytest.skip("no setuptools to build with")
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}

    def run(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("-c", USE).splitlines() == [
        "feasible",
        "['mine', 'random']",
        "2 jobs: 2 done",
        "0.0 True True 0.0",
        "feasible refused False",
        "2 jobs: 2 done",
        "1 job: 1 done None",
        "{'max_tp': 8}",
    ]
    run("-m", "experiments.app.cli", "plan", "cluster=small_mixed", "model=tiny", "solver=mine", "hydra.run.dir=out")
    assert (elsewhere / "out" / "plan.json").is_file()
    steered = (
        "cluster=small_mixed",
        "model=tiny",
        "pricer=hidden_sync",
        "solver.max_steps=20",
        "hydra.run.dir=steered",
    )
    assert "cost model  hidden_sync" in run("-m", "experiments.app.cli", "plan", *steered)
    assert (
        json.loads((elsewhere / "steered" / "plan.json").read_text())["prediction"]["breakdown_s"]["gradient_sync"] == 0
    )
    run("-m", "experiments.app.cli", "compare", *steered, "compare.solvers=[mine,exact]")
    rows = {row["solver"]: row for row in csv.DictReader((elsewhere / "steered" / "comparison.csv").open())}
    assert (rows["mine"]["lower_bound_s"], rows["exact"]["status"]) == ("", "refused")
    assert "2 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", str(source / "test_my_planner.py"))
