"""What a rank reads of a run, on its device: a thread reads it for the next step while this one is computed."""

from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.device import pin


class BatchesAhead:
    """What `read` returns of samples [first, end) of a run, by step: sequences, or borders of documents. A rank asks
    for the same samples of every global batch, so those of the next one can be read once it has asked for them."""

    def __init__(
        self, read: Callable[[int, int], NDArray[np.integer[Any]]], global_batch: int, device: torch.device
    ) -> None:
        self._read_samples, self._global_batch, self._device = read, global_batch, device
        self._thread = ThreadPoolExecutor(1, "sequences")
        self._read: dict[tuple[int, int], deque[Future[Tensor]]] = defaultdict(deque)

    def after(self, seen: int) -> Callable[[int, int], Tensor]:
        """What there is of the samples [first, end) of the global batch that follows `seen` sequences."""
        return lambda first, end: self._of(seen + first, seen + end)

    def _of(self, first: int, end: int) -> Tensor:
        before = self._read[first, end]
        samples = before.popleft().result() if before else self._from_corpus(first, end)
        if not before:
            del self._read[first, end]
        following = first + self._global_batch, end + self._global_batch
        self._read[following].append(self._thread.submit(self._from_corpus, *following))
        return samples.to(self._device, non_blocking=True)

    def _from_corpus(self, first: int, end: int) -> Tensor:
        return pin(torch.from_numpy(self._read_samples(first, end)), self._device)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)
