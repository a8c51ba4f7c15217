"""Starts and watches the processes of one machine by torch's elastic agent: `python -m runtime.launch.agent HOST:PORT`.

HOST:PORT is the meeting place of the run. The machine is called `--machine NAME`, as in the cluster file. Ends with 0
when the run has ended, with 2 when this machine does not suit it, and with 75 (try again) when it has lost the others:
run it in a loop, so that a machine whose network was cut comes back.

What is torch's own business here, names with an underscore, stands in this file only; a test holds them.
"""

import argparse
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

# Optimisers import it at first use: here once, before processes fork.
import torch._dynamo  # noqa: F401
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousGracefulExitError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from hexiopt.errors import InputError
from runtime.launch.admission import admit_machine
from runtime.launch.meeting import EndedError, MeetingClient
from runtime.launch.vitals import forget, silence_of
from runtime.launch.worker import TOLD, HooksOf, Seats, assignment, die_with_parent, work
from runtime.parallel.hooks import NO_HOOKS, Hooks

ENDED, REFUSED, LOST = 0, 2, os.EX_TEMPFAIL
# A machine that has not been heard of for 10 s has left. Torch's 5 s three times are about that, but it also compares
# clocks of different machines with them: hence `check_clock`.
_KEEP_ALIVE_S, _KEEP_ALIVES = 2, 5
# Further machines may come for so long once the first is there (torch: 30 s). A late one costs another round.
_LAST_CALL = timedelta(seconds=2)
_MONITOR_S = 0.2
_CUT_OFF_S, _PROBE_S = 30.0, 5.0
_FOR_EVER = 10**9  # restarts: the head counts those that brought no new checkpoint, over all machines


def no_hooks(rank: int) -> Hooks:
    """Of any rank: none."""
    return NO_HOOKS


class LostError(Exception):
    """This machine has lost the others; the message says how, in one line."""


class ProgressAgent(LocalElasticAgent):
    """Torch's agent, which also ends processes that give no sign of life, and tells the head who was lost.

    Torch's own watchdog (`TORCHELASTIC_ENABLE_FILE_TIMER`) ends the agent along with the process that hangs, so that
    nobody starts it again, and its health check is an empty class outside Meta.
    """

    def __init__(
        self, spec: WorkerSpec, logs: Path, start_method: str, meeting: MeetingClient, seats: Seats, machine: str | None
    ) -> None:
        super().__init__(spec, logs_specs=DefaultLogsSpecs(str(logs)), start_method=start_method, shutdown_timeout=5)
        self._meeting, self._seats = meeting, seats
        self._is_ours = meeting.claim(machine or "")  # from an agent that was taken for dead, too

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        pids = {worker.local_rank: int(worker.id) for worker in worker_group.workers}
        try:
            self._meeting.check_end()
            if not self._is_ours():
                raise InputError("another agent has joined the run under this machine's name; give each its own")
        except (EndedError, InputError):
            self._kill(worker_group)
            raise
        codes = {local: code for local, pid in pids.items() if (code := exit_code(pid)) is not None}
        silent = {local: silence for local, pid in pids.items() if (silence := silence_of(self._seats.folder, pid))}
        if not codes and not silent:
            return RunResult(WorkerState.HEALTHY)
        for local, code in codes.items():
            if code != TOLD:
                self._tell("lost", local, f"ended with exit code {code}")
        if silent:  # others may be silent because they wait for the first
            first = min(silent, key=lambda local: silent[local])
            self._tell("hung", first, silent[first][1])
        return RunResult(WorkerState.UNHEALTHY)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        # A process that ignores SIGTERM, as a stopped one does, would be waited for 30 s, whatever `shutdown_timeout`
        # says, while the others wait for this machine.
        self._kill(worker_group)
        super()._stop_workers(worker_group)
        forget(self._seats.folder)

    def _kill(self, worker_group: WorkerGroup) -> None:
        for worker in worker_group.workers:
            if worker.id is not None and exit_code(int(worker.id)) is None:
                os.kill(int(worker.id), signal.SIGKILL)

    def _tell(self, what: str, local: int, reason: str) -> None:
        self._meeting.tell({"event": what, "device": self._seats.names[local], "reason": reason})


class EndingBackend(C10dRendezvousBackend):
    """Torch's backend of a rendezvous, which ends with the run: who waits for others would lose the meeting place."""

    def __init__(self, meeting: MeetingClient) -> None:
        super().__init__(meeting.store, "hexiopt")
        self._meeting = meeting

    def get_state(self) -> tuple[bytes, Any] | None:
        """Those who have come. Raises RendezvousGracefulExitError, which torch's agent takes as the end."""
        try:
            self._meeting.check_end()
        except EndedError:
            raise RendezvousGracefulExitError("the run has ended") from None
        return super().get_state()


def exit_code(pid: int) -> int | None:
    """The exit code of a child that has ended, or minus its signal; None while it runs. Does not collect it."""
    try:
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return TOLD  # collected already
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def check_clock(sent_s: float, head_s: float, received_s: float) -> None:
    """Raise InputError where this machine's clock and the head's, read between two moments of this machine's, differ by
    more than half the time after which a silent machine has left: heartbeats are compared by the clock of the reader,
    so that healthy machines would be expelled."""
    apart_s, most_s = max(sent_s - head_s, head_s - received_s), _KEEP_ALIVE_S * _KEEP_ALIVES / 2
    if apart_s > most_s:
        raise InputError(
            f"the clocks of this machine and of the head are {apart_s:.0f} s apart, more than {most_s:.0f} s; "
            "synchronise them (chrony, systemd-timesyncd)"
        )


