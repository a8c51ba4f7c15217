"""The factors of a cluster are found again from what runs with them would have measured, and do what they say."""

import json
from pathlib import Path

import pytest

import hexiopt as hx
from experiments.measure.calibrating import MeasuredRun, fit, predict, step_of
from experiments.measure.training_logs import logged_step_times
from hexiopt.files.calibration_file import calibration_from_section, calibration_text
from hexiopt.files.cluster_file import cluster_from_section, cluster_to_dict
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.factors import Calibration, calibration_of
from hexiopt.problem.problem import Problem
from hexiopt.reading import Section, read_mapping
from tests.models import TINY
from tests.solvers.problems import BATCH_OF_4, SMALL_SPACE, cluster

GPUS = cluster(("a", "fast", 2), ("b", "slow", 2), network_gb_per_s=0.1)
TRUTH = Calibration({"fast": 0.8, "slow": 1.1}, between=0.6, inside=0.9, source="x")


def plans(gpus: hx.Cluster = GPUS) -> list[hx.PlacedPlan]:
    problem, half = Problem(gpus, TINY, BATCH_OF_4, SMALL_SPACE), TINY.num_layers // 2
    chain = Pipeline((Stage.of((0, 1), 0, half), Stage.of((2, 3), half, TINY.num_layers)), 4)
    apart = [Pipeline((Stage.of((device,), 0, TINY.num_layers),), 2) for device in (0, 2)]
    return [hx.PlacedPlan.of(problem, Plan(pipelines, sharding=Sharding(1))) for pipelines in ((chain,), tuple(apart))]


def measure(plan: hx.PlacedPlan, truth: Calibration, devices: bool = True) -> MeasuredRun:
    step_s, device_s = predict(MeasuredRun("run", plan, 0.0, {}), truth)
    return MeasuredRun("run", plan, step_s, device_s if devices else {})


def test_the_fit_finds_the_factors_that_made_the_figures() -> None:
    calibration = fit([measure(plan, TRUTH) for plan in plans()], "two runs")
    assert calibration.source == "two runs"
    for name, factor in TRUTH.factors.items():
        assert calibration.factors[name] == pytest.approx(factor, rel=0.05), name


def test_step_times_alone_are_met_and_tell_little_else() -> None:
    """One number fits: devices that no run has used stay as they are, and so do links."""
    (run,) = (measure(plan, Calibration({"fast": 0.5, "slow": 0.5}), devices=False) for plan in plans()[:1])
    calibration = fit([run], "a log")
    assert predict(run, calibration)[0] == pytest.approx(run.step_s, rel=0.01)
    assert set(calibration.compute) == {"fast", "slow"}


def test_a_calibrated_cluster_has_the_factors_in_its_figures_once(tmp_path: Path) -> None:
    (tmp_path / "calibration.yaml").write_text(calibration_text(TRUTH, ["by a test"]))
    stated = cluster_to_dict(GPUS) | {"calibration": "calibration.yaml"}
    calibrated_cluster = cluster_from_section(Section(stated, "my.yaml"), tmp_path)
    assert calibrated_cluster == TRUTH.apply_to(GPUS)
    assert calibrated_cluster.machines[1].nic_bandwidth_bytes_per_s == pytest.approx(0.6 * 0.1e9)
    assert calibrated_cluster.machines[0].intra_bandwidth_bytes_per_s == pytest.approx(0.9 * 25e9)
    again = cluster_from_section(Section(json.loads(json.dumps(cluster_to_dict(calibrated_cluster))), "plan.json"))
    assert calibration_of(again) == TRUTH
    assert again.machines[0].gpu.efficiency == calibrated_cluster.machines[0].gpu.efficiency
    assert again.machines[0].nic_bandwidth_bytes_per_s == pytest.approx(
        calibrated_cluster.machines[0].nic_bandwidth_bytes_per_s
    )
    # What is fitted to runs on it is said of the cluster without any.
    further = fit(
        [measure(plan, Calibration({"fast": 0.5, "slow": 1.0})) for plan in plans(calibrated_cluster)], "later"
    )
    assert further.compute["fast"] == pytest.approx(0.4, rel=0.05)
    (tmp_path / "calibration.yaml").write_text("between: -1\n")
    with pytest.raises(hx.InputError, match=r"calibration\.yaml: between: -1 is out of range"):
        cluster_from_section(Section(stated, "my.yaml"), tmp_path)


MEGATRON = """
 [2025-05-27 15:23:07] iteration        1/    100 | consumed samples:  256 | elapsed time per iteration (ms): 9000.0 |
 [2025-05-27 15:23:17] iteration        2/    100 | consumed: 512 | elapsed time per iteration (ms): 2000.0/2010.0 |
 iteration        3/    100 | consumed samples:   768 | elapsed time per iteration (ms): 2100.5 | learning rate: 1E-04 |
"""
TORCHTITAN = (
    "[rank0]:[titan] - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  4.5  \x1b[33mmemory: 20.1GiB(25.0%)  "
    "\x1b[34mtps: 1,000  \x1b[36mtflops: 50.1  \x1b[35mmfu: 16.0%\x1b[39m\n"
)


def test_logs_of_other_trainers(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(MEGATRON)
    assert logged_step_times(path, 1000, 4) == [9.0, 2.0, 2.1005]
    assert step_of(logged_step_times(path, 1000, 4)) == pytest.approx(2.05025)
    path.write_text(TORCHTITAN)
    assert logged_step_times(path, 8000, 4) == [2.0]
    path.write_text("hello\n")
    with pytest.raises(hx.InputError, match="states no step"):
        logged_step_times(path, 8000, 4)


def test_any_name_can_be_written_and_read(tmp_path: Path) -> None:
    odd = Calibration({'a "fast": one': 0.5}, source='run "é": 2')
    path = tmp_path / "calibration.yaml"
    path.write_text(calibration_text(odd, ["Two lines", "of comments."]), encoding="utf-8")
    assert calibration_from_section(Section(read_mapping(path), str(path))) == odd
