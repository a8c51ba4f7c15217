"""What an agent watches, and what of torch's own business it stands on."""

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from hexiopt.errors import InputError
from hexiopt.files.plan_file import PlanFile
from hexiopt.numbers.products import find_gpu
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.launch import admission, vitals
from runtime.launch.admission import admit_machine
from runtime.launch.agent import EndingBackend, check_clock, exit_code
from runtime.launch.meeting import MeetingClient, MeetingPlace
from runtime.launch.vitals import Vitals, forget, silence_of
from tests.runtime.launch.test_faults import narrow, problem

ROOT = Path(__file__).parents[3]


def test_torch_calls_the_methods_that_we_extend() -> None:
    """Their names have an underscore: a newer torch may call others, and the agent would not watch any more."""
    run, restart = (
        inspect.getsource(getattr(api.SimpleElasticAgent, name)) for name in ("_invoke_run", "_restart_workers")
    )
    assert "self._monitor_workers(self._worker_group)" in run
    assert "self._restart_workers(self._worker_group)" in run
    assert "self._stop_workers(worker_group)" in restart
    for name in ("_monitor_workers", "_stop_workers"):
        assert list(inspect.signature(getattr(LocalElasticAgent, name)).parameters) == ["self", "worker_group"]


def test_names_of_torch_with_an_underscore_stand_in_one_file() -> None:
    """Of its elastic agent: other files may override or call none of its methods."""
    names = {name for name in vars(LocalElasticAgent) | vars(api.SimpleElasticAgent) if name.startswith("_")}
    names = {name for name in names if not name.startswith("__")} | {"_pcontext", "_worker_group"}
    files = {
        path.name
        for path in (ROOT / "runtime" / "launch").glob("*.py")
        if any(f"def {name}(" in (text := path.read_text()) or f".{name}(" in text for name in names)
    }
    assert files == {"agent.py"}


def test_who_waits_for_others_ends_with_the_run() -> None:
    """Without a trace of torch's, and without going on as if the network had been cut."""
    place = MeetingPlace()
    meeting = MeetingClient(place.address)
    limits = RendezvousTimeout(join=timedelta(seconds=60))
    waiting = DynamicRendezvousHandler.from_backend("it", meeting.store, EndingBackend(meeting), 2, 2, timeout=limits)
    ending = threading.Timer(0.5, place.end)
    ending.start()
    with pytest.raises(RendezvousGracefulExitError, match="the run has ended"):
        waiting.next_rendezvous()
    ending.join()


def test_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts is waited for; the first step may take any time; then steps must end."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr("threading.Thread", lambda **more: type("Never", (), {"start": lambda self: None})())
    pid = os.getpid()
    assert silence_of(tmp_path, pid) is None
    signs = Vitals(tmp_path)
    now += vitals.START_S - 1
    assert silence_of(tmp_path, pid) is None
    signs.limit(15.0, 60.0)
    now += 14
    assert silence_of(tmp_path, pid) is None
    now += 2
    assert silence_of(tmp_path, pid) == (now - 1, "has given no sign of life for 15 s")
    signs.note_progress()  # says that it lives, not that steps have a limit
    signs._beat()
    now += 10**6
    signs._beat()
    assert silence_of(tmp_path, pid) is None
    signs.step_ended(4.0)
    now += 79
    signs._beat()
    assert silence_of(tmp_path, pid) is None
    now += 2
    signs._beat()
    assert silence_of(tmp_path, pid) == (now - 1, "has ended no step for 80 s")  # 5 steps of 4 s, and 60 s
    signs.note_progress()
    assert silence_of(tmp_path, pid) is None
    forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_where_only_steps_of_another_are_told_is_healthy(tmp_path: Path) -> None:
    """Each process tells of its own steps: a machine without rank 0 once ended healthy runs after silence_s and
    timeout_s."""
    signs = Vitals(tmp_path)
    signs.limit(0.5, 0.5)
    for _ in range(12):
        signs.step_ended(0.1)
        time.sleep(0.1)
    assert silence_of(tmp_path, os.getpid()) is None


def test_how_a_process_has_ended_is_known_without_collecting_it() -> None:
    for code, script in ((7, "import sys; sys.exit(7)"), (-signal.SIGKILL, "import os; os.kill(os.getpid(), 9)")):
        process = subprocess.Popen([sys.executable, "-c", script])
        while exit_code(process.pid) is None:
            time.sleep(0.01)
        assert exit_code(process.pid) == code
        assert process.wait() == code


def test_clocks() -> None:
    """Between two moments of this machine, the head's clock was read: what is certain counts, not what took long."""
    check_clock(100.0, 100.1, 100.2)
    check_clock(100.0, 104.0, 100.2)
    check_clock(100.0, 160.0, 160.0)
    for head in (94.0, 106.0):
        with pytest.raises(InputError, match=r"are 6 s apart, more than 5 s; synchronise them"):
            check_clock(100.0, head, 100.0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Eight A100s; which of them were looked at."""
    asked: list[int] = []

    def memory(index: int) -> int:
        asked.append(index)
        return 80 * 2**30

    monkeypatch.setattr(admission, "num_gpus", lambda: 8)
    monkeypatch.setattr(admission, "gpu_memory_bytes", memory)
    monkeypatch.setattr(admission, "gpu_product", lambda index: "NVIDIA A100-SXM4-80GB")
    return asked


def test_devices_that_are_left_out_do_not_shift_gpus(gpus: list[int]) -> None:
    stages = Stage.of((1,), 0, 2), Stage.of((3,), 2, 4)
    plan_file = PlanFile(problem(), Plan((Pipeline(stages, 4),), ONE_F_ONE_B, Sharding(1)), {})
    assert [plan_file.problem.cluster.device_name(device) for device in (1, 3)] == ["a:1", "b:1"]
    for machine in ("a", "b"):
        assert admit_machine(plan_file, machine, [1], "auto", False) == ("cuda", None)
    assert set(gpus) == {1}
    with pytest.raises(InputError, match="cuda takes a GPU for each of 9 processes, and this machine has 8"):
        admit_machine(plan_file, "b", [8], "cuda", False)


def test_a_gpu_of_another_type_than_the_plans_is_refused(gpus: list[int]) -> None:
    task = problem()
    machines = tuple(replace(machine, gpu=find_gpu("h100_80gb_sxm", {}, "")) for machine in task.cluster.machines)
    plan_file = PlanFile(replace(task, cluster=replace(task.cluster, machines=machines)), narrow(), {})
    message = (
        r"^train: b:0 of the plan is a h100_80gb_sxm, and GPU 0 of this machine is a a100_80gb_sxm "
        r"\(NVIDIA A100-SXM4-80GB\); plan for these GPUs"
    )
    with pytest.raises(InputError, match=message):
        admit_machine(plan_file, "b", [0, 1], "auto", False)
    assert admit_machine(plan_file, "b", [0, 1], "auto", True) == ("cuda", None)
