"""On a GPU the host that waits for its device waits for every receive that is posted, too: a step must not.

NCCL's messages are kernels: `torch.cuda.synchronize()` ends when all that are enqueued have come. A rank that waits
with a receive posted may be what its sender waits for. gloo knows no such order, so a double of the device stands in:
whatever makes the host wait fails while a receive has been posted that nothing has waited for yet.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hexiopt.plan.plan import Pipeline, Plan, Sharding, Stage
from hexiopt.problem.model import ModelSpec
from hexiopt.schedules.registry import GPIPE, INTERLEAVED, ONE_F_ONE_B
from hexiopt.schedules.schedule import Schedule, StagePosition, operations
from runtime.device import StreamClock, clock_of
from tests.runtime.parallel.test_training import SEQ_LEN, SETTINGS, trainee
from tests.runtime.ranks import run_ranks

MODEL = ModelSpec(
    name="small",
    architecture="llama",
    num_layers=8,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=2,
    head_dim=4,
    ffn_size=8,
    vocab_size=16,
    max_positions=16,
    tied_embeddings=True,
)


class HostWaitedError(Exception):
    """The host has waited for the device with a receive posted."""


class Receive:
    """A posted receive, known until something waits for it."""

    posted = 0

    def __init__(self, work: dist.Work) -> None:
        self._work: dist.Work | None = work
        Receive.posted += 1

    def wait(self) -> bool:
        assert self._work is not None, "waited for twice"
        Receive.posted -= 1
        work, self._work = self._work, None
        return work.wait()


def host_waits() -> None:
    if Receive.posted:
        raise HostWaitedError(f"{Receive.posted} receives are posted")


class Event:
    """An event of a stream, whose work is done as soon as it is enqueued here."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at_s = 0.0

    def record(self) -> None:
        self._at_s = time.time()

    def synchronize(self) -> None:
        host_waits()

    def elapsed_time(self, later: "Event") -> float:
        return 1e3 * (later._at_s - self._at_s)


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """Within, receives are counted, and what would make the host wait for a GPU refuses while one is posted."""
    irecv = dist.irecv

    def guard(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: torch.Tensor, *arguments: Any) -> Any:
            host_waits()
            return method(self, *arguments)

        return call

    tensor = torch.Tensor
    with (
        patch.object(dist, "irecv", lambda *words, **more: Receive(irecv(*words, **more))),
        patch.object(torch.cuda, "synchronize", lambda device=None: host_waits()),
        patch.object(torch.cuda, "Event", Event),
        patch.multiple(tensor, **{name: guard(getattr(tensor, name)) for name in ("item", "tolist", "__float__")}),
        patch("runtime.training.trainee.clock_of", lambda device: StreamClock()),
    ):
        yield


def plan_of(schedule: Schedule, num_stages: int, num_chunks: int, num_micro_batches: int) -> Plan:
    """One pipeline, a device a stage."""
    cuts = [MODEL.num_layers * k // (num_stages * num_chunks) for k in range(num_stages * num_chunks + 1)]
    ranges = list(pairwise(cuts))
    stages = [
        Stage.of_replicas(
            Stage.of((s,), 0, 1).parallelism.replicas, layers, ("none",) * sum(end - first for first, end in layers)
        )
        for s in range(num_stages)
        for layers in [tuple(ranges[s::num_stages])]
    ]
    return Plan((Pipeline(tuple(stages), num_micro_batches),), schedule, Sharding(0))


@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_chunks", "num_micro_batches"),
    [
        (ONE_F_ONE_B, 2, 1, 4),
        (ONE_F_ONE_B, 4, 1, 1),
        (ONE_F_ONE_B, 4, 1, 6),
        (GPIPE, 3, 1, 4),
        (INTERLEAVED, 2, 2, 4),
        (INTERLEAVED, 2, 4, 2),
    ],
)
def test_a_step_never_waits_with_a_receive_posted(
    schedule: Schedule, num_stages: int, num_chunks: int, num_micro_batches: int
) -> None:
    plan = plan_of(schedule, num_stages, num_chunks, num_micro_batches)

    def work(rank: int) -> Any:
        tokens = torch.randint(MODEL.vocab_size, (num_micro_batches, SEQ_LEN + 1))
        with like_a_gpu():
            rank_trainee = trainee(plan, MODEL, num_micro_batches)
            began_s = time.time()
            for _ in range(2):
                rank_trainee.step(lambda first, end: tokens[first:end], SETTINGS.lr)
            timeline = rank_trainee.pipeline.timeline()
        assert Receive.posted == 0
        at = StagePosition(rank, num_stages, num_micro_batches, num_chunks)
        assert [span.operation for span in timeline] == operations(schedule, at)
        moments = [moment for span in timeline for moment in (span.began_s, span.ended_s)]
        assert began_s <= moments[0]
        assert moments == sorted(moments)
        assert moments[-1] <= time.time()
        return True

    assert run_ranks(num_stages, work) == [True] * num_stages


def test_the_double_refuses_what_waits() -> None:
    """A clock that synchronises fails it, as do numbers read from the device, once a receive is posted."""

    def work(rank: int) -> list[str]:
        refused = []
        with like_a_gpu():
            torch.cuda.synchronize()
            here = torch.zeros(2)
            if rank == 0:
                coming = dist.irecv(here, 1)
                for wait in (torch.cuda.synchronize, lambda: float(torch.ones(())), torch.ones(1).tolist):
                    with pytest.raises(HostWaitedError):
                        wait()
                    refused.append("refused")
                assert coming is not None
                coming.wait()
                torch.cuda.synchronize()
            else:
                dist.send(torch.ones(2), 0)
        return refused

    assert run_ranks(2, work) == [["refused"] * 3, []]


def test_a_device_has_its_clock() -> None:
    assert isinstance(clock_of(torch.device("cuda", 0)), StreamClock)
    clock = clock_of(torch.device("cpu"))
    marks = [clock.mark(), clock.mark()]
    assert clock.read(marks) == sorted(marks)
