"""The fit finds constants again that made the figures, and leaves alone what the rows do not show."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from experiments.calibrate import FREE, calibration_yaml, fit
from experiments.validation.cases import Measurements, case_of
from experiments.validation.predict import Case, in_metric, predict
from experiments.validation.rows import read_rows
from experiments.validation.shipped import RUNS
from hexiopt.numbers.constants import constants
from hexiopt.problem.profile import NOTHING_MEASURED
from tests.conftest import ROOT, Run

LINES = (50, 53, 57, 61, 71, 74, 81, 86)  # FSDP on A100, short and long sequences, small and large models


def test_a_fit_finds_the_constants_that_made_the_figures() -> None:
    truth = {free.name: free.start for free in FREE} | {"ampere_gemm_max": 0.7, "memory_traffic": 2.4}
    cases = [case_of(row, Measurements(NOTHING_MEASURED, None)) for row in read_rows(RUNS) if row.line in LINES]
    assert len(cases) == len(LINES)
    made = [_with_value(case, in_metric(case, predict(case, truth).step_time_s)) for case in cases]
    fitted = fit(made, prior=0.005)
    assert fitted["ampere_gemm_max"] == pytest.approx(0.7, rel=0.02)
    assert fitted["memory_traffic"] == pytest.approx(2.4, rel=0.05)
    for free in FREE:
        assert free.least <= fitted[free.name] <= free.most
        if free.name.startswith(("turing", "deepspeed", "internevo", "ethernet")):
            assert fitted[free.name] == pytest.approx(free.start, rel=1e-3), free.name


def _with_value(case: Case, value: float) -> Case:
    return replace(case, row=replace(case.row, value=value))


def test_the_shipped_constants_are_those_that_the_fit_knows() -> None:
    assert list(constants()) == [free.name for free in FREE]
    for free in FREE:
        known = constants()[free.name]
        assert (known.unit, known.meaning) == (free.unit, free.meaning)
        assert free.least <= known.value <= free.most
    values = {free.name: free.start for free in FREE}
    written = yaml.safe_load(calibration_yaml(values, []))["constants"]
    assert {name: entry["value"] for name, entry in written.items()} == values


@pytest.mark.slow
def test_rows_of_ones_own_join_the_fit(hexiopt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hexiopt calibrate data=`: with a row that was faster, the constants make it faster; others are as they were."""
    with RUNS.open(newline="", encoding="utf-8") as file:
        header, *lines = list(csv.reader(file))
    (row,) = (row for row in read_rows(RUNS) if row.line == LINES[0])
    cells = dict(zip(header, lines[row.line - 2], strict=True))
    assert float(cells["value"]) == row.value
    cases = [
        case_of(other, Measurements(NOTHING_MEASURED, None)) for other in read_rows(RUNS) if other.line in LINES[1:3]
    ]
    fits = {}
    for name, ratio in (("same", 1.0), ("faster", 0.8)):
        with (tmp_path / "own.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, header)
            writer.writeheader()
            faster = (
                row.value * ratio if "s" in cells["metric"] and "tokens" not in cells["metric"] else row.value / ratio
            )
            writer.writerow(cells | {"value": f"{faster:g}", "source": "mine"})
        asked: list[Path] = []

        def cases_of(path: Path, asked: list[Path] = asked) -> list[Case]:
            asked.append(path)
            given = Measurements(NOTHING_MEASURED, None)
            return cases if path == RUNS else [case_of(other, given) for other in read_rows(path)]

        monkeypatch.setattr("experiments.calibrate._cases", cases_of)
        monkeypatch.setattr("experiments.calibrate.fitted_layers", list)
        ran = hexiopt("calibrate", "data=own.csv", "hydra.run.dir=out")
        assert ran.code == 0, ran.err
        assert asked == [RUNS, Path("own.csv")]
        written = yaml.safe_load((tmp_path / "out" / "constants.yaml").read_text())["constants"]
        assert list(written) == [free.name for free in FREE]
        fits[name] = {key: entry["value"] for key, entry in written.items()}
    assert fits["faster"]["ampere_gemm_max"] > fits["same"]["ampere_gemm_max"]
    assert fits["faster"]["turing_gemm_max"] == pytest.approx(fits["same"]["turing_gemm_max"], rel=1e-3)
    ran = hexiopt("calibrate", "data=none.csv", "hydra.run.dir=none")
    assert ran.code == 2
    assert len(ran.err.splitlines()) == 1


def test_a_run_calibrates_a_cluster(hexiopt: Run, tmp_path: Path) -> None:
    """`hexiopt calibrate run=`: of our executor and of a log; a cluster file names what is written, and explain too."""
    task = ("cluster=small_mixed", "model=tiny", "workload=small", "report=false", "bound.time_limit_s=0")
    ran = hexiopt("plan", *task, "workload.global_batch=8", "solver.max_steps=40", "hydra.run.dir=first")
    assert ran.code == 0, ran.err
    step_s = json.loads((tmp_path / "first" / "plan.json").read_text())["prediction"]["step_time_s"]
    log = "".join(f"iteration {k}/9 | elapsed time per iteration (ms): {2e3 * step_s:.6f} |\n" for k in range(9))
    (tmp_path / "train.log").write_text(log)
    ran = hexiopt("calibrate", "run=train.log", "hydra.run.dir=without")
    assert (ran.code, "does not say what it ran" in ran.err) == (2, True)
    ran = hexiopt("calibrate", "run=train.log", "plan=first/plan.json", "hydra.run.dir=fitted")
    assert ran.code == 0, ran.err
    assert "−50" in ran.out or "-50" in ran.out  # the error before
    assert "train.log" in ran.out
    stated = (ROOT / "conf" / "cluster" / "small_mixed.yaml").read_text()
    (tmp_path / "my.yaml").write_text(stated + "calibration: fitted/calibration.yaml\n")
    ran = hexiopt("price", "plan=first/plan.json", "cluster=my.yaml", "hydra.run.dir=again")
    assert ran.code == 0, ran.err
    now_s = json.loads((tmp_path / "again" / "plan.json").read_text())["prediction"]["step_time_s"]
    assert now_s == pytest.approx(2 * step_s, rel=0.05)
    ran = hexiopt("explain", "plan=again/plan.json", "hydra.run.dir=explained")
    output = " ".join(ran.out.split())
    assert "calibrated: between" in output
    assert "train.log" in output


@pytest.mark.slow
def test_a_run_of_our_executor_calibrates_its_machine(hexiopt: Run, tmp_path: Path) -> None:
    task = ("cluster=small_mixed", "model=tiny", "workload=small", "workload.global_batch=4", "workload.seq_len=32")
    train = ("train.steps=6", "train.device=cpu", "solver.max_steps=40", "report=false", "hydra.run.dir=run")
    ran = hexiopt("train", *task, *train)
    assert ran.code == 0, ran.err
    ran = hexiopt("calibrate", "run=run", "hydra.run.dir=fitted")
    assert ran.code == 0, ran.err
    calibration = yaml.safe_load((tmp_path / "fitted" / "calibration.yaml").read_text())
    assert all(factor < 0.5 for factor in calibration["compute"].values())  # a CPU is no RTX 4090
