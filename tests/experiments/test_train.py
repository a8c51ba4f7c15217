"""`hexiopt train`: a whole small run, and input that ends before any process starts."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
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


def test_trains_and_goes_on(hexiopt: Run, tmp_path: Path) -> None:
    command = ("train", "cluster=small_mixed", "model=tiny", *SMALL, *ASYMMETRIC, *SEARCH)
    ran = hexiopt(*command, "train.steps=12", "train.checkpoint_every=6", "train.warmup_steps=2")
    assert ran.code == 0, ran.err
    assert "→" in ran.out
    events = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.5
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"plan.json", "checkpoints", "loss.png", "run.json"}
    last = tmp_path / "out" / "checkpoints" / "step-00000012"
    resumed = ("train", "plan=out/plan.json", f"train.resume={last}")
    for steps in (12, 11):
        ran = hexiopt(*resumed, f"train.steps={steps}", "hydra.run.dir=complete")
        assert ran.code == 0, ran.err
        said = " ".join(ran.out.split())
        assert said.startswith("The run is complete: ")
        assert said.endswith(f"is at step 12 of train.steps={steps}. To go on, set train.steps above that.")
        assert not (tmp_path / "complete" / "run.json").exists()
    more = ("plan=out/plan.json", f"train.resume={last}", "train.steps=14", "hydra.run.dir=again")
    more += ("train.loggers=[tensorboard]", "train.profile=here.yaml")
    devices = sum(len(stage["devices"]) for pipeline in plan_of(tmp_path / "out") for stage in pipeline["stages"])
    for measured, code in ((devices + 1, 2), (devices, 0)):
        (tmp_path / "here.yaml").write_text(PROFILE.format(measured))
        ran = hexiopt("train", *more)
        assert ran.code == code, ran.err
        if code:
            assert f"train.profile: here.yaml: is of {measured} devices" in ran.err
    assert "predicted for here.yaml" in ran.out
    assert "of the peak of here.yaml" in ran.out
    events = [json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [13, 14]
    for event in steps:
        assert event["tokens_per_s"] == pytest.approx(4 * 32 / event["seconds"])
        assert 0.0 < event["mfu"] < 1.0
    assert list((tmp_path / "again" / "tensorboard").glob("events.*"))
    ran = hexiopt("export", f"export.checkpoint={last}", "export.precision=fp32", "hydra.run.dir=exported")
    assert ran.code == 0, ran.err
    more = ("plan=out/plan.json", "train.weights=exported/huggingface", "train.steps=1", "hydra.run.dir=from_weights")
    more += ("train.seed=3",)
    ran = hexiopt("train", *more)
    assert ran.code == 0, ran.err
    events = [json.loads(line) for line in (tmp_path / "from_weights" / "metrics.jsonl").read_text().splitlines()]
    assert json.loads((tmp_path / "from_weights" / "run.json").read_text())["settings"]["seed"] == 3
    (first,) = (event["loss"] for event in events if event["event"] == "step")
    assert first < losses[0] - 0.5


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
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
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
        events = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses[name] = [event["loss"] for event in events if event["event"] == "step"]
    assert losses["late"] == pytest.approx(losses["apart"][:3], rel=1e-5)
    for name in ("on", "back"):
        assert losses[name] == pytest.approx(losses["apart"][3:], rel=1e-4)


def edited(path: Path, change: Callable[[Any], None]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def missing_layer(data: Any) -> None:
    data["pipelines"][0]["stages"][0]["layers"][1] -= 1


def extra_layer(data: Any) -> None:
    data["pipelines"][0]["stages"][-1]["layers"][1] += 1


def device_twice(data: Any) -> None:
    data["pipelines"][0]["stages"][0]["devices"] = data["pipelines"][0]["stages"][1]["devices"]


def wrong_shares(data: Any) -> None:
    data["pipelines"][0]["num_micro_batches"] += 1


def other_counts(data: Any) -> None:
    """ZeRO-3 over pipelines of unequally many micro-batches."""
    first, second = data["pipelines"]
    first["num_micro_batches"] = second["num_micro_batches"] + 1
    data["sharding"]["stage"] = 3


def other_model(data: Any) -> None:
    data["problem"]["model"]["num_hidden_layers"] += 1


def sequence(
    tokens: Sequence[int] = (20, 12), heads: Sequence[int] = (3, 1), order: str = "zigzag", groups: int = 1
) -> Callable[[Any], None]:
    """All layers of the first pipeline in a sequence layout over two of its devices, as so many equal groups."""

    def change(data: Any) -> None:
        stages = data["pipelines"][0]["stages"]
        devices = [device for stage in stages for device in stage["devices"]][:2]
        own = {"devices": devices, "tokens": [n // groups for n in tokens], "heads": list(heads)}
        layers = [0, stages[-1]["layers"][1]]
        stages[:] = [{"layers": layers, "sequence": {"groups": [own] * groups, "order": order}}]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (missing_layer, "layer"),
        (extra_layer, "layer"),
        (device_twice, "device"),
        (wrong_shares, "sequences"),
        (other_model, "does not belong to the problem"),
        (other_counts, "sharding: ZeRO-3 over pipelines of unequally many micro-batches; give all as many"),
        (sequence(tokens=[20, 11]), "the groups have 31 tokens, a sequence 32"),
        (sequence(heads=[1, 2]), "group 0 has 3 heads, the model 4"),
        (sequence(tokens=[32, 0]), "has tokens (32, 0); give every device at least 1"),
        (sequence(order="spiral"), "spiral"),
        (sequence(groups=2), "is used 2 times"),
    ],
)
def test_a_bad_plan_starts_nothing(
    hexiopt: Run, tmp_path: Path, plan: Path, change: Callable[[Any], None], message: str
) -> None:
    edited(plan, change)
    ran = hexiopt("train", f"plan={plan}", "hydra.run.dir=trained")
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert not (tmp_path / "trained").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.data=none.txt"], "none.txt"),
        (["train.resume=nowhere"], "nowhere: is not a checkpoint"),
        (["train.tokenizer=none.json"], "none.json"),
        (["train.weights=nowhere"], "nowhere"),
        (["train.weights=a", "train.resume=b"], "resume and weights"),
        (
            ["train.launch=machine", "train.master=nowhere"],
            "train.master: 'nowhere' is not an address; write host:port",
        ),
        (["train.launch=machine", "train.master=192.0.2.1:29500"], "cannot listen at 192.0.2.1:29500"),
        (["train.launch=machine", "train.machine=old"], "train.master: is missing"),
        (["train.launch=torchrun"], "RANK is not set"),
        (["train.steps=0"], "train: steps"),
        (["train.on_failure=pray"], "train: on_failure"),
        (["train.lr=-1"], "train: lr"),
        (["train.device=tpu"], "train: device"),
        (["train.lr_schedule=steps"], "train: lr_schedule"),
        (["train.decay_share=2"], "train: decay_share"),
    ],
)
def test_bad_settings_start_nothing(
    hexiopt: Run, tmp_path: Path, plan: Path, overrides: list[str], message: str
) -> None:
    ran = hexiopt("train", f"plan={plan}", "hydra.run.dir=trained", *overrides)
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1


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


def test_a_tokenizer_of_another_model_is_refused(hexiopt: Run, tmp_path: Path, plan: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(5000, dtype=np.uint16))
    ran = hexiopt("train", f"plan={plan}", "hydra.run.dir=trained", "train.data=tokens.npy")
    assert ran.code == 2
    assert "vocab" in ran.err
