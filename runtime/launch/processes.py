"""Processes of this machine, each with a pipe through which it reports events."""

import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

# Optimisers import it at first use: here once, before processes fork.
import torch._dynamo  # noqa: F401


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
