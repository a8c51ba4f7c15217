"""A short training of one plan by processes of this machine: seconds of steps, memory, and the kernels that ran."""

import json
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isfinite
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hexiopt.files.plan_file import read_plan
from runtime.device import KernelUse, forget_peak, gpu_peak_bytes, kernels_of, num_gpus, taken_device
from runtime.launch.processes import Child, free_port
from runtime.mapping.times import StepTimes
from runtime.network import join_world
from runtime.parallel.optimizer import AdamW
from runtime.state.weights import DTYPES
from runtime.training.trainee import Trainee, drawn

_LR = 1e-4
_SHOWN_KERNELS = 20
_WARM_UP_STEPS = 2  # of which the first one compiles


@dataclass(frozen=True)
class Trial:
    """What came of a plan, by rank where that says something else on each: the seconds of every step, losses, the most
    bytes of tensors at once, the kernels that took longest on rank 0; or the `trouble` that ended it."""

    seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    kernels: tuple[KernelUse, ...] = ()
    trouble: str | None = None

    @property
    def step_s(self) -> float:
        """The median step."""
        return median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True)
class TrialRequest:
    """The plan file, how many steps count, whether layers are compiled, and after how long without an answer the trial
    is given up."""

    plan: Path
    steps: int
    is_compiled: bool
    limit_s: float
    address: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")


def tried(request: TrialRequest) -> Trial:
    """Train with as many processes as the plan has devices, each with a GPU if there are any."""
    devices = sorted(read_plan(request.plan).plan.devices())
    kind = "cuda" if num_gpus() else "cpu"
    children = [Child.start(kind, _rank, request, kind, rank, device) for rank, device in enumerate(devices)]
    until_s = time.monotonic() + request.limit_s
    told: dict[int, Any] = {}
    try:
        while len(told) < len(children):
            waiting = [child.end for rank, child in enumerate(children) if rank not in told]
            ready = wait(waiting, max(0.0, until_s - time.monotonic()))
            if not ready:
                silent = [str(rank) for rank in range(len(children)) if rank not in told]
                return Trial(trouble=f"no answer of rank {', '.join(silent)} in {request.limit_s:g} s")
            for rank, child in enumerate(children):
                if child.end in ready:
                    told[rank] = _heard(child.end)
                    if "trouble" in told[rank]:
                        return Trial(trouble=f"rank {rank}: {told[rank]['trouble']}")
    finally:
        for child in children:
            child.stop()
    return _of_all([told[rank] for rank in range(len(children))])


def _heard(end: Connection) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(end.recv_bytes())
    except EOFError:
        return {"trouble": "the process has ended"}
    return found


def _of_all(told: Sequence[dict[str, Any]]) -> Trial:
    if not all(map(isfinite, told[0]["losses"])):
        return Trial(trouble=f"the loss is no number: {told[0]['losses']}")
    return Trial(
        tuple(max(seconds) for seconds in zip(*(one["seconds"] for one in told), strict=True)),
        tuple(told[0]["losses"]),
        tuple(one["peak_bytes"] for one in told),
        tuple(KernelUse(**one) for one in told[0]["kernels"]),
    )


def _rank(request: TrialRequest, kind: str, rank: int, device: int, end: Connection) -> None:
    try:
        found = _measured(request, kind, rank, device)
    except Exception as error:
        found = {"trouble": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    end.send_bytes(json.dumps(found).encode())


def _measured(request: TrialRequest, kind: str, rank: int, index: int) -> dict[str, Any]:
    """What one rank measures. On a CPU, which counts no peak of its own, tensors are counted in a step more."""
    plan_file = read_plan(request.plan)
    problem, plan = plan_file.problem, plan_file.plan
    workload, count = problem.workload, len(plan.devices())
    device = taken_device(kind, index, count)
    join_world(device, rank, count, request.limit_s, address=request.address)
    trainee = Trainee.of(
        problem,
        plan,
        dtype=DTYPES[workload.precision],
        device=device,
        settings=AdamW(lr=_LR),
        initial=partial(drawn, 0, device=device),
        timeout_s=request.limit_s,
        is_compiled=request.is_compiled,
        times=StepTimes.priced(problem, plan) if rank == 0 else None,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(problem.model.vocab_size, (workload.global_batch, workload.seq_len + 1), generator=generator)
    tokens = tokens.to(device)

    def sequences(first: int, end: int) -> Tensor:
        return tokens[first:end]

    outcomes = [trainee.begin_step(sequences, _LR) for _ in range(_WARM_UP_STEPS)]
    outcomes[-1].read()
    forget_peak(device)
    outcomes += [trainee.begin_step(sequences, _LR) for _ in range(request.steps)]
    losses = [outcome.read()[0] for outcome in outcomes]
    peak_bytes = gpu_peak_bytes(device)
    kernels = kernels_of(device, lambda: trainee.step(sequences, _LR))
    return {
        "seconds": [outcome.seconds for outcome in outcomes[_WARM_UP_STEPS:]],
        "losses": losses,
        "peak_bytes": trainee.used(sequences).peak_bytes if peak_bytes is None else peak_bytes,
        "kernels": [asdict(one) for one in kernels[:_SHOWN_KERNELS]],
    }
