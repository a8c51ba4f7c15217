"""Runs a training on this machine to its end: starts its processes, and starts again from the last checkpoint."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.checkpoint import finished
from runtime.settings import Run

Event = dict[str, Any]
_TROUBLE = ("lost", "hung", "error")


class TrainingFailedError(Exception):
    """Training has ended before its last step, for the reason said."""


def supervised(
    run: Run, folder: Path, on_failure: str, replan: Callable[[list[str]], Path], max_restarts: int
) -> Iterator[Event]:
    """The events of a run, which is written into `folder`, to its last step.

    After a lost or hung process, `restart` goes on with the same plan, `replan` with one that `replan(lost devices)`
    has written, `stop` not at all. More than `max_restarts` times in a row without a new checkpoint are a failure.
    Raises TrainingFailedError.
    """
    lost: list[str] = []
    restarts, best = 0, run.resume
    while True:
        run.write(folder / "run.json")
        trouble = yield from _attempt(folder / "run.json")
        if trouble is None:
            return
        if trouble["event"] not in _TROUBLE or on_failure == "stop":
            raise TrainingFailedError(trouble["reason"])
        written = finished(run.checkpoints)
        last = written[-1] if written else run.resume
        restarts = restarts + 1 if last == best else 1
        best = last
        if restarts > max_restarts:
            raise TrainingFailedError(f"{trouble['reason']}; {max_restarts} restarts brought no new checkpoint")
        plan = run.plan
        if on_failure == "replan" and trouble["event"] in ("lost", "hung") and "device" in trouble:
            lost.append(trouble["device"])
            plan = replan(lost)
        run = replace(run, plan=plan, resume=last)
        yield {**trouble, "event": "restart", "from": None if last is None else str(last)}


def _attempt(run_file: Path) -> Generator[Event, None, Event | None]:
    """The events of one attempt; returns what ended it too early."""
    command = [sys.executable, "-m", "runtime.node", str(run_file), "--master", f"127.0.0.1:{free_port()}"]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    trouble: Event | None = None
    assert node.stdout is not None
    assert node.stderr is not None
    try:
        for line in node.stdout:
            event: Event = json.loads(line)
            if event["event"] in (*_TROUBLE, "not_finite"):
                trouble = event
            else:
                yield event
        said = node.stderr.read()
        if node.wait() != 0 and trouble is None:
            trouble = {"event": "error", "reason": said.strip() or f"exit code {node.returncode}"}
    finally:
        if node.poll() is None:
            node.send_signal(signal.SIGINT)
            try:
                node.wait(5.0)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()
    return trouble


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
