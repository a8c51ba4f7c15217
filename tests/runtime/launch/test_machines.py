"""Machines that are lost and come back: each fault once, over two agents. Losses are those of an undisturbed run.

Machine `a` has ranks 0 and 1, `b` has 2 and 3. What waits, waits for events: no fault depends on when it comes.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.schedules.registry import ONE_F_ONE_B
from runtime.events import Event
from runtime.launch.agent import LOST, REFUSED
from runtime.launch.head import AfterFaults, training_events
from runtime.launch.meeting import MeetingClient, MeetingPlace, TrainingFailedError
from tests.conftest import STRESS
from tests.runtime.launch import test_faults
from tests.runtime.launch.test_faults import STEPS, a_run, narrow, problem, save_plan, undisturbed_losses, wide
from tests.runtime.ranks import free_port

__all__ = ["undisturbed_losses"]
_ENDS_S = 60.0
PATIENT = {"timeout_s": 300.0, "silence_s": 120.0}  # nothing but what a test does is a fault


@dataclass
class Machines:
    """Agents of a run, and what was heard of it."""

    folder: Path
    place: MeetingPlace
    agents: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    plans: list[tuple[str, ...]] = field(default_factory=list)

    def start(self, name: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "runtime.launch.agent", self.place.address, "--machine", name]
        self.agents[name] = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        return self.agents[name]

    def kill(self, name: str) -> None:
        self.agents[name].kill()
        self.agents[name].wait()

    def stop_rank(self, device: str) -> None:
        os.kill(self.pids[device], signal.SIGSTOP)

    def kill_rank(self, device: str) -> None:
        os.kill(self.pids[device], signal.SIGKILL)

    def replan(self, lost: list[str], before: Path, checkpoint: Path | None) -> Path:
        """Two stages on the two devices of whichever machine is left."""
        (gone,) = {name.partition(":")[0] for name in lost if name[0] in "ab"} or {"c"}
        self.plans.append(tuple(lost))
        stages = (Stage.of((0,), 0, 2), Stage.of((1,), 2, 4))
        left = narrow() if gone == "a" else Plan((Pipeline(stages, 4),), ONE_F_ONE_B, Sharding(1))
        return save_plan(self.folder, f"without-{gone}.json", left)

    def train(
        self, on_failure: str, faults: list[tuple[str, int, Callable[["Machines"], Any]]], **more: Any
    ) -> dict[int, float]:
        """Losses by step. `faults`: what happens at the first event of a kind with at least this step."""
        left = list(faults)
        run = a_run(self.folder, **(PATIENT | more))
        for event in training_events(run, self.folder, AfterFaults(on_failure, self.replan, 3), self.place, force=True):
            self.hear(event)
            if left and event["event"] == left[0][0] and event.get("step", 0) >= left[0][1]:
                left.pop(0)[2](self)
        assert not left
        return self.losses

    def hear(self, event: Event) -> None:
        match event["event"]:
            case "ready":
                self.pids[event["device"]] = event["pid"]
            case "step":
                self.losses[event["step"]] = event["loss"]
            case "restart" | "note":
                self.notes.append(event["reason"])


@contextmanager
def two_machines(folder: Path) -> Iterator[Machines]:
    machines = Machines(folder, MeetingPlace(f"127.0.0.1:{free_port()}"))
    try:
        machines.start("a")
        machines.start("b")
        yield machines
    finally:
        for agent in machines.agents.values():
            try:
                agent.wait(0.0 if sys.exc_info()[0] else _ENDS_S)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


@pytest.mark.slow
def test_a_machine_that_is_killed_is_waited_for(undisturbed_losses: dict[int, float], tmp_path: Path) -> None:
    """Its ranks end with its agent, whatever they do; when it comes again, all go on, and no retry is spent."""
    ranks: list[int] = []

    def kill(machines: Machines) -> None:
        ranks.extend(machines.pids[device] for device in ("b:0", "b:1"))
        machines.kill("b")
        machines.start("b")

    with two_machines(tmp_path) as machines:
        losses = machines.train("restart", [("step", 3, kill)])
        assert losses == pytest.approx(undisturbed_losses, rel=1e-9)
        assert [agent.wait(_ENDS_S) for agent in machines.agents.values()] == [0, 0]
    for pid in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
def test_a_killed_rank(undisturbed_losses: dict[int, float], tmp_path: Path) -> None:
    with two_machines(tmp_path) as machines:
        losses = machines.train("restart", [("step", 3, lambda m: m.kill_rank("b:0"))])
        assert losses == pytest.approx(undisturbed_losses, rel=1e-9)
        assert "rank 2 (b:0) ended with exit code -9" in machines.notes


@pytest.mark.slow
def test_a_rank_that_hangs(undisturbed_losses: dict[int, float], tmp_path: Path) -> None:
    """Its own agent notices and ends it, although others may only wait for it."""
    with two_machines(tmp_path) as machines:
        losses = machines.train("restart", [("step", 3, lambda m: m.stop_rank("b:1"))], silence_s=4.0)
        assert losses == pytest.approx(undisturbed_losses, rel=1e-9)
        assert any(note.startswith("rank 3 (b:1) has given no sign of life for ") for note in machines.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "left"), [("b", "a"), ("a", "b")] if STRESS else [("b", "a")])
def test_others_go_on_until_a_lost_machine_comes_back(
    undisturbed_losses: dict[int, float], tmp_path: Path, lost: str, left: str
) -> None:
    """`replan`: on a plan for whoever is left, also where rank 0 was lost, then on the first plan again."""
    restarted: list[str] = []

    def come_back(machines: Machines) -> None:
        machines.stop_rank(f"{left}:1")  # training stands still until the machine is back
        restarted.extend(machines.notes)
        machines.start(lost)

    with two_machines(tmp_path) as machines:
        machines.start("c")  # whose devices the plan leaves out
        faults = [("step", 3, lambda m: m.kill(lost)), ("restart", 0, lambda m: None), ("step", 4, come_back)]
        losses = machines.train("replan", faults)
        assert losses == pytest.approx(undisturbed_losses, rel=1e-9)
        assert len(machines.plans) == 1
        assert all(device.startswith(f"{lost}:") for device in machines.plans[0])
        assert restarted[-1] == f"{lost} gone"
        assert machines.notes[-1] == f"{lost} joined"
        assert sorted(losses) == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("machine", "host", "message"),
    [
        ("b", "node1", None),
        ("b", "node1.lab", None),
        ("a", "anything", None),
        (
            "b",
            "node2",
            "train.machine: b is on host node1.lab, says the cluster file, and this is node2; start it there",
        ),
        ("c", "node1", "train.machine: 'c' has no device of the plan; name one of a, b"),
    ],
)
def test_who_may_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, host: str, message: str | None
) -> None:
    """The head answers before anything is started on the machine."""
    run, task = a_run(tmp_path), problem()
    machines = tuple(node.replace(host="node1.lab") if node.name == "b" else node for node in task.cluster.machines)
    monkeypatch.setattr(test_faults, "problem", lambda: replace(task, cluster=replace(task.cluster, machines=machines)))
    save_plan(tmp_path, "plan.json", wide())
    place = MeetingPlace()
    place.is_local = False
    MeetingClient(place.address).tell({"event": "hello", "machine": machine, "host": host, "token": "asked"})
    events = training_events(run, tmp_path, AfterFaults("restart", lambda *_: tmp_path, 3), place)
    meeting = MeetingClient(place.address)
    MeetingClient(place.address).tell({"event": "note", "reason": "heard"})
    assert next(events) == {"event": "note", "reason": "heard"}
    answer = json.loads(meeting.store.get("asked"))
    meeting.tell({"event": "left", "machine": machine})
    events.close()  # type: ignore[attr-defined]
    assert answer.get("refused") == message
    if message is None:
        assert answer["seats"] == [f"{machine}:0", f"{machine}:1"]
        assert answer["gpus"] == [0, 1]


@pytest.mark.slow
def test_stop_ends_the_run_when_a_machine_is_lost(tmp_path: Path) -> None:
    with two_machines(tmp_path) as machines:
        with pytest.raises(TrainingFailedError, match=r"^(rank \d \(a:\d\): |b: gone)"):
            machines.train("stop", [("step", 3, lambda m: m.kill("b"))])
        assert machines.agents["a"].wait(_ENDS_S) == 0


@pytest.mark.slow
def test_an_agent_without_a_head_tries_again(tmp_path: Path) -> None:
    """By its exit code: where nobody listens, and where the head has ended without a word."""
    words = [sys.executable, "-m", "runtime.launch.agent", f"127.0.0.1:{free_port()}", "--machine", "a"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == LOST
    assert done.stderr.startswith("hexiopt: no run answers at 127.0.0.1:")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_machine_of_another_name_is_refused_and_a_second_of_one_name_replaces_the_first(tmp_path: Path) -> None:
    with two_machines(tmp_path) as machines:
        stranger = machines.start("x")
        first: list[subprocess.Popen[str]] = []

        def double(m: Machines) -> None:
            m.stop_rank("a:0")  # training stands still until the second has come
            first.append(m.agents["b"])
            m.start("b")

        machines.train("restart", [("step", 3, double)])
        assert sorted(machines.losses) == list(range(1, STEPS + 1))
        assert stranger.wait(_ENDS_S) == REFUSED
        assert stranger.stderr is not None
        assert "train.machine: 'x' has no device of the plan; name one of a, b" in stranger.stderr.read()
        assert first[0].wait(_ENDS_S) == REFUSED
        assert first[0].stderr is not None
        assert "another agent has joined the run under this machine's name" in first[0].stderr.read()
