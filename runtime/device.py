"""The devices of this machine: how many, with how much memory, when their work began and ended, and how numbers get to
them and back. Nothing else in `runtime/` names `torch.cuda`.
"""

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    sdpa_kernel,
)
from torch.profiler import ProfilerActivity, profile

from hexiopt.cores import usable_cores
from hexiopt.errors import InputError

_CGROUP = Path("/sys/fs/cgroup")


class DeviceClock:
    """Marks moments between the operations of a device, and later says when they were. Of a CPU, where an operation is
    done when its call returns."""

    def mark(self) -> Any:
        """The moment at which all that has been enqueued so far is done. Does not wait for it."""
        return time.time()

    def between_s(self, began: Any, ended: Any) -> float:
        """Seconds between two marks. Waits until the device has come to the later one."""
        return float(ended - began)

    def read(self, marks: Sequence[Any]) -> list[float]:
        """Seconds since 1970 of each mark. May wait for the device, so that no message may be awaited meanwhile."""
        return list(marks)


class StreamClock(DeviceClock):
    """The clock of a GPU: an event in the current stream for each mark.

    A synchronisation instead would also wait for every receive that is posted (NCCL's are kernels), and with it for a
    peer that may be waiting for this rank.
    """

    def mark(self) -> torch.cuda.Event:
        """An event, enqueued now."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between_s(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        """As the device has counted. What was enqueued after the later mark is not waited for."""
        ended.synchronize()
        milliseconds: float = began.elapsed_time(ended)
        return 1e-3 * milliseconds

    def read(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Counted back from an event of now. Waits for the current stream."""
        last = self.mark()
        last.synchronize()
        now_s = time.time()
        return [now_s - 1e-3 * mark.elapsed_time(last) for mark in marks]


def clock_of(device: torch.device) -> DeviceClock:
    """The clock of a device."""
    return StreamClock() if device.type == "cuda" else DeviceClock()


class Reading:
    """Numbers of a device on their way to the host, which goes on meanwhile."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._came = numbers, None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._came = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._came.record()

    def read(self) -> list[float]:
        """The numbers. Waits for them, so that no message may be awaited meanwhile."""
        if self._came is not None:
            self._came.synchronize()
        return [float(number) for number in self._host.tolist()]


def counts_now(counts: Tensor) -> list[int]:
    """Whole numbers of a device. The host waits for what the current stream has yet to do, and for no message beside
    it: within an operation, every rank that takes part in it has come as far."""
    numbers: list[int] = counts.tolist()
    return numbers


def steps_ahead(device: torch.device) -> int:
    """How many steps its host enqueues before it reads what an earlier one found: that a GPU always has work. A CPU has
    done a step when its call returns."""
    return 1 if device.type == "cuda" else 0


def pin(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host where a device can copy them from while the host goes on."""
    return numbers.pin_memory() if device.type == "cuda" else numbers


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all that was enqueued, messages included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def has_flash_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a device has the kernels of flash attention, forward and backward, that torch brings: for 16 bits, of
    NVIDIA's GPUs since Ampere, up to 256 numbers a head."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or torch.version.hip is not None:
        return False
    in_build = torch.backends.cuda.is_flash_attention_available()
    return in_build and head_dim <= 256 and head_dim % 8 == 0 and torch.cuda.get_device_capability(device) >= (8, 0)


def fused_attention(device: torch.device, dtype: torch.dtype, head_dim: int) -> AbstractContextManager[None]:
    """In here attention that a device can fuse takes cuDNN's kernel where it has one for the shapes, else that of flash
    attention, so that nothing slower runs unseen; where there is neither, torch chooses.

    Where `take_attention` has chosen another flash attention, it is that.
    """
    if not has_flash_attention(device, dtype, head_dim):
        return nullcontext()
    if current_flash_attention_impl() is not None:
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True)


def take_attention(name: str, device: torch.device) -> None:
    """From now on attention of this process takes the kernels of that name: `auto` as `fused_attention` says, `fa3` or
    `fa4` FlashAttention-3 or -4 (Shah et al., arXiv 2407.08608) wherever flash attention runs.

    Raises InputError where the device or the package with the kernels is not there.
    """
    if name == "auto":
        return
    if device.type != "cuda":
        raise InputError(f"train.attention: {name} needs a GPU, and this process computes on a CPU; take auto")
    try:
        activate_flash_attention_impl(name.upper())
    except (ImportError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"train.attention: {name} cannot be loaded ({reason}); install it, or take auto") from None


def check_async_tp(device: torch.device) -> None:
    """Raises InputError where a device is no GPU, or cannot read the memory of another one of this machine."""
    if device.type != "cuda":
        raise InputError("train.async_tp: true needs GPUs, and this process computes on a CPU; take false")
    for other in range(num_gpus()):
        if other != device.index and not torch.cuda.can_device_access_peer(device.index, other):
            raise InputError(f"train.async_tp: GPU {device.index} cannot read the memory of GPU {other}; take false")


def usable_gpu(index: int) -> bool:
    """Whether this process can compute on a GPU: it is there, and takes a tensor."""
    try:
        torch.zeros(1, device=torch.device("cuda", index))
    except (RuntimeError, AssertionError):  # torch without CUDA asserts
        return False
    return True


def take_device(kind: str, gpu: int, num_processes: int) -> torch.device:
    """The device of this process from now on: GPU number `gpu`, or its share of the cores where `kind` is `cpu`."""
    if kind == "cuda":
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
        return device
    torch.set_num_threads(threads_of_each(num_processes))
    return torch.device("cpu")


def activities(device: torch.device) -> list[ProfilerActivity]:
    """What a profile of a device has in it."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


class Tracer:
    """Traces what this process and its device do, from when it is made until it is written."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile = profile(activities=activities(device))
        self._profile.start()

    def write(self, path: Path) -> None:
        """End, and write a trace of Chrome's format, compressed (.json.gz)."""
        wait_for(self._device)
        self._profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(path))


def gpu_peak_bytes(device: torch.device) -> int | None:
    """The most bytes of tensors that this process has had on a GPU at once; None where the device is none."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


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
