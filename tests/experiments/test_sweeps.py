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
from tests.experiments.command_line import in_process
from tests.slow import slow_but
from tests.solvers.stranger import install

TINY = (
    "cluster=small_mixed",
    "model=tiny",
    "solver=random",
    "solver.max_steps=40",
    "bound.time_limit_s=0",
    "hydra.sweep.dir=sweep",
)
LAUNCHERS = {"basic": (), "joblib": ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2")}


def statuses(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted((tmp_path / "sweep").glob("*/status.json"))]


@pytest.mark.parametrize("launcher", slow_but(("basic",), LAUNCHERS))
def test_a_bad_job_does_not_end_the_sweep(hexiopt: Run, tmp_path: Path, launcher: str) -> None:
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    ran = hexiopt("plan", "-m", *TINY, *LAUNCHERS[launcher], "cluster=typo,small_mixed", "seed=0,abc")
    assert ran.code == 2, ran.err
    assert "1 of 4 jobs done" in ran.out
    assert ran.err.count("\n") == 3
    jobs = statuses(tmp_path)
    assert [status["exit_code"] for status in jobs] == [2, 2, 0, 2]
    assert "'typo' is not known" in jobs[0]["message"]
    assert jobs[3]["message"] == "seed: 'abc' is not a whole number; state one"
    assert {"cluster=small_mixed", "seed=0", "solver.max_steps=40"} <= set(jobs[2]["overrides"])
    assert jobs[2]["step_time_s"] > 0
    assert jobs[3]["step_time_s"] is None
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
        jobs = self.launcher.launch([[*arguments, f"model={name}"] for name in ("tiny", "typo", "llama2_70b")], 0)
        assert [job.return_value for job in jobs][1:] == [float("inf")] * 2


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

    def crash(*args: Any, **more: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("experiments.plan.search", crash)
    assert hexiopt("plan", "-m", *TINY, "seed=0,-1").code == 1
    assert [status["exit_code"] for status in statuses(tmp_path)] == [1, 2]


def test_a_swept_value_of_a_cluster(hexiopt: Run, tmp_path: Path) -> None:
    assert hexiopt("plan", "-m", *TINY, "cluster.inter_machine.bandwidth_gb_per_s=1,10").code == 0
    plans = [json.loads(path.read_text()) for path in sorted((tmp_path / "sweep").glob("*/plan.json"))]
    rates = [plan["problem"]["cluster"]["inter_machine"]["bandwidth_gb_per_s"] for plan in plans]
    assert rates == [1, 10]
    assert "cluster.inter_machine.bandwidth_gb_per_s=1" in statuses(tmp_path)[0]["overrides"]


def test_collect_gathers_a_row_a_job(hexiopt: Run, tmp_path: Path) -> None:
    sweep = [value for value in TINY if not value.startswith("hydra.")]
    assert hexiopt("plan", "-m", *sweep, "seed=0,1,-1").code == 2
    ran = hexiopt("collect", "hydra.run.dir=all")
    assert ran.code == 0, ran.err
    assert "3 jobs: 2 done, 1 refused" in ran.out
    with (tmp_path / "all" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["seed"] for row in rows] == ["0", "1", "-1"]
    assert [row["exit_code"] for row in rows] == ["0", "0", "2"]
    assert [bool(row["result.step_time_s"]) for row in rows] == [True, True, False]
    assert "out of range" in rows[2]["message"]
    assert ("results.parquet is not written" in ran.out) != (tmp_path / "all" / "results.parquet").exists()


@pytest.mark.parametrize("launcher", slow_but(["basic"], LAUNCHERS))
def test_a_resumed_sweep_runs_what_has_not_ended(hexiopt: Run, tmp_path: Path, launcher: str) -> None:
    if launcher == "joblib":
        pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    swept = ("plan", "-m", *TINY, *LAUNCHERS[launcher])
    assert hexiopt(*swept, "seed=0,1,-1").code == 2
    (tmp_path / "sweep" / "1" / "status.json").unlink()  # as where it was killed
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("sweep/*/plan.json")}
    ran = hexiopt(*swept, "seed=2,0,1,-1", "sweep.resume=true")
    assert ran.code == 2
    assert "3 of 4 jobs done" in ran.out
    assert ran.err.count("\n") == 1
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("sweep/*/plan.json")}
    assert all(after[path] == time_ns for path, time_ns in before.items()), "nothing is run twice, nor overwritten"
    assert len(after) == len(before) + 2
    ended = [(status["key"], status["overrides"][-1]) for status in statuses(tmp_path)]
    assert len({key for key, _ in ended}) == 4
    assert sorted(seed for _, seed in ended) == ["seed=-1", "seed=0", "seed=1", "seed=2"]


