"""A run read back: its steps, and the operations of both timelines."""

import json
from pathlib import Path
from typing import Any

import pytest

import hexiopt as hx
from experiments.reports.measured import MeasuredOperation, MeasuredRank, both_timelines
from hexiopt import InputError
from hexiopt.report.facts import PlanFacts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As `hexiopt train` leaves it, of two steps on two GPUs; each operation takes 0.1 s longer than the one before."""
    problem = hx.Problem(hx.Cluster.of({"rtx_4090": 2}), hx.model("tiny"), hx.Workload(4, 64))
    result = hx.solve(problem, "random", max_steps=20, constraints={"num_stages": 2, "replicas": False})
    plan, cost = result.found(), result.cost
    assert cost is not None
    ranks = []
    for stage, name in enumerate(("a", "b")):
        operations = [
            MeasuredOperation(("forward", "backward")[k % 2], 0, k // 2, 5.0 + k, 5.1 + 1.1 * k) for k in range(4)
        ]
        ranks.append(MeasuredRank(0, stage, 0, name, tuple(operations)))
    (tmp_path / "timeline.json").write_text(json.dumps(both_timelines(PlanFacts(problem, plan, cost), ranks)))
    step = {"norm": 1.0, "seconds": 0.25, "tokens_per_s": 1024.0, "mfu": 0.01}
    events: list[dict[str, Any]] = [{"event": "ready", "step": 0}]
    events += [{"event": "step", "step": k, "loss": 5.0 - k, **step} for k in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return tmp_path


def test_steps_and_operations(folder: Path) -> None:
    run = hx.read_training(folder)
    assert run.steps["loss"] == (4.0, 3.0)
    assert repr(run) == "TrainedRun(2 steps, loss 4.0000 → 3.0000, 250 ms a step)"
    measured = [row for row in run.operations if row["measured"]]
    assert [row["stage"] for row in measured] == ["0: a"] * 4 + ["1: b"] * 4
    assert [row["kind"] for row in measured[:2]] == ["forward", "backward"]
    assert [row["micro_batch"] for row in measured[:4]] == [0, 0, 1, 1]
    assert [round(row["end_s"] - row["start_s"], 6) for row in measured[:4]] == [0.1, 0.2, 0.3, 0.4]
    predicted = [row for row in run.operations if not row["measured"]]
    assert {row["stage"].split(":")[0] for row in predicted} == {"0", "1"}
    assert all(row["end_s"] > row["start_s"] for row in run.operations)


def test_the_picture_has_both_steps(folder: Path) -> None:
    figure = hx.read_training(folder).plot()
    predicted, measured = figure.axes
    assert [label.get_text() for label in measured.get_yticklabels()] == ["0·0: a", "0·1: b"]
    assert len(measured.patches) == 8
    assert len(predicted.get_yticklabels()) == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.jsonl", "{", "metrics.jsonl: cannot be read as a run's metrics"),
        ("metrics.jsonl", '{"event": "step"}', "metrics.jsonl: cannot be read as a run's metrics"),
        ("timeline.json", "{}", "timeline.json: is no timeline of hexiopt train"),
    ],
)
def test_what_is_no_run_is_one_line(folder: Path, name: str, text: str, message: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(InputError, match=message):
        hx.read_training(folder)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"metrics\.jsonl"):
        hx.read_training(tmp_path)
