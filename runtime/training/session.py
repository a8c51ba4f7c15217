"""A training run as its user follows it: the steps that count, what the ranks measured, and a line of JSON an event."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

from hexiopt.problem.problem import Problem
from runtime.events import Event


@dataclass(frozen=True)
class TrainedStep:
    """A step that has ended. `mfu` counts all devices of the plan's cluster; None where CPUs stand in for them."""

    step: int
    loss: float
    norm: float
    seconds: float
    tokens_per_s: float
    mfu: float | None

    @classmethod
    def of(cls, event: Event, problem: Problem, *, on_its_devices: bool = True) -> "TrainedStep":
        """The step that an event reports."""
        seconds = event["seconds"]
        mfu = problem.mfu(seconds) if on_its_devices else None
        return cls(event["step"], event["loss"], event["norm"], seconds, problem.workload.tokens / seconds, mfu)


@dataclass(frozen=True)
class ValidatedStep:
    """The loss of what is not trained on, after a step."""

    step: int
    loss: float


@dataclass
class Session:
    """Follows the events of a run of `problem` and writes them to `metrics`.

    `on_step` is called with each step, `log` with its numbers and the loss of each validation, `tell` with one line on
    each restart, and on whatever else is to be known. Steps that a restart takes back leave `steps` and `validations`;
    `timelines` holds the last event of each rank, with the operations of its last step, of which `metrics` has the
    seconds of a micro-batch; `plan` is that of the last restart, if any; `traces` are files.
    """

    problem: Problem
    metrics: TextIO
    on_step: Callable[[TrainedStep], None]
    log: Callable[[int, Mapping[str, float]], None]
    tell: Callable[[str], None]
    steps: list[TrainedStep] = field(default_factory=list)
    validations: list[ValidatedStep] = field(default_factory=list)
    traces: list[Path] = field(default_factory=list)
    timelines: list[Event] = field(default_factory=list)
    plan: Path | None = None
    _on_its_devices: bool = True

    def follow(self, events: Iterable[Event]) -> None:
        """Follow the run to its end. Raises what `events` raises."""
        for event in events:
            match event["event"]:
                case "timeline":
                    self.timelines.append(event)
                    event = {"event": "rank", "device": event["device"], "micro_batch_s": _micro_batch_s(event)}
                case "ready":
                    types = {gpu.type_name for gpu in self.problem.cluster.types}
                    self._on_its_devices = event.get("device_type") != "cpu" or types == {"cpu"}
                case "step":
                    step = TrainedStep.of(event, self.problem, on_its_devices=self._on_its_devices)
                    self.steps.append(step)
                    values = asdict(step)
                    event = {"event": "step", **values}
                    self.on_step(step)
                    self.log(values.pop("step"), {key: value for key, value in values.items() if value is not None})
                case "validation":
                    validated = ValidatedStep(event["step"], event["loss"])
                    self.validations.append(validated)
                    event = {"event": "validation", **asdict(validated)}
                    self.tell(f"step {validated.step}: validation loss {validated.loss:.4f}")
                    self.log(validated.step, {"validation_loss": validated.loss})
                case "trace":
                    self.traces.append(Path(event["path"]))
                case "note":
                    self.tell(event["reason"])
                case "restart":
                    self.plan = Path(event["plan"])
                    resumed = 0 if event["from"] is None else step_of(event["from"])
                    self.steps = [step for step in self.steps if step.step <= resumed]
                    self.validations = [
                        validation for validation in self.validations if validation.step <= resumed and event["from"]
                    ]
                    self.tell(f"{event['reason']}; going on from {event['from'] or 'the start'}")
            print(json.dumps(event), file=self.metrics, flush=True)


def _micro_batch_s(timeline: Event) -> float:
    """Seconds of a forward and a backward of a micro-batch of a rank, in all ranges of its layers."""
    operations = timeline["operations"]
    busy_s: float = sum(ended_s - began_s for *_, began_s, ended_s in operations)
    return busy_s / len({micro_batch for _, _, micro_batch, _, _ in operations})


def step_of(checkpoint: str | Path) -> int:
    """The number of steps that a checkpoint has behind it."""
    return int(Path(checkpoint).name.removeprefix("step-"))
