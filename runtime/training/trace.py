"""A trace of some steps of a rank, in which what it did has the names of its actions."""

from pathlib import Path

import torch

from runtime.device import Tracer
from runtime.parallel.pipeline import StageRunner
from runtime.settings import TRACE_AFTER


class StepTrace:
    """Traces `count` steps of a process, which begins with step `first`: those after the first `TRACE_AFTER`."""

    def __init__(self, pipeline: StageRunner, device: torch.device, first: int, count: int, folder: Path) -> None:
        self._pipeline, self._device, self._folder = pipeline, device, folder
        self._first, self._end = first + TRACE_AFTER, first + TRACE_AFTER + count
        self._tracer: Tracer | None = None

    def begin(self, step: int) -> None:
        """Before step `step`, counted from 0."""
        if step == self._first < self._end:
            self._pipeline.names_actions = True
            self._tracer = Tracer(self._device)

    def ends(self, step: int) -> bool:
        """Whether the last of the traced steps was the one before `step`."""
        return self._tracer is not None and step == self._end

    def write(self, step: int, rank: int) -> Path:
        """Write the trace of a rank, after the last traced step; where."""
        assert self._tracer is not None
        path = self._folder / f"steps-{self._first + 1:08d}-{step:08d}-rank-{rank:05d}.json.gz"
        self._tracer.write(path)
        self._pipeline.names_actions, self._tracer = False, None
        return path
