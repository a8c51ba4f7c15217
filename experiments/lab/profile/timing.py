"""Seconds of an operation: warmed up, repeated; on a GPU the median, on a CPU the mean.

Processes of a CPU share its cores, in turns that are longer than most operations: the median knows nothing of the
turns of others, which training waits for too.
"""

import statistics
import time
from collections.abc import Callable

import torch

from runtime.device import wait_for

_LEAST_SAMPLE_S = 2e-3  # shorter work is queued several times, so that neither the clock nor the wait counts
_WARM_UP = 3
_SAMPLES = (3, 25)
_MOST_QUEUED = 2000


class Timer:
    """Times work on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, work: Callable[[], object], budget_s: float) -> float:
        """The median, on a CPU the mean, of as many samples as fit into `budget_s`, at least three."""
        first_s = min(self._once(work, 1) for _ in range(_WARM_UP))
        queued = max(1, min(_MOST_QUEUED, round(_LEAST_SAMPLE_S / max(first_s, 1e-7))))
        sample_s = self._once(work, queued)
        least, most = _SAMPLES
        count = max(least, min(most, int(budget_s / max(sample_s, 1e-7))))
        usual = statistics.fmean if self._device.type == "cpu" else statistics.median
        return usual([self._once(work, queued) for _ in range(count)]) / queued

    def _once(self, work: Callable[[], object], queued: int) -> float:
        wait_for(self._device)
        began = time.perf_counter()
        for _ in range(queued):
            work()
        wait_for(self._device)
        return time.perf_counter() - began
