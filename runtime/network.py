"""Between ranks: the process groups of a run, and the messages that are on their way.

Messages between two ranks come in the order in which they are sent: there are no tags, which NCCL would ignore.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Condition, Thread

import torch
import torch.distributed as dist
from torch import Tensor


def is_gloo() -> bool:
    """Whether ranks talk over gloo, whose groups carry messages and collectives of any order at once. Elsewhere a group
    is a queue."""
    return bool(dist.get_backend() == "gloo")


def set_nccl_defaults() -> None:
    """Say, before the first group is made, how NCCL shall run, unless the user has said so."""
    defaults = {
        "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # several communicators in the order of the host's calls: NCCL 2.26
        "TORCH_FR_BUFFER_SIZE": "2000",  # collectives that torch's flight recorder remembers
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",  # which it writes down when one hangs, for torchfrtrace
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


class ProcessGroups:
    """Process groups by their ranks. Every rank must make them, and at the same time: creation is collective.

    Each of the `pairs` (sender, receiver) gets a group of its own where groups are queues.
    """

    def __init__(
        self,
        all_ranks: Sequence[tuple[int, ...]],
        timeout_s: float,
        pairs: Sequence[tuple[int, int]] = (),
        device: torch.device | None = None,
    ) -> None:
        limit = timedelta(seconds=timeout_s)
        # Without a timeout of its own a group waits for 30 minutes, whatever the first one was given.
        self._of = {ranks: dist.new_group(list(ranks), timeout=limit) for ranks in all_ranks}
        self._of_pair: dict[tuple[int, int], dist.ProcessGroup] = {}
        if not is_gloo():
            self._of_pair = {pair: dist.new_group(list(pair), timeout=limit) for pair in pairs}
            self._warm(device)

    def _warm(self, device: torch.device | None) -> None:
        """Use every group, in one order: NCCL makes a communicator when it is first used, and waits for all its ranks
        meanwhile."""
        rank, number = dist.get_rank(), torch.zeros(1, device=device)
        dist.all_reduce(number)
        for ranks, group in (*self._of.items(), *self._of_pair.items()):
            if rank in ranks:
                dist.all_reduce(number, group=group)

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
