"""Keeps the tensors of sent messages alive until they have arrived."""

from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False, slots=True)
class _Sent:
    work: dist.Work
    part: Tensor


class Outbox:
    """What one rank has sent. A send of gloo says that it is complete only to who waits for it, so a thread does;
    one of NCCL can be asked."""

    def __init__(self, device: torch.device) -> None:
        self._on_the_way: list[_Sent] = []
        self._changed = Condition()
        self._error: Exception | None = None
        self._queue: SimpleQueue[_Sent] | None = None
        if device.type != "cuda":
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
