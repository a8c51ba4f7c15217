"""Starts and watches the ranks of one machine.

    python -m runtime.launch.node RUN.json --master HOST:PORT [--machine NAME]

Prints an event a line, as JSON: what rank 0 tells of every step, and what went wrong, once. A process that dies is
noticed at once, one that hangs by the silence of its heart: longer than 15 s and than five steps usually take. Then the
others are ended too. Without a machine, all ranks of the plan run here.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

from hexiopt.errors import InputError
from hexiopt.readers.plan_file import PlanFile, read_plan
from runtime.launch.admission import ranks_on
from runtime.launch.processes import Child
from runtime.launch.rank import Event, run_rank
from runtime.launch.settings import TrainingRun
from runtime.mapping.layout import layout_of

_SILENT_STEPS = 5
_RECENT = 20  # steps that say how long one usually takes
_SPAWN_S = 120.0  # in which a spawned process must have imported torch, before it can give a sign of life
_SETTLE_S = 0.5  # in which the first cause may still be told after its consequences


class NodeLauncher:
    """The ranks of one machine."""

    def __init__(self, run: TrainingRun, plan_file: PlanFile, machine: str | None, master: str) -> None:
        devices = layout_of(plan_file.plan, plan_file.problem.model).devices
        self._names = [plan_file.problem.cluster.device_name(device) for device in devices]
        self._ranks = ranks_on(plan_file, machine)
        if not self._ranks:
            names = ", ".join(sorted({name.partition(":")[0] for name in self._names}))
            raise InputError(f"--machine {machine}: has no rank of the plan; name one of {names}")
        self._ends: dict[Connection, int] = {}
        self._children: dict[int, Child] = {}
        for local, rank in enumerate(self._ranks):
            child = Child.start(run.device, _start, run, plan_file, rank, local, master)
            self._ends[child.end] = rank
            self._children[rank] = child
        began = time.monotonic() + (_SPAWN_S if run.device == "cuda" else 0.0)
        self._heard = dict.fromkeys(self._ranks, began)  # when each last gave a sign of life
        self._moved = began  # when any of them last got on
        self._steps_s: list[float] = []
        self._done: set[int] = set()
        self._ready: set[int] = set()
        self._settings = run.settings

    def watch(self) -> int:
        """Print events until all ranks have ended. Returns the exit code."""
        try:
            while self._done != set(self._ranks):
                trouble = self._listen() or self._dead() or self._hung()
                if trouble is not None:
                    _say(trouble)
                    return 1
        finally:
            for child in self._children.values():
                child.stop()
        return 0

    def _listen(self) -> Event | None:
        """Hear what ranks tell; the first trouble, if any."""
        trouble: list[Event] = []
        sentinels = [child.process.sentinel for rank, child in self._children.items() if rank not in self._done]
        ready = wait([*self._ends, *sentinels], timeout=1.0)
        deadline = time.monotonic()
        while True:
            for end in [one for one in ready if one in self._ends]:
                event = self._event(end)
                if event is not None and event["event"] in ("error", "stopped"):
                    trouble.append(event)
                    deadline = time.monotonic() + _SETTLE_S
            if time.monotonic() >= deadline:
                break
            ready = wait(list(self._ends), timeout=deadline - time.monotonic())
        dead = self._dead() if trouble else None
        if dead is not None:
            return dead
        # A number that is none comes before the errors that follow from it.
        return min(trouble, key=lambda event: event["event"] == "error", default=None)

    def _event(self, end: Connection) -> Event | None:
        rank = self._ends[end]
        try:
            event: Event = json.loads(end.recv_bytes())
        except EOFError:
            del self._ends[end]
            return None
        self._heard[rank] = time.monotonic()
        event |= {"rank": rank, "device": self._names[rank]}
        match event["event"]:
            case "done":
                self._done.add(rank)
            case "ready":
                self._ready.add(rank)
                self._moved = time.monotonic()
                _say({**event, "pid": self._children[rank].process.pid})
            case "timeline":
                _say(event)
            case "step" | "checkpoint" if rank == 0:
                self._moved = time.monotonic()
                if event["event"] == "step":
                    self._steps_s.append(event["seconds"])
                _say(event)
        return event

    def _dead(self) -> Event | None:
        for rank, child in self._children.items():
            code = child.process.exitcode
            if rank not in self._done and code not in (None, 0):
                reason = f"rank {rank} ({self._names[rank]}) ended with exit code {code}"
                return {"event": "lost", "rank": rank, "device": self._names[rank], "reason": reason}
        return None

    def _hung(self) -> Event | None:
        usual_s = statistics.median(self._steps_s[-_RECENT:]) if self._steps_s else 0.0
        limit_s, now = max(self._settings.silence_s, _SILENT_STEPS * usual_s), time.monotonic()
        silent = [r for r in self._ranks if r not in self._done and now - self._heard[r] > limit_s]
        if silent:
            rank = min(silent, key=lambda rank: self._heard[rank])
            reason = f"rank {rank} ({self._names[rank]}) has given no sign of life for {limit_s:.0f} s"
            return {"event": "hung", "rank": rank, "device": self._names[rank], "reason": reason}
        # Ranks that live may still wait for each other for ever; messages and collectives have their own limit.
        if now - self._moved > limit_s + self._settings.timeout_s:
            return {"event": "hung", "reason": f"no step has ended for {limit_s + self._settings.timeout_s:.0f} s"}
        return None


def _start(run: TrainingRun, plan_file: PlanFile, rank: int, local: int, master: str, end: Connection) -> None:
    run_rank(run, plan_file, rank, local, master, lambda event: end.send_bytes(json.dumps(event).encode()))


def _say(event: Event) -> None:
    print(json.dumps(event), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this machine's ranks."""
    parser = argparse.ArgumentParser(prog="python -m runtime.launch.node", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--master", required=True, metavar="HOST:PORT", help="where rank 0 listens")
    parser.add_argument("--machine", metavar="NAME", help="as in the cluster file (default: all ranks run here)")
    given = parser.parse_args(arguments)
    run = TrainingRun.read(given.run)
    plan_file = read_plan(run.plan)
    return NodeLauncher(run, plan_file, given.machine, given.master).watch()


if __name__ == "__main__":
    sys.exit(main())
