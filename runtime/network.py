"""Between ranks: the process groups of a run, and the messages that are on their way. Nothing else in `runtime/` names
a backend of `torch.distributed`.

Messages between two ranks come in the order in which they are sent: there are no tags, which NCCL would ignore.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory
from torch.distributed.distributed_c10d import Store, _set_pg_timeout

from hexiopt.cost.executors.communicators import Channels
from hexiopt.numbers.coefficients import WORLD_CHANNELS

_FIRST_STEP_S = 600.0
_ANY = Channels()


def is_gloo() -> bool:
    """Whether ranks talk over gloo, whose groups carry messages and collectives of any order at once. Elsewhere a group
    is a queue."""
    return bool(dist.get_backend() == "gloo")


def join_world(
    device: torch.device,
    rank: int,
    world_size: int,
    timeout_s: float,
    *,
    store: Store | None = None,
    address: str | None = None,
    interface: str | None = None,
) -> None:
    """Make the world of all ranks, which meet in a `store` or at an `address` (host:port of rank 0). Ranks on CPUs talk
    over the `interface` of their machine, if one is given."""
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    if device.type == "cuda":
        _set_nccl_defaults()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        init_method=None if address is None else f"tcp://{address}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=_first_s(timeout_s, device)),
        pg_options=_options(device, WORLD_CHANNELS),
    )


def gathered_products(
    x: Tensor, matrices: Sequence[Tensor], group: dist.ProcessGroup, returns_whole: bool = False
) -> tuple[Tensor | None, list[Tensor]]:
    """All ranks' rows [T, ...] of which each gives as many [t, ...], if asked for, and their products with matrices
    [inputs, outputs]. GPUs read each other's memory, a part at a time, and multiply what has come meanwhile."""
    symmetric = torch.ops.symm_mem.fused_all_gather_matmul
    gather = symmetric if x.is_cuda else _symmetric_memory._fused_all_gather_matmul_fallback
    whole, products = gather(x.contiguous(), list(matrices), 0, group.group_name, return_A=returns_whole)
    return whole, products


