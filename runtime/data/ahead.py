"""Sequences of a run on a rank's device: a thread reads those of the next step while this one is computed."""

from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from runtime.data.batches import Batches
from runtime.device import pinned


class BatchesAhead:
    """The sequences of `batches` by step. A rank asks for the same samples of every global batch, so those of the next
    one can be read once it has asked for them."""

    def __init__(self, batches: Batches, global_batch: int, device: torch.device) -> None:
        self._batches, self._global_batch, self._device = batches, global_batch, device
        self._thread = ThreadPoolExecutor(1, "sequences")
        self._read: dict[tuple[int, int], deque[Future[Tensor]]] = defaultdict(deque)

    def after(self, seen: int) -> Callable[[int, int], Tensor]:
        """Of the samples [first, end) of the global batch that follows `seen` sequences, theirs:
        [end - first, seq_len + 1]."""
        return lambda first, end: self._of(seen + first, seen + end)

    def _of(self, first: int, end: int) -> Tensor:
        before = self._read[first, end]
        found = before.popleft().result() if before else self._from_corpus(first, end)
        if not before:
            del self._read[first, end]
        following = first + self._global_batch, end + self._global_batch
        self._read[following].append(self._thread.submit(self._from_corpus, *following))
        return found.to(self._device, non_blocking=True)

    def _from_corpus(self, first: int, end: int) -> Tensor:
        return pinned(torch.from_numpy(self._batches.sequences(first, end)), self._device)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
