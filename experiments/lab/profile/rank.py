"""What one process of a measurement does, and what rank 0 has of all of them in the end."""

import platform
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from experiments.lab.devices import free_gpu_bytes, gpu_knows_bf16
from experiments.lab.profile.links import Links
from experiments.lab.profile.operators import OperatorBench
from experiments.lab.profile.points import PRECISIONS, Device, MeasuredPoint, Measurement
from hexiopt.errors import InputError
from hexiopt.problem.machine import NAME, NAME_RULE
from runtime.device import gpu_memory_bytes, gpu_product, host_memory_bytes, num_gpus, take_device, threads_of_each
from runtime.launch.torchrun import ProcessPlace
from runtime.network import join_world


def own_device(machine: str | None, local: int, num_local: int, precision: str | None) -> tuple[Device, torch.device]:
    """The device of the process `local` of `num_local` on this machine, by default called after the host.

    `precision` None is bf16 on a GPU that has it, else fp16, and fp32 on a CPU. Raises InputError.
    """
    host = socket.gethostname()
    name = machine or host
    if not NAME.fullmatch(name):
        raise InputError(f"profile.machine: {name!r} {NAME_RULE}; state profile.machine=NAME")
    if not num_gpus():
        device = take_device("cpu", local, num_local)
        total, free = host_memory_bytes()
        share, spare, threads = total // num_local, free // num_local, threads_of_each(num_local)
        cpu = Device(name, local, host, _processor(), False, threads, share, spare, PRECISIONS, precision or "fp32")
        return cpu, device
    device, product = take_device("cuda", local, num_local), gpu_product(local)
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


_TIMEOUT = timedelta(minutes=10)
_SHARE_OF_MEMORY = 0.25  # of what is free, that measuring holds at once


@dataclass(frozen=True)
class Request:
    """What to measure: see `experiments.app.verb_config.ProfileConfig`."""

    seconds: float
    precision: str | None = None
    processes: int | None = None
    machine: str | None = None


def measure(
    request: Request,
    place: ProcessPlace,
    tell: Callable[[str], None],
    conclude: Callable[[Measurement], None],
    check: Callable[[Sequence[Device]], None] = lambda devices: None,
) -> None:
    """Measure with all processes. Rank 0 tells what is being measured, and has `conclude` done before others end.

    `check` may refuse the devices before anything is measured. Raises InputError on every rank.
    """
    if place.size > 1:
        device = take_device("cuda" if num_gpus() else "cpu", place.local, place.num_local)
        join_world(device, place.rank, place.size, _TIMEOUT.total_seconds(), address=place.master)
    try:
        _measure(request, place, tell if place.rank == 0 else lambda line: None, conclude, check)
    finally:
        if dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()


def _measure(
    request: Request,
    place: ProcessPlace,
    tell: Callable[[str], None],
    conclude: Callable[[Measurement], None],
    check: Callable[[Sequence[Device]], None],
) -> None:
    refused, rank_device, device = None, None, torch.device("cpu")
    try:
        rank_device, device = own_device(request.machine, place.local, place.num_local, request.precision)
    except InputError as error:
        refused = str(error)
    _raise_first(_gather(refused, place))
    devices: list[Device] = _gather(rank_device, place)
    try:
        check(devices)
    except InputError as error:
        refused = str(error)
    _raise_first(_gather(refused, place))
    assert rank_device is not None
    most_bytes = _SHARE_OF_MEMORY * rank_device.free_bytes
    bench = OperatorBench(device, rank_device.precision, request.seconds, most_bytes)
    points = [MeasuredPoint(p.what, p.size, p.seconds, (rank_device.name, *p.of)) for p in bench.points(tell)]
    for precision in rank_device.precisions:
        tell(f"peak in {precision}")
        peak = bench.peak(precision)
        points += [] if peak is None else [MeasuredPoint(peak.what, peak.size, peak.seconds, (rank_device.name,))]
    if place.size > 1:
        points += _measure_links(devices, Links(device, [d.name for d in devices], request.seconds, most_bytes), tell)
    every = tuple(chain.from_iterable(_gather(points, place)))
    if place.rank == 0:
        conclude(Measurement(tuple(devices), every, torch.__version__))
    _gather(None, place)  # until rank 0 has written what came of it


def _measure_links(devices: Sequence[Device], links: Links, tell: Callable[[str], None]) -> list[MeasuredPoint]:
    """Pairs and TP groups inside every machine, and a pair of devices, both ways, for every two machines."""
    machines: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        machines.setdefault(device.machine, []).append(rank)
    points: list[MeasuredPoint] = []
    # In turns, so that no link is shared, but for machines, whose insides do not meet.
    turns = max(len(ranks) * (len(ranks) - 1) // 2 for ranks in machines.values())
    for turn in range(turns):
        tell(f"message {turn + 1} of {turns} inside machines")
        for ranks in machines.values():
            pairs = list(combinations(ranks, 2))
            if turn < len(pairs):
                points += links.exchange(*pairs[turn])
        dist.barrier()
    degree = 2
    while degree <= max(map(len, machines.values())):
        tell(f"collectives of {degree} devices")
        groups = [tuple(ranks[:degree]) for ranks in machines.values() if len(ranks) >= degree]
        process_groups = [dist.new_group(list(members), timeout=_TIMEOUT) for members in groups]
        for members, group in zip(groups, process_groups, strict=True):
            points += links.collectives(members, group)
        dist.barrier()
        degree *= 2
    for a, b in combinations(machines, 2):
        for sender, receiver in ((a, b), (b, a)):
            tell(f"message from {sender} to {receiver}")
            points += links.exchange(machines[sender][0], machines[receiver][0])
            dist.barrier()
    return points


def _raise_first(refusals: Sequence[str | None]) -> None:
    if refused := next(filter(None, refusals), None):
        raise InputError(refused)


def _gather(value: Any, place: ProcessPlace) -> list[Any]:
    """What every rank says, on every rank."""
    if place.size == 1:
        return [value]
    values: list[Any] = [None] * place.size
    dist.all_gather_object(values, value)
    return values
