"""A rank of a training is killed while it trains: when the others have ended, and what the run says.

Each process has an agent and, for NCCL, a machine of its own, so that they may share a GPU; without one they talk over
gloo. Otherwise the run is any run with `train.on_failure=stop`.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lab.devices import free_gpu_bytes
from experiments.lab.processes import forking_context
from hexiopt.cost.pricer import PlanPricer
from hexiopt.files.plan_file import write_plan
from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.cluster import Cluster
from hexiopt.problem.machine import Machine
from hexiopt.problem.model import ModelSpec
from hexiopt.problem.problem import Problem
from hexiopt.problem.workload import Workload
from hexiopt.schedules.registry import ONE_F_ONE_B
from hexiopt.units import GB
from runtime.device import num_gpus
from runtime.launch import agent
from runtime.launch.head import AfterFaults, Stop, training_events
from runtime.launch.meeting import MeetingPlace, TrainingFailedError
from runtime.settings import Settings
from runtime.training.settings import TrainingRun

_RANKS, _VICTIM = 3, 1
_STEPS = 2  # that end before
_START_S = 90.0  # in which they must
_MOST_S = 30.0  # that the others may take to end
LIMIT_S = _START_S + _MOST_S  # of it all
_AGENT_ENDS_S = 10.0
_LOOK_S = 0.02
_MANY = 10**6  # steps, of which none is the last


@dataclass(frozen=True)
class KilledRank:
    """What followed: the `line` with which the run ended, seconds from the kill until the last process had ended, and
    bytes of the GPU that are not free again, None where there is none; or the `trouble`, what was not as it must be."""

    backend: str
    line: str = ""
    ended_s: float | None = None
    lost_bytes: int | None = None
    trouble: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def kill_rank(folder: Path, machine: Machine, model: ModelSpec, workload: Workload) -> KilledRank:
    """Train `model` in `folder` by three processes, each with the device of a `machine` of one, and kill one of them.

    A pipeline of two stages trains beside a device: of those left one waits for a message, one for a sum.
    """
    problem = Problem(_apart(machine, _RANKS), model, workload)
    half, share = model.num_layers // 2, workload.global_batch // 2
    stages = Stage.of((0,), 0, half), Stage.of((_VICTIM,), half, model.num_layers)
    replica = Pipeline((Stage.of((2,), 0, model.num_layers),), workload.global_batch - share)
    plan = Plan((Pipeline(stages, share), replica), ONE_F_ONE_B, Sharding(1))
    folder.mkdir(parents=True, exist_ok=True)
    tokens, path = folder / "tokens.npy", folder / "plan.json"
    np.save(tokens, np.random.default_rng(0).integers(model.vocab_size, size=64 * workload.tokens).astype(np.int32))
    write_plan(path, problem, plan, PlanPricer(problem).price(plan), {})
    settings = Settings(steps=_MANY, checkpoint_every=_MANY, timeout_s=LIMIT_S, compile_layers=False)
    run = TrainingRun("killed", path, tokens, folder / "checkpoints", settings, device="auto")
    has_gpu = num_gpus() > 0
    free_bytes = free_gpu_bytes(0) if has_gpu else 0
    with ThreadPoolExecutor(1) as watcher:
        training = _Training(watcher)
        line = training.end(run, folder, [node.name for node in problem.cluster.machines])
        backend = "nccl" if has_gpu else "gloo"
        trouble, ended_s = training.trouble(line, problem.cluster.device_name(_VICTIM))
    return KilledRank(backend, line, ended_s, max(0, free_bytes - free_gpu_bytes(0)) if has_gpu else None, trouble)


def _apart(machine: Machine, count: int) -> Cluster:
    """So many machines of one device each, like that one's."""
    spec = "process"
    alone = replace(machine, spec_name=spec, num_gpus=1, intra_links=(), slow=(), host=None)
    machines = tuple(replace(alone, name=f"{spec}-{k}", nic_bandwidth_bytes_per_s=GB) for k in range(count))
    return Cluster("processes", machines, GB, machine.nic_latency_s)


class _Training:
    """Follows a run, kills a rank of it once it trains, and has the `watcher` look when the processes end."""

    def __init__(self, watcher: ThreadPoolExecutor) -> None:
        self._watcher = watcher
        self._pids: dict[int, int] = {}
        self._deadline_s = time.monotonic() + _START_S
        self._killed_s: float | None = None
        self._end_s: Future[float | None] | None = None

    def end(self, run: TrainingRun, folder: Path, machines: Sequence[str]) -> str:
        """The line with which the run ends; empty where it has to be ended."""
        place = MeetingPlace(f"127.0.0.1:{_free_port()}")
        faults, stop = AfterFaults("stop", lambda *_: run.plan, 0), Stop(lambda: time.monotonic() > self._deadline_s)
        with _agents(place.address, machines, folder / "agents.txt"):
            try:
                for event in training_events(run, folder, faults, place, force=True, stop=stop):
                    if event["event"] == "ready":
                        self._pids[event["rank"]] = event["pid"]
                    elif event["event"] == "step" and event["step"] >= _STEPS and self._killed_s is None:
                        self._kill()
            except TrainingFailedError as error:
                return str(error)
        return ""

    def trouble(self, line: str, victim: str) -> tuple[str | None, float | None]:
        """What was not as it must be, if anything, and seconds from the kill to the end of the last process."""
        if self._killed_s is None or self._end_s is None:
            return f"nothing was killed: {line or f'{_STEPS} steps did not end in {_START_S:.0f} s'}", None
        end_s = self._end_s.result()
        if end_s is None:
            return f"processes were left {_MOST_S:.0f} s after {victim} was killed", None
        names_victim = victim in line and "\n" not in line
        return (
            None if names_victim else f"{victim} was killed, and the run said: {line or 'nothing'}",
            end_s - self._killed_s,
        )

    def _kill(self) -> None:
        self._killed_s = time.monotonic()
        self._deadline_s = self._killed_s + _MOST_S
        os.kill(self._pids[_VICTIM], signal.SIGKILL)
        self._end_s = self._watcher.submit(_end_s, list(self._pids.values()), self._deadline_s)


def _end_s(pids: Collection[int], until_s: float) -> float | None:
    """When the last of these processes had ended; None where that was not by then."""
    while time.monotonic() < until_s:
        if not any(map(_runs, pids)):
            return time.monotonic()
        time.sleep(_LOOK_S)
    return None


def _runs(pid: int) -> bool:
    """Whether a process is there, and not only its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def _agents(address: str, machines: Sequence[str], noise: Path) -> Iterator[None]:
    """Agents of these machines, which end with this process; what they print goes to a file."""
    context = forking_context()
    started = [context.Process(target=_serve, args=(address, name, noise)) for name in machines]
    try:
        for process in started:
            process.start()
        yield
    finally:
        for process in started:
            process.join(_AGENT_ENDS_S)
            process.kill()
            process.join()


def _serve(address: str, machine: str, noise: Path) -> None:
    os.environ["NCCL_HOSTID"] = machine  # else NCCL refuses two ranks of a host on one GPU
    os.setsid()  # Ctrl-C is for who started it
    with noise.open("ab") as file:
        for printed in (1, 2):
            os.dup2(file.fileno(), printed)
    sys.exit(agent.main([address, "--machine", machine, "--with-parent"]))
