"""How slow a rank is made where a cluster is emulated: what it computes takes so long, what it sends leaves so late."""

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock, Timer

from torch import Tensor

from experiments.lab.emulate.namespaces import INTERFACE, enter
from hexiopt.files.plan_file import write_text
from hexiopt.plan.plan import Plan
from hexiopt.problem.problem import Problem
from hexiopt.schedules.operation import OperationKind
from runtime.mapping.times import StepTimes
from runtime.parallel.hooks import Hooks, Part


@dataclass(frozen=True)
class Pace:
    """How slow one rank is. `chunks` has seconds of each of its layer ranges for one micro-batch, by the schedule's
    kinds of operations, `optimizer_s` those of a step, `latency_s` those of a message to each other rank."""

    chunks: tuple[tuple[float, ...], ...]
    optimizer_s: float
    latency_s: tuple[float, ...]
    namespace: str | None = None
    """The network namespace of its device, if any."""
    units: tuple[tuple[float, float], ...] = ()
    """Under ZeRO-2 and 3: seconds of computing each unit in a forward and a backward, where those of `chunks` have
    gathers and scatters in them too."""
    last_parts: tuple[tuple[float, ...], ...] = ()
    """Otherwise: seconds of each part of the last backward through each layer range, beside which gradients are
    summed."""
    first_parts: tuple[tuple[float, ...], ...] = ()
    """Seconds of each part of the first forward through each layer range, beside which weights are gathered."""
    times: StepTimes | None = None
    """What the operations and messages of all stages of the emulated plan take."""

    def operation_s(self, kind: OperationKind, chunk: int, part: int | None = None) -> float:
        """Seconds of computing a forward or a backward of a layer range, or a part of one, which is a unit; or of the
        gradients of weights of all its layers."""
        if kind is OperationKind.WEIGHTS:
            return self.chunks[chunk][-1]
        backward = kind is OperationKind.BACKWARD
        if not self.units:
            return self.chunks[chunk][backward] if part is None else self.last_parts[chunk][part]
        if part is None:
            return sum(unit[backward] for unit in self.units)
        return self.units[len(self.units) - 1 - part if backward else part][backward]


def pace_until(began_s: float, seconds: float) -> None:
    """Wait until `seconds` after `began_s` (of `time.time`)."""
    left = began_s + seconds - time.time()
    if left > 0:
        time.sleep(left)


def write_paces(path: Path, paces: list[Pace]) -> None:
    """Write the paces of all ranks as JSON."""
    write_text(path, json.dumps([asdict(pace) | {"times": pace.times and pace.times.to_data()} for pace in paces]))


def read_pace(path: Path, rank: int) -> Pace:
    """A rank's pace of a file that `write_paces` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))[rank]
    return Pace(
        tuple(map(tuple, data["chunks"])),
        data["optimizer_s"],
        tuple(data["latency_s"]),
        data["namespace"],
        tuple((forward_s, backward_s) for forward_s, backward_s in data["units"]),
        tuple(map(tuple, data["last_parts"])),
        tuple(map(tuple, data["first_parts"])),
        data["times"] and StepTimes.of_data(data["times"]),
    )


class PaceHooks(Hooks):
    """Slow a rank down to its pace, and let its messages leave late by the latencies of their links."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._timers: list[Timer] = []
        self._late: dict[int, deque[Callable[[], None]]] = defaultdict(deque)  # by receiver, in order
        self._posting = Lock()

    def join(self) -> str | None:
        """Enters the network namespace of the rank's device; connections that are there stay in theirs."""
        if self._pace.namespace is None:
            return None
        enter(self._pace.namespace)
        return INTERFACE

    def times(self, problem: Problem, plan: Plan) -> StepTimes:
        """Those of the cluster that is emulated: the stand-in's are others."""
        assert self._pace.times is not None
        return self._pace.times

    def now_s(self) -> float:
        """Of `time.time`, as `pace_until` counts."""
        return time.time()

    def on_operation(self, began_s: float, kind: OperationKind, chunk: int, part: int | None, num_late: int) -> None:
        """Wait until the operation's time is over."""
        share = 1 / num_late if kind is OperationKind.WEIGHTS else 1.0
        pace_until(began_s, share * self._pace.operation_s(kind, chunk, part))

    def first_part(self, chunk: int, number: int, part: Part) -> Part:
        """The part, which takes its time."""
        if not self._pace.first_parts:
            return part
        seconds = self._pace.first_parts[chunk][number]

        def paced_part(x: Tensor) -> Tensor:
            began_s = time.time()
            y = part(x)
            pace_until(began_s, seconds)
            return y

        return paced_part

    def on_optimizer_step(self, began_s: float, share: float) -> None:
        """Wait until that share of the optimizer's time is over."""
        pace_until(began_s, share * self._pace.optimizer_s)

    def send(self, peer: int, post: Callable[[], None]) -> None:
        """Post the message after the latency of its link."""
        self._late[peer].append(post)
        self._timers.append(Timer(self._pace.latency_s[peer], self._send_late, (peer,)))
        self._timers[-1].start()

    def _send_late(self, peer: int) -> None:
        with self._posting:  # the earliest one, whichever timer is the first to wake up
            self._late[peer].popleft()()

    def finish(self) -> None:
        """Wait for all timers."""
        while self._timers:
            self._timers.pop().join()


def hooks_of(path: Path, rank: int) -> Hooks:
    """Those of a rank whose pace stands in a file that `write_paces` wrote."""
    return PaceHooks(read_pace(path, rank))
