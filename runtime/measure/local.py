"""Measuring with processes of this machine, which this one starts and hears."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from hexiopt.errors import InputError
from runtime.launch.processes import events_of
from runtime.measure.points import Device, Measurement
from runtime.measure.rank import Request


class MeasuringFailedError(Exception):
    """Measuring has ended too early, for the reason said in a line."""


def measured_here(
    request: Request, tell: Callable[[str], None], check: Callable[[Sequence[Device]], None]
) -> Measurement:
    """What the processes of this machine measure. Raises InputError, also what `check` raises, MeasuringFailedError."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "request.json"
        request.write(path)
        events = events_of([sys.executable, "-m", "runtime.measure.node", str(path)])
        measured = None
        try:
            while True:
                event = next(events)
                match event["event"]:
                    case "progress":
                        tell(event["line"])
                    case "devices":
                        check([Device.from_dict(one) for one in event["devices"]])
                    case "measured":
                        measured = Measurement.from_dict(event["measured"])
        except StopIteration as end:
            trouble = end.value
        finally:
            events.close()
    if trouble is not None and trouble["event"] == "stopped":
        raise InputError(trouble["reason"])
    if trouble is not None or measured is None:
        reason = "no result" if trouble is None else trouble["reason"].strip().splitlines()[-1]
        raise MeasuringFailedError(f"measuring ended too early: {reason}")
    return measured
