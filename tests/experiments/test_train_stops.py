"""How `hexiopt train` ends before its last step: by Ctrl-C with a checkpoint, by a fault with what resumes it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.app.common import interrupt
from runtime.launch.head import Stop
from runtime.launch.meeting import TrainingFailedError
from runtime.state.checkpoint import INDEX, finished_checkpoints
from tests.conftest import ROOT, Ran, Run
from tests.experiments.test_train import plan  # noqa: F401

CTRL_C = "Ctrl-C"
TRAIN = ("train.steps=5000", "train.checkpoint_every=1000", "train.device=cpu", "report=false")
# Ctrl-C also where this runs in the background, where shells let it be ignored.
_HEARS_CTRL_C = """
import signal, sys
from experiments.app.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(["train", *sys.argv[1:]]))
"""


def interrupt_run(folder: Path, *words: str, presses: int = 1) -> Ran:
    """A run that gets Ctrl-C after its third step."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", _HEARS_CTRL_C, *words, "hydra.run.dir=out"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = folder / "out" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"event": "step"') < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    for _ in range(presses):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    out, err = process.communicate(timeout=600)
    return Ran(process.returncode, out, err)


def steps(folder: Path) -> list[int]:
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [event["step"] for event in events if event["event"] == "step"]


@pytest.mark.slow
def test_ctrl_c_saves_a_checkpoint_and_says_what_resumes_it(hexiopt: Run, tmp_path: Path, plan: Path) -> None:  # noqa: F811
    ran = interrupt_run(tmp_path, f"plan={plan}", *TRAIN)
    assert ran.code == 130, ran.err
    last = steps(tmp_path / "out")[-1]
    *told, end = ran.err.splitlines()
    assert any("stopping: a checkpoint is written first, within 120 s" in line for line in told), ran.err
    message, _, resume = end.partition("; resume with ")
    assert message == f"hexiopt: interrupted at step {last}"
    assert resume == f"train.resume=out/checkpoints/step-{last:08d}"
    assert f"steps {last}" in " ".join(ran.out.split())
    ran = hexiopt("train", f"plan={plan}", resume, f"train.steps={last + 2}", *TRAIN[1:], "hydra.run.dir=again")
    assert ran.code == 0, ran.err
    assert steps(tmp_path / "again") == [last + 1, last + 2]


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"presses": 2}, {"words": ("train.stop_s=0",)}])
def test_a_second_ctrl_c_or_no_time_ends_it_at_once(tmp_path: Path, plan: Path, how: dict[str, Any]) -> None:  # noqa: F811
    words, presses = how.get("words", ()), how.get("presses", 1)
    ran = interrupt_run(tmp_path, f"plan={plan}", *TRAIN, "train.checkpoint_every=2", *words, presses=presses)
    assert ran.code == 130, ran.err
    last = finished_checkpoints(tmp_path / "out" / "checkpoints")[-1]
    assert ran.err.splitlines()[-1].endswith(f"; resume with train.resume=out/checkpoints/{last.name}")


@pytest.fixture
def told_events(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any] | str]:
    """What a run tells before it fails, or before a Ctrl-C ends it; another word is a checkpoint."""
    events: list[dict[str, Any] | str] = []

    def training_events(run: Any, *_: Any, stop: Stop, **__: Any) -> Iterator[dict[str, Any]]:
        for event in events:
            if event == CTRL_C:
                interrupt.pressed = True
                assert stop.must_stop()
                return
            if isinstance(event, str):
                (run.checkpoints / event).mkdir(parents=True)
                (run.checkpoints / event / INDEX).touch()
            else:
                yield event
        raise TrainingFailedError("rank 1 (old:0): out of memory")

    monkeypatch.setattr("runtime.launch.head.training_events", training_events)
    return events


def step(number: int) -> dict[str, Any]:
    return {"event": "step", "step": number, "loss": 1.0, "norm": 1.0, "seconds": 1.0}


@pytest.mark.parametrize(
    ("events", "folder", "ending"),
    [
        ([], "out", ""),
        ([step(1)], "out", "; ended at step 1, before the first checkpoint (train.checkpoint_every=25)"),
        (
            [step(1), "step-00000001", step(2)],
            "out",
            "; ended at step 2; resume with train.resume=out/checkpoints/step-00000001",
        ),
        (
            [step(1), "step-00000001"],
            "my run=1",
            "; ended at step 1; resume with \"train.resume='my run=1/checkpoints/step-00000001'\"",
        ),
    ],
)
def test_a_run_that_fails_says_at_which_step_and_what_resumes_it(
    hexiopt: Run,
    plan: Path,  # noqa: F811
    told_events: list[dict[str, Any] | str],
    events: list[dict[str, Any] | str],
    folder: str,
    ending: str,
) -> None:
    told_events += events
    ran = hexiopt("train", f"plan={plan}", "report=false", f"hydra.run.dir='{folder}'")
    assert (ran.code, ran.err.splitlines()[-1]) == (1, f"hexiopt: rank 1 (old:0): out of memory{ending}")


def test_a_stopped_run_says_what_resumes_it(
    hexiopt: Run,
    plan: Path,  # noqa: F811
    told_events: list[dict[str, Any] | str],
) -> None:
    """Without processes; a slow test presses Ctrl-C."""
    told_events += [step(1), step(2), "step-00000002", CTRL_C]
    ran = hexiopt("train", f"plan={plan}", "report=false", "hydra.run.dir=out")
    last = "hexiopt: interrupted at step 2; resume with train.resume=out/checkpoints/step-00000002"
    assert (ran.code, ran.err.splitlines()[-1]) == (130, last)


def test_ctrl_c_in_the_search_keeps_its_plan_and_trains_nothing(
    hexiopt: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experiments import train

    search = train.search  # type: ignore[attr-defined]

    def press_and_search(*given: Any) -> Any:
        interrupt.pressed = True
        return search(*given)

    monkeypatch.setattr(train, "search", press_and_search)
    asked = ("cluster=small_mixed", "model=tiny", "solver=random", "solver.max_steps=20", "workload.global_batch=4")
    ran = hexiopt("train", *asked, "workload=small", "report=false", "hydra.run.dir=out")
    assert (ran.code, ran.err) == (130, "hexiopt: interrupted; the best plan so far is kept\n")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"plan.json"}


def test_data_are_opened_before_torch_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "b.txt").symlink_to("nowhere")
    code = "import sys; from experiments.app.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    words = ["train", "cluster=small_mixed", "model=tiny", "train.data=texts"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr.count("\n")) == (0, 1), ran.stderr
    assert "texts/b.txt: cannot be read" in ran.stderr
