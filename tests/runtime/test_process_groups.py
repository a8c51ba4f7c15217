"""Groups of ranks, and what is on its way between them."""

import gc
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from runtime import network
from runtime.network import Outbox, ProcessGroups
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
        outbox, checks = Outbox(), []
        if rank == 0:
            part = torch.ones(3)
            seen = weakref.ref(part)
            outbox.put(dist.isend(part, 1), part)  # type: ignore[arg-type]
            del part
            gc.collect()
            checks.append(seen() is not None)
            dist.barrier()
            outbox.finish()
            outbox.tensors()
            gc.collect()
            checks.append(seen() is None)
        else:
            dist.barrier()  # only then
            dist.recv(torch.zeros(3), 0)
        return checks

    assert run_ranks(2, work)[0] == [True, True]


def test_nccl_runs_as_stated_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    for name in ("NCCL_LAUNCH_ORDER_IMPLICIT", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # so that it is removed afterwards
        monkeypatch.delenv(name)
    network._set_nccl_defaults()
    assert [os.environ[n] for n in ("NCCL_LAUNCH_ORDER_IMPLICIT", "TORCH_NCCL_DUMP_ON_TIMEOUT")] == ["1", "1"]
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"


def test_pairs_are_warmed_as_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL makes a communicator for messages of its own: a collective over the pair would make another one."""
    used: list[list[tuple[str, int]]] = [[], [], []]  # by rank
    for name in ("isend", "irecv"):
        original = getattr(dist, name)

        def note(part: Any, peer: int, *, group: Any = None, name: str = name, of: Any = original) -> Any:
            used[dist.get_rank()].append((name, peer))
            return of(part, peer, group=group)

        monkeypatch.setattr(dist, name, note)
    run_in_order(3, lambda rank: ProcessGroups([(0, 1, 2), (0, 2)], TIMEOUT_S, PAIRS))
    assert used == [[("irecv", 1)], [("isend", 0), ("isend", 2)], [("irecv", 1)]]


def test_the_first_step_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs; that the limit changes is seen over gloo."""
    assert network._first_s(60.0, torch.device("cuda", 1)) == 600.0
    assert network._first_s(900.0, torch.device("cuda", 1)) == 900.0
    assert network._first_s(60.0, torch.device("cpu")) == 60.0

    def work(rank: int) -> list[float]:
        monkeypatch.setattr(network, "_first_s", lambda timeout_s, device: 2 * timeout_s)
        groups, limits_s = ProcessGroups([(0, 1), (1, 2)], TIMEOUT_S), []
        group = dist.group.WORLD if rank == 2 else groups.of((0, 1))
        for _ in range(2):
            assert group is not None
            limits_s.append(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
            groups.step_ended()
        return limits_s

    assert run_ranks(3, work) == [[2 * TIMEOUT_S, TIMEOUT_S]] * 2 + [[TIMEOUT_S, TIMEOUT_S]]


def test_communicators_have_few_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        """As of torch with CUDA, which this one need not have."""

        def __init__(self) -> None:
            self.config = SimpleNamespace(max_ctas=0)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    assert network._options(torch.device("cuda", 0), 4).config.max_ctas == 4
    assert network._options(torch.device("cuda", 0), None) is None
    assert network._options(torch.device("cpu"), 4) is None
    stub = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"
    assert "max_ctas: int" in stub.read_text(encoding="utf-8")
