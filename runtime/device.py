"""A device: when its work began and ended, without the host waiting for it, and how many threads a process has."""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from hexiopt.cores import usable_cores


class Clock(Protocol):
    """Marks moments between the operations of one device, and later says when they were."""

    def mark(self) -> Any:
        """The moment at which all that has been enqueued so far is done. Does not wait for it."""
        ...

    def read(self, marks: Sequence[Any]) -> list[float]:
        """Seconds since 1970 of each mark. May wait for the device, so that no message may be awaited meanwhile."""
        ...


class HostClock:
    """The clock of a CPU, where an operation is done when its call returns."""

    def mark(self) -> float:
        """Now."""
        return time.time()

    def read(self, marks: Sequence[float]) -> list[float]:
        """The marks themselves."""
        return list(marks)


class StreamClock:
    """The clock of a GPU: an event in the current stream for each mark.

    A synchronisation instead would also wait for every receive that is posted (NCCL's are kernels), and with it for a
    peer that may be waiting for this rank.
    """

    def mark(self) -> torch.cuda.Event:
        """An event, enqueued now."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def read(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Counted back from an event of now. Waits for the current stream."""
        last = self.mark()
        last.synchronize()
        now_s = time.time()
        return [now_s - 1e-3 * mark.elapsed_time(last) for mark in marks]


def clock_of(device: torch.device) -> Clock:
    """The clock of a device."""
    return StreamClock() if device.type == "cuda" else HostClock()


def threads_of_each(num_processes: int) -> int:
    """How many threads each of some processes of a CPU has, of the cores that this one may run on."""
    return max(1, usable_cores() // num_processes)
