"""What the head of a run decides after losses, without processes: they are told, and it answers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from runtime.events import Event
from runtime.launch import head as head_module
from runtime.launch.head import AfterFaults, NoPlanLeftError, Stop, _Head, training_events
from runtime.launch.meeting import MeetingPlace, TrainingFailedError
from tests.runtime.launch.test_faults import a_run, narrow, problem, save_plan


class Place:
    """A meeting place where nothing is heard but what a test tells the head."""

    def __init__(self) -> None:
        self.answers: list[Event] = []
        self.stops = 0

    def answer(self, event: Event, what: Event) -> None:
        self.answers.append(what)

    def ask_to_stop(self) -> None:
        self.stops += 1


class Run:
    """A run under `on_failure=replan`; `plans` are what `replan` has: a plan, or why there is none."""

    def __init__(self, folder: Path, *plans: str | None, max_restarts: int = 3) -> None:
        self.folder, self.place, self.rounds = folder, Place(), 0
        self.plans, self.asked = list(plans), list[tuple[str, ...]]()
        self.run = a_run(folder)
        faults = AfterFaults("replan", self.replan, max_restarts)
        self.head = _Head(cast("MeetingPlace", self.place), self.run, folder, faults, True)
        task = problem()
        self.names = [task.cluster.device_name(device) for device in task.usable_devices]

    def replan(self, lost: Sequence[str], before: Path, checkpoint: Path | None) -> Path:
        self.asked.append(tuple(lost))
        why = self.plans.pop(0)
        if why is not None:
            raise NoPlanLeftError(why)
        return save_plan(self.folder, f"replanned-{len(self.asked)}.json", narrow())

    def come(self, *away: str) -> list[Event]:
        self.rounds += 1
        names = [name for name in self.names if name not in away]
        return list(self.head.hear({"event": "came", "names": names, "token": str(self.rounds)}))

    def lose(self, device: str) -> None:
        assert not list(self.head.hear({"event": "lost", "device": device, "reason": "ended with exit code -9"}))

    @property
    def trains(self) -> list[str]:
        """The devices of the last round that was started."""
        return list(self.place.answers[-1]["ranks"])


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "_GRACE_S", 0.0)


def reasons(events: Sequence[Event]) -> list[str]:
    return [event["reason"] for event in events]


def test_where_there_is_no_plan_all_devices_go_on(tmp_path: Path) -> None:
    run = Run(tmp_path, "two stages need two devices", None)
    assert not run.come()
    first = run.trains
    run.lose(first[1])
    note, restart = run.come()
    assert note["reason"] == (
        f"no plan without {first[1]}: two stages need two devices; going on as train.on_failure=restart does"
    )
    assert (restart["event"], restart["reason"]) == ("restart", f"rank 1 ({first[1]}) ended with exit code -9")
    assert run.trains == first
    run.lose(first[1])
    assert [event["event"] for event in run.come()] == ["restart"], "it is not searched for again"
    assert run.trains == first
    run.lose(first[0])
    assert [event["event"] for event in run.come()] == ["restart"]
    assert run.asked == [(first[1],), (first[0],)], "another loss is another question"
    assert first[0] not in run.trains


def test_a_missing_machine_without_which_there_is_no_plan_is_waited_for(tmp_path: Path) -> None:
    run = Run(tmp_path, "not enough memory")
    run.come()
    first = run.trains
    machine = first[0].rpartition(":")[0]
    names = [name for name in run.names if name.startswith(f"{machine}:")]
    assert reasons(run.come(*names)) == [
        f"no plan without {', '.join(sorted(names))}: not enough memory; going on as train.on_failure=restart does",
        f"waiting for {machine}",
    ]
    assert not list(run.head.wait()), "it has said so, and does not search again"
    assert len(run.place.answers) == 1
    assert reasons(run.come()) == [f"{machine} joined"]
    assert run.trains == first


def test_a_plan_made_after_a_fault_that_keeps_failing_is_given_up(tmp_path: Path) -> None:
    run = Run(tmp_path, None, max_restarts=1)
    run.come()
    first = run.trains
    run.lose(first[0])
    run.come()
    replanned = run.trains
    assert first[0] not in replanned
    run.lose(replanned[0])
    notes = reasons(run.come())
    assert "1 restarts brought no new checkpoint of" in notes[0]
    assert "replanned-1.json; going on as train.on_failure=restart does" in notes[0]
    assert run.trains == first
    run.lose(first[0])
    with pytest.raises(TrainingFailedError, match=r"1 restarts brought no new checkpoint$"):
        run.come()


def test_a_stop_is_asked_for_once_and_not_waited_for_where_nothing_trains(tmp_path: Path) -> None:
    run = Run(tmp_path)
    assert not list(run.head.stop(60.0))
    assert run.head.complete
    assert run.place.stops == 0
    run = Run(tmp_path)
    run.come()
    assert reasons([event for _ in range(3) for event in run.head.stop(60.0)]) == [
        "stopping: a checkpoint is written first, within 60 s"
    ]
    assert (run.place.stops, run.head.complete) == (1, False)
    run.lose(run.trains[0])
    assert run.head.complete, "nobody is left to write it"


def test_a_stop_has_a_limit(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.come()
    list(run.head.stop(0.0))
    assert (run.place.stops, run.head.complete) == (0, True)


@pytest.mark.slow
def test_a_stopped_run_has_a_checkpoint_of_its_last_step(tmp_path: Path) -> None:
    from runtime.state.checkpoint import Checkpoint, finished_checkpoints

    run, seen = a_run(tmp_path, checkpoint_every=1000, steps=1000), list[int]()
    events: list[Any] = []
    stop = Stop(lambda: len(seen) >= 3, 60.0)
    for event in training_events(run, tmp_path, AfterFaults("restart", lambda *_: tmp_path, 3), stop=stop):
        events.append(event)
        if event["event"] == "step":
            seen.append(event["step"])
    (last,) = finished_checkpoints(tmp_path / "checkpoints")
    assert Checkpoint(last).progress.step == seen[-1] < 20
    Checkpoint(last).check()
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [seen[-1]]
