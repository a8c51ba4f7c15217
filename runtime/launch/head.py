"""The head of a run, in the process that its user started: says who trains what, hears of it, and goes on after faults.

Machines come to its meeting place, each with an agent. Whenever their processes have met, the head answers with a plan
for those that came and the checkpoint to go on from, or lets them wait for the others. If its own machine dies, the run
ends. Asked to stop, it has all ranks write a checkpoint first.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hexiopt.files.plan_file import read_plan
from hexiopt.problem.problem import Problem
from runtime.events import Event
from runtime.launch.meeting import MeetingPlace, TrainingFailedError
from runtime.mapping.layout import layout_of
from runtime.state.checkpoint import finished_checkpoints
from runtime.training.settings import TrainingRun

# What ended a round, the surest cause first: a number that is none comes before the errors that follow from it, and
# everything else may follow from the loss of a process.
_CAUSES = ("lost", "hung", "stopped", "error")
_SETTLE_S = 1.0  # in which the cause may still be told after its consequences
_GRACE_S = 10.0  # that `replan` waits for a machine which was there, and may only be slow to meet the others
_LEAVE_S = 5.0  # in which agents hear that the run has ended
_MOST_FAILURES = 100  # of processes that do not even meet
AGENT = ("-m", f"{__package__}.agent")
_AS_RESTART = "going on as train.on_failure=restart does"


class NoPlanLeftError(Exception):
    """There is no plan without the lost devices; the message says why, in one line."""


@dataclass(frozen=True)
class AfterFaults:
    """What follows the loss or hang of a process or machine: see `experiments.app.config.TrainConfig`.

    `replan(lost devices, plan so far, checkpoint)` writes a plan without them, to go on from the checkpoint if there is
    one, and returns its path. Where it raises NoPlanLeftError, the run goes on as after a `restart`.
    """

    on_failure: str
    replan: Callable[[list[str], Path, Path | None], Path]
    max_restarts: int


@dataclass(frozen=True)
class Stop:
    """When a run is to stop, as `must_stop` says, and seconds that it then has for a last checkpoint."""

    must_stop: Callable[[], bool] = lambda: False
    limit_s: float = 0.0


def training_events(
    run: TrainingRun,
    folder: Path,
    faults: AfterFaults,
    place: MeetingPlace | None = None,
    *,
    force: bool = False,
    stop: Stop | None = None,
    agent: Sequence[str] = AGENT,
) -> Iterator[Event]:
    """The events of a run, which is written into `folder`, to its last step or until it is to `stop`.

    The machines of the plan come to `place`, and refuse, unless by `force`, what they cannot carry. By default, or if
    it is local, all processes are on this machine, which the caller has checked, as if it were all of them; `agent` are
    Python's arguments that start them. More than `max_restarts` restarts in a row without a new checkpoint are a
    failure. Raises TrainingFailedError.
    """
    place = MeetingPlace() if place is None else place
    head, stop = _Head(place, run, folder, faults, force or place.is_local), stop or Stop()
    with tempfile.TemporaryFile("w+") as stderr:  # a pipe that nobody reads would fill up
        words = [sys.executable, *agent, place.address, "--with-parent"]
        # In a session of its own: Ctrl-C is for the head, which ends the others.
        process = subprocess.Popen(words, stderr=stderr, start_new_session=True) if place.is_local else None
        try:
            while not head.complete:
                if stop.must_stop():
                    yield from head.stop(stop.limit_s)
                event = place.hear()
                yield from head.wait() if event is None else head.hear(event)
                if event is None and process is not None and process.poll() is not None:
                    stderr.seek(0)
                    lines = stderr.read().strip().splitlines() or [
                        f"the agent ended with exit code {process.returncode}"
                    ]
                    raise TrainingFailedError(lines[-1])
        finally:
            place.end()
            head.part(process)


@dataclass
class _Round:
    """Processes that have met: the devices by whose names they came, and when. `ranks` once they train."""

    request: Event
    devices: frozenset[str]
    at: float = field(default_factory=time.monotonic)
    ranks: dict[str, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    @property
    def token(self) -> str:
        token: str = self.request["token"]
        return token


class _Head:
    """Decides. Each event may lead to events for whoever follows the run."""

    def __init__(self, place: MeetingPlace, run: TrainingRun, folder: Path, faults: AfterFaults, force: bool) -> None:
        self._place, self._run, self._folder, self._faults, self._force = place, run, folder, faults, force
        problem, used = _read(run.plan)
        # `replan` may use any device that its problem allows: those that the plan leaves out keep an idle process.
        usable = tuple(map(problem.cluster.device_name, problem.usable_devices))
        self._all = usable if faults.on_failure == "replan" else used
        self._plans = {frozenset[str](): (run.plan, used)}  # by the devices that they do without
        self._hosts: dict[str | None, str | None] = {machine.name: machine.host for machine in problem.cluster.machines}
        self._met: _Round | None = None  # who waits for an answer
        self._training: _Round | None = None
        self._joined: set[str] = set()  # machines that have come, or come back, since the last round began to train
        self._dead: set[str] = set()  # devices whose processes were lost, until their machine comes anew
        self._troubles: list[Event] = []
        self._troubled_at = 0.0
        self._restarts, self._best = 0, run.resume
        self._agents: set[str | None] = set()
        self._last_note = ""
        self._planless: list[frozenset[str]] = []  # devices without which there is no plan
        self._stops_by: float | None = None  # once it is to stop
        run.write(folder / "run.json")

    @property
    def complete(self) -> bool:
        """Whether all ranks have done their last step, or there is nothing more to wait for before a stop."""
        if self._stops_by is not None and (time.monotonic() > self._stops_by or self._troubles):
            return True
        return self._training is not None and len(self._training.done) == len(self._training.ranks)

    def stop(self, limit_s: float) -> Iterator[Event]:
        """Have the ranks write a checkpoint, within `limit_s`, and end; at once where none trains."""
        if self._stops_by is not None:
            return
        trains = self._training is not None and not self._troubles
        self._stops_by = time.monotonic() + (limit_s if trains else 0.0)
        if trains and limit_s:
            self._place.ask_to_stop()
            yield {"event": "note", "reason": f"stopping: a checkpoint is written first, within {limit_s:g} s"}

    def hear(self, event: Event) -> Iterator[Event]:
        """Take an event into account. Raises TrainingFailedError."""
        match event["event"]:
            case "hello":
                self._admit(event)
            case "left":
                self._agents.discard(event["machine"])
            case "refused":
                self._agents.discard(event["machine"])
                if event["machine"] is None:
                    raise TrainingFailedError(event["reason"])
                yield {"event": "note", "reason": f"{event['machine']}: {event['reason']}"}
            case "note":
                yield event
            case "came":
                names = event["names"]
                if len(set(names)) == len(names):  # else two agents have one name, and the older one leaves
                    met, last = _Round(event, frozenset(names)), self._met or self._training
                    self._joined |= set() if last is None else _machines(met) - _machines(last)
                    self._met = met
                    yield from self._decide()
            case "lost" | "hung":
                self._trouble(event)
            case _ if self._training is None or event["round"] == self._training.token:
                yield from self._of_rank(event)

    def wait(self) -> Iterator[Event]:
        """Do what is due although nothing was heard. Raises TrainingFailedError."""
        if self._troubles and time.monotonic() - self._troubled_at > _SETTLE_S:
            cause = self._cause()
            if self._faults.on_failure == "stop" or cause["event"] == "stopped":
                raise TrainingFailedError(_reason(cause))
            if len(self._troubles) > _MOST_FAILURES:
                raise TrainingFailedError(f"{_reason(cause)}; {len(self._troubles)} processes have failed to meet")
        yield from self._decide()

    def part(self, agent: subprocess.Popen[bytes] | None) -> None:
        """Wait until agents have heard that the run has ended, for a while; the own one, `agent`, is ended then."""
        until = time.monotonic() + _LEAVE_S
        while self._agents and time.monotonic() < until and (agent is None or agent.poll() is None):
            event = self._place.hear()
            if event is not None and event["event"] in ("left", "refused"):
                self._agents.discard(event["machine"])
        if agent is not None:
            agent.kill()
            agent.wait()

    def _admit(self, event: Event) -> None:
        machine = event["machine"]
        seats = [name for name in self._all if machine in (None, _machine(name))]
        wrong = self._wrong(machine, event["host"], seats)
        if wrong is not None:
            self._place.answer(event, {"refused": wrong})
            return
        self._dead.difference_update(seats)
        self._joined.update(map(_machine, seats))
        self._agents.add(machine)
        one_machine = len({_machine(name) for name in seats}) == 1
        # Devices that are left out do not shift the others' GPUs.
        gpus = [int(name.rpartition(":")[2]) if one_machine else k for k, name in enumerate(seats)]
        most = 1 if machine is None else len({_machine(name) for name in self._all})
        about = {"seats": seats, "gpus": gpus, "most": most, "force": self._force, "now_s": time.time()}
        self._place.answer(event, {**about, **self._assignment()})

    def _wrong(self, machine: str | None, host: str, seats: Sequence[str]) -> str | None:
        """Why an agent on `host` cannot be `machine`, in a line; None if it can."""
        if not seats:
            names = ", ".join(dict.fromkeys(map(_machine, self._all)))
            return f"train.machine: {machine!r} has no device of the plan; name one of {names}"
        planned = self._hosts.get(machine)
        if planned is None or host in (planned, planned.partition(".")[0]) or host.partition(".")[0] == planned:
            return None
        return (
            f"train.machine: {machine} is on host {planned}, says the cluster file, and this is {host}; start it there"
        )

    def _of_rank(self, event: Event) -> Iterator[Event]:
        match event["event"]:
            case "error" | "stopped":
                self._trouble(event)
            case "done" if self._training is not None:
                self._training.done.add(event["rank"])
            case "done":
                pass
            case _:
                yield {key: value for key, value in event.items() if key != "round"}

    def _trouble(self, event: Event) -> None:
        if self._training is not None:
            if event["device"] not in self._training.devices:
                return  # of a machine that the others have gone on without
            if event["device"] in self._training.ranks:
                event = {**event, "rank": self._training.ranks[event["device"]]}
        if not self._troubles:
            self._troubled_at = time.monotonic()
        self._troubles.append(event)

    def _cause(self) -> Event:
        return min(self._troubles, key=lambda event: _CAUSES.index(event["event"]))

    def _decide(self) -> Iterator[Event]:
        """Let those that have met train, if they suffice."""
        if self._met is None:
            return
        met, before = self._met, self._training
        cause = self._cause() if self._troubles else None
        if cause is not None and (cause["event"] == "stopped" or self._faults.on_failure == "stop"):
            return  # `wait` ends the run
        replans = self._faults.on_failure == "replan"
        if replans and cause is not None and cause["event"] in ("lost", "hung"):
            self._dead.add(cause["device"])
        missing = frozenset(self._all) - met.devices
        if missing:
            if before is not None and self._faults.on_failure == "stop":
                raise TrainingFailedError(f"{_away(missing)}: gone")
            if not replans or before is None:
                yield from self._say(f"waiting for {_away(missing)}")
                return
            if time.monotonic() - met.at < _GRACE_S:
                return
        yield from self._start(met, before, cause, missing)

    def _start(
        self, met: _Round, before: _Round | None, cause: Event | None, missing: frozenset[str]
    ) -> Iterator[Event]:
        """Let those that have met train, unless every plan takes devices that are missing."""
        joined = self._joined if before is not None else set()
        written = finished_checkpoints(self._run.checkpoints)
        last = written[-1] if written else self._run.resume
        interruption, restarts = self._why(met, before, cause, joined), self._restarts
        if interruption is not None and not joined:
            restarts = self._restarts + 1 if last == self._best else 1
            if restarts > self._faults.max_restarts:
                yield from self._give_up(
                    f"{interruption['reason']}; {self._faults.max_restarts} restarts brought no new checkpoint"
                )
                restarts = 1
        chosen = yield from self._plan_without(missing, last)
        if chosen is None:
            yield from self._say(f"waiting for {_away(missing)}")
            return
        path, used = chosen
        self._met, self._troubles, self._last_note, self._joined = None, [], "", set()
        if interruption is not None and not joined:
            self._restarts, self._best = restarts, last
        self._run = replace(self._run, plan=path, resume=self._run.resume if interruption is None else last)
        self._run.write(self._folder / "run.json")
        if interruption is not None:
            yield {**interruption, "event": "restart", "from": None if last is None else str(last), "plan": str(path)}
        met.ranks = {name: rank for rank, name in enumerate(used)}
        self._training = met
        self._place.answer(met.request, {"round": met.token, "ranks": met.ranks, **self._assignment()})

    def _assignment(self) -> Event:
        """The run and its plan, as `runtime.launch.worker.assignment` reads them."""
        return {"run": self._run.to_dict(), "plan": json.loads(self._run.plan.read_text(encoding="utf-8"))}

    def _why(self, met: _Round, before: _Round | None, cause: Event | None, joined: set[str]) -> Event | None:
        """What has ended the round before, with a `reason`; None for the first one."""
        lost_machines = _machines(before) - _machines(met) if before is not None else set()
        if cause is not None and (cause["event"] in ("lost", "hung") or not joined | lost_machines):
            return {**cause, "reason": _reason(cause)}
        if joined:
            return {"reason": f"{' and '.join(sorted(joined))} joined"}
        if lost_machines:
            return {"reason": f"{' and '.join(sorted(lost_machines))} gone"}
        return None if before is None else {"reason": "the machines have met again"}

    def _plan_without(
        self, missing: frozenset[str], checkpoint: Path | None
    ) -> Generator[Event, None, tuple[Path, Sequence[str]] | None]:
        """A plan without the devices that are missing or have failed, and its own: of the plans that there are, the one
        made for the most devices. Where there is none, as after a `restart`: failed devices, whose processes run again,
        are taken back, and missing ones are waited for (None)."""
        for lost in dict.fromkeys((frozenset(missing | self._dead), missing)):
            for known in sorted(self._plans, key=len):
                if known <= lost and lost.isdisjoint(self._plans[known][1]):
                    return self._plans[known]
            if any(less <= lost for less in self._planless):
                self._dead.clear()
                continue
            try:
                path = self._faults.replan(sorted(lost), self._run.plan, checkpoint)
            except NoPlanLeftError as error:
                self._planless.append(lost)
                self._dead.clear()
                yield {"event": "note", "reason": f"no plan without {', '.join(sorted(lost))}: {error}; {_AS_RESTART}"}
                continue
            self._plans[lost] = path, _read(path)[1]
            return self._plans[lost]
        return None

    def _give_up(self, reason: str) -> Iterator[Event]:
        """Do without the plan that keeps failing, if it was made after a fault. Raises TrainingFailedError."""
        lost = next((lost for lost, (path, _) in self._plans.items() if lost and path == self._run.plan), None)
        if lost is None:
            raise TrainingFailedError(reason)
        del self._plans[lost]
        self._planless.append(lost)
        self._dead.clear()
        yield {"event": "note", "reason": f"{reason} of {self._run.plan}; {_AS_RESTART}"}

    def _say(self, line: str) -> Iterator[Event]:
        if line != self._last_note:
            self._last_note = line
            yield {"event": "note", "reason": line}


def _read(path: Path) -> tuple[Problem, tuple[str, ...]]:
    """The problem of a plan file, and the names of the plan's devices in the order of ranks."""
    plan_file = read_plan(path)
    devices = layout_of(plan_file.plan, plan_file.problem.model).devices
    return plan_file.problem, tuple(map(plan_file.problem.cluster.device_name, devices))


def _machine(device: str) -> str:
    return device.rpartition(":")[0]


def _away(missing: frozenset[str]) -> str:
    return " and ".join(sorted({_machine(name) for name in missing}))


def _machines(training_round: _Round) -> set[str]:
    return set(map(_machine, training_round.devices))


def _reason(trouble: Event) -> str:
    """The reason in one line: of a traceback the last, with the rank that raised it."""
    line: str = trouble["reason"].strip().splitlines()[-1]
    if trouble.get("event") == "stopped" or "device" not in trouble:
        return line
    whose = f"rank {trouble['rank']} ({trouble['device']})" if trouble.get("rank") is not None else trouble["device"]
    return f"{whose}: {line}" if trouble["event"] == "error" else f"{whose} {line}"
