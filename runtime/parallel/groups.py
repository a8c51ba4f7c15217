"""The process groups of a layout: made by all ranks in the same order, each with the same timeout."""

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from runtime.mapping.layout import Lane


class ProcessGroups:
    """Process groups by their ranks. Every rank must make them, and at the same time: creation is collective."""

    def __init__(self, all_ranks: Sequence[tuple[int, ...]], timeout_s: float) -> None:
        self._limit = timedelta(seconds=timeout_s)
        # Without a timeout of its own a group waits for 30 minutes, whatever the first one was given.
        self._of = {ranks: dist.new_group(list(ranks), timeout=self._limit) for ranks in all_ranks}

    def lanes(self, found: Sequence[Lane]) -> dict[Lane, dist.ProcessGroup]:
        """A group of its own for each lane. Every rank must ask for the same ones, at the same time."""
        return {lane: dist.new_group([lane.sender, lane.receiver], timeout=self._limit) for lane in found}

    def of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of several ranks; None of a single one."""
        return self._of[ranks] if len(ranks) > 1 else None
