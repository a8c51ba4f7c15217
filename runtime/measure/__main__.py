"""Measures with the processes of this machine: `python -m runtime.measure REQUEST.json`.

A process for each GPU, or as many as are asked for. Prints an event a line, as JSON: what is being measured, in the
end everything that was, or what went wrong.
"""

import json
import multiprocessing
import signal
import sys
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimisers import it at first use: here once, before processes fork

from hexiopt.errors import InputError
from runtime.launch.supervisor import free_port
from runtime.measure.rank import Place, Request, measure

_ENDING_S = 5.0  # that a process may take to end after its last word


def main(path: Path) -> int:
    """Run all processes; the exit code."""
    request = Request.read(path)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = request.processes or gpus or 1
    if gpus and count > gpus:
        _say({"event": "stopped", "reason": f"profile.processes: {count} on {gpus} GPUs; state at most {gpus}"})
        return 1
    master = f"127.0.0.1:{free_port()}"
    context = multiprocessing.get_context("fork")
    ends, processes = [], []
    for rank in range(count):
        here, there = context.Pipe(duplex=False)
        place = Place(rank, count, rank, count, master)
        process = context.Process(target=_start, args=(request, place, there), daemon=True)
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    try:
        return _listen(ends, processes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _listen(ends: list[Any], processes: list[Any]) -> int:
    """Pass on events until all processes have ended, or one has failed."""
    ranks = {end: rank for rank, end in enumerate(ends)}
    while ends:
        for end in wait(ends):
            try:
                event = json.loads(end.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                ends.remove(end)
                processes[ranks.pop(end)].join(_ENDING_S)
                continue
            _say(event)
            if event["event"] in ("stopped", "error"):
                return 1
        dead = [k for k, process in enumerate(processes) if process.exitcode not in (None, 0)]
        if dead:
            reason = f"process {dead[0]} ended with exit code {processes[dead[0]].exitcode}"
            _say({"event": "lost", "reason": reason})
            return 1
    return 0


def _start(request: Request, place: Place, told: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started all ends them

    def tell(event: dict[str, Any]) -> None:
        told.send_bytes(json.dumps(event).encode())

    try:
        measure(
            request,
            place,
            lambda line: tell({"event": "progress", "line": line}),
            lambda measured: tell({"event": "measured", "measured": measured.to_dict()}),
            lambda devices: tell({"event": "devices", "devices": [device.to_dict() for device in devices]}),
        )
    except InputError as error:
        tell({"event": "stopped", "reason": str(error)})
    except BaseException:
        tell({"event": "error", "reason": traceback.format_exc()})


def _say(event: dict[str, Any]) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
