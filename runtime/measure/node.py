"""Measures with the processes of this machine: `python -m runtime.measure.node REQUEST.json`.

A process for each GPU, or as many as are asked for. Prints an event a line, as JSON: what is being measured, in the
end everything that was, or what went wrong.
"""

import json
import sys
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from runtime.device import num_gpus
from runtime.launch.processes import Child, free_port
from runtime.launch.torchrun import ProcessPlace
from runtime.measure.rank import Request, measure

_ENDING_S = 5.0  # that a process may take to end after its last word


def main(path: Path) -> int:
    """Run all processes; the exit code."""
    request = Request.read(path)
    gpus = num_gpus()
    count = request.processes or gpus or 1
    if gpus and count > gpus:
        _say({"event": "stopped", "reason": f"profile.processes: {count} on {gpus} GPUs; state at most {gpus}"})
        return 1
    master = f"127.0.0.1:{free_port()}"
    device = "cuda" if gpus else "cpu"
    children = [
        Child.start(device, _start, request, ProcessPlace(rank, count, rank, count, master)) for rank in range(count)
    ]
    try:
        return _listen(children)
    finally:
        for child in children:
            child.stop()


def _listen(children: list[Child]) -> int:
    """Pass on events until all processes have ended, or one has failed."""
    heard = {child.end: child for child in children}
    while heard:
        for end in wait(list(heard)):
            assert isinstance(end, Connection)
            try:
                event = json.loads(end.recv_bytes())
            except EOFError:
                heard.pop(end).process.join(_ENDING_S)
                continue
            _say(event)
            if event["event"] in ("stopped", "error"):
                return 1
        for rank, child in enumerate(children):
            if child.process.exitcode not in (None, 0):
                _say({"event": "lost", "reason": f"process {rank} ended with exit code {child.process.exitcode}"})
                return 1
    return 0


def _start(request: Request, place: ProcessPlace, end: Connection) -> None:
    def tell(event: dict[str, Any]) -> None:
        end.send_bytes(json.dumps(event).encode())

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