@pytest.mark.slow
def test_what_changes_a_result_makes_another_job(hexiopt: Run, tmp_path: Path) -> None:
    cluster_file = tmp_path / "own.yaml"
    cluster_file.write_text("name: own\nmachines: [{name: a, gpu: rtx_3090, num_gpus: 1}]\n")
    swept = ("plan", "-m", "cluster=own.yaml", *TINY[1:], "sweep.resume=true", "seed=0")
    assert hexiopt(*swept).code == 0
    assert hexiopt(*swept).code == 0
    assert len(statuses(tmp_path)) == 1
    cluster_file.write_text(cluster_file.read_text().replace("3090", "4090"))
    assert hexiopt(*swept).code == 0
    assert len(statuses(tmp_path)) == 2, "the file has another cluster now"
    assert hexiopt(*swept, "solver.max_steps=3").code == 0
    assert len(statuses(tmp_path)) == 3


@pytest.mark.slow
def test_a_plan_on_changed_problems_is_several_jobs(hexiopt: Run, tmp_path: Path) -> None:
    assert hexiopt("plan", *TINY[:-1], "constraints.num_pipelines=1", "hydra.run.dir=found").code == 0
    priced = ("price", "-m", "plan=found/plan.json", "workload.global_batch=128,256", "sweep.resume=true", TINY[-1])
    for known in (0, 2):
        ran = hexiopt(*priced)
        assert ran.code == 0, ran.err
        assert ran.out.count("known already") == known
    # Resumed jobs have folders named by what they are, in no order of theirs.
    times_s = {status["overrides"][-1]: status["step_time_s"] for status in statuses(tmp_path)}
    assert len(times_s) == 2
    assert times_s["workload.global_batch=128"] < times_s["workload.global_batch=256"]


@pytest.mark.slow
def test_the_newest_sweep_is_resumed_where_none_is_named(hexiopt: Run, tmp_path: Path) -> None:
    swept = ("plan", "-m", *(word for word in TINY if not word.startswith("hydra.")), "seed=0,1")
    assert hexiopt(*swept).code == 0
    ran = hexiopt(*swept, "sweep.resume=true")
    assert ran.code == 0, ran.err
    assert ran.out.count("known already") == 2
    assert len(list(tmp_path.glob("multirun/**/status.json"))) == 2


