"""What `hexiopt train` leaves in its folder: the steps of the run, and the operations of one step and of the plan."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hexiopt.errors import InputError
from hexiopt.frame import Frame
from hexiopt.reading import Section, read_mapping, read_text
from hexiopt.units import MICROSECOND

METRICS, TIMELINE, RUN = "metrics.jsonl", "timeline.json", "run.json"
_STEP = ("step", "loss", "norm", "seconds", "tokens_per_s", "mfu")
_OPERATION = ("measured", "pipeline", "stage", "kind", "micro_batch", "start_s", "end_s")
_KINDS = ("forward", "backward")


def read_steps(folder: Path) -> Frame:
    """One row per step: loss in nats per token, gradient norm, seconds, tokens/s, MFU.

    Of a step that was trained again, after a restart or from a checkpoint, the last time counts. Raises InputError.
    """
    steps = (event for event in _events(folder / METRICS) if event["event"] == "step")
    by_step = {event["step"]: tuple(event[name] for name in _STEP) for event in steps}
    rows = tuple(by_step[step] for step in sorted(by_step))
    return Frame(_STEP, rows, title=f"{len(rows)} steps")


_OF_EVENT: dict[str, tuple[str, ...]] = {"step": _STEP, "rank": ("device", "micro_batch_s"), "restart": ("plan",)}


def _events(path: Path) -> list[Mapping[str, Any]]:
    """The lines of a run's metrics. Raises InputError."""
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    try:
        events = [json.loads(line) for line in lines]
        for event in events:
            for name in _OF_EVENT.get(event["event"], ()):
                event[name]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path}: cannot be read as a run's metrics ({error}); give the folder of hexiopt train"
        ) from None
    return events


def plan_of_run(folder: Path) -> Path:
    """The plan file that a run trained to its end. Raises InputError."""
    plans = [event["plan"] for event in _events(folder / METRICS) if event["event"] == "restart"]
    return Path(plans[-1] if plans else Section(read_mapping(folder / RUN), str(folder / RUN)).text("plan"))


def read_rank_times(run: Path) -> dict[str, float]:
    """Seconds per micro-batch of each device in a run's last step, forward and backward, over all its layer ranges.

    `run` is the folder of the run, or its metrics.jsonl. Raises InputError.
    """
    path = run / METRICS if run.is_dir() else run
    times_s: dict[str, float] = {}
    for event in _events(path):
        if event["event"] == "restart":
            times_s = {}
        elif event["event"] == "rank":
            times_s[event["device"]] = float(event["micro_batch_s"])
    if not times_s:
        raise InputError(f"{path}: measured no devices; give the metrics.jsonl of a run that has ended")
    return times_s


def read_operations(folder: Path) -> Frame:
    """One row per forward and backward of one step, predicted for the plan's GPUs and measured. Raises InputError.

    `stage` begins with the number of the stage and names its devices; times are seconds from the start of the step.
    """
    path = folder / TIMELINE
    events = read_mapping(path).get("traceEvents")
    try:
        rows = tuple(_operations(events))  # type: ignore[arg-type]
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(f"{path}: is no timeline of hexiopt train ({error}); give the folder of a run") from None
    return Frame(_OPERATION, rows)


def _operations(events: list[Mapping[str, Any]]) -> Iterator[tuple[Any, ...]]:
    pipelines = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    stages = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    for event in events:
        if event.get("cat") in _KINDS:
            name = pipelines[event["pid"]]
            measured = name.startswith("measured")
            number = int(name.removeprefix("measured: ").split()[1])
            stage = stages[event["pid"], event["tid"]].removeprefix("stage ")
            start_s, duration_s = event["ts"] * MICROSECOND, event["dur"] * MICROSECOND
            yield measured, number, stage, event["cat"], event["args"]["micro_batch"], start_s, start_s + duration_s
