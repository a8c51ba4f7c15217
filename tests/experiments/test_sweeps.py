"""Sweeps: every job runs, says how it ended, and the worst exit code is the sweep's; with both launchers."""

import csv
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

from tests.conftest import Run

TINY = (
    "cluster=small_mixed",
    "model=tiny",
    "solver=random",
    "solver.time_limit_s=0.2",
    "hydra.sweep.dir=sweep",
)
LAUNCHERS = {"basic": (), "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")}


def statuses(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((tmp_path / "sweep").glob("*/status.json"))]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_bad_job_does_not_end_the_sweep(hexiopt: Run, tmp_path: Path, launcher: str) -> None:
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    ran = hexiopt("plan", "-m", *TINY, *LAUNCHERS[launcher], "cluster=typo,small_mixed", "seed=0,abc")
    assert ran.code == 2, ran.err
    assert "1 of 4 jobs done" in ran.out
    assert ran.err.count("\n") == 3
    found = statuses(tmp_path)
    assert [status["exit_code"] for status in found] == [2, 2, 0, 2]
    assert "'typo' is not known" in found[0]["message"]
    assert found[3]["message"] == "seed: 'abc' is not a whole number; state one"
    assert {"cluster=small_mixed", "seed=0", "solver.time_limit_s=0.2"} <= set(found[2]["overrides"])
    assert found[2]["step_time_s"] > 0
    assert found[3]["step_time_s"] is None
    assert sorted(path.name for path in (tmp_path / "sweep" / "2").iterdir()) == ["plan.json", "status.json"]
    assert [path.name for path in (tmp_path / "sweep" / "3").iterdir()] == ["status.json"]


def test_a_sweep_may_be_asked_for_by_its_mode(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("plan", *TINY, "seed=0,1", "hydra.mode=MULTIRUN")
    assert ran.code == 0, ran.err
    assert [status["exit_code"] for status in statuses(tmp_path)] == [0, 0]


def test_an_experiment_may_sweep(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "seeds.yaml").write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      seed: 0,1\n"
    )
    where = f"hydra.searchpath=[file://{tmp_path / 'mine'}]"
    for name, jobs in (("even", 0), ("seeds", 2)):
        ran = hexiopt("plan", where, *TINY, f"experiment={name}", "hydra.run.dir=run")
        assert ran.code == 0, ran.err
        assert len(statuses(tmp_path)) == jobs


class SilentSweeper(Sweeper):
    """As Optuna's: launches jobs, and returns nothing."""

    def __init__(self, **kwargs: Any) -> None:
        pass

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments: list[str]) -> None:
        found = self.launcher.launch([[*arguments, f"model={name}"] for name in ("tiny", "typo", "llama2_70b")], 0)
        assert [job.return_value for job in found][1:] == [float("inf")] * 2


def test_failed_jobs_count_whatever_the_sweeper_returns(
    hexiopt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("hydra_plugins.silent")
    module.SilentSweeper = SilentSweeper  # type: ignore[attr-defined]
    monkeypatch.setattr(SilentSweeper, "__module__", "hydra_plugins.silent")
    monkeypatch.setitem(sys.modules, "hydra_plugins.silent", module)
    Plugins.instance().register(SilentSweeper)
    ran = hexiopt("plan", "-m", *TINY, "hydra.sweeper._target_=hydra_plugins.silent.SilentSweeper")
    assert ran.code == 2
    assert "1 of 3 jobs done: sweep" in ran.out
    assert [line.partition(": ")[2][:6] for line in ran.err.splitlines()] == ["job 1:", "job 2:"]


def test_pictures_on_request(hexiopt: Run, tmp_path: Path) -> None:
    assert hexiopt("plan", "-m", *TINY, "seed=0", "report=true").code == 0
    names = sorted(path.name for path in (tmp_path / "sweep" / "0").iterdir())
    assert names == ["plan.json", "plan.png", "report.html", "status.json", "timeline.json"]


def test_no_plan_and_an_unexpected_error(hexiopt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = hexiopt("plan", "-m", *TINY, "model=tiny,llama2_70b")
    assert ran.code == 3
    assert [status["exit_code"] for status in statuses(tmp_path)] == [0, 3]

    def broken(job: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("experiments.plan.solver_of", broken)
    assert hexiopt("plan", "-m", *TINY, "seed=0,-1").code == 1
    assert [status["exit_code"] for status in statuses(tmp_path)] == [1, 2]


def test_a_swept_value_of_a_cluster(hexiopt: Run, tmp_path: Path) -> None:
    assert hexiopt("plan", "-m", *TINY, "cluster.inter_machine.bandwidth_gb_per_s=1,10").code == 0
    plans = [json.loads(path.read_text()) for path in sorted((tmp_path / "sweep").glob("*/plan.json"))]
    rates = [plan["problem"]["cluster"]["inter_machine"]["bandwidth_gb_per_s"] for plan in plans]
    assert rates == [1, 10]
    assert "cluster.inter_machine.bandwidth_gb_per_s=1" in statuses(tmp_path)[0]["overrides"]


def test_price_and_compare_sweep(hexiopt: Run, tmp_path: Path) -> None:
    assert hexiopt("plan", "-m", *TINY, "seed=0,1").code == 0
    plans = ",".join(str(path) for path in sorted(tmp_path.glob("sweep/*/plan.json")))
    assert hexiopt("price", "-m", f"plan={plans}", "hydra.sweep.dir=prices").code == 0
    assert len(list(tmp_path.glob("prices/*/plan.json"))) == 2
    assert hexiopt("compare", "-m", *TINY, "compare.solvers=[random]", "seed=0,1").code == 0
    assert len(list(tmp_path.glob("sweep/*/comparison.csv"))) == 2


def test_collect_gathers_a_row_a_job(hexiopt: Run, tmp_path: Path) -> None:
    sweep = [value for value in TINY if not value.startswith("hydra.")]
    assert hexiopt("plan", "-m", *sweep, "seed=0,1,-1").code == 2
    ran = hexiopt("collect", "hydra.run.dir=all")
    assert ran.code == 0, ran.err
    assert "3 jobs, 2 done" in ran.out
    with (tmp_path / "all" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["0", "1", "-1"]
    assert [row["exit_code"] for row in rows] == ["0", "0", "2"]
    assert [bool(row["result.step_time_s"]) for row in rows] == [True, True, False]
    assert "out of range" in rows[2]["message"]
    assert ("results.parquet is not written" in ran.out) != (tmp_path / "all" / "results.parquet").exists()


def test_a_sweep_that_cannot_start_is_one_line(hexiopt: Run) -> None:
    for extra in ("hydra/launcher=nope", "seed=[", "sed=1"):
        ran = hexiopt("plan", "-m", *TINY, extra)
        assert ran.code == 2
        assert ran.err.count("\n") == 1, ran.err