@pytest.mark.slow
def test_collect_counts_the_jobs_that_were_asked_for(hexiopt: Run, tmp_path: Path) -> None:
    assert hexiopt("plan", "-m", *TINY, "seed=range(3)", "solver.max_steps=2,3").code == 0
    for name in ("1", "4"):
        (tmp_path / "sweep" / name / "status.json").unlink()
    ran = hexiopt("collect", "collect.folders=[sweep]", "hydra.run.dir=all")
    assert ran.code == 0, ran.err
    assert "6 jobs: 4 done, 2 not run" in ran.out
    assert ran.out.count("not run") == 3, "and a line each in the table"
    assert (tmp_path / "all" / "results.png").stat().st_size > 5_000
    with (tmp_path / "all" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    left = {(row["seed"], row["solver.max_steps"]) for row in rows if row["exit_code"] == ""}
    assert left == {("1", "2"), ("1", "3")}


@pytest.mark.slow
def test_optuna_counts_failures(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    drawn = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1", "seed=0,1")
    ran = in_process("plan", "-m", *TINY, *drawn, "model=tiny,gpt_70b", cwd=tmp_path)
    out, err = ran.communicate(timeout=600)
    codes = [status["exit_code"] for status in statuses(tmp_path)]
    assert len(codes) == 4, err
    assert ran.returncode == (3 if 3 in codes else 0)
    assert f"{codes.count(0)} of 4 jobs done" in out


@pytest.mark.slow
def test_submitit_runs_a_sweep_and_resumes_it(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    swept = ("plan", "-m", *TINY, "hydra/launcher=submitit_local", "seed=0,1,-1", "sweep.resume=true")
    for known in (0, 3):
        ran = in_process(*swept, cwd=tmp_path)
        out, err = ran.communicate(timeout=600)
        assert ran.returncode == 2, err
        assert "2 of 3 jobs done" in out
        logs = "".join(path.read_text() for path in tmp_path.rglob("*_log.out"))
        assert logs.count("known already") == known
    assert [status["exit_code"] for status in statuses(tmp_path)].count(0) == 2


def test_a_sweep_that_cannot_start_is_one_line(hexiopt: Run) -> None:
    for extra in ("hydra/launcher=nope", "seed=[", "sed=1"):
        ran = hexiopt("plan", "-m", *TINY, extra)
        assert ran.code == 2
        assert ran.err.count("\n") == 1, ran.err


CRASH = '''
from hexiopt.solving import Capabilities


class Crash:
    """Divides by nothing."""

    name = "crash"
    capabilities = Capabilities()

    def solve(self, problem, budget, *, seed=0, pricer=None, on_progress=None):
        return 1 / 0
'''


def test_collect_has_a_row_a_solver_of_each_comparison(
    hexiopt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, tmp_path / "site", "crash", CRASH, crash="Crash")
    compared = [value for value in TINY if not value.startswith("solver=")]
    ran = hexiopt("compare", "-m", *compared, "compare.solvers=[random,hexiscale,crash]", "seed=0,1")
    assert ran.code == 0, ran.err
    ran = hexiopt("collect", "collect.folders=[sweep]", "hydra.run.dir=all")
    assert ran.code == 0, ran.err
    assert "2 jobs: 2 done" in ran.out
    with (tmp_path / "all" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sorted((row["seed"], row["result.solver"], row["result.status"]) for row in rows) == [
        (seed, solver, status)
        for seed in ("0", "1")
        for solver, status in (("crash", "crashed"), ("hexiscale", "feasible"), ("random", "feasible"))
    ]
    for row in rows:
        assert bool(row["result.step_time_s"]) == (row["result.solver"] != "crash")
        assert ("ZeroDivisionError in crash.py:12 (division by zero)" in row["message"]) == (
            row["result.solver"] == "crash"
        )
    for folder in (path.parent for path in tmp_path.glob("sweep/*/plan.json")):
        best = json.loads((folder / "plan.json").read_text())
        job_rows = [row for row in rows if row["folder"].endswith(folder.name) and row["num_stages"]]
        assert [row["result.solver"] for row in job_rows] == [best["solver"]["name"]]
        assert float(job_rows[0]["result.step_time_s"]) == best["prediction"]["step_time_s"]


@pytest.mark.slow
def test_collect_fills_in_what_other_jobs_leave_as_it_is(hexiopt: Run, tmp_path: Path) -> None:
    swept = ("plan", "-m", *TINY[:-1])
    assert hexiopt(*swept, "space.uneven_layers=false", "constraints.max_tp=1", "hydra.sweep.dir=a").code == 0
    assert hexiopt(*swept, "seed=3", "solver=local_search", "hydra.sweep.dir=b").code == 0
    assert hexiopt("collect", "collect.folders=[a,b]", "hydra.run.dir=all").code == 0
    with (tmp_path / "all" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    keys = ("space.uneven_layers", "constraints.max_tp", "seed", "solver")
    assert [[row[key] for key in keys] for row in rows] == [
        ["false", "1", "0", "random"],
        ["true", "null", "3", "local_search"],
    ]
