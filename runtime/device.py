"""The devices of this machine: how many, with how much memory, and when their work began and ended."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from hexiopt.cores import usable_cores

_CGROUP = Path("/sys/fs/cgroup")


class DeviceClock(Protocol):
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


def clock_of(device: torch.device) -> DeviceClock:
    """The clock of a device."""
    return StreamClock() if device.type == "cuda" else HostClock()


def threads_of_each(num_processes: int) -> int:
    """How many threads each of some processes of a CPU has, of the cores that this one may run on."""
    return max(1, usable_cores() // num_processes)


def num_gpus() -> int:
    """The GPUs of this machine that a process may use."""
    return torch.cuda.device_count()


def gpu_memory_bytes(index: int) -> int:
    """All memory of one of this machine's GPUs."""
    return torch.cuda.get_device_properties(index).total_memory


def gpu_product(index: int) -> str:
    """The name that the driver gives one of this machine's GPUs."""
    return str(torch.cuda.get_device_properties(index).name)


def usable_gpu(index: int) -> bool:
    """Whether this process can compute on a GPU: it is there, and takes a tensor."""
    try:
        torch.zeros(1, device=torch.device("cuda", index))
    except (RuntimeError, AssertionError):  # torch without CUDA asserts
        return False
    return True


def host_memory_bytes() -> tuple[int, int]:
    """All memory of the machine, or of the container, and what of it is available now."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = total
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        if limit.isdecimal():
            total = min(total, int(limit))
            available = min(available, int(limit) - used)
    except (OSError, ValueError, IndexError):
        pass
    return total, max(available, 1)
