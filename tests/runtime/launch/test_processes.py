"""Processes for a GPU do not come from a process that may have touched CUDA, nor does one that starts them touch it."""

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from hexiopt.files.plan_file import PlanFile
from hexiopt.files.problem_file import problem_sha256
from runtime.launch.processes import Child
from runtime.launch.torchrun import ProcessPlace
from runtime.measure import node
from runtime.measure.rank import Request
from runtime.training.rank import _agree_on_device
from tests.runtime.launch.test_faults import a_run, problem, wide
from tests.runtime.ranks import run_ranks

STATE = {"touched": False}


def tell(plan_file: PlanFile, end: Connection) -> None:
    """What a started process has of its parent's state, and of its arguments."""
    end.send((STATE["touched"], problem_sha256(plan_file.problem), plan_file.plan))


@pytest.mark.parametrize(("device", "inherits"), [("cpu", True), ("cuda", False)])
def test_a_process_for_a_gpu_inherits_nothing(monkeypatch: pytest.MonkeyPatch, device: str, inherits: bool) -> None:
    monkeypatch.setitem(STATE, "touched", True)
    plan_file = PlanFile(problem(), wide(), {})
    child = Child.start(device, tell, plan_file)
    try:
        assert child.end.recv() == (inherits, problem_sha256(plan_file.problem), plan_file.plan)
    finally:
        child.stop()
    assert child.process.exitcode is not None


def end_at_once(end: Connection) -> None:
    end.close()


@pytest.mark.parametrize(("gpus", "device"), [(2, "cuda"), (0, "cpu")])
def test_measuring_touches_cuda_in_its_processes_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, device: str
) -> None:
    started: list[tuple[str, int]] = []
    start = Child.start

    def recorded(device: str, work: Any, request: Request, place: ProcessPlace) -> Child:
        started.append((device, place.rank))
        return start("cpu", end_at_once)

    def refuse(*words: Any, **more: Any) -> Any:
        raise AssertionError("the process that starts others has touched CUDA")

    monkeypatch.setattr(node.Child, "start", recorded)
    monkeypatch.setattr(node, "num_gpus", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "is_available", refuse)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    Request(0.01).write(tmp_path / "request.json")
    assert node.main(tmp_path / "request.json") == 0
    assert started == [(device, rank) for rank in range(max(gpus, 1))]


def test_a_rank_computes_on_what_its_run_says(tmp_path: Path) -> None:
    """Whatever GPUs there are: the run of a file names its device."""
    run = a_run(tmp_path)
    assert run.device == "cpu"
    run.write(tmp_path / "run.json")
    assert type(run).read(tmp_path / "run.json") == run


def test_ranks_on_gpus_and_cpus_do_not_mix() -> None:
    def work(rank: int) -> str:
        store = torch.distributed.distributed_c10d._get_default_store()
        _agree_on_device(torch.distributed.PrefixStore("same", store), "cpu", rank, 3)
        try:
            _agree_on_device(torch.distributed.PrefixStore("mixed", store), "cuda" if rank == 1 else "cpu", rank, 3)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing refused"

    (said,) = set(run_ranks(3, work))
    assert said.startswith("InputError: train.device: rank 0 computes on a CPU, rank 1 on a GPU; all must do the same")
