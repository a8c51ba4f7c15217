"""Sequences of a run on a rank's device: a thread reads those of the next step while this one is computed."""

from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from runtime.data.batches import Batches
from runtime.device import pinned


class BatchesAhead:
    """The sequences of `batches` by step. A rank asks for the same samples in every step, so those of the next
    one can be read once it has asked for them."""

    def __init__(self, batches: Batches, device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._thread = ThreadPoolExecutor(1, "sequences")
        self._read: dict[tuple[int, int, int], deque[Future[Tensor]]] = defaultdict(deque)

    def of(self, step: int) -> Callable[[int, int], Tensor]:
        """Of the samples [first, end) of a step's global batch, their sequences [samples, seq_len + 1]."""
        return partial(self._of, step)

    def _of(self, step: int, first: int, end: int) -> Tensor:
        before = self._read[step, first, end]
        found = before.popleft().result() if before else self._from_corpus(step, first, end)
        if not before:
            del self._read[step, first, end]
        following = self._thread.submit(self._from_corpus, step + 1, first, end)
        self._read[step + 1, first, end].append(following)
        return found.to(self._device, non_blocking=True)

    def _from_corpus(self, step: int, first: int, end: int) -> Tensor:
        return pinned(torch.from_numpy(self._batches.sequences(step, first, end)), self._device)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
