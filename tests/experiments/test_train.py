"""`hexiopt train`: whole small runs."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.app.configurations import named_cluster, named_model
from hexiopt.files.plan_file import plan_file_to_dict, read_plan
from hexiopt.problem.problem import Problem
from hexiopt.problem.space import Space
from hexiopt.problem.workload import Workload
from hexiopt.solving import Budget
from runtime.state.checkpoint import Checkpoint
from solvers.registry import make_solver
from tests.conftest import Run

SMALL = ("workload=small", "workload.global_batch=4", "workload.seq_len=32")
SEARCH = ("solver.max_steps=40", "hydra.run.dir=out")
ASYMMETRIC = ("constraints.num_pipelines=2", "constraints.num_stages=2", "space.replicas=false")


@cache
def plan_text() -> str:
    """A plan of two pipelines of two stages."""
    problem = Problem(
        named_cluster("small_mixed"),
        named_model("tiny"),
        Workload(4, 32, precision="fp32", optimizer_sharding="1"),
        Space(num_pipelines=2, num_stages=2, replicas=False),
    )
    result = make_solver("portfolio").solve(problem, Budget(3600.0, 40), seed=0)
    assert result.plan is not None
    assert result.cost is not None
    return json.dumps(plan_file_to_dict(problem, result.plan, result.cost, {}))


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(plan_text())
    return path


PROFILE = """\
name: measured
machines:
  - {{name: here, gpu: cpu, num_gpus: {}, intra_bandwidth_gb_per_s: 0.3}}
"""


def plan_of(folder: Path) -> Any:
    return json.loads((folder / "plan.json").read_text())["pipelines"]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "step"]


def test_trains_and_goes_on(hexiopt: Run, tmp_path: Path) -> None:
    """The journey of `make test`: search, train, go on with a logger beside what a profile predicts."""
    command = ("train", "cluster=small_mixed", "model=tiny", *SMALL, *ASYMMETRIC, *SEARCH)
    ran = hexiopt(*command, "train.steps=12", "train.checkpoint_every=6", "train.warmup_steps=2")
    assert ran.code == 0, ran.err
    assert "→" in ran.out
    steps = steps_of(tmp_path / "out")
    assert len(steps) == 12
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"plan.json", "checkpoints", "loss.png", "run.json"}
    last = tmp_path / "out" / "checkpoints" / "step-00000012"
    resumed = ("train", "plan=out/plan.json", f"train.resume={last}")
    for count in (12, 11):
        ran = hexiopt(*resumed, f"train.steps={count}", "hydra.run.dir=complete")
        assert ran.code == 0, ran.err
        output = " ".join(ran.out.split())
        assert output.startswith("The run is complete: ")
        assert output.endswith(f"is at step 12 of train.steps={count}. To go on, set train.steps above that.")
        assert not (tmp_path / "complete" / "run.json").exists()
    more = ("train.steps=14", "hydra.run.dir=again", "train.loggers=[tensorboard]", "train.profile=here.yaml")
    devices = sum(len(stage["devices"]) for pipeline in plan_of(tmp_path / "out") for stage in pipeline["stages"])
    for measured, code in ((devices + 1, 2), (devices, 0)):
        (tmp_path / "here.yaml").write_text(PROFILE.format(measured))
        ran = hexiopt(*resumed, *more)
        assert ran.code == code, ran.err
        if code:
            assert f"train.profile: here.yaml: is of {measured} devices" in ran.err
    assert "predicted for here.yaml" in ran.out
    assert "of the peak of here.yaml" in ran.out
    steps = steps_of(tmp_path / "again")
    assert [event["step"] for event in steps] == [13, 14]
    for event in steps:
        assert event["tokens_per_s"] == pytest.approx(4 * 32 / event["seconds"])
        assert 0.0 < event["mfu"] < 1.0
    assert list((tmp_path / "again" / "tensorboard").glob("events.*"))


@pytest.mark.slow
def test_a_run_begins_with_the_weights_of_another(hexiopt: Run, tmp_path: Path, plan: Path) -> None:
    ran = hexiopt("train", f"plan={plan}", "train.steps=12", "train.warmup_steps=2", "hydra.run.dir=out")
    assert ran.code == 0, ran.err
    last = tmp_path / "out" / "checkpoints" / "step-00000012"
    ran = hexiopt("export", f"export.checkpoint={last}", "export.precision=fp32", "hydra.run.dir=exported")
    assert ran.code == 0, ran.err
    more = ("train.weights=exported/huggingface", "train.steps=1", "train.seed=3", "hydra.run.dir=from_weights")
    ran = hexiopt("train", f"plan={plan}", *more)
    assert ran.code == 0, ran.err
    assert json.loads((tmp_path / "from_weights" / "run.json").read_text())["settings"]["seed"] == 3
    (first,) = steps_of(tmp_path / "from_weights")
    assert first["loss"] < steps_of(tmp_path / "out")[0]["loss"] - 0.5


@pytest.mark.slow
def test_a_run_goes_on_in_its_own_folder_alone(hexiopt: Run, tmp_path: Path, plan: Path) -> None:
    """Its metrics are appended to; another batch takes up the text where the last one left it."""
    words = ("train", f"plan={plan}", "train.warmup_steps=1", "hydra.run.dir=run")
    ran = hexiopt(*words, "train.steps=2")
    assert ran.code == 0, ran.err
    run = json.loads((tmp_path / "run" / "run.json").read_text())["run"]
    last = tmp_path / "run" / "checkpoints" / "step-00000002"
    ran = hexiopt(*words, "train.steps=2")
    assert ran.code == 2
    assert f"step-00000002: is of run {run}, not of this one; go on with train.resume=" in ran.err
    batch = read_plan(plan).problem.workload.global_batch
    ran = hexiopt(*words, f"train.resume={last}", "train.steps=4", "train.seed=5")
    assert ran.code == 2
    assert "was trained with train.seed=0, not 5, which would" in ran.err
    ran = hexiopt(*words, f"train.resume={last}", "train.steps=3")
    assert ran.code == 0, ran.err
    assert [event["step"] for event in steps_of(tmp_path / "run")] == [1, 2, 3]
    progress = Checkpoint(tmp_path / "run" / "checkpoints" / "step-00000003").progress
    assert (progress.run, progress.sequences) == (run, 3 * batch)


@pytest.mark.slow
def test_a_plan_of_zero_3_that_plan_chose_trains_and_goes_on_with_zero_1(hexiopt: Run, tmp_path: Path) -> None:
    """As ZeRO-1 does with the same data, and its checkpoint is any plan's."""
    command = ("cluster=small_mixed", "model=tiny", *SMALL, *ASYMMETRIC, "solver.max_steps=40")
    for zero in (1, 3):
        ran = hexiopt("plan", *command, f"workload.optimizer_sharding={zero}", f"hydra.run.dir=zero{zero}")
        assert ran.code == 0, ran.err
    steps = ("train.checkpoint_every=3", "train.warmup_steps=2")
    runs = [
        ("apart", "plan=zero1/plan.json", "train.steps=6"),
        ("late", "plan=zero3/plan.json", "train.steps=3"),
        ("on", "plan=zero1/plan.json", "train.steps=6", "train.resume=late/checkpoints/step-00000003"),
        ("back", "plan=zero3/plan.json", "train.steps=6", "train.resume=apart/checkpoints/step-00000003"),
    ]
    losses = {}
    for name, *words in runs:
        ran = hexiopt("train", *words, *steps, f"hydra.run.dir={name}")
        assert ran.code == 0, ran.err
        losses[name] = [event["loss"] for event in steps_of(tmp_path / name)]
    assert losses["late"] == pytest.approx(losses["apart"][:3], rel=1e-5)
    for name in ("on", "back"):
        assert losses[name] == pytest.approx(losses["apart"][3:], rel=1e-4)


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def test_a_refusal_of_the_command_writes_nothing(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("train", "plan=plan.json", "hydra.run.dir=trained", "train.steps=0")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "train: steps" in ran.err
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    ("master", "message"),
    [
        ("nowhere", "train.master: 'nowhere' is not an address; write host:port"),
        ("192.0.2.1:29500", "cannot listen at 192.0.2.1:29500"),
    ],
)
def test_a_head_that_cannot_be_met_starts_nothing(hexiopt: Run, plan: Path, master: str, message: str) -> None:
    ran = hexiopt("train", f"plan={plan}", "hydra.run.dir=trained", "train.launch=machine", f"train.master={master}")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert message in ran.err


