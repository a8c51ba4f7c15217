"""`train.on_failure=replan`: after a loss, the plan that reaches the last step first; losses stay what they were."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import hexiopt as hx
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.plan_file import write_plan
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from runtime.launch.head import AfterFaults, NoPlanLeftError
from tests.conftest import Run

CLUSTER = """
name: two
inter_machine: {bandwidth_gb_per_s: 1}
machines:
  - {name: a, gpu: rtx_3090, num_gpus: 2, intra_bandwidth_gb_per_s: 12}
  - {name: b, gpu: rtx_4090, num_gpus: 1}
"""
STEPS = 40
TRAIN = (f"train.steps={STEPS}", "train.checkpoint_every=2", "train.warmup_steps=2", "train.device=cpu", "report=false")
SEARCH = ("solver.max_steps=40", "solver.time_limit_s=600")


@pytest.fixture
def plan(tmp_path: Path) -> str:
    """A plan on all three devices: a pipeline on each machine."""
    (tmp_path / "two.yaml").write_text(CLUSTER)
    model = hx.model("tiny")
    task = hx.Problem(hx.cluster(tmp_path / "two.yaml"), model, hx.Workload(4, 32, precision="fp32"))
    pipelines = [Pipeline((Stage.of(devices, 0, model.num_layers),), 2) for devices in ((0, 1), (2,))]
    plan = Plan(tuple(pipelines), sharding=Sharding(1))
    write_plan(tmp_path / "plan.json", task, plan, PlanPricer(task).price(plan), {})
    return "plan=plan.json"


def devices(path: Path) -> set[str]:
    pipelines = json.loads(path.read_text())["pipelines"]
    return {device for pipeline in pipelines for stage in pipeline["stages"] for device in stage["devices"]}


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_the_executor_weighs_plans_for_the_steps_that_are_left(
    hexiopt: Run, tmp_path: Path, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without processes: what the head asks for when it has lost a device after 30 of 40 steps."""
    written: list[Path] = []

    def lose(run: Any, folder: Path, faults: AfterFaults, *_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        written.append(faults.replan(["b:0"], run.plan, Path("checkpoints/step-00000030")))
        written.append(faults.replan(["a:1", "b:0"], written[0], None))
        yield from ()

    monkeypatch.setattr("runtime.launch.head.training_events", lose)
    ran = hexiopt("train", plan, *TRAIN, *SEARCH, "train.on_failure=replan", "hydra.run.dir=out")
    assert ran.code == 0, ran.err
    assert devices(tmp_path / "plan.json") == {"a:0", "a:1", "b:0"}
    assert [path.name for path in written] == ["replanned-1.json", "replanned-2.json"]
    assert devices(written[0]) <= {"a:0", "a:1"}
    assert devices(written[1]) == {"a:0"}
    output = " ".join(ran.out.split())
    assert "trains 10 more steps first" in output
    assert f"trains {STEPS} more steps first" in output
    assert "checkpoint" in output  # where all states come from
    excluded = json.loads(written[1].read_text())["problem"]["space"]["exclude"]
    assert excluded == ["a:1", "b:0"]


def test_constraints_that_too_few_devices_are_left_for_are_dropped_with_a_note(
    hexiopt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two pipelines of one stage; with one device left, there is one of any number of stages."""
    (tmp_path / "two.yaml").write_text(CLUSTER)
    written: list[Path] = []

    def lose(run: Any, folder: Path, faults: AfterFaults, *_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        written.append(faults.replan(["a:1", "b:0"], run.plan, None))
        yield from ()

    monkeypatch.setattr("runtime.launch.head.training_events", lose)
    asked = ("cluster=two.yaml", "model=tiny", "workload=small", "workload.global_batch=4", "constraints.max_tp=1")
    shape = ("constraints.num_pipelines=2", "constraints.num_stages=1", "train.on_failure=replan", "hydra.run.dir=out")
    ran = hexiopt("train", *asked, *shape, *TRAIN, *SEARCH)
    assert ran.code == 0, ran.err
    output = " ".join(ran.out.split())
    assert "Note: planned without constraints.num_pipelines=2 and constraints.num_stages=1: constraints: 2" in output
    space = json.loads(written[0].read_text())["problem"]["space"]
    assert (space["num_pipelines"], space["num_stages"], space["max_tp"]) == (None, None, 1)
    assert devices(written[0]) == {"a:0"}


def test_a_search_that_fails_is_no_plan_and_ends_no_run(
    hexiopt: Run, tmp_path: Path, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []

    def lose(run: Any, folder: Path, faults: AfterFaults, *_: Any, **__: Any) -> Iterator[dict[str, Any]]:
        try:
            faults.replan(["b:0"], run.plan, None)
        except NoPlanLeftError as error:
            messages.append(str(error))
        yield from ()

    def crash(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("division by\nzero")

    monkeypatch.setattr("runtime.launch.head.training_events", lose)
    monkeypatch.setattr("experiments.train.replan_job", crash)
    ran = hexiopt("train", plan, *TRAIN, *SEARCH, "train.on_failure=replan", "hydra.run.dir=out")
    assert ran.code == 0, ran.err
    assert messages == ["division by zero"]


@contextmanager
def start(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-m", *words], cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_run_that_loses_a_machine_ends_as_if_undisturbed(hexiopt: Run, tmp_path: Path, plan: str) -> None:
    ran = hexiopt("train", plan, *TRAIN, "hydra.run.dir=undisturbed")
    assert ran.code == 0, ran.err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{free.getsockname()[1]}"
    train = ("hexiopt", "train", plan, *TRAIN, *SEARCH, "train.launch=machine", f"train.master={master}")
    metrics = tmp_path / "disturbed" / "metrics.jsonl"
    agent = ("runtime.launch.agent", master, "--machine")
    with start(tmp_path, *train, "train.on_failure=replan", "hydra.run.dir=disturbed") as head:
        while not (tmp_path / "disturbed" / "launch.sh").exists():
            assert head.poll() is None, head.communicate()[1]
            time.sleep(0.05)
        with start(tmp_path, *agent, "a") as a, start(tmp_path, *agent, "b") as b:
            while not metrics.exists() or not any(event.get("step", 0) >= 5 for event in events(metrics)):
                assert head.poll() is None, head.communicate()[1]
                time.sleep(0.02)
            b.send_signal(signal.SIGKILL)
            assert head.wait() == 0, head.communicate()[1]
            assert a.wait() == 0
    (restart,) = (event for event in events(metrics) if event["event"] == "restart")
    assert restart["plan"].endswith("replanned-1.json")
    assert devices(Path(restart["plan"])) <= {"a:0", "a:1"}
    losses = [
        {
            event["step"]: event["loss"]
            for event in events(tmp_path / folder / "metrics.jsonl")
            if event["event"] == "step"
        }
        for folder in ("undisturbed", "disturbed")
    ]
    assert sorted(losses[1]) == list(range(1, STEPS + 1))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
