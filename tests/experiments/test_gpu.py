"""`make gpu` for real, on the CPU; and what `validate` makes of its file."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.measure.trial_files import FORMAT, read_trials
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.plan_file import plan_file_to_dict
from hexiopt.plan.plan import Pipeline, Plan, Stage
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from tests.conftest import Run
from tests.solvers.problems import cluster

pytest.importorskip("torch")


def file_of(*measured: dict[str, Any]) -> dict[str, Any]:
    """A file of trials of one plan, which has gone as each of `measured` says."""
    from tests.runtime.memory_cases import LLAMA

    problem = Problem(cluster(("a", "fast", 1)), LLAMA, Workload(1, 64, precision="fp32"))
    plan = Plan((Pipeline((Stage.of((0,), 0, LLAMA.num_layers),), 1),))
    file = plan_file_to_dict(problem, plan, PlanPricer(problem).price(plan), {})
    trials = [{"name": f"trial {k}", "plan": file, "measured": measurement} for k, measurement in enumerate(measured)]
    return {"format": FORMAT, "version": 1, "torch": "2", "is_gpu": True, "trials": trials}


TRAINED = {"seconds": [0.3, 0.1, 0.2], "losses": [6.0], "peak_bytes": [2**30, 2**31], "kernels": [], "trouble": None}


def test_validate_shows_errors_and_what_was_not_trained(hexiopt: Run, tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(file_of(TRAINED, {"trouble": "no answer of rank 0"})))
    (first, second) = read_trials(tmp_path / "gpu.json")
    assert (first.step_s, first.peak_bytes, first.trouble) == (0.2, 2**31, None)
    assert second.trouble == "no answer of rank 0"
    ran = hexiopt("validate", "data=gpu.json", "hydra.run.dir=out")
    assert ran.code == 0, ran.err
    assert "not trained: trial 1: no answer of rank 0" in ran.out
    assert "1 of 2 plans: mean error" in ran.out
    assert (tmp_path / "out" / "validation.csv").read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "other"}, "format"),
        ({"version": 2}, "version"),
        ({"trials": [{"name": "x", "plan": {}, "measured": {}}]}, "trials"),
        (file_of(TRAINED | {"seconds": []}), "seconds: [] is empty"),
        (file_of(TRAINED | {"peak_bytes": ["many"]}), "peak_bytes"),
        (file_of({"trouble": "hung"}), "none of its 1 plans could be trained"),
    ],
)
def test_bad_files_are_refused_in_a_line(hexiopt: Run, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(file_of(TRAINED) | change))
    ran = hexiopt("validate", "data=gpu.json", "hydra.run.dir=out")
    assert ran.code == 2
    assert words in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.slow
def test_make_gpu_runs_on_a_cpu(hexiopt: Run, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments.measure.gpu", "--out", str(tmp_path / "gpu")]
    ran_here = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran_here.returncode == 0, ran_here.stdout + ran_here.stderr
    stdout = " ".join(ran_here.stdout.split())
    assert stdout.startswith("No GPU")
    assert "A step of toy" in stdout
    assert "rank 1 (process-1:0) ended with exit code -9" in stdout
    assert "TP 2 no device memory 0" in stdout
    trials = read_trials(tmp_path / "gpu" / "gpu.json")
    assert len(trials) == 7
    content = json.loads((tmp_path / "gpu" / "gpu.json").read_text())
    assert content["killed"]["backend"] == "gloo"
    assert 0 < content["killed"]["ended_s"] < 30
    assert [communicator["measured_bytes"] for communicator in content["communicators"]] == [None] * 5
    losses = [trial["measured"]["losses"] for trial in content["trials"]]
    for trial_losses in losses:
        assert trial_losses == pytest.approx(losses[0], rel=1e-5)
    assert all(trial.trouble is None for trial in trials)
    ran = hexiopt("validate", "data=gpu/gpu.json", "hydra.run.dir=out")
    assert ran.code == 0, ran.err
    assert "7 of 7 plans" in ran.out
