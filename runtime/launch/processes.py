"""Processes of this machine, each with a pipe through which it reports events: those that measure."""

import json
import multiprocessing
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Generator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from runtime.events import Event

_TROUBLE = ("lost", "error", "stopped")


@dataclass(frozen=True)
class Child:
    """A process and the reading end of its pipe."""

    process: BaseProcess
    end: Connection

    @classmethod
    def start(cls, device: str, work: Callable[..., None], *arguments: Any) -> "Child":
        """Start a process that calls `work(*arguments, end)` with the other end of its pipe.

        A process forked after its parent has touched CUDA cannot use it, and whether something has is hard to know: one
        for a GPU is spawned, so `work` and its arguments are pickled. One for a CPU is forked, which takes 0.1 s, not
        seconds.
        """
        context = multiprocessing.get_context("spawn") if device == "cuda" else multiprocessing.get_context("fork")
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(work, arguments, there), daemon=True)
        process.start()
        there.close()
        return cls(process, here)

    def stop(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.join()


def _run(work: Callable[..., None], arguments: tuple[Any, ...], end: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    work(*arguments, end)


def events_of(command: list[str]) -> Generator[Event, None, Event | None]:
    """Yield the events that a command prints, one JSON object a line; return the event that ended it early, if any."""
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115  # a pipe that nobody reads would fill up
    node = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True)
    trouble: Event | None = None
    assert node.stdout is not None
    try:
        for line in node.stdout:
            event: Event = json.loads(line)
            if event["event"] in _TROUBLE:
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
