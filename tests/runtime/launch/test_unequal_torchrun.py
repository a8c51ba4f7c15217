"""torchrun with unequal numbers of processes: the same losses as under our own agent."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.launch.head import AfterFaults, training_events
from runtime.training.settings import TrainingRun
from tests.runtime.launch.test_faults import a_run, save_plan
from tests.runtime.ranks import free_port

_ENDS_S = 300.0


def unequal_plan() -> Plan:
    """Two devices of machine a, one of b."""
    long = Pipeline((Stage.of((0,), 0, 3), Stage.of((2,), 3, 4)), 3)
    return Plan((long, Pipeline((Stage.of((1,), 0, 4),), 1)), ONE_F_ONE_B, Sharding(1))


def the_run(folder: Path) -> TrainingRun:
    folder.mkdir()
    run = replace(a_run(folder), plan=save_plan(folder, "unequal.json", unequal_plan()))
    run.write(folder / "run.json")
    return run


def losses_of(lines: Sequence[str]) -> list[float]:
    events = [json.loads(line) for line in lines if line.startswith("{")]
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.fixture(scope="module")
def expected_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("own") / "run"
    faults = AfterFaults("stop", lambda lost: folder, 0)
    events = list(training_events(the_run(folder), folder, faults))
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_unequal_processes(expected_losses: list[float], tmp_path: Path, named: bool) -> None:
    """By node rank under static rendezvous. Under c10d, which sorts machines as it likes, names of machines say which
    ranks are where."""
    folder = tmp_path / "run"
    the_run(folder)
    port = free_port()
    started = []
    for rank, (machine, count) in enumerate((("a", 2), ("b", 1))):
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={count}"]
        if named:
            is_host = f"--rdzv-conf=is_host={int(machine == 'b')}"
            words += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", is_host, "--local-addr=127.0.0.1"]
        else:
            words += [f"--node-rank={rank}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        words += ["-m", "runtime.launch.worker", str(folder / "run.json"), *(["--machine", machine] if named else [])]
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        outputs = [process.communicate(timeout=_ENDS_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert losses_of([line for out, _ in outputs for line in out.splitlines()]) == pytest.approx(
        expected_losses, rel=1e-9
    )
