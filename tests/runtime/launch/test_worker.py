"""Which GPU a process of torchrun takes."""

from dataclasses import replace
from pathlib import Path

import pytest

from hexiopt.files.plan_file import read_plan
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.launch import worker
from tests.runtime.launch.test_faults import a_run, problem, save_plan


@pytest.mark.parametrize("local", [0, 1])
def test_devices_that_the_plan_leaves_out_do_not_shift_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: int
) -> None:
    """The plan has the second and third device of a machine, of which torchrun starts two processes."""
    cluster = problem().cluster
    devices = [d for d in range(len(cluster.machine_of)) if cluster.machine_of[d] == cluster.machine_of[-1]][1:3]
    stages = tuple(Stage.of((d,), 2 * k, 2 * k + 2) for k, d in enumerate(devices))
    plan = Plan((Pipeline(stages, 4),), ONE_F_ONE_B, Sharding(1))
    run = replace(a_run(tmp_path), plan=save_plan(tmp_path, "later.json", plan))
    names = [cluster.device_name(d) for d in devices]
    about = {"RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in (about | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(worker, "meet", lambda name: (None, names))
    monkeypatch.setattr(worker, "PrefixStore", lambda *_: None)
    taken: list[int] = []
    monkeypatch.setattr(worker, "run_rank", lambda run, plan_file, rank, gpu, *_: taken.append(gpu))
    machine = names[0].rpartition(":")[0]
    worker.train_as_torchrun(run, read_plan(run.plan), "cpu", False, machine)
    assert taken == [int(names[local].rpartition(":")[2])] == [local + 1]
