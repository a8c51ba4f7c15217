"""`hexiopt train` on a dataset, with document masking, validation, loggers and a trace; and resumed."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run
from tests.experiments.test_train import plan, plan_of  # noqa: F401 (a fixture)

CORPUS = ("train.data=rows.jsonl", "train.separator=0", "train.document_masking=true", "train.validation=0.25")
STEPS = ("train.steps=4", "train.warmup_steps=1", "train.checkpoint_every=2", "train.validation_every=2")


def rows(folder: Path) -> None:
    texts = [f"{k} times {j} is {k * j}\n" * (j % 5 + 1) for k in range(20) for j in range(1, 12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def events(folder: Path, kind: str) -> list[Any]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.mark.slow
def test_a_dataset_with_validation_and_a_trace(hexiopt: Run, tmp_path: Path, plan: Path) -> None:  # noqa: F811
    pytest.importorskip("datasets")
    rows(tmp_path)
    command = ("train", f"plan={plan}", *CORPUS, *STEPS)
    ran = hexiopt(*command, "train.loggers=[tensorboard]", "train.trace_steps=1", "hydra.run.dir=out")
    assert ran.code == 0, ran.err
    out = tmp_path / "out"
    validations = events(out, "validation")
    assert [event["step"] for event in validations] == [0, 2, 4]
    first, second, third = (event["loss"] for event in validations)
    assert 0 < third < second < first < 6
    assert f"{first:.4f} → {third:.4f} nats per token" in ran.out
    assert f"step 2: validation loss {second:.4f}" in ran.err
    assert json.loads((out / "run.json").read_text())["settings"]["separator"] == 0
    assert list((out / "tensorboard").glob("events.*"))
    assert (out / "loss.png").stat().st_size > 5000
    assert "ui.perfetto.dev" in ran.out
    traces = sorted((out / "trace").iterdir())
    assert len(traces) == len(json.loads(plan.read_text())["pipelines"][0]["stages"]) * 2 == len(events(out, "trace"))
    assert {path.name.rpartition("-rank-")[0] for path in traces} == {"steps-00000003-00000003"}
    events_by_rank = [json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] for trace in traces]
    assert {"0F0", "0B0.0"} <= {event["name"] for rank in events_by_rank for event in rank}

    resumed = (*command, f"train.resume={out / 'checkpoints' / 'step-00000002'}", "hydra.run.dir=again")
    ran = hexiopt(*resumed, "train.validation=0.5")
    assert ran.code == 2
    assert "was trained with train.validation=0.25, not 0.5, which would cut or order its text anew" in ran.err


@pytest.mark.slow
def test_a_resumed_run_validates_as_one_that_was_not(hexiopt: Run, tmp_path: Path, plan: Path) -> None:  # noqa: F811
    pytest.importorskip("datasets")
    rows(tmp_path)
    command, losses = ("train", f"plan={plan}", *CORPUS, *STEPS), []
    for name, more in (("whole", ()), ("again", (f"train.resume={tmp_path}/whole/checkpoints/step-00000002",))):
        ran = hexiopt(*command, *more, f"hydra.run.dir={name}")
        assert ran.code == 0, ran.err
        losses.append({event["step"]: event["loss"] for event in events(tmp_path / name, "validation")})
    assert [[*run_losses] for run_losses in losses] == [[0, 2, 4], [4]]
    assert losses[1][4] == pytest.approx(losses[0][4], rel=1e-6)


@pytest.mark.slow
def test_training_is_the_same_with_validation(hexiopt: Run, tmp_path: Path, plan: Path) -> None:  # noqa: F811
    """Of another text, which changes nothing that is trained on."""
    (tmp_path / "other.txt").write_text("what is not trained on\n" * 100)
    losses = []
    for name, more in (("without", ()), ("with", ("train.validation=other.txt", "train.validation_every=1"))):
        ran = hexiopt("train", f"plan={plan}", *STEPS, *more, f"hydra.run.dir={name}")
        assert ran.code == 0, ran.err
        losses.append([(event["loss"], event["norm"]) for event in events(tmp_path / name, "step")])
    assert losses[0] == losses[1]
    assert len(events(tmp_path / "with", "validation")) == 5