def serve(master: str, machine: str | None, hooks_of: HooksOf = no_hooks) -> None:
    """Start and watch the processes of `machine` in the run whose meeting place is at `master`, until that has ended.

    Raises InputError where this machine does not suit the run, LostError where the run is out of reach.
    """
    try:
        meeting = MeetingClient(master)
    except (OSError, DistError) as error:
        raise LostError(f"no run answers at {master} ({_first_line(error)}); start its head first") from None
    threading.Thread(target=_leave_when_cut_off, args=(meeting, master), daemon=True).start()
    try:
        _serve(meeting, machine, hooks_of)
    except EndedError:
        return
    except InputError as error:
        meeting.tell({"event": "refused", "machine": machine, "reason": str(error)})
        raise
    except (DistError, RendezvousError) as error:
        raise LostError(f"the run at {master} is out of reach ({_first_line(error)})") from None


def _leave_when_cut_off(meeting: MeetingClient, master: str) -> None:
    """End this process, and with it those that it has started, when the meeting place cannot be reached for a while:
    torch's store would wait for an answer until TCP gives up, a quarter of an hour."""
    reached_s = time.monotonic()
    while time.monotonic() - reached_s < _CUT_OFF_S:
        time.sleep(_PROBE_S)
        try:
            meeting.probe(_PROBE_S)
            reached_s = time.monotonic()
        except OSError as error:
            why = _first_line(error)
    print(f"hexiopt: the run at {master} is out of reach ({why})", file=sys.stderr, flush=True)
    os._exit(LOST)


def _serve(meeting: MeetingClient, machine: str | None, hooks_of: HooksOf) -> None:
    # Else rounds share a store, in which they are told apart by how often an agent restarted its processes; agents
    # differ in that once one has come back (pytorch#135712). So each round gets a store of its own, on its rank 0.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ.pop("TORCH_ELASTIC_WORKER_IDENTICAL", None)  # multiplies numbers of processes instead of adding them
    sent_s = time.time()
    answer = meeting.ask({"event": "hello", "machine": machine, "host": socket.gethostname()})
    if "refused" in answer:
        raise InputError(answer["refused"])
    check_clock(sent_s, answer["now_s"], time.time())
    run, plan_file = assignment(answer)
    names, gpus = answer["seats"], answer["gpus"]
    with tempfile.TemporaryDirectory(prefix="hexiopt-agent-") as folder:
        device, fallback = admit_machine(plan_file, machine, gpus, run.device, answer["force"])
        if fallback is not None:
            meeting.tell({"event": "note", "reason": fallback})
        seats = Seats(tuple(names), tuple(gpus), device, Path(folder))
        rendezvous = DynamicRendezvousHandler.from_backend(
            "hexiopt",
            meeting.store,
            EndingBackend(meeting),
            1,  # the head decides whether those that came suffice
            answer["most"],
            meeting.own_address(),  # where others reach the store of a round, if rank 0 is here
            # Other machines may take long to come back.
            RendezvousTimeout(join=timedelta(days=1), last_call=_LAST_CALL),
            keep_alive_interval=_KEEP_ALIVE_S,
            keep_alive_max_attempt=_KEEP_ALIVES,
        )
        address = f"{meeting.host}:{meeting.port}"
        spec = WorkerSpec(
            "rank",
            len(names),
            rendezvous,
            entrypoint=work,
            args=(address, seats, hooks_of),
            max_restarts=_FOR_EVER,
            monitor_interval=_MONITOR_S,
        )
        # A process forked after its parent has touched CUDA cannot use it, and whether something has is hard to know:
        # those for GPUs are spawned. Those for a CPU are forked, which takes 0.1 s, not seconds.
        start_method = "spawn" if device == "cuda" else "fork"
        try:
            ProgressAgent(spec, Path(folder), start_method, meeting, seats, machine).run()
            meeting.check_end()
        except EndedError:
            meeting.tell({"event": "left", "machine": machine})
            raise


def main(arguments: Sequence[str] | None = None, hooks_of: HooksOf = no_hooks) -> int:
    """Serve a run, whose ranks have the hooks that `hooks_of` makes, a function of a module; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m runtime.launch.agent", description=__doc__)
    parser.add_argument("master", metavar="HOST:PORT", help="the meeting place of the run")
    parser.add_argument("--machine", metavar="NAME", help="as in the cluster file (default: all devices are here)")
    parser.add_argument("--with-parent", action="store_true", help="end when the process ends that started this one")
    options = parser.parse_args(arguments)
    if options.with_parent:
        die_with_parent()
    try:
        serve(options.master, options.machine, hooks_of)
    except (InputError, LostError) as error:
        print(f"hexiopt: {error}", file=sys.stderr, flush=True)
        return REFUSED if isinstance(error, InputError) else LOST
    return ENDED


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
