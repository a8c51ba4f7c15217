"""What is said of a run of which a rank was killed, by made-up runs of real processes; `test_gpu.py` has a real run."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from experiments.lab.trials import killed
from experiments.measure.gpu_processes import toy_model, toy_workload
from runtime.launch.meeting import TrainingFailedError
from runtime.settings import Settings
from runtime.training.settings import TrainingRun
from tests.experiments.lab.trials.gpu import first_gpu, needs_gpu
from tests.solvers.problems import cluster

__all__ = ["first_gpu"]
VICTIM = "process-1:0"


@contextmanager
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(3)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def outcome(
    monkeypatch: pytest.MonkeyPatch, folder: Path, line: str | None, *, steps: int = 3, ends_all: bool = True
) -> tuple[str | None, float | None]:
    """Of a run that has so many steps, then ends as `line` says, if at all, once its processes have, if they do."""
    monkeypatch.setattr(killed, "_agents", lambda *_: nullcontext())
    monkeypatch.setattr(killed, "_MOST_S", 1.0)
    with processes() as started, ThreadPoolExecutor(1) as watcher:

        def train(*_: Any, **__: Any) -> Iterator[dict[str, Any]]:
            for rank, process in enumerate(started):
                yield {"event": "ready", "rank": rank, "pid": process.pid}
            for step in range(1, steps + 1):
                yield {"event": "step", "step": step}
            for process in started if ends_all else ():
                process.kill()  # of which none is waited for: an exit code is no process
            if line is not None:
                raise TrainingFailedError(line)

        monkeypatch.setattr(killed, "trained", train)
        run = TrainingRun("killed", folder / "plan.json", folder / "tokens.npy", folder / "checkpoints", Settings())
        training = killed._Training(watcher)
        return training.trouble(training.end(run, folder, ["process-0"]), VICTIM)


def test_a_run_that_names_who_died_is_as_it_must_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trouble, ended_s = outcome(monkeypatch, tmp_path, f"rank 1 ({VICTIM}) ended with exit code -9")
    assert trouble is None
    assert ended_s is not None
    assert 0 < ended_s < 1


@pytest.mark.parametrize(
    ("line", "more", "words"),
    [
        ("rank 0: Connection closed by peer", {}, f"{VICTIM} was killed, and the run said: rank 0: Connection"),
        (f"{VICTIM} is gone\nTraceback", {}, "was killed, and the run said"),
        (None, {}, f"{VICTIM} was killed, and the run said: nothing"),
        (f"{VICTIM} is gone", {"ends_all": False}, f"processes were left 1 s after {VICTIM} was killed"),
        ("no port", {"steps": 0}, "nothing was killed: no port"),
        (None, {"steps": 1}, "nothing was killed: 2 steps did not end in 90 s"),
    ],
)
def test_a_run_that_ends_otherwise_is_trouble(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str | None, more: dict[str, Any], words: str
) -> None:
    trouble, _ = outcome(monkeypatch, tmp_path, line, **more)
    assert trouble is not None
    assert words in trouble


@needs_gpu
def test_a_rank_killed_over_nccl_gives_the_gpu_back(first_gpu: None, tmp_path: Path) -> None:
    (machine,) = cluster(("a", "fast", 1)).machines
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # which looks at the GPU
        followed = apart.submit(killed.kill_rank, tmp_path, machine, toy_model(), toy_workload("fp32")).result()
    assert (followed.backend, followed.trouble) == ("nccl", None)
    assert followed.lost_bytes is not None
    assert followed.lost_bytes < 64 * 2**20  # each process had some hundred MiB
