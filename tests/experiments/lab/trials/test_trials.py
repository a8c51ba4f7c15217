"""Plans to try are valid and show every way of communicating; a trial that goes wrong says how."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.lab.trials.plans import TrialPlan, trial_plans
from experiments.lab.trials.trial import Trial, TrialRequest, try_plan
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.plan_file import write_plan
from hexiopt.plan.check import check
from hexiopt.plan.parallelism import SequenceParallel
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import INTERLEAVED
from runtime.mapping.layout import layout_of
from tests.runtime.memory_cases import LLAMA
from tests.solvers.problems import cluster

WORK = Workload(4, 64, precision="fp32")


def plans(num_devices: int, gib: float = 64.0) -> list[TrialPlan]:
    return trial_plans(cluster(("a", "fast", num_devices), fast_gib=gib), [LLAMA], LLAMA, WORK)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
def test_every_plan_is_one_that_can_run(num_devices: int) -> None:
    trials = plans(num_devices)
    assert len({trial.name for trial in trials}) == len(trials)
    for trial_plan in trials:
        assert not check(trial_plan.problem, trial_plan.plan), trial_plan.name
        layout_of(trial_plan.plan, trial_plan.problem.model, trial_plan.problem.cluster)
        assert PlanPricer(trial_plan.problem).price(trial_plan.plan).fits


def test_several_devices_communicate_in_every_way() -> None:
    stages = [stage for trial in plans(4) for pipeline in trial.plan.pipelines for stage in pipeline.stages]
    groups = [len(s.parallelism.groups) for s in stages if isinstance(s.parallelism, SequenceParallel)]
    assert sorted(groups) == [1, 2]  # all-to-all, and a ring
    assert {len(stage.devices) for stage in stages} >= {1, 2, 4}
    assert {trial.plan.sharding.stage for trial in plans(4)} == {0, 1}
    assert INTERLEAVED in {trial.plan.schedule for trial in plans(4)}
    assert [trial.name for trial in plans(1)] == ["small, 1 device"]


def test_a_model_is_cut_to_what_fits() -> None:
    model = replace(LLAMA, num_layers=4000)
    (trial,) = trial_plans(cluster(("a", "fast", 1), fast_gib=4.0), [model], model, WORK)
    layers = trial.problem.model.num_layers
    assert 4 < layers < 4000
    assert trial.name == f"small, 1 device, {layers} layers"
    more = replace(trial.problem, model=replace(model, num_layers=layers + 1))
    stage = replace(trial.plan.pipelines[0].stages[0], layers=((0, layers + 1),))
    larger = replace(trial.plan, pipelines=(replace(trial.plan.pipelines[0], stages=(stage,)),))
    assert not PlanPricer(more).price(larger).fits
    assert plans(1, gib=0.01) == []


def request_of(trial: TrialPlan, folder: Path, limit_s: float) -> TrialRequest:
    path = folder / "plan.json"
    write_plan(path, trial.problem, trial.plan, PlanPricer(trial.problem).price(trial.plan), {})
    return TrialRequest(path, 2, False, limit_s)


def test_a_plan_is_trained_with(tmp_path: Path) -> None:
    (candidate,) = [plan for plan in plans(2) if plan.name.endswith(", 2 stages")]
    trial = try_plan(request_of(candidate, tmp_path, 240.0))
    assert trial.trouble is None
    assert (len(trial.seconds), len(trial.losses), len(trial.peak_bytes)) == (2, 4, 2)
    assert trial.step_s > 0
    assert trial.losses[-1] < trial.losses[0]
    assert any("mm" in kernel.name for kernel in trial.kernels)
    cost = PlanPricer(candidate.problem).price(candidate.plan)
    for stage, peak in zip(cost.pipelines[0].stages, trial.peak_bytes, strict=True):
        assert peak == pytest.approx(stage.memory.tensors, rel=0.1)


def test_what_goes_wrong_is_said(tmp_path: Path) -> None:
    (candidate,) = plans(1)
    assert try_plan(request_of(candidate, tmp_path, 1e-3)) == Trial(trouble="rank 0: no answer in time")
    fp16 = replace(candidate, problem=replace(candidate.problem, workload=replace(WORK, precision="fp16")))
    assert try_plan(request_of(fp16, tmp_path, 240.0)) == Trial(trouble="rank 0: KeyError: 'fp16'")
