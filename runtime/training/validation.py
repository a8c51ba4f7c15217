"""The loss of text that is not trained on, by the plan itself."""

from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.data.batches import Batches
from runtime.device import pin
from runtime.settings import Settings
from runtime.training.trainee import Trainee


class Validation:
    """Computes the loss of the first global batches of `held_out`, always the same ones: as many as there are whole
    ones, and as the settings say at most."""

    def __init__(
        self, trainee: Trainee, held_out: Batches, global_batch: int, device: torch.device, settings: Settings
    ) -> None:
        self._trainee, self._held_out, self._device, self._settings = trainee, held_out, device, settings
        count = min(settings.validation_batches, held_out.num_windows // global_batch)
        self._begins = range(0, count * global_batch, global_batch)

    def is_due(self, step: int) -> bool:
        """Whether it follows that many steps."""
        return step == self._settings.steps or step % self._settings.validation_every == 0

    def loss(self, waiting: Callable[[], None]) -> float:
        """The mean loss per token, asked for by all ranks together; `waiting` is called after each batch."""
        losses = []
        for begin in self._begins:
            borders = None if self._settings.separator is None else self._read(self._held_out.borders, begin)
            losses.append(self._trainee.loss(self._read(self._held_out.sequences, begin), borders))
            waiting()
        return fmean(losses)

    def _read(self, read: Callable[[int, int], NDArray[Any]], begin: int) -> Callable[[int, int], Tensor]:
        def samples(first: int, end: int) -> Tensor:
            values = torch.from_numpy(read(begin + first, begin + end))
            return pin(values, self._device).to(self._device, non_blocking=True)

        return samples
