"""What devices run and hold, for those who measure it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch.profiler import profile

from runtime.device import activities, wait_for


@dataclass(frozen=True)
class KernelUse:
    """What a device ran under one name: how often, and for how long in all."""

    name: str
    calls: int
    seconds: float


def kernels_of(device: torch.device, work: Callable[[], object], trace: Path) -> list[KernelUse]:
    """The kernels that `work` runs, those that take longest first; of a CPU, torch's operators. Their spans go to
    `trace`, in Chrome's format, compressed (.json.gz)."""
    is_gpu = device.type == "cuda"
    with profile(activities=activities(device)) as profiler:
        work()
        wait_for(device)
    profiler.export_chrome_trace(str(trace))
    used = []
    for event in profiler.key_averages():
        is_on_device = event.device_type == (DeviceType.CUDA if is_gpu else DeviceType.CPU)
        seconds = 1e-6 * (event.self_device_time_total if is_gpu else event.self_cpu_time_total)
        if is_on_device and seconds > 0:
            used.append(KernelUse(event.key, event.count, seconds))
    return sorted(used, key=lambda kernel: -kernel.seconds)


def forget_peak(device: torch.device) -> None:
    """Let `gpu_peak_bytes` begin anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free_gpu_bytes(index: int) -> int:
    """What this process can still allocate of a GPU, once its context, which no tensor gets, is there."""
    torch.zeros(1, device=torch.device("cuda", index))
    return torch.cuda.mem_get_info(index)[0]


def free_device_bytes(device: torch.device) -> int | None:
    """What is free of a GPU, with what torch keeps of it for tensors of this process; None of a CPU."""
    if device.type != "cuda":
        return None
    wait_for(device)
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def gpu_knows_bf16() -> bool:
    """Whether the arithmetic of this process's GPU has bf16."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def free_unused(device: torch.device) -> None:
    """Give back the memory that torch keeps for tensors to come."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