@pytest.mark.slow
def test_a_gpu_for_each_process_or_the_cpu(
    hexiopt: Run, tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with fewer GPUs than the plan has devices, as it says of itself, trains on its CPU and says so."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    ran = hexiopt("train", f"plan={plan}", "train.steps=2", "train.warmup_steps=0", "hydra.run.dir=trained")
    assert ran.code == 0, ran.err
    assert "Training on CPU processes: this machine has GPUs for only 1 of" in ran.out
    assert json.loads((tmp_path / "trained" / "run.json").read_text())["device"] == "cpu"
    ran = hexiopt("train", f"plan={plan}", "train.device=cuda", "hydra.run.dir=refused")
    assert ran.code == 2
    assert "train.device: cuda takes a GPU for each of" in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "refused" / "run.json").exists()


@pytest.mark.slow
def test_more_processes_than_a_machine_carries_are_refused(
    hexiopt: Run, tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.launch.admission.MOST_PROCESSES_PER_CORE", 1)
    monkeypatch.setattr("runtime.launch.admission.usable_cores", lambda: 2)
    ran = hexiopt("train", f"plan={plan}", "train.steps=1", "hydra.run.dir=refused")
    assert ran.code == 2
    assert "are more than 1 on each of this machine's 2 cores; plan for at most 2 devices" in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "refused" / "run.json").exists()
    ran = hexiopt("train", f"plan={plan}", "train.steps=1", "train.force=true", "hydra.run.dir=forced")
    assert ran.code == 0, ran.err


def test_what_cannot_be_trained_is_not_planned(hexiopt: Run, tmp_path: Path) -> None:
    ran = hexiopt("train", "cluster=small_mixed", "model=gpt2_345m", "hydra.run.dir=trained")
    assert ran.code == 2
    assert "gpt2 cannot be trained" in ran.err
    assert not (tmp_path / "trained").exists()
