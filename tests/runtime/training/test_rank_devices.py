"""Ranks compute on what their run says, all on the same kind of device."""

from pathlib import Path

import torch
from torch.distributed.distributed_c10d import PrefixStore

from runtime.training.rank import _agree_on_device
from tests.runtime.launch.test_faults import a_run
from tests.runtime.ranks import run_ranks


def test_a_rank_computes_on_what_its_run_says(tmp_path: Path) -> None:
    """Whatever GPUs there are: the run of a file names its device."""
    run = a_run(tmp_path)
    assert run.device == "cpu"
    run.write(tmp_path / "run.json")
    assert type(run).read(tmp_path / "run.json") == run


def test_ranks_on_gpus_and_cpus_do_not_mix() -> None:
    def work(rank: int) -> str:
        store = torch.distributed.distributed_c10d._get_default_store()
        _agree_on_device(PrefixStore("same", store), "cpu", rank, 3)
        try:
            _agree_on_device(PrefixStore("mixed", store), "cuda" if rank == 1 else "cpu", rank, 3)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing refused"

    (message,) = set(run_ranks(3, work))
    assert message.startswith(
        "InputError: train.device: rank 0 computes on a CPU, rank 1 on a GPU; all must do the same"
    )
