"""Measuring with processes of this machine: one for each GPU, or as many as are asked for."""

from collections.abc import Callable, Sequence

from experiments.lab.processes import ProcessFailedError, run_processes
from experiments.lab.profile.points import Device, Measurement
from experiments.lab.profile.rank import Request, measure
from hexiopt.errors import InputError
from runtime.device import num_gpus
from runtime.launch.torchrun import torchrun_place


class MeasuringFailedError(Exception):
    """Measuring has ended too early, for the reason said in a line."""


def accept(devices: Sequence[Device]) -> None:
    """Check nothing."""


def measure_here(
    request: Request, tell: Callable[[str], None], check: Callable[[Sequence[Device]], None] = accept
) -> Measurement:
    """The measurement by the processes of this machine, each of which calls `check`, a function of a module. Raises
    InputError, also what `check` raises, MeasuringFailedError."""
    gpus = num_gpus()
    count = request.processes or gpus or 1
    if gpus and count > gpus:
        raise InputError(f"profile.processes: {count} on {gpus} GPUs; state at most {gpus}")
    try:
        first, *_ = run_processes(count, "cuda" if gpus else "cpu", _measure_rank, request, check, tell=tell)
    except ProcessFailedError as error:
        raise MeasuringFailedError(f"measuring ended too early: {error}") from None
    if isinstance(first, str):
        raise InputError(first)
    assert first is not None, "rank 0 concludes"
    return first


def _measure_rank(
    tell: Callable[[str], None], request: Request, check: Callable[[Sequence[Device]], None]
) -> Measurement | str | None:
    """Of rank 0 what all have measured; of any the line that refuses it."""
    place = torchrun_place()
    assert place is not None, "set by the agent"
    measurements: list[Measurement] = []
    try:
        measure(request, place, tell, measurements.append, check)
    except InputError as error:
        return str(error)
    return measurements[0] if measurements else None
