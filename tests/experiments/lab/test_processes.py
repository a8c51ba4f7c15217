"""Processes that work together for a while: their places, their lines, their ends; they inherit nothing."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from experiments.lab.processes import ProcessFailedError, run_processes
from experiments.lab.profile import local
from experiments.lab.profile.points import Device
from experiments.lab.profile.rank import Request
from hexiopt.errors import InputError
from runtime.device import take_device
from runtime.launch.torchrun import torchrun_place
from runtime.network import join_world

STATE = {"touched": False}


def is_touched(tell: Callable[[str], None]) -> bool:
    return STATE["touched"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_a_process_inherits_nothing(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setitem(STATE, "touched", True)
    assert run_processes(1, device, is_touched) == [False]


def sum_ranks(tell: Callable[[str], None], addend: int) -> int:
    place = torchrun_place()
    assert place is not None
    join_world(take_device("cpu", place.local, place.num_local), place.rank, place.size, 60.0, address=place.master)
    total = torch.tensor([addend + place.rank])
    dist.all_reduce(total)
    tell(f"rank {place.rank} of {place.size}")
    return int(total)


def test_processes_meet_and_are_heard() -> None:
    lines: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    assert run_processes(3, "cpu", sum_ranks, 10, tell=lines.append) == [33, 33, 33]
    assert sorted(lines) == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    assert signal.getsignal(signal.SIGINT) is before


def fails(tell: Callable[[str], None], how: str) -> None:
    if os.environ["RANK"] == "0":
        time.sleep(60.0)
    if how == "raises":
        raise ValueError("no such kernel")
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    time.sleep(60.0)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raises", "rank 1: ValueError: no such kernel"),
        ("is killed", "rank 1: the process ended with exit code -9"),
        ("is late", "rank 1: no answer in time"),
    ],
)
def test_one_that_fails_ends_all(how: str, reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    began_s = time.monotonic()
    with pytest.raises(ProcessFailedError, match=f"^{reason}$"):
        run_processes(2, "cpu", fails, how)
    assert time.monotonic() - began_s < 45.0, "the other does not wait"
    assert capfd.readouterr() == ("", ""), "torch's tracebacks are not for users"


@pytest.mark.parametrize(("gpus", "device"), [(2, "cuda"), (0, "cpu")])
def test_measuring_touches_cuda_in_its_processes_only(monkeypatch: pytest.MonkeyPatch, gpus: int, device: str) -> None:
    started: list[tuple[int, str]] = []

    def record(count: int, device: str, *arguments: Any, **more: Any) -> list[str]:
        started.append((count, device))
        return ["refused"]

    def refuse(*words: Any, **more: Any) -> Any:
        raise AssertionError("the process that starts others has touched CUDA")

    def check(devices: Sequence[Device]) -> None:
        raise AssertionError("checked in the processes")

    monkeypatch.setattr(local, "run_processes", record)
    monkeypatch.setattr(local, "num_gpus", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    with pytest.raises(InputError, match=r"^refused$"):
        local.measure_here(Request(0.01), print, check)
    assert started == [(max(gpus, 1), device)]


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "num_gpus", lambda: 2)
    with pytest.raises(InputError, match=r"profile\.processes: 3 on 2 GPUs; state at most 2"):
        local.measure_here(Request(0.01, processes=3), print)
