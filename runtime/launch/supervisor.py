"""Runs a training on this machine to its end, restarting its processes from the last checkpoint when one fails."""

import json
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.launch.rank import Event
from runtime.launch.settings import TrainingRun
from runtime.state.checkpoint import finished

_TROUBLE = ("lost", "hung", "error")


class TrainingFailedError(Exception):
    """Training ended before its last step; the message says why."""


@dataclass(frozen=True)
class MachinePlace:
    """Which ranks run here (those of `machine`, or all if None), and the `host:port` where rank 0 listens."""

    machine: str | None = None
    master: str | None = None

    def command(self, run_file: Path) -> list[str]:
        """What starts the ranks. A run on one machine takes a free port each time."""
        master = self.master or f"127.0.0.1:{free_port()}"
        words = [sys.executable, "-m", "runtime.launch.node", str(run_file), "--master", master]
        return words if self.machine is None else [*words, "--machine", self.machine]


HERE = MachinePlace()


def supervised(
    run: TrainingRun,
    folder: Path,
    on_failure: str,
    replan: Callable[[list[str]], Path],
    max_restarts: int,
    place: MachinePlace = HERE,
) -> Iterator[Event]:
    """The events of a run, which is written into `folder`, to its last step.

    On several machines each one starts its own ranks again, and they find each other as at first.

    After a lost or hung process, `restart` goes on with the same plan, `replan` with one that `replan(lost devices)`
    has written, `stop` not at all. More than `max_restarts` times in a row without a new checkpoint are a failure.
    Raises TrainingFailedError.
    """
    lost: list[str] = []
    restarts, best = 0, run.resume
    while True:
        name = "run.json" if place.machine is None else f"run-{place.machine}.json"
        run.write(folder / name)
        trouble = yield from events_of(place.command(folder / name))
        if trouble is None:
            return
        if trouble["event"] not in _TROUBLE or on_failure == "stop":
            raise TrainingFailedError(_last_line(trouble))
        written = finished(run.checkpoints)
        last = written[-1] if written else run.resume
        restarts = restarts + 1 if last == best else 1
        best = last
        if restarts > max_restarts:
            raise TrainingFailedError(f"{_last_line(trouble)}; {max_restarts} restarts brought no new checkpoint")
        plan = run.plan
        if on_failure == "replan" and trouble["event"] in ("lost", "hung") and "device" in trouble:
            lost.append(trouble["device"])
            plan = replan(lost)
        run = replace(run, plan=plan, resume=last)
        yield {**trouble, "event": "restart", "from": None if last is None else str(last)}


def _last_line(trouble: Event) -> str:
    """The reason in one line: the last line of a traceback, with the rank that raised it."""
    line: str = trouble["reason"].strip().splitlines()[-1]
    whose = f"rank {trouble['rank']} ({trouble['device']}): " if "rank" in trouble else ""
    return whose + line if trouble["event"] == "error" else line


def events_of(command: list[str]) -> Generator[Event, None, Event | None]:
    """Yield the events that a command prints, one JSON object a line; return the event that ended it early, if any."""
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # a pipe that nobody reads would fill up
    node = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
    trouble: Event | None = None
    assert node.stdout is not None
    try:
        for line in node.stdout:
            event: Event = json.loads(line)
            if event["event"] in (*_TROUBLE, "stopped"):
                trouble = event
            else:
                yield event
        if node.wait() != 0 and trouble is None:
            said.seek(0)
            trouble = {"event": "error", "reason": said.read().strip() or f"exit code {node.returncode}"}
    finally:
        if node.poll() is None:
            node.send_signal(signal.SIGINT)
            try:
                node.wait(5.0)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()
        said.close()
    return trouble


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