def scattered_product(x: Tensor, matrix: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The ranks' sum of products of rows [T, ...] with a matrix [inputs, outputs], of which each keeps as many rows
    [t, ...]. GPUs send what is done while they multiply the rest."""
    symmetric = torch.ops.symm_mem.fused_matmul_reduce_scatter
    scatter = symmetric if x.is_cuda else _symmetric_memory._fused_matmul_reduce_scatter_fallback
    product: Tensor = scatter(x.contiguous(), matrix, "sum", 0, group.group_name)
    return product


def host_group(timeout_s: float) -> dist.ProcessGroup:
    """A group of all ranks for what their hosts tell each other beside the steps. Made by all together."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


def _first_s(timeout_s: float, device: torch.device | None) -> float:
    """The limit of a message or collective in the first step: on GPUs ranks compile kernels in it, unequally long."""
    return timeout_s if device is None or device.type == "cpu" else max(timeout_s, _FIRST_STEP_S)


def _set_nccl_defaults() -> None:
    """Say, before the first group is made, how NCCL shall run, unless the user has said so."""
    defaults = {
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # several communicators in the order of the host's calls: NCCL 2.26
        "TORCH_FR_BUFFER_SIZE": "2000",  # collectives that torch's flight recorder remembers
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # which it writes down when one hangs, for torchfrtrace
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _options(device: torch.device | None, channels: int | None) -> Any:
    """How NCCL makes a communicator: with so many channels at most, as it holds buffers for each of them."""
    if device is None or device.type == "cpu" or channels is None:
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = channels
    return options


class ProcessGroups:
    """Process groups by their ranks. Every rank must make them, and at the same time: creation is collective.

    Each of the `pairs` (sender, receiver) gets a group of its own: groups are queues on GPUs, and gloo's announce a
    receive to its sender on the connection that carries the messages the other way. `channels` bounds those of their
    communicators.
    """

    def __init__(
        self,
        all_ranks: Sequence[tuple[int, ...]],
        timeout_s: float,
        pairs: Sequence[tuple[int, int]] = (),
        device: torch.device | None = None,
        channels: Channels = _ANY,
    ) -> None:
        self._timeout_s, self._is_first_step = timeout_s, _first_s(timeout_s, device) != timeout_s
        limit = timedelta(seconds=_first_s(timeout_s, device))
        # Without a timeout of its own a group waits for 30 minutes, whatever the first one was given.
        self._of = {
            ranks: dist.new_group(list(ranks), timeout=limit, pg_options=_options(device, channels.groups.get(ranks)))
            for ranks in all_ranks
        }
        self._of_pair = {
            pair: dist.new_group(list(pair), timeout=limit, pg_options=_options(device, channels.pairs.get(pair)))
            for pair in pairs
        }
        if not is_gloo():
            self._warm(device)

    def _warm(self, device: torch.device | None) -> None:
        """Use every group as it will be used, in one order: NCCL makes a communicator when it is first used, another
        one for messages than for collectives, and waits for all its ranks meanwhile."""
        rank, number = dist.get_rank(), torch.zeros(1, device=device)
        dist.all_reduce(number)
        for ranks, group in self._of.items():
            if rank in ranks:
                dist.all_reduce(number, group=group)
        for sender, receiver in self._of_pair:
            if rank == sender:
                self.send(number, receiver).wait()
            elif rank == receiver:
                self.receive(number, sender).wait()

    def step_ended(self) -> None:
        """From the second step on, no message or collective may take longer than the run's limit."""
        if self._is_first_step:
            self._is_first_step = False
            rank, limit = dist.get_rank(), timedelta(seconds=self._timeout_s)
            for ranks, group in (*self._of.items(), *self._of_pair.items()):
                if rank in ranks:
                    _set_pg_timeout(limit, group)
            _set_pg_timeout(limit)

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of several ranks; None of a single one."""
        return self._of[ranks] if len(ranks) > 1 else None

    def send(self, part: Tensor, receiver: int) -> dist.Work:
        """Begin to send a contiguous tensor."""
        work = dist.isend(part, receiver, group=self._of_pair.get((dist.get_rank(), receiver)))
        assert work is not None
        return work

    def receive(self, part: Tensor, sender: int) -> dist.Work:
        """Begin to receive into a contiguous tensor."""
        work = dist.irecv(part, sender, group=self._of_pair.get((sender, dist.get_rank())))
        assert work is not None
        return work


@dataclass(frozen=True, eq=False, slots=True)
class _Sent:
    work: dist.Work
    part: Tensor


class Outbox:
    """Keeps the tensors of a rank's messages alive until they have arrived.

    A send of gloo says that it is complete only to who waits for it, so a thread does; those of others can be asked.
    """

    def __init__(self) -> None:
        self._on_the_way: list[_Sent] = []
        self._changed = Condition()
        self._error: Exception | None = None
        self._queue: SimpleQueue[_Sent] | None = None
        if is_gloo():
            self._queue = SimpleQueue()
            Thread(target=self._wait, args=(self._queue,), daemon=True).start()

    def put(self, work: dist.Work, part: Tensor) -> None:
        """Keep what has been sent."""
        sent = _Sent(work, part)
        with self._changed:
            self._on_the_way.append(sent)
        if self._queue is not None:
            self._queue.put(sent)

    def tensors(self) -> list[Tensor]:
        """The tensors still on their way; those that have arrived are released."""
        with self._changed:
            if self._queue is None:
                self._on_the_way = [sent for sent in self._on_the_way if not sent.work.is_completed()]
            return [sent.part for sent in self._on_the_way]

    def finish(self) -> None:
        """Wait until all messages have arrived. Raises the error of any that failed."""
        if self._queue is None:
            while self._on_the_way:
                self._on_the_way.pop(0).work.wait()
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._on_the_way)
        if self._error is not None:
            raise self._error

    def _wait(self, queue: "SimpleQueue[_Sent]") -> None:
        while True:
            sent = queue.get()
            try:
                sent.work.wait()
            except Exception as error:  # what a backend raises
                self._error = error
            with self._changed:
                self._on_the_way.remove(sent)
                self._changed.notify_all()
            del sent  # not kept until the next one comes
