"""Groups of ranks, and what is on its way between them."""

import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime.network import Outbox, ProcessGroups, set_nccl_defaults
from tests.runtime.ranks import TIMEOUT_S, run_ranks
from tests.runtime.stream_order import run_in_order

PAIRS = [(1, 0), (1, 2)]


def exchange(rank: int) -> list[float]:
    """Rank 1 sends two messages to rank 0 and one to rank 2; all sum a number meanwhile. Returns what came."""
    groups, outbox = ProcessGroups([(0, 1, 2), (0, 2)], TIMEOUT_S, PAIRS), Outbox()
    expected = {0: 2, 1: 0, 2: 1}[rank]
    came = [torch.zeros(2) for _ in range(expected)]
    works = [groups.receive(x, 1) for x in came]
    for receiver, value in ((0, 10.0), (0, 11.0), (2, 5.0)) if rank == 1 else ():
        part = torch.full((2,), value)
        outbox.put(groups.send(part, receiver), part)
    for work in works:
        work.wait()
    outbox.finish()
    total = torch.full((1,), float(rank))
    dist.all_reduce(total, group=groups.of((0, 1, 2)))
    assert groups.of((0,)) is None
    return [float(x[0]) for x in (*came, total)]


@pytest.mark.parametrize("run", [run_ranks, run_in_order])
def test_messages_of_a_pair_keep_their_order(run: Any) -> None:
    """Over gloo and over a group for each pair, without tags."""
    assert run(3, exchange) == [[10.0, 11.0, 3.0], [3.0], [5.0, 3.0]]


def test_an_outbox_keeps_what_is_sent_until_it_has_arrived() -> None:
    def work(rank: int) -> list[bool]:
        outbox, kept = Outbox(), []
        if rank == 0:
            part = torch.ones(3)
            seen = weakref.ref(part)
            outbox.put(dist.isend(part, 1), part)  # type: ignore[arg-type]
            del part
            gc.collect()
            kept.append(seen() is not None)
            dist.barrier()
            outbox.finish()
            outbox.tensors()
            gc.collect()
            kept.append(seen() is None)
        else:
            dist.barrier()  # only then
            dist.recv(torch.zeros(3), 0)
        return kept

    assert run_ranks(2, work)[0] == [True, True]


def test_nccl_runs_as_stated_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    for name in ("NCCL_LAUNCH_ORDER_IMPLICIT", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that it is removed afterwards
        monkeypatch.delenv(name)
    set_nccl_defaults()
    assert [os.environ[n] for n in ("NCCL_LAUNCH_ORDER_IMPLICIT", "TORCH_NCCL_DUMP_ON_TIMEOUT")] == ["1", "1"]
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
