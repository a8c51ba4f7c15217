"""What whoever follows a run sees: steps and validations, and what a restart takes back of them."""

import json
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest

from experiments.app.configurations import named_cluster
from runtime.events import Event
from runtime.training.session import Session, ValidatedStep
from tests.runtime.training.test_preparation import PROBLEM


def step(number: int) -> Event:
    return {"event": "step", "step": number, "loss": 5.0 - number, "norm": 1.0, "seconds": 0.5}


def validation(number: int, loss: float) -> Event:
    return {"event": "validation", "step": number, "loss": loss, "device": "a:0", "rank": 0, "pid": 7}


def restart(checkpoint: str | None) -> Event:
    return {"event": "restart", "from": checkpoint, "plan": "plan.json", "reason": "a:0 was lost"}


@pytest.mark.parametrize(
    ("checkpoint", "steps", "validations"),
    [("checkpoints/step-00000002", [1, 2, 3], [(0, 9.0), (2, 8.0)]), (None, [3], [])],
)
def test_a_restart_takes_back_what_follows_its_checkpoint(
    checkpoint: str | None, steps: list[int], validations: list[tuple[int, float]]
) -> None:
    logged: list[Any] = []
    told: list[str] = []
    metrics = StringIO()
    session = Session(PROBLEM, metrics, lambda _: None, lambda number, values: logged.append(values), told.append)
    before = [validation(0, 9.0), step(1), step(2), validation(2, 8.0), step(3), step(4), validation(4, 7.0)]
    session.follow([*before, restart(checkpoint), step(3), {"event": "trace", "path": "trace/one.json.gz"}])
    assert [record.step for record in session.steps] == steps
    assert session.validations == [ValidatedStep(*pair) for pair in validations]
    assert [path.name for path in session.traces] == ["one.json.gz"]
    assert told == [
        "step 0: validation loss 9.0000",
        "step 2: validation loss 8.0000",
        "step 4: validation loss 7.0000",
        f"a:0 was lost; going on from {checkpoint or 'the start'}",
    ]
    assert [values["validation_loss"] for values in logged if "validation_loss" in values] == [9.0, 8.0, 7.0]
    assert {name for values in logged for name in values} == {
        *("loss", "norm", "seconds", "tokens_per_s", "mfu", "validation_loss")
    }
    assert session.steps[0].mfu == pytest.approx(PROBLEM.mfu(0.5))
    written = [json.loads(line) for line in metrics.getvalue().splitlines()]
    assert written[0] == {"event": "validation", "step": 0, "loss": 9.0}
    assert len(written) == 10


def test_a_cpu_that_stands_in_for_a_gpu_has_no_mfu() -> None:
    logged: list[Any] = []
    metrics = StringIO()
    session = Session(PROBLEM, metrics, lambda _: None, lambda _, values: logged.append(values), lambda _: None)
    session.follow([{"event": "ready", "step": 0, "device_type": "cpu"}, step(1)])
    assert session.steps[0].mfu is None
    assert set(logged[0]) == {"loss", "norm", "seconds", "tokens_per_s"}
    assert json.loads(metrics.getvalue().splitlines()[1])["mfu"] is None
    here = replace(PROBLEM, cluster=named_cluster("local_cpu"))
    session = Session(here, metrics, lambda _: None, lambda *_: None, lambda _: None)
    session.follow([{"event": "ready", "step": 0, "device_type": "cpu"}, step(1)])
    assert session.steps[0].mfu is not None, "the peak is this CPU's"
