"""A short training of one plan by processes of this machine: seconds of steps, memory, and the kernels that ran."""

import gzip
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from experiments.lab.devices import KernelUse, forget_peak, kernels_of
from experiments.lab.memory import trainee_memory_use
from experiments.lab.processes import ProcessFailedError, run_processes
from hexiopt.files.plan_file import read_plan
from runtime.device import gpu_peak_bytes, num_gpus, take_device
from runtime.launch.torchrun import torchrun_place
from runtime.mapping.times import StepTimes
from runtime.network import join_world
from runtime.settings import AdamW, Settings
from runtime.state.weights import DTYPES
from runtime.training.trainee import Trainee, initial_values

Spans = Sequence[tuple[float, float]]  # (begin, end)


@dataclass(frozen=True)
class ExchangeTime:
    """Seconds in which a rank exchanged with others, and those of them in which it also computed."""

    total_s: float = 0.0
    hidden_s: float = 0.0


def exchange_in(path: Path) -> ExchangeTime:
    """Of a rank's compressed trace. On a GPU exchanges are NCCL's kernels, and other kernels compute; on a CPU gloo's
    annotations and torch's operators."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    exchanges = [event for event in kernels if event["name"].startswith("nccl")]
    computing = [event for event in kernels if not event["name"].startswith("nccl")]
    if not kernels:
        exchanges = [event for event in events if event["name"].startswith("gloo:")]
        threads = {event["tid"] for event in exchanges}
        computing = [e for e in events if e["name"].startswith("aten::") and e["tid"] not in threads]
    spans, busy = _spans(exchanges), _spans(computing)
    return ExchangeTime(1e-6 * _length(spans), 1e-6 * _length(_common(spans, busy)))


def _spans(events: Iterable[Mapping[str, Any]]) -> Spans:
    """The union of the events' spans, in order, in µs."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events):
        if union and begin <= union[-1][1]:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def _common(a: Spans, b: Spans) -> Spans:
    """What two unions have in common."""
    common, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            common.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


_LR = 1e-4
_SHOWN_KERNELS = 20
_WARM_UP_STEPS = 2  # of which the first one compiles


@dataclass(frozen=True)
class Trial:
    """What came of a plan, by rank where that says something else on each: the seconds of every step, losses, the most
    bytes of tensors at once, the kernels that took longest on rank 0, and how much of its exchange was hidden; or the
    `trouble` that ended it."""

    seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    kernels: tuple[KernelUse, ...] = ()
    exchange: ExchangeTime = field(default_factory=ExchangeTime)
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
    is given up. Where `shares_gpu`, all processes compute on the first GPU, each for NCCL as if it were a machine;
    without `launch_order`, NCCL launches what several communicators run in any order."""

    plan: Path
    steps: int
    is_compiled: bool
    limit_s: float
    shares_gpu: bool = False
    launch_order: bool = True


def try_plan(request: TrialRequest) -> Trial:
    """Train with as many processes as the plan has devices, each with a GPU if there are any."""
    plan_file, kind = read_plan(request.plan), "cuda" if num_gpus() else "cpu"
    times = StepTimes.of_plan(plan_file.problem, plan_file.plan)
    try:
        return _of_all(run_processes(len(plan_file.plan.devices()), kind, _measure_rank, request, kind, times))
    except ProcessFailedError as error:
        return Trial(trouble=str(error))


def _of_all(reports: Sequence[dict[str, Any]]) -> Trial:
    if not all(map(isfinite, reports[0]["losses"])):
        return Trial(trouble=f"the loss is no number: {reports[0]['losses']}")
    return Trial(
        tuple(max(seconds) for seconds in zip(*(report["seconds"] for report in reports), strict=True)),
        tuple(reports[0]["losses"]),
        tuple(report["peak_bytes"] for report in reports),
        reports[0]["kernels"],
        reports[0]["exchange"],
    )


def join_ranks(
    kind: str, devices: Sequence[int], num_shares: int, limit_s: float, *, shares_gpu: bool
) -> tuple[int, torch.device]:
    """Join the world of all that `run_processes` has started, as the rank and on the device that are returned: of GPUs
    the one among `devices`, or the first where all share it, of a CPU one of `num_shares`. Ends the process after
    `limit_s`, whatever it waits for."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    place = torchrun_place()
    assert place is not None, "set by the agent"
    if shares_gpu:
        os.environ["NCCL_HOSTID"] = f"rank-{place.rank}"  # else NCCL refuses two ranks of a host on one GPU
    device = take_device(kind, 0 if shares_gpu else devices[place.rank], num_shares)
    join_world(device, place.rank, place.size, limit_s, address=place.master)
    return place.rank, device


def _measure_rank(
    tell: Callable[[str], None], request: TrialRequest, kind: str, times: StepTimes | None
) -> dict[str, Any]:
    """What one rank measures. On a CPU, which counts no peak of its own, tensors are counted in a step more."""
    plan_file = read_plan(request.plan)
    problem, plan = plan_file.problem, plan_file.plan
    workload = problem.workload
    if not request.launch_order:
        os.environ["NCCL_LAUNCH_ORDER_IMPLICIT"] = "0"
    devices, num_shares = sorted(plan.devices()), problem.cluster.num_devices  # by so many processes a CPU was profiled
    rank, device = join_ranks(kind, devices, num_shares, request.limit_s, shares_gpu=request.shares_gpu)
    trainee = Trainee(
        problem,
        plan,
        Settings(adam=AdamW(lr=_LR), timeout_s=request.limit_s, compile_layers=request.is_compiled),
        DTYPES[workload.precision],
        device,
        partial(initial_values, 0, device=device),
        times=times,
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

    def step() -> None:
        trainee.step(sequences, _LR)
        trainee.finish()  # gloo breaks down where what a profiler has seen begin ends after it

    kernels, exchange = list[KernelUse](), ExchangeTime()
    if rank:
        step()
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "step.json.gz"
            kernels, exchange = kernels_of(device, step, path), exchange_in(path)
    return {
        "seconds": [outcome.seconds for outcome in outcomes[_WARM_UP_STEPS:]],
        "losses": losses,
        "peak_bytes": trainee_memory_use(trainee, sequences).peak_bytes if peak_bytes is None else peak_bytes,
        "exchange": exchange,
        "kernels": tuple(kernels[:_SHOWN_KERNELS]),
    }
