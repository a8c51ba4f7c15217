"""What this process computes on: a GPU, or its share of a CPU."""

import platform
import socket
from pathlib import Path

import torch

from experiments.lab.devices import free_gpu_bytes, gpu_knows_bf16
from experiments.lab.profile.points import PRECISIONS, Device
from hexiopt.errors import InputError
from hexiopt.problem.machine import NAME, NAME_RULE
from runtime.device import (
    gpu_memory_bytes,
    gpu_product,
    host_memory_bytes,
    num_gpus,
    taken_device,
    threads_of_each,
)


def own_device(machine: str | None, local: int, num_local: int, precision: str | None) -> tuple[Device, torch.device]:
    """The device of the process `local` of `num_local` on this machine, by default called after the host.

    `precision` None is bf16 on a GPU that has it, else fp16, and fp32 on a CPU. Raises InputError.
    """
    host = socket.gethostname()
    name = machine or host
    if not NAME.fullmatch(name):
        raise InputError(f"profile.machine: {name!r} {NAME_RULE}; state profile.machine=NAME")
    if not num_gpus():
        device = taken_device("cpu", local, num_local)
        total, free = host_memory_bytes()
        own, spare, threads = total // num_local, free // num_local, threads_of_each(num_local)
        found = Device(name, local, host, _processor(), False, threads, own, spare, PRECISIONS, precision or "fp32")
        return found, device
    device, product = taken_device("cuda", local, num_local), gpu_product(local)
    total, free = gpu_memory_bytes(local), free_gpu_bytes(local)
    known = PRECISIONS if gpu_knows_bf16() else ("fp16", "fp32")
    if precision is not None and precision not in known:
        raise InputError(
            f"profile.precision: {precision} is no arithmetic of {product}; take one of {', '.join(known)}"
        )
    return Device(name, local, host, product, True, 1, total, free, known, precision or known[0]), device


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return " ".join(value.split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "processor"
